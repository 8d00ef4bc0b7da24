"""Batches divided among ranks: the bytes and figures of one process, ranks that differ, and one that dies."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import shell_in
from distilling import tiny
from hypothesis import given
from hypothesis import strategies as st
from shardwright.ds_configs.plan.rendering import NodePlace
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.distillation.cache.teacher_cache import TeacherCache
from shardwright.trainers.runs.launch import Replicas
from shardwright.trainers.runs.share import Share, in_order_of_batches
from warm_ranks import RanksFailedError, run_ranks

pytestmark = pytest.mark.distributed

VOCAB_SIZE = 384
RANK = """
import os, signal, sys
import torch
from pathlib import Path
from torch import distributed
from transformers import AutoModelForCausalLM
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.transformers.teacher_placement import PlacedTeacher
from shardwright.trainers.distillation.cache import cache_writer
from shardwright.trainers.distillation.cache.teacher_cache import CacheKey
from shardwright.trainers.runs.share import Share

model, directory, last = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
cache_writer.FILE_ROWS = 150
share = Share()
if int(os.environ["WORLD_SIZE"]) > 1:
    distributed.init_process_group("gloo")
    share = Share(rank=distributed.get_rank(), ranks=distributed.get_world_size())
    try:
        share.check_same({"key": "one", "text": share.rank})
    except UsageError as error:
        reported = str(error)
    assert "rank 1 on" in reported and "differ in: text" in reported and "key" not in reported, reported

def die_of_rank_2(what, done, total):
    if share.rank == 2 and done >= last:
        os.kill(os.getpid(), signal.SIGKILL)

cache_writer.log_progress = die_of_rank_2

key = CacheKey(teacher="teacher", weights="one", tokenizer="one", template="", vocab_size=257, top_k=9,
               temperatures=(1.0,))
samples = [[(7 * place + token) % 257 for token in range(5 + place % 23)] for place in range(90)]
teacher = AutoModelForCausalLM.from_pretrained(model).eval()
cache_writer.write_cache(directory, key, PlacedTeacher(teacher, teacher, "replica"), samples, batch_size=3,
                         device="cpu", share=share)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replicas")
    tiny("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=64).save_pretrained(directory / "model")
    byte_tokenizer(VOCAB_SIZE).save_pretrained(directory / "model")
    text = "\n\n".join(f"Line {index} of a text that says {index * index}." * (1 + index % 4) for index in range(60))
    (directory / "text.txt").write_text(text)
    (directory / "rank.py").write_text(RANK)
    return directory


def test_four_ranks_cache_a_teacher_as_one_process(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shell_in(tmp_path, "cache-teacher", capsys, monkeypatch)
    words = [files / "model", "--dataset", files / "text.txt", "--seq-len", 40, "--packing", "off", "--batch-size", 3]
    for name, processes in (("one", 1), ("four", 4)):
        result = run(*words, "--output-dir", name, "--num-processes", processes)
        assert result.code == 0, result.err
    assert bytes_of(tmp_path / "four") == bytes_of(tmp_path / "one")


def test_a_rank_that_dies_leaves_complete_files_and_other_ranks_continue(files: Path, tmp_path: Path) -> None:
    words = [files / "rank.py", files / "model"]
    with pytest.raises(RanksFailedError, match="rank 2 of 4 was killed by SIGKILL"):
        run_ranks([*words, tmp_path / "cache", 40], ranks=4)
    left = TeacherCache.open(tmp_path / "cache")
    assert 0 < len(left) < 1000
    kept = bytes_of(tmp_path / "cache")
    run_ranks([*words, tmp_path / "cache", 10**6], ranks=2)
    run_ranks([*words, tmp_path / "whole", 10**6], ranks=1)
    whole = bytes_of(tmp_path / "whole")
    assert bytes_of(tmp_path / "cache") == whole
    assert len(whole) > len(kept) > 1
    assert kept.items() <= whole.items()


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@given(st.integers(1, 9), st.integers(0, 40))
def test_every_batch_is_read_once_and_comes_back_in_order(ranks: int, count: int) -> None:
    parts = [list(Share(rank=rank, ranks=ranks).indices(count)) for rank in range(ranks)]
    assert in_order_of_batches(parts) == list(range(count))


@pytest.mark.parametrize(
    ("replicas", "device", "where"),
    [
        (Replicas(processes=3, nodes=2, place=NodePlace(rank=0, main_address="a")), "cpu", ["num_nodes"]),
        (Replicas(processes=4, nodes=2), "cpu", ["num_nodes"]),
        (Replicas(processes=4, nodes=2, place=NodePlace(rank=2, main_address="a")), "cpu", ["node_rank"]),
        (Replicas(processes=2), "cuda:0", ["device"]),
        (Replicas(processes=2, nodes=2, place=NodePlace(rank=1, main_address="a")), "cpu", []),
        (Replicas(), "cuda:0", []),
    ],
)
def test_counts_and_places_that_cannot_be(replicas: Replicas, device: str, where: list[str]) -> None:
    assert [error.where for error in replicas.errors(device=device)] == where
