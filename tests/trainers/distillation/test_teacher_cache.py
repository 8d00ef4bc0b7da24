"""Teacher caches: what they keep, reading and writing, and training against a live teacher."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from distilling import collate, tiny, training_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shardwright.cli.main import run
from shardwright.ds_configs.specs.errors import RefusedInputError, ShardwrightError, UsageError
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.samples import collate as padded_batch
from shardwright.trainers.data.samples import packed_row
from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer
from shardwright.trainers.distillation.teacher_cache import (
    CachedTeacherDataset,
    CacheKey,
    TeacherCache,
    answers_of,
    write_answers,
    write_cache,
)

pytestmark = pytest.mark.slow

K = 50


def key_of(
    vocab_size: int, *, k: int = K, temperatures: tuple[float, ...] = (1.0, 2.0), weights: str = "one"
) -> CacheKey:
    return CacheKey(
        teacher="teacher",
        weights=weights,
        vocab_size=vocab_size,
        top_k=min(k, vocab_size),
        temperatures=temperatures,
    )


VOCAB_SIZE = 384


def trained_pair() -> tuple[Any, Any, list[dict[str, Any]]]:
    """Train a teacher and a student on the bytes of Python's help topics, and return 24 unseen samples."""
    from shardwright.trainers.data.sources import pack, read_documents

    samples = pack(read_documents(None)[:40], byte_tokenizer(VOCAB_SIZE), 64)
    models = []
    for hidden, steps, seed in ((64, 120, 4), (32, 40, 5)):
        model = tiny("llama", hidden=hidden, vocab_size=VOCAB_SIZE, seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for step in range(steps):
            ids = torch.stack([sample["input_ids"] for sample in samples[24 + 8 * step : 32 + 8 * step]])
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model.eval())
    rows = [{"input_ids": sample["input_ids"].tolist(), "labels": sample["labels"].tolist()} for sample in samples[:24]]
    return models[0].requires_grad_(False), models[1], rows


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, list[dict[str, Any]]]:
    return trained_pair()


def written(directory: Path, pair: Any, key: CacheKey | None = None) -> TeacherCache:
    teacher, _, rows = pair
    key = key or key_of(VOCAB_SIZE)
    write_cache(directory, key, teacher, [row["input_ids"] for row in rows], batch_size=8)
    return TeacherCache.open(directory, key)


def stored(logits_NV: torch.Tensor, key: CacheKey, directory: Path) -> TeacherCache:
    """Return a cache with these distributions, as one sample."""
    write_answers(directory / "answers-00000.safetensors", key, [range(len(logits_NV))], [answers_of(logits_NV, key)])
    return TeacherCache.open(directory, key)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4000), st.integers(1, 60), st.integers(0, 2**31), st.sampled_from([0.1, 3.0, 30.0]))
def test_cache_restores_the_likeliest_tokens_and_the_mass_of_all_others(
    vocab_size: int, k: int, seed: int, spread: float
) -> None:
    key = key_of(vocab_size, k=k, temperatures=(1.0, 2.5, 4.0))
    logits = spread * torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(seed))
    with TemporaryDirectory() as directory:
        cache = stored(logits, key, Path(directory))
        for temperature in key.temperatures:
            found = cache.read(torch.arange(5), temperature)
            exact = torch.log_softmax(logits.double() / temperature, -1)
            kept = exact.gather(1, found.ids_NK)
            assert torch.equal(kept.sort(dim=1).values, exact.topk(key.top_k).values.sort(dim=1).values)
            p, tail = found.log_probabilities_NK.double().exp(), found.tail_log_probability_N.double().exp()
            assert p.sum(dim=1) + tail == pytest.approx(1, abs=2e-6)
            assert p.numpy() == pytest.approx(kept.exp().numpy(), abs=6e-3)
            assert tail.numpy() == pytest.approx((1 - kept.exp().sum(dim=1)).clamp(min=0).numpy(), abs=2e-3)


def test_training_from_the_cache(pair: Any, tmp_path: Path) -> None:
    teacher, student, rows = pair
    cache = written(tmp_path / "cache", pair)
    found = {}
    for name, source, data in (("live", teacher, rows), ("cached", cache, CachedTeacherDataset(rows, cache))):
        for implementation in ("fused", "plain"):
            trainer = DistillationTrainer(
                model=copy.deepcopy(student),
                args=training_arguments(tmp_path, max_steps=2, learning_rate=0.1, gradient_accumulation_steps=3),
                teacher=source,
                distillation=DistillationConfig(alpha=0.8, implementation=implementation),  # type: ignore[arg-type]
                train_dataset=data,
                data_collator=collate,
            )
            trainer.train()
            found[name, implementation] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found["cached", "fused"] == pytest.approx(found["cached", "plain"], rel=1e-6)
    assert not {"teacher_cross_entropy", "speculative_acceptance"} & trainer.state.log_history[0].keys(), "unknown"
    for cached, live in zip(found["cached", "fused"], found["live", "fused"], strict=True):
        assert live - 0.02 < cached < live, "what is lacking is the shape of the tail, which is never negative"


def test_a_packed_row_has_the_answers_to_its_documents(pair: Any, tmp_path: Path) -> None:
    teacher, student, rows = pair
    cache = written(tmp_path / "cache", pair)
    single, packed = (CachedTeacherDataset(data, cache) for data in (rows[3:6], [packed_row(rows[3:6])]))
    assert packed[0]["teacher_rows"] == [row for sample in single for row in sample["teacher_rows"]]
    with pytest.raises(UsageError, match="has no sample of 192 tokens"):
        CachedTeacherDataset([{"input_ids": packed[0]["input_ids"]}], cache)[0]
    live = ((rows[3:6], collate), ([packed_row(rows[3:6])], padded_batch))
    for source, inputs in ((cache, ((single, collate), (packed, padded_batch))), (teacher, live)):
        losses = []
        for data, collator in inputs:
            trainer = DistillationTrainer(
                model=copy.deepcopy(student),
                args=training_arguments(tmp_path),
                teacher=source,
                distillation=DistillationConfig(alpha=0.8),
                train_dataset=data,
                data_collator=collator,
            )
            trainer.train()
            losses.append(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_writing_resumes_and_keeps_finished_files(pair: Any, tmp_path: Path) -> None:
    teacher, student, rows = pair
    first = written(tmp_path / "cache", (teacher, student, rows[:10]))
    assert len(first) == 640
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*.safetensors")}
    both = written(tmp_path / "cache", (teacher, student, rows + rows[:3]))
    assert len(both) == 24 * 64
    assert {name: (tmp_path / "cache" / name).stat().st_mtime_ns for name in before} == before
    whole = written(tmp_path / "whole", pair)
    for row in rows:
        parts = [cache.read(torch.tensor(cache.rows_of(row["input_ids"])), 1.0) for cache in (both, whole)]
        assert torch.equal(parts[0].ids_NK, parts[1].ids_NK)
        torch.testing.assert_close(parts[0].log_probabilities_NK, parts[1].log_probabilities_NK, atol=0.02, rtol=0)


def test_pickled_cache_maps_files_again(pair: Any, tmp_path: Path) -> None:
    """Data loader workers that are spawned get a pickled dataset."""
    cache = written(tmp_path / "cache", pair)
    found = copy.deepcopy(CachedTeacherDataset(pair[2][:1], cache))
    assert found[0]["teacher_rows"] == list(cache.rows_of(pair[2][0]["input_ids"]))
    (tmp_path / "cache" / "answers-00000.safetensors").unlink()
    with pytest.raises(RefusedInputError, match="has no answers"):
        copy.deepcopy(cache)


class TestBadInput:
    def test_caches_of_other_answers_are_rejected(self, pair: Any, tmp_path: Path) -> None:
        cache = written(tmp_path, pair)
        for change, differs in (
            ({"weights": "other"}, "another teacher"),
            ({"weights": "other", "temperatures": (3.0,)}, "another temperatures"),
            ({"top_k": 5}, r"another top_k \(50, expected 5\)"),
            ({"vocab_size": 385}, "another vocabulary"),
        ):
            with pytest.raises(RefusedInputError, match=differs) as caught:
                written(tmp_path, pair, replace(cache.key, **change))
            assert len(caught.value.errors) == len(change)
        write_answers(
            tmp_path / "answers-9.safetensors", key_of(9, k=2), [[1]], [answers_of(torch.ones(1, 9), key_of(9, k=2))]
        )
        with pytest.raises(RefusedInputError, match=r"answers-9\.safetensors: was made with another vocabulary"):
            TeacherCache.open(tmp_path)

    def test_absent_samples_rows_and_temperatures_are_rejected(self, pair: Any, tmp_path: Path) -> None:
        cache = written(tmp_path / "cache", pair)
        with pytest.raises(UsageError, match=r"temperature = 3\.0: the cache has 1\.0, 2\.0"):
            cache.read(torch.tensor([0]), 3.0)
        with pytest.raises(UsageError, match=r"has no sample of 3 tokens that starts with \[1, 2, 3\]"):
            cache.rows_of([1, 2, 3])
        for row in (-1, len(cache)):
            with pytest.raises(UsageError, match=f"a labelled position has row {row}"):
                cache.read(torch.tensor([0, row]), 1.0)

    def test_damaged_files_are_rejected(self, pair: Any, tmp_path: Path) -> None:
        written(tmp_path, pair)
        (file,) = tmp_path.glob("*.safetensors")
        content, tensors = file.read_bytes(), load_file(file)
        with safe_open(file, framework="pt") as header:
            metadata = header.metadata()
        file.write_bytes(content[:-5])
        with pytest.raises(RefusedInputError, match="not a complete safetensors file"):
            TeacherCache.open(tmp_path)
        key = json.loads(metadata["cache_key"])
        for changed, own in (
            ({"lengths": tensors["lengths"][:-1]}, key),
            ({"lengths": -tensors["lengths"]}, key),
            ({"lengths": tensors["lengths"] + 1}, key),
            ({"hashes": tensors["hashes"][:, :8].clone()}, key),
            ({"logits": tensors["logits"].float()}, key),
            ({}, key | {"temperatures": [1.0]}),
            ({}, key | {"top_k": "many"}),
            ({}, {}),
        ):
            save_file({**tensors, **changed}, file, metadata={"cache_key": json.dumps(own)})
            with pytest.raises(RefusedInputError, match="write the cache again"):
                TeacherCache.open(tmp_path)

    def test_nan_teacher_logits_are_rejected(self, tmp_path: Path) -> None:
        teacher = tiny("llama", vocab_size=VOCAB_SIZE)
        teacher.lm_head.weight.data[7] = float("nan")
        with pytest.raises(ShardwrightError, match="teacher: NaN or infinite logits"):
            written(tmp_path / "cache", (teacher, None, [{"input_ids": [1, 2, 3]}]))
        assert not list((tmp_path / "cache").glob("*.safetensors"))


class TestCommand:
    """The command with a model and a text on disk."""

    @pytest.fixture()
    def files(self, tmp_path: Path) -> tuple[str, str]:
        tiny("llama", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path / "teacher")
        byte_tokenizer(VOCAB_SIZE).save_pretrained(tmp_path / "teacher")
        (tmp_path / "text.txt").write_text("\n\n".join(f"Line {index} of a text." * 4 for index in range(40)))
        return str(tmp_path / "teacher"), str(tmp_path / "text.txt")

    def arguments(self, files: tuple[str, str], *more: str) -> list[str]:
        data = () if "--dataset" in more else ("--dataset", files[1])
        return ["cache-teacher", files[0], *data, "--seq-len", "32", *more]

    def test_command_writes_a_cache_that_distill_reads(
        self, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from shardwright.trainers.data.samples import load_samples
        from transformers import AutoTokenizer

        output = tmp_path / "answers"
        command = self.arguments(files, "--output-dir", str(output), "--temperature", "2", "--format", "json")
        assert run(command) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["temperatures"] == [2.0]
        assert shown["bytes"] == shown["tokens"] * shown["bytes_per_token"]
        cache = TeacherCache.open(output)
        samples = load_samples(files[1], AutoTokenizer.from_pretrained(files[0]), seq_len=32)
        assert all(sample["input_ids"] in cache for sample in (*samples.train, *samples.evaluation))
        assert len(cache) <= shown["tokens"]
        before = {path.name: path.stat().st_mtime_ns for path in output.glob("*.safetensors")}
        assert run(command) == 0
        assert {path.name: path.stat().st_mtime_ns for path in output.glob("*.safetensors")} == before
        capsys.readouterr()
        assert run([*command, "--top-k", "5"]) == 4
        assert "was made with another top_k (50, expected 5)" in capsys.readouterr().err


def test_cache_stores_soft_capped_logits(tmp_path: Path) -> None:
    """The model's logits differ from its head's output; the cache stores the model's."""
    teacher, samples, key = tiny("recurrent_gemma"), ([8, 6, 7], [3, 9, 4, 11, 5]), key_of(128, k=8)
    write_cache(tmp_path, key, teacher, samples, batch_size=2)
    found = load_file(tmp_path / "answers-00000.safetensors")
    with torch.no_grad():
        logits = torch.cat([teacher(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in samples])
    expected = answers_of(logits, key)
    assert torch.equal(found["ids"], expected["ids"])
    torch.testing.assert_close(found["logits"], expected["logits"], atol=1e-3, rtol=0)
