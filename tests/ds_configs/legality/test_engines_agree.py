"""Rules of sizes over drawn layouts, against the libraries that apply the sizes: they accept exactly the legal ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel_rules import rule_errors
from planning import llama
from shardwright.ds_configs.check.files import check_text
from shardwright.ds_configs.legality.axes import context_parallel_errors, expert_errors, sequence_parallel_errors
from shardwright.ds_configs.legality.rules import legality_errors
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout

pytestmark = pytest.mark.slow

SIZES = st.integers(1, 12)
SEQUENCE = 5760
"""Divisible by twice every drawn size of an axis."""


def accepts(call: Callable[[], Any]) -> bool:
    try:
        call()
    except (ValueError, AssertionError):
        return False
    return True


def test_heads_are_exchanged_as_ulysses_does() -> None:
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    shapes = {"attn": None, "batch_size": 1, "attn_head_size": 8, "num_hidden_layers": 1, "process_group": None}
    with (
        patch.object(ulysses_sp.dist, "get_world_size") as world_size,
        patch.object(ulysses_sp.dist, "get_rank", return_value=0),
        patch.object(ulysses_sp, "register_all_to_all_group", create=True),
    ):
        for ranks, heads, shared in itertools.product(range(1, 9), range(1, 13), range(1, 13)):
            world_size.return_value = ranks
            sizes = {"attn_head_count": heads, "kv_head_count": shared, "seq_length_is_variable": True}
            accepted = accepts(partial(ulysses_sp.UlyssesSPAttentionHF, **shapes, **sizes))
            facts = {"num_attention_heads": heads, "num_key_value_heads": shared}
            errors = rule_errors(sequence_parallel_errors, sp=ranks, world_size=ranks, **facts)
            assert accepted == (not errors), (ranks, heads, shared)


@given(experts=st.integers(1, 32), ep=st.integers(2, 16), ranks=SIZES)
def test_experts_are_divided_as_auto_ep_does(experts: int, ep: int, ranks: int) -> None:
    from deepspeed.module_inject import auto_ep_config

    def validate() -> None:
        config = auto_ep_config.parse_autoep_config({"enabled": True, "autoep_size": ep})
        auto_ep_config.validate_autoep_config(config, ranks, 1, 1, 1)
        layer: Any = SimpleNamespace(
            num_experts=experts, moe_module_name="moe", num_expert_groups=None, num_limited_groups=None, top_k=1
        )
        auto_ep_config.validate_autoep_post_detection(config, [layer])

    errors = rule_errors(expert_errors, ep=ep, model_type="mixtral", num_experts=experts, dp_shard=ranks, zero_stage=1)
    assert accepts(validate) == (not errors)


@given(ranks=st.integers(2, 8), length=st.integers(1, 200))
def test_sequences_are_divided_as_the_ring_does(ranks: int, length: int) -> None:
    balancing = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    accepted = accepts(balancing._HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices)
    errors = rule_errors(context_parallel_errors, cp=ranks, engine="fsdp2", world_size=ranks, seq_len_tokens=length)
    assert accepted == (not errors)


@given(replicate=st.integers(1, 3), shard=st.integers(1, 4), cp=st.integers(1, 3), ranks=st.sampled_from([2, 4, 6, 8]))
def test_sizes_are_the_mesh_of_accelerate(replicate: int, shard: int, cp: int, ranks: int) -> None:
    from accelerate import ParallelismConfig

    def mesh() -> None:
        accelerator: Any = SimpleNamespace(multi_device=True, num_processes=ranks, is_fsdp2=True)
        sizes = {"dp_replicate_size": replicate, "dp_shard_size": shard, "cp_size": cp}
        ParallelismConfig(**sizes, tp_size=1, sp_size=1)._validate_accelerator(accelerator)

    layout = Layout(engine="fsdp2", dp_replicate=replicate, dp_shard=shard, cp=cp)
    errors = legality_errors(
        llama(), layout, TrainingJob(seq_len_tokens=SEQUENCE), parse_hardware(f"{ranks}xA100-80GB")
    )
    if shard * cp > 1:
        assert accepts(mesh) == (not errors), errors


@given(micro=SIZES, steps=SIZES, ranks=SIZES, off=st.integers(-2, 2), missing=st.sampled_from(["", "micro", "steps"]))
def test_batches_are_those_that_deepspeed_derives(micro: int, steps: int, ranks: int, off: int, missing: str) -> None:
    from deepspeed.runtime import config as upstream

    batch = micro * steps * ranks + off
    file = {"train_batch_size": batch, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}
    file |= {} if missing == "micro" else {"train_micro_batch_size_per_gpu": micro}
    file |= {} if missing == "steps" else {"gradient_accumulation_steps": steps}
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: ranks)
    with patch.object(upstream.dist, "get_rank", return_value=0):
        accepted = accepts(lambda: upstream.DeepSpeedConfig(dict(file), mpu=mpu))
    findings = check_text(json.dumps(file), filename="ds_config.json", world_size=ranks, uses_transformers=False)
    assert accepted == (not any(finding.kind == "error" for finding in findings)), findings
    if not missing and batch > 0:
        layout = Layout(engine="deepspeed", zero_stage=1, dp_shard=ranks)
        layout = replace(layout, micro_batch_size=micro, gradient_accumulation_steps=steps)
        job = TrainingJob(global_batch_size=batch, micro_batch_size=micro, seq_len_tokens=SEQUENCE)
        errors = legality_errors(llama(), layout, job, parse_hardware(f"{ranks}xA100-80GB"))
        assert accepted == (not errors), errors
        unit = micro * ranks
        for error in errors:
            legal = [int(number) for number in error.fix.removeprefix("nearest legal values: ").split(", ")]
            nearest = {batch // unit * unit, -(-batch // unit) * unit} - {0}
            assert set(legal) == nearest
