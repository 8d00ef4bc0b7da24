"""Parts of `PipelineTrainer` that need no second rank: shapes, counted samples, stages and checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equivalence.cases import Case, make_model
from fresh_process import forget_last_run
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError
from shardwright.ds_configs.specs.layout import PipelineStage, contiguous_stages, partition_errors
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.deepspeed_pipeline.checkpoint import check_cut, save_cut
from shardwright.plugins.deepspeed_pipeline.engine import (
    free_logits_early,
)
from shardwright.trainers.counting.counts import labelled_tokens
from shardwright.trainers.parallel.pipeline import (
    PipelineTrainer,
    check_pipeline,
    engine_errors,
    of_one_shape,
)
from transformers import TrainingArguments

pytestmark = pytest.mark.slow


def batch_of(samples: int, tokens: int, *, masked: bool) -> dict[str, torch.Tensor]:
    ids_BS = torch.arange(1, samples * tokens + 1).view(samples, tokens)
    mask = {"attention_mask": torch.ones_like(ids_BS)} if masked else {}
    return {"input_ids": ids_BS, "labels": ids_BS.clone(), **mask}


sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(2, 7)), min_size=1, max_size=5)


@settings(deadline=None)
@given(sizes=sizes, masked=st.booleans())
def test_padding_to_one_shape_keeps_the_predicted_tokens(sizes: list[tuple[int, int]], masked: bool) -> None:
    batches = [batch_of(samples, tokens, masked=masked) for samples, tokens in sizes]
    padded = of_one_shape(batches)
    shape = (max(samples for samples, _ in sizes), max(tokens for _, tokens in sizes))
    for before, after, (samples, tokens) in zip(batches, padded, sizes, strict=True):
        assert after.keys() == before.keys()
        assert all(tensor.shape == shape for tensor in after.values())
        assert labelled_tokens([after]) == labelled_tokens([before])
        for name, tensor in before.items():
            assert torch.equal(after[name][:samples, :tokens], tensor)
        if masked:
            assert not after["attention_mask"][:samples, tokens:].any()
            assert after["attention_mask"].any(dim=1).all(), "every sample has a token to attend to"


def deepspeed_settings(output: Path, *, zero_stage: int = 1, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    settings = Case(layout="pp2-zero1", accumulation=accumulation).arguments(output)
    settings["deepspeed"]["zero_optimization"]["stage"] = zero_stage
    return settings | more


def deepspeed_arguments(output: Path, **settings: Any) -> Any:
    return TrainingArguments(**deepspeed_settings(output, **settings), **configure_cpu_ranks("deepspeed"))


class OnRanks:
    """Training arguments that report another world size."""

    def __init__(self, world_size: int, arguments: Any) -> None:
        self.world_size = world_size
        self.arguments = arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self.arguments, name)


@pytest.fixture(autouse=True)
def forgotten_runs() -> Iterator[None]:
    """Leave no DeepSpeed configuration to the next test."""
    yield
    forget_last_run()


def errors_of(arguments: Any, **more: Any) -> dict[str, str]:
    """Return the refused fields with the sentences about each."""
    model = make_model("llama", {})
    layout = {"stages": 2, "eval_dataset": None, **more}
    found: dict[str, str] = {}
    try:
        check_pipeline(arguments, model, **layout)
    except UsageError as error:
        for config_error in error.errors:
            found[config_error.where] = f"{found.get(config_error.where, '')}{config_error}\n"
    return found


def test_broken_rules_are_reported_together_with_the_nearest_legal_values(tmp_path: Path) -> None:
    more = {"label_smoothing_factor": 0.1, "train_sampling_strategy": "group_by_length"}
    arguments = deepspeed_arguments(tmp_path, zero_stage=2, **more)
    found = errors_of(OnRanks(8, arguments), stages=5)
    assert found.keys() == {"pp", "zero_optimization.stage", "label smoothing", "train_sampling_strategy"}
    assert "8 % 5 = 3); nearest legal value: 2" in found["pp"]
    assert "nearest legal value: 1" in found["zero_optimization.stage"]


def test_other_axes_are_rejected(tmp_path: Path) -> None:
    arguments = deepspeed_arguments(tmp_path)
    arguments.deepspeed_plugin.deepspeed_config["tensor_parallel"] = {"autotp_size": 2}
    assert "tensor_parallel_size" in errors_of(OnRanks(4, arguments))["tensor_parallel.autotp_size"]
    del arguments.deepspeed_plugin.deepspeed_config["tensor_parallel"]
    assert errors_of(OnRanks(4, arguments), tensor_parallel_size=2) == {}
    assert "pp * tp" in str(errors_of(OnRanks(6, arguments), tensor_parallel_size=2))
    arguments.deepspeed_plugin.deepspeed_config["expert_parallel"] = {"autoep_size": 2}
    assert "cannot be combined with pp = 2" in errors_of(OnRanks(4, arguments))["ep"]


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"torch_empty_cache_steps": 3}, "torch_empty_cache_steps"),
        ({"optim": "adalomo"}, "adalomo"),
        ({"optim": "schedule_free_adamw"}, "schedule_free_adamw"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
        ({"accelerator_config": {"even_batches": False}}, "even_batches"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_arguments_are_rejected(tmp_path: Path, more: dict[str, Any], where: str) -> None:
    arguments = TrainingArguments(**{**deepspeed_settings(tmp_path), **configure_cpu_ranks("deepspeed"), **more})
    assert errors_of(OnRanks(4, arguments)).keys() == {where}
    assert (where in errors_of(OnRanks(2, arguments))) == (where != "even_batches")


def test_other_gradient_precision_with_offloaded_optimizer_is_rejected(tmp_path: Path) -> None:
    arguments = deepspeed_arguments(tmp_path)
    config = arguments.deepspeed_plugin.deepspeed_config
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    assert errors_of(OnRanks(2, arguments)) == {}
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    assert "not be summed" in errors_of(OnRanks(2, arguments))["data_types.grad_accum_dtype"]
    del config["data_types"]
    assert errors_of(OnRanks(2, arguments)) == {}


def test_checkpoint_of_other_stages_is_rejected(tmp_path: Path) -> None:
    even, late = contiguous_stages([2, 4]), contiguous_stages([3, 4])
    layout: dict[str, Any] = {"tensor_parallel_size": 1}
    check_cut(tmp_path, even, **layout)
    save_cut(tmp_path, even, **layout)
    check_cut(tmp_path, even, **layout)
    with pytest.raises(UsageError, match="stages = '0-2, 2-4': must equal the value of this run, 0-3, 3-4"):
        check_cut(tmp_path, late, **layout)
    with pytest.raises(UsageError, match="tensor_parallel_size = 1: must equal the value of this run, 2"):
        check_cut(tmp_path, even, **{**layout, "tensor_parallel_size": 2})
    next(tmp_path.iterdir()).write_text("[")
    with pytest.raises(RefusedInputError):
        check_cut(tmp_path, even, **layout)


def test_global_batch_is_checked_before_the_trainer_fills_it_in(tmp_path: Path) -> None:
    section = {**deepspeed_settings(tmp_path)["deepspeed"], "train_batch_size": 8}
    arguments = deepspeed_arguments(tmp_path, deepspeed=section)
    (config_error,) = engine_errors(arguments, replicas=1, tensor_parallel_size=1)
    assert (config_error.where, config_error.value) == ("train_batch_size", 8)
    assert engine_errors(arguments, replicas=2, tensor_parallel_size=1) == []


def test_stages_that_skip_a_layer_are_rejected() -> None:
    first, second = contiguous_stages([2, 4])
    late = PipelineStage(index=1, first_layer=3, end_layer=4, has_embedding=False, has_head=True)
    assert partition_errors((first, second), 4) == []
    for stages in ((first, late), (second, first), (first,)):
        (config_error,) = partition_errors(stages, 4)
        assert "4 decoder layers" in config_error.rule


def test_deepspeed_keeps_logits_after_the_last_stage_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when DeepSpeed lets go of them by itself (seen in 0.19.8); `free_logits_early` can then go."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

    monkeypatch.setattr(DeepSpeedEngine, "backward", lambda self, loss: None)
    engine = object.__new__(PipelineEngine)
    buffers = {"outputs": ["logits"], "labels": ["labels"]}
    module = SimpleNamespace(training=False)
    engine.__dict__.update(pipe_buffers=buffers, module=module, stage_id=1, num_stages=2, optimizer=1, loss=None)
    engine._INSTRUCTION_MAP[BackwardPass](engine, 0)
    assert buffers == {"outputs": ["logits"], "labels": ["labels"]}

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, ForwardPass: lambda self, buffer_id: None}
    free_logits_early(engine)
    engine._INSTRUCTION_MAP[ForwardPass](engine, 0)
    assert buffers == {"outputs": [None], "labels": ["labels"]}
    engine._INSTRUCTION_MAP[BackwardPass](engine, 0)
    assert buffers == {"outputs": [None], "labels": [None]}


class TestOverriddenHooks:
    @pytest.mark.parametrize("name", ["compute_loss", "training_step", "prediction_step", "_clip_grad_norm"])
    def test_overrides_that_a_schedule_does_not_call_are_rejected(self, name: str, tmp_path: Path) -> None:
        subclass: Any = type("OwnTrainer", (PipelineTrainer,), {name: lambda self, *args, **kwargs: None})
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        with pytest.raises(UsageError, match=rf"OwnTrainer\.{name}"):
            subclass(make_model("llama", {}), arguments, pipeline_stages=2)
