"""Illegal sizes of parallel axes: each error names the violated rule and the nearest legal values."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_rules import rule_errors
from planning import llama, public_model
from shardwright.ds_configs.legality.axes import context_parallel_errors, sequence_parallel_errors
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob

LLAMA = llama(num_attention_heads=12, num_key_value_heads=4, num_hidden_layers=4, hidden_size=192)
MIXTRAL = public_model("mistralai/Mixtral-8x7B-v0.1")


def refused(model=LLAMA, hardware="8xA100-80GB", **job) -> str:
    with pytest.raises(UsageError) as caught:
        make_plan(model, parse_hardware(hardware), TrainingJob(**job))
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings_", "expected"),
    [
        ({"model": MIXTRAL, "expert_parallel_size": 2, "strategy": "zero0"}, "with ep requires fp32"),
        ({"pipeline_parallel_size": 3}, "pp = 3: must divide the ranks (8 % 3 = 2); nearest legal values: 2, 4"),
        ({"pipeline_parallel_size": 3, "tensor_parallel_size": 4}, "for pp, nearest legal value: 2"),
        ({"context_parallel_size": 2, "sequence_parallel_size": 2}, "cannot be combined with cp = 2"),
        ({"pipeline_parallel_size": 2, "precision": "fp16"}, "pp = 2: is not supported in fp16"),
        ({"pipeline_parallel_size": 2, "loss": "chunked"}, "pp = 2: is not supported with a chunked loss"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size = 0: must be an integer from 1"),
        ({"zero_quantized_weights": True, "tensor_parallel_size": 2}, "requires ZeRO stage 0 to 2, not 3"),
    ],
)
def test_planning_rejects_illegal_sizes(settings_, expected):
    assert expected in refused(**settings_)


@given(
    tp=st.integers(1, 12), sp=st.integers(1, 12), pp=st.integers(1, 6), batch=st.one_of(st.none(), st.integers(1, 40))
)
@settings(max_examples=30, deadline=None)
def test_planning_never_changes_fixed_sizes(tp, sp, pp, batch):
    job = TrainingJob(
        tensor_parallel_size=tp,
        sequence_parallel_size=sp,
        pipeline_parallel_size=pp,
        global_batch_size=batch,
        seq_len_tokens=480,
    )
    try:
        layout = make_plan(LLAMA, parse_hardware("12xA100-80GB"), job).chosen.layout
    except UsageError as error:
        assert error.errors
        return
    assert (layout.tp, layout.sp, layout.pp) == (tp, sp, pp)
    assert layout.world_size == 12
    assert batch is None or layout.global_batch_size == batch


@pytest.mark.parametrize(
    ("facts", "instead"),
    [
        ({"model_type": "qwen3_next", "layer_types": ("linear_attention", "full_attention")}, "use cp = 1"),
        ({"model_type": "mamba"}, "use cp = 1"),
        ({"model_type": "gpt2"}, "use cp = 1"),
        ({"model_type": "gpt_neox"}, "use cp = 1, or sp with DeepSpeed"),
        (
            {"layer_types": ("sliding_attention",), "attention_window_tokens": 8},
            "use cp = 1, or sp with DeepSpeed and flash_attention_2",
        ),
        ({"attention_window_tokens": 8}, "use cp = 1, or sp with DeepSpeed and flash_attention_2"),
    ],
)
def test_suggests_sequence_parallelism_only_where_supported(facts, instead):
    (error,) = rule_errors(context_parallel_errors, cp=2, engine="fsdp2", world_size=4, **facts)
    assert error.fix == instead
    attention = "flash_attention_2" if instead.endswith("flash_attention_2") else "sdpa"
    sharing = {"sp": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "attention": attention}
    runs = not rule_errors(sequence_parallel_errors, world_size=4, **sharing, **facts)
    assert runs == ("sp with DeepSpeed" in instead)
