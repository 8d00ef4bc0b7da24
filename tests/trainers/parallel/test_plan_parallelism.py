"""Which trainer and callbacks a plan's axes become."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import MODELS
from shardwright.ds_configs.memory.pipeline_stages import pipeline_stages
from shardwright.ds_configs.memory.shares import rank_shares
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.strategy import Strategy
from shardwright.plugins.planning.from_names import plan
from shardwright.trainers import ExpertParallelCallback, SequenceParallelCallback, TensorParallelCallback
from shardwright.trainers.parallel.trainer_for import PlannedParallelism, parallelism_of, planned_parallelism

DATA = Strategy(engine="deepspeed", zero_stage=1, dp_shard=4)


def test_data_parallelism_needs_nothing() -> None:
    assert parallelism_of(DATA) == PlannedParallelism()
    assert not parallelism_of(DATA).is_pipeline


@pytest.mark.parametrize(
    ("axis", "kind", "size"),
    [
        ("sp", SequenceParallelCallback, "sequence_parallel_size"),
        ("ep", ExpertParallelCallback, "expert_parallel_size"),
        ("tp", TensorParallelCallback, "tensor_parallel_size"),
    ],
)
def test_each_axis_becomes_its_callback(axis: str, kind: type, size: str) -> None:
    found = parallelism_of(replace(DATA, **{axis: 4}))
    (callback,) = found.callbacks
    assert type(callback) is kind
    assert getattr(callback, size) == 4
    assert not found.is_pipeline


def test_context_parallelism_is_prepared_without_a_callback() -> None:
    found = parallelism_of(Strategy(engine="fsdp2", dp_shard=2, cp=2))
    assert (found.callbacks, found.context_parallel_size) == ((), 2)


def test_a_pipeline_divides_its_matrices_itself() -> None:
    found = parallelism_of(replace(DATA, pp=2, tp=2))
    assert found.is_pipeline and found.callbacks == ()
    assert (found.pipeline_stages, found.tensor_parallel_size) == (2, 2)


def test_the_stages_of_a_plan_are_those_that_its_memory_was_computed_for() -> None:
    job = TrainingJob(pipeline_parallel_size=2, strategy="zero1", global_batch_size=64)
    made = plan(str(MODELS / "meta-llama--Llama-3.1-8B"), "8xB200", job)
    found = planned_parallelism(made)
    assert found.pipeline_stages == pipeline_stages(made.model, made.job, 2)
    assert found.pipeline_stages[-1].end_layer == made.model.dimensions.num_layers


def test_tensor_parallelism_moves_the_borders_of_plan_and_run_alike() -> None:
    """Whole matrices would be cut [19, 21, 21, 19]: the head, which stays whole, weighs more beside eighths of them."""
    job = TrainingJob(
        pipeline_parallel_size=4, tensor_parallel_size=8, strategy="zero1", global_batch_size=64, micro_batch_size=1
    )
    made = plan(str(MODELS / "meta-llama--Llama-3.1-70B"), "8x8xH100", job)
    strategy = made.chosen.strategy
    run = planned_parallelism(made).pipeline_stages
    assert isinstance(run, tuple)
    priced = {share.stage.index: share.stage for share in rank_shares(strategy, made.model, made.job) if share.stage}
    assert {index: run[index] for index in priced} == priced
    whole = pipeline_stages(made.model, made.job, 4)
    assert run != whole and run[-1].num_layers < whole[-1].num_layers
