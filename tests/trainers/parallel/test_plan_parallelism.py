"""Pipeline stages of a run are those that its plan was computed for."""

from __future__ import annotations

from paths import CONFIGS
from shardwright.ds_configs.memory.rank_parameters import pipeline_stages, rank_shares
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning.from_names import plan
from shardwright.trainers.parallel.trainer_for import planned_parallelism


def test_tensor_parallelism_moves_stage_borders_equally_in_plan_and_run() -> None:
    """Without tensor parallelism the cut is [19, 21, 21, 19]; the unsharded head weighs more then."""
    job = TrainingJob(
        pipeline_parallel_size=4, tensor_parallel_size=8, strategy="zero1", global_batch_size=64, micro_batch_size=1
    )
    made = plan(str(CONFIGS / "meta-llama--Llama-3.1-70B"), "8x8xH100", job)
    layout = made.chosen.layout
    run = planned_parallelism(made).stages
    priced = {share.stage.index: share.stage for share in rank_shares(layout, made.model, made.job) if share.stage}
    assert {index: run[index] for index in priced} == priced
    whole = pipeline_stages(made.model, made.job, 4)
    assert run != whole and run[-1].num_layers < whole[-1].num_layers
