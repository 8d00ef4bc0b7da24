"""Plans for accelerators with sequence, context, tensor, pipeline or expert parallelism pass on CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest
from paths import CONFIGS
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning.from_names import plan
from shardwright.trainers.rehearsal.rehearse import rehearse

pytestmark = pytest.mark.distributed

LLAMA, MIXTURE = "meta-llama--Llama-3.1-8B", "Qwen--Qwen3-30B-A3B"
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sequence": (LLAMA, 2, {"sequence_parallel_size": 2, "strategy": "zero3"}),
    "tensor": (LLAMA, 2, {"tensor_parallel_size": 2, "strategy": "zero1"}),
    "context": (LLAMA, 2, {"context_parallel_size": 2}),
    "expert": (MIXTURE, 2, {"expert_parallel_size": 2, "strategy": "zero2", "offload": "none"}),
    "pipelines": (LLAMA, 4, {"pipeline_parallel_size": 2, "strategy": "zero1", "global_batch_size": 64}),
}
"""Model, ranks and what is fixed; four ranks are two pipelines."""
MEMORY_TOLERANCE = 0.15
"""Largest relative difference of metered from predicted bytes. Seen: 0.11, backward phase of tensor parallelism."""


@pytest.mark.parametrize(
    "name",
    [
        "pipelines",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("sequence", "tensor", "context", "expert")),
    ],
)
def test_rehearsal_passes(name: str, deepspeed_cpu_ops: None) -> None:
    model, ranks, fixed = CASES[name]
    made = plan(str(CONFIGS / model), "8xB200", TrainingJob(**fixed))
    axes = {axis: getattr(made.chosen.strategy, axis) for axis in ("tp", "pp", "sp", "cp", "ep")}
    assert max(axes.values()) == 2, "the plan has the axis that was asked for"
    found = rehearse(made, ranks=ranks, steps=4)
    assert found.passed, "\n".join(f"{check.name}: {check.detail}" for check in found.checks if not check.passed)
    assert found.ranks == ranks
    assert found.measured is not None and found.predicted is not None
    for phase in ("loss", "backward", "step"):
        measured = sum(found.measured[phase].values())
        predicted = sum(found.predicted[phase].terms.values())
        assert measured == pytest.approx(predicted, rel=MEMORY_TOLERANCE), phase
