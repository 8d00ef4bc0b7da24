"""`train_causal_lm` under plans with sequence, tensor, expert and pipeline parallelism: all lose what ZeRO-1 does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shardwright.ds_configs.plan.measurement import FILE_NAME, measurement_from_text
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning.from_names import plan
from small_models import mixtral
from warm_ranks import OnDemand, run_ranks

pytestmark = pytest.mark.distributed

STEPS = 3
AXES: dict[str, dict[str, Any]] = {
    "data": {},
    "expert": {"expert_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "sequence": {"sequence_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def tiny_mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-mixtral")
    mixtral(intermediate_size=64).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def plans(
    tiny_llama: Path, tiny_mixtral: Path, deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("plans")

    def run(name: str) -> Path:
        model = tiny_mixtral if name == "expert" else tiny_llama
        replicas = 2 if name in ("data", "expert") else 1
        job = TrainingJob(
            seq_len_tokens=64,
            global_batch_size=8,
            micro_batch_size=4 // replicas,
            precision="fp32",
            optimizer="adamw_torch",
            strategy="zero1",
            **AXES[name],
        )
        plan(str(model), "2xCPU", job).write(directory / name)
        run_ranks([Path(__file__).with_name("parallel_entry_worker.py"), directory / name, str(STEPS)])
        return directory / name

    return OnDemand(run)


def losses_of(plans: dict[str, Path], name: str) -> list[float]:
    record = json.loads((plans[name] / "losses.json").read_text())
    assert record["world_size"] == 2
    losses: list[float] = record["losses"]
    assert len(losses) == STEPS
    return losses


@pytest.mark.parametrize("name", ["pipeline", "sequence", "tensor"])
def test_axes_have_the_losses_of_data_parallelism(name: str, plans: dict[str, Path]) -> None:
    assert losses_of(plans, name) == pytest.approx(losses_of(plans, "data"), abs=1e-5)


def test_mixture_of_experts_trains_under_its_plan(plans: dict[str, Path]) -> None:
    losses = losses_of(plans, "expert")
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", AXES)
def test_saved_model_loads_and_measurements_match_the_plan(name: str, plans: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    directory = plans[name] / "model"
    _, loading = AutoModelForCausalLM.from_pretrained(
        directory, use_safetensors=True, trust_remote_code=False, output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = measurement_from_text((directory / FILE_NAME).read_bytes(), source="launch")
    assert [rank.rank for rank in found.measured] == [0, 1]
    assert found.differences == ()
