"""Plans on fewer nodes: the same global batch, or a reason why there must be all."""

from __future__ import annotations

import pytest
from planning import public_model
from shardwright.ds_configs.plan.plan import Plan, make_plan, most_nodes, on_fewer_nodes
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob


def planned(hardware: str, model: str = "meta-llama--Llama-3.2-1B", **job: object) -> Plan:
    return make_plan(public_model(model), parse_hardware(hardware), TrainingJob(**job))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_fewer_nodes_keep_global_batch(strategy: str) -> None:
    plan = planned("4x8xH100-80GB", strategy=strategy, global_batch_size=96, micro_batch_size=1)
    fewer = on_fewer_nodes(plan, 3)
    assert fewer.hardware.nodes == 3
    assert fewer.chosen.strategy.world_size == 24
    assert fewer.chosen.strategy.global_batch_size == plan.chosen.strategy.global_batch_size == 96
    assert fewer.chosen.memory.gpu.peak_bytes >= plan.chosen.memory.gpu.peak_bytes
    assert fewer.chosen.strategy.gradient_accumulation_steps == 4


def test_node_counts_that_do_not_divide_the_batch_are_skipped() -> None:
    plan = planned("4x8xH100-80GB", strategy="zero2", global_batch_size=64, micro_batch_size=1)
    with pytest.raises(UsageError, match="nodes = 3: must divide the 8 micro-batches"):
        on_fewer_nodes(plan, 3)
    assert most_nodes(plan, 3, least=1) == 2
    assert most_nodes(plan, 3, least=3) is None
    assert most_nodes(plan, 4, least=1) == 4


def test_plans_that_need_all_nodes_are_rejected_on_fewer() -> None:
    large = planned("4x8xH100-80GB", "meta-llama--Llama-3.1-70B", strategy="zero3", micro_batch_size=1)
    with pytest.raises(UsageError, match="does not fit: an accelerator needs"):
        on_fewer_nodes(large, 1)
    divided = planned("2x8xH100-80GB", tensor_parallel_size=2, micro_batch_size=1)
    with pytest.raises(UsageError, match="needs all nodes"):
        on_fewer_nodes(divided, 1)
