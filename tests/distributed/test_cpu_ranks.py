"""What Accelerate reports on two CPU ranks, without the adapter (upstream's behaviour) and with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from warm_ranks import run_ranks

pytestmark = pytest.mark.distributed

RANKS = 2


@pytest.fixture(scope="module")
def output(tiny_llama: Path, deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("state")
    run_ranks([Path(__file__).with_name("state_worker.py"), tiny_llama, directory], ranks=RANKS)
    return directory


@pytest.fixture(scope="module")
def facts(output: Path) -> list[dict[str, Any]]:
    return [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def test_upstream_still_needs_the_recipes_of_cpu_ranks(facts: list[dict[str, Any]]) -> None:
    """Fails when Accelerate counts CPU ranks under DeepSpeed, shards with FSDP2 or trains bf16 on them (1.15.0)."""
    for rank in facts:
        without = rank["without"]
        assert (without["process_group_size"], without["deepspeed_world_size"]) == (RANKS, 1)
        assert not without["fsdp2"]["is_fsdp2"] and without["fsdp2"]["dtensors"] == 0
        assert without["fsdp2"]["wrapper"] == "DistributedDataParallel"
        assert "use_cpu" in without["bf16_error"]


def test_zero3_and_fsdp2_keep_one_shard_of_every_parameter_on_each_rank(facts: list[dict[str, Any]]) -> None:
    for index, rank in enumerate(facts):
        zero3, fsdp2 = rank["with"]["zero3"], rank["with"]["fsdp2"]
        assert (zero3["world_size"], zero3["rank"]) == (RANKS, index)
        assert fsdp2["is_fsdp2"] and fsdp2["dtensors"] == fsdp2["parameters"]
        for engine in (zero3, fsdp2):
            assert engine["local_elements"] == engine["elements"] / RANKS


def test_fsdp2_saves_a_model_directory(output: Path, tiny_llama: Path) -> None:
    from safetensors.torch import load_file

    saved, start = (load_file(path / "model.safetensors") for path in (output / "fsdp2", tiny_llama))
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in start.items()
    }
    assert not list((output / "fsdp2").glob("*.bin"))


def test_deepspeed_clips_at_the_trainers_norm_only_when_the_key_is_auto(facts: list[dict[str, Any]]) -> None:
    """A DeepSpeed configuration without `gradient_clipping` clips at 1.0 whatever max_grad_norm says (0.19.8)."""
    for rank in facts:
        assert rank["with"]["clipping_auto"] == 0.25
        assert rank["with"]["clipping_missing"] == 1.0
