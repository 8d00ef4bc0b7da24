"""Arguments of `make_trainer` that are rejected before a Trainer is created, and the stages of a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paths import CONFIGS
from shardwright.ds_configs.memory.rank_parameters import pipeline_stages, rank_shares
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.planning import plan
from shardwright.trainers.parallel.planned import parallelism_of, planned_parallelism
from transformers import Trainer, TrainingArguments

SHARED = Layout(engine="deepspeed", zero_stage=1, sp=2)


class Newer(Trainer):  # type: ignore[misc]
    def __init__(self, model: Any = None, args: Any = None, novel_weight: float = 1.0) -> None:
        super().__init__(model=model, args=args)
        self.novel_weight = novel_weight


@pytest.fixture
def arguments(tmp_path: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")


def error_of(arguments: Any, layout: Layout = SHARED, **settings: Any) -> str:
    with pytest.raises(UsageError) as error:
        parallelism_of(layout).make_trainer(args=arguments, **settings)
    return str(error.value)


def test_misspelled_parameter_suggests_the_nearest_name(arguments: TrainingArguments) -> None:
    model = torch.nn.Linear(2, 2)
    assert "did you mean novel_weight?" in error_of(arguments, model=model, trainer_class=Newer, novel_wieght=2.0)
    assert "did you mean compute_metrics?" in error_of(arguments, model=model, compute_metric=len)


def test_every_layout_needs_a_loaded_model(arguments: TrainingArguments) -> None:
    assert "pass model=..., or model_init=..." in error_of(arguments)
    assert "load it with from_pretrained" in error_of(arguments, model="directory")
    message = error_of(arguments, model_init=lambda: None)
    assert "it builds the model again" in message and "pass model=model_init()" in message


def test_pipeline_rejects_every_unsupported_argument(arguments: TrainingArguments) -> None:
    stages = Layout(engine="deepspeed", zero_stage=0, pp=2)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    message = error_of(arguments, stages, model="directory", optimizers=(optimizer, None), compute_metrics=len)
    assert "optimizers: " in message and "compute_metrics: " in message


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
