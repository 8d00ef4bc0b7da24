"""Under FSDP2 and ZeRO-3 only the first rank reads weights, and results stay those of upstream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from first_rank_loading_worker import CASES
from safetensors.torch import load_file
from shardwright.plugins.patches import PATCHES, needed
from warm_ranks import run_ranks

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("first_rank_loading_worker.py")
RANKS = 3
METERED = {"hidden_size": 576, "intermediate_size": 2304, "num_hidden_layers": 4, "vocab_size": 2304}
"""Sizes that the ranks divide, because torch copies other shards to pad them."""
EQUAL = [case.name for case in CASES if not case.upstream_fails]
MB = 10**6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for name, model in {
        "metered": small_models.llama(**METERED),
        "tied": small_models.llama(tie_word_embeddings=True),
        "mixtral": small_models.mixtral(),
        "headless": small_models.llama(),
    }.items():
        state = model.to(torch.bfloat16).state_dict()
        if name == "headless":
            del state["lm_head.weight"]
        model.save_pretrained(directory / name, state_dict=state)
    return directory


@pytest.fixture(scope="module")
def output(models: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("loading")
    items = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    names = dict.fromkeys(["metered", "buffers", *(item.callspec.params["name"] for item in items)])
    run_ranks([WORKER, models, directory, "fsdp2", *names], ranks=RANKS, timeout_seconds=300)
    return directory


@pytest.fixture(scope="module")
def facts(output: Path) -> list[dict[str, Any]]:
    return [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def elements(models: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(models / "metered" / "model.safetensors").values())


@pytest.mark.full
@pytest.mark.parametrize("name", EQUAL)
def test_losses_and_checkpoints_equal_those_of_upstream(name: str, output: Path, facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        assert rank[f"{name}-ours"]["losses"] == rank[f"{name}-upstream"]["losses"]
        assert rank[f"{name}-ours"]["dtypes"] == rank[f"{name}-upstream"]["dtypes"]
    ours, upstream = (
        {path.name: path for path in (output / f"{name}-{way}").iterdir()} for way in ("ours", "upstream")
    )
    assert ours.keys() == upstream.keys()
    weights = [file for file in ours if file.endswith(".safetensors")]
    assert weights
    for file in weights:
        first, second = load_file(ours[file]), load_file(upstream[file])
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) and first[key].dtype == second[key].dtype for key in first)
    for file in ("config.json", "adapter_config.json"):
        if file in ours:
            assert json.loads(ours[file].read_text()) == json.loads(upstream[file].read_text())


def test_each_rank_of_upstream_holds_all_weights_in_fp32(facts: list[dict[str, Any]], elements: int) -> None:
    """Fails when Accelerate converts weights to fp32 while it distributes them (1.15.0 does not)."""
    assert all(rank["metered-upstream"]["peak"] > 4 * elements for rank in facts)


def test_accelerate_distributes_no_buffers(facts: list[dict[str, Any]]) -> None:
    assert all("device_mesh" in rank["buffers-upstream"] for rank in facts)


def test_only_the_first_rank_holds_weights(facts: list[dict[str, Any]], elements: int) -> None:
    first, *others = (rank["metered-ours"] for rank in facts)
    # On CPU ranks the shards are in host memory too, and copies of the tensor that is distributed.
    shard = 4 * elements / RANKS
    copies = 4 * 4 * METERED["hidden_size"] * METERED["intermediate_size"]
    allowance = 8 * MB
    assert all(rank["loaded"] < allowance for rank in others)
    assert all(rank["peak"] < shard + copies + allowance for rank in others)
    assert first["peak"] < 2 * elements + shard + copies + allowance


def test_buffers_of_the_first_rank_reach_every_rank(facts: list[dict[str, Any]]) -> None:
    for rank in facts:
        trained = rank["buffers-ours"]
        assert trained["buffers"] == {"scale": 2.0, "unsaved": 1.0}
        assert "scale" in trained["saved"]
        assert "unsaved" not in trained["saved"]
        assert trained["losses"] == facts[0]["buffers-ours"]["losses"]


# ZeRO-3


ZERO3_RANKS = 2
MIXTURE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_local_experts": 8}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    directory = tmp_path_factory.mktemp("mixtures")
    small_models.mixtral(**MIXTURE).to(torch.bfloat16).save_pretrained(directory / "mixtral")
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    experts |= {"first_k_dense_replace": 1, "moe_intermediate_size": 32}
    config = DeepseekV3Config(**small_models.SIZES | sizes | experts, intermediate_size=64)
    model = AutoModelForCausalLM.from_config(config)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases
    for bias in biases:
        bias.normal_()
    model.to(torch.bfloat16).save_pretrained(directory / "deepseek")
    return directory


@pytest.fixture(scope="module")
def partitioned(
    mixtures: Path, deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    output = tmp_path_factory.mktemp("partitioned")
    run_ranks([WORKER, mixtures, output, "zero3"], ranks=ZERO3_RANKS)
    return [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(ZERO3_RANKS)]


@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_zero3_partitions_the_weights_and_buffers_of_the_first_rank(
    name: str, partitioned: list[dict[str, Any]]
) -> None:
    for rank in partitioned:
        assert rank[f"{name}-ours"]["ranks"] == ZERO3_RANKS
        assert rank[f"{name}-ours"]["sums"] == partitioned[0][f"{name}-upstream"]["sums"]


def stored_bytes(mixtures: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(mixtures / "mixtral" / "model.safetensors").values())


@pytest.mark.skipif(
    not next(needed(patch) for patch in PATCHES if patch.name == "zero3-unread-weights"), reason="not needed"
)
def test_each_rank_of_upstream_fuses_experts_under_zero3(partitioned: list[dict[str, Any]], mixtures: Path) -> None:
    """Fails when Transformers reads weights on the first rank only (5.17.0 does not)."""
    assert all(rank["mixtral-upstream"]["peak"] > stored_bytes(mixtures) for rank in partitioned)


def test_only_the_first_rank_fuses_experts_under_zero3(partitioned: list[dict[str, Any]], mixtures: Path) -> None:
    # Of fused experts a rank would hold all, beyond its partition and the layer that the first rank fills.
    assert partitioned[1]["mixtral-ours"]["peak"] < 2 * stored_bytes(mixtures)
