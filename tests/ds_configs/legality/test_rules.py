"""Every legality rule: a legal neighbour passes, and the violation names the equation and the nearest legal values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import llama, public_model
from shardwright.ds_configs.legality.rules import RULES, legality_errors
from shardwright.ds_configs.specs.errors import nearest_divisors
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout, ZeroOptions
from shardwright.ds_configs.specs.model import ParameterShape

LLAMA = llama(num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=4)
MIXTRAL = public_model("mistralai/Mixtral-8x7B-v0.1")
SCALAR = replace(
    LLAMA,
    parameters=(
        *LLAMA.parameters,
        ParameterShape(name="logit_scale", shape=(), count=1, group=LLAMA.parameters[0].group, kind="other"),
    ),
)
ROUTER = "model.layers.*.feed_forward.router.weight"
ROUTED = replace(
    LLAMA,
    parameters=(*LLAMA.parameters, ParameterShape(name=ROUTER, shape=(4, 8), count=2, group="mlp", kind="router")),
)
OUT = "backbone.layers.*.mixer.out_proj.weight"
MAMBA = replace(
    LLAMA,
    model_type="mamba",
    parameters=(*LLAMA.parameters, ParameterShape(name=OUT, shape=(8, 8), count=2, group="other", kind="linear")),
)
WINDOWED = replace(LLAMA, sliding_window=1024)
ZERO1 = Layout(engine="deepspeed", zero_stage=1, dp_shard=8)
ZERO3 = Layout(engine="deepspeed", zero_stage=3, dp_shard=8)
FSDP2 = Layout(engine="fsdp2", dp_shard=8)
DDP = Layout(engine="ddp", dp_replicate=8)


def errors(layout, model=LLAMA, hardware="8xA100-80GB", nvme=None, **job) -> list[str]:
    cluster = parse_hardware(hardware, nvme=nvme)
    return [str(error) for error in legality_errors(model, layout, TrainingJob(**job), cluster)]


def test_legal_neighbours_of_the_violations_have_no_errors():
    recomputed = replace(ZERO1, gradient_checkpointing=True, checkpointed_layers=2)
    seq2seq = replace(LLAMA, model_type="t5", task="seq2seq")
    legal = [
        *((layout, {}) for layout in (ZERO1, ZERO3, FSDP2, DDP)),
        *((ZERO1, {"model": model}) for model in (ROUTED, MAMBA, seq2seq, WINDOWED)),
        *((replace(ZERO1, dp_shard=4, **{axis: 2}), {}) for axis in ("sp", "tp", "pp")),
        (DDP, {"model": SCALAR}),
        (replace(ZERO1, dp_shard=4, sp=2), {"teacher": LLAMA}),
        (replace(ZERO1, ep=2), {"model": MIXTRAL}),
        (replace(FSDP2, cp=2, dp_shard=4), {}),
        (replace(ZERO1, micro_batch_size=2), {"global_batch_size": 16}),
        (ZERO1, {"model": replace(LLAMA, learned_positions=4096), "seq_len_tokens": 4096}),
        (ZERO1, {"loss": "chunked"}),
        (ZERO1, {"method": "lora"}),
        (replace(ZERO1, tiled_mlp=True), {}),
        (replace(recomputed, offloaded_checkpoints=2), {}),
        (replace(ZERO1, offload_optimizer="cpu"), {}),
        (replace(ZERO3, offload_optimizer="nvme", offload_param="nvme"), {"nvme": "/n:1TB"}),
        (replace(FSDP2, offload_optimizer="cpu", offload_param="cpu"), {}),
        (replace(ZERO3, zero=ZeroOptions(hpz_partition_size=4, quantized_weights=True)), {}),
        (
            replace(ZERO3, dp_shard=16, zero=ZeroOptions(quantized_gradients=True)),
            {"hardware": "2x8xA100-80GB"},
        ),
        (Layout(engine="single"), {"optimizer": "lomo", "hardware": "1xA100-80GB"}),
        (ZERO3, {"optimizer": "muon"}),
        (FSDP2, {"weights_dtype": "bf16"}),
        (FSDP2, {"precision": "fp8", "hardware": "8xH100-80GB"}),
        (ZERO1, {"precision": "fp16", "hardware": "8xV100-32GB"}),
        (FSDP2, {"use_liger_kernel": True}),
        (DDP, {"torch_compile": True}),
    ]
    for layout, settings in legal:
        assert errors(layout, **settings) == [], (layout, settings)


CASES = {
    "sizes": (replace(ZERO1, micro_batch_size=0), {}, "micro_batch_size = 0: must be at least 1"),
    "world": (
        replace(ZERO1, dp_shard=6),
        {},
        "number of accelerators, 8; use dp_replicate * dp_shard = 8",
    ),
    "world with tp": (
        replace(ZERO1, tp=3, dp_shard=2),
        {},
        "product divides it; tp * pp * sp * cp is 3",
    ),
    "batch": (ZERO1, {"global_batch_size": 12}, "nearest legal values: 8, 16"),
    "open micro-batch": (
        replace(ZERO1, micro_batch_size=7),
        {"global_batch_size": 57},
        "global_batch_size = 57: must be a multiple of the 8 data-parallel ranks; nearest legal values: 56, 64",
    ),
    "scalar": (FSDP2, {"model": SCALAR}, "does not support zero-dimensional parameters such as logit_scale; use ddp"),
    "built in pieces": (ZERO3, {"model": replace(LLAMA, model_type="whisper")}, "use ZeRO-2 or FSDP2"),
    "shared layers": (FSDP2, {"model": replace(LLAMA, model_type="zamba2")}, "share parameters; use a ZeRO stage"),
    "stage": (replace(FSDP2, zero_stage=2), {}, "zero_stage = 2: must be None with engine fsdp2"),
    "stage 4": (replace(ZERO1, zero_stage=4), {}, "must be 0, 1, 2 or 3"),
    "single": (Layout(engine="single", dp_replicate=8), {}, "requires 1 rank, not 8; use ddp"),
    "replicas": (replace(ZERO1, dp_replicate=2, dp_shard=4), {}, "dp_replicate = 2: must be 1 with ZeRO 1 to 3"),
    "unseen code": (FSDP2, {"model": replace(LLAMA, source="structure")}, "is defined by code in its repository"),
    "encoder": (
        replace(ZERO1, dp_shard=4, sp=2),
        {"model": replace(LLAMA, task="masked_lm")},
        "is not a causal language model",
    ),
    "reference of TRL": (
        ZERO3,
        {"task": "dpo", "reference": LLAMA, "reference_placement": "replica"},
        "is not how TRL places a reference under ZeRO-3 and FSDP2; use sharded or cached",
    ),
    "offloaded reward model": (
        DDP,
        {"task": "grpo", "reward": LLAMA, "reward_placement": "offloaded"},
        "is not how TRL places a reward under this engine; use replica",
    ),
    "groups of completions": (
        ZERO1,
        {"task": "grpo", "num_generations": 3},
        "must divide the 8 completions of a generation: micro-batch 1 * data-parallel ranks 8 * steps per generation 1",
    ),
    "pipeline of pairs": (replace(ZERO1, pp=2, dp_shard=4), {"task": "orpo"}, "whose trainer has none; use pp = 1"),
    "shards": (replace(DDP, dp_replicate=4, dp_shard=2), {}, "must be 1 with DDP and ZeRO-0"),
    "offload stage 0": (replace(DDP, offload_optimizer="cpu"), {}, "requires ZeRO stage 1, 2 or 3"),
    "offload parameters": (replace(ZERO1, offload_param="cpu"), {}, "offload_param = 'cpu': requires ZeRO-3"),
    "nvme stage": (replace(ZERO1, offload_optimizer="nvme"), {"nvme": "/n:1TB"}, "use ZeRO-3, or cpu"),
    "nvme missing": (replace(ZERO3, offload_optimizer="nvme"), {}, "pass --nvme PATH:SIZE"),
    "fsdp2 offload": (
        replace(FSDP2, offload_optimizer="cpu"),
        {},
        "offloads parameters, gradients and optimizer states",
    ),
    "cpu kernel": (
        replace(ZERO3, offload_optimizer="cpu"),
        {"optimizer": "adamw_8bit"},
        "DeepSpeed replaces the optimizer with CPU Adam; supported with one process, ddp, zero1, zero2, zero3",
    ),
    "dtensors": (FSDP2, {"optimizer": "lion_8bit"}, "do not support DTensors"),
    "layerwise ranks": (DDP, {"optimizer": "lomo"}, "supported with one process; or use adamw_torch_fused"),
    "layerwise accumulation": (
        Layout(engine="single", gradient_accumulation_steps=2),
        {"optimizer": "lomo", "hardware": "1xA100-80GB"},
        "updates weights after every micro-batch",
    ),
    "matrices of adapters": (DDP, {"optimizer": "muon", "method": "lora"}, "is for full training, not for lora"),
    "steps of muon": (ZERO3, {"optimizer": "muon", "optim_args": "ns_steps=3"}, "is not read by DeepSpeed"),
    "bf16 weights": (ZERO1, {"weights_dtype": "bf16"}, "trains fp32 master weights; use ddp or fsdp2"),
    "bf16": (ZERO1, {"hardware": "8xV100-32GB"}, "is not supported by V100-32GB; use fp16 or fp32"),
    "fp16 on cpu": (ZERO1, {"hardware": "8xCPU", "precision": "fp16"}, "is not supported on CPU ranks"),
    "hpz stage": (replace(ZERO1, zero=ZeroOptions(hpz_partition_size=4)), {}, "requires ZeRO-3; use 1"),
    "hpz divides": (replace(ZERO3, zero=ZeroOptions(hpz_partition_size=3)), {}, "nearest legal values: 2, 4"),
    "qgz": (replace(ZERO3, zero=ZeroOptions(quantized_gradients=True)), {}, "ZeRO-3 on several nodes"),
    "fp8 on ampere": (
        FSDP2,
        {"precision": "fp8"},
        "needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper or later), not A100-80GB of compute capability 8.0",
    ),
    "fp8 elsewhere": (FSDP2, {"precision": "fp8", "hardware": "8xMI300X"}, "or later), not MI300X; use bf16"),
    "fp8 engine": (
        ZERO3,
        {"precision": "fp8", "hardware": "8xH100-80GB"},
        "accelerate 1.15.0 rejects mixed_precision beside a DeepSpeed file; use --strategy fsdp2 or ddp, or bf16",
    ),
    "fp8 adapters": (
        FSDP2,
        {"precision": "fp8", "method": "lora", "hardware": "8xH100-80GB"},
        "supports full training only, not lora",
    ),
    "fp8 axes": (
        replace(FSDP2, cp=2, dp_shard=4),
        {"precision": "fp8", "hardware": "8xH100-80GB"},
        "precision = 'fp8': supports data parallelism only",
    ),
    "liger family": (
        FSDP2,
        {"use_liger_kernel": True, "model": MAMBA},
        "has no kernels for mamba; supported: deepseek_v2",
    ),
    "liger on cpu": (FSDP2, {"use_liger_kernel": True, "hardware": "8xCPU"}, "needs Triton"),
    "tiled compile": (replace(FSDP2, tiled_mlp=True), {"torch_compile": True}, "is not supported with tiled MLPs"),
    "liger stages": (
        replace(ZERO1, tp=2, dp_shard=4),
        {"use_liger_kernel": True},
        "tp = 2: replaces the layers that Liger replaces",
    ),
    "compiled zero3": (ZERO3, {"torch_compile": True}, "the compiled backward pass reads parameters that ZeRO-3"),
    "qwz stage": (
        replace(ZERO1, zero=ZeroOptions(quantized_weights=True)),
        {},
        "requires ZeRO-3, which gathers weights",
    ),
    "qwz on cpu": (
        replace(ZERO3, zero=ZeroOptions(quantized_weights=True)),
        {"hardware": "8xCPU", "precision": "fp32"},
        "is not supported on CPU ranks",
    ),
    "sp engine": (replace(FSDP2, sp=2, dp_shard=4), {}, "or cp with FSDP2"),
    "cp engine": (replace(ZERO1, cp=2, dp_shard=4), {}, "cp = 2: requires FSDP2, not deepspeed"),
    "ep dense": (replace(ZERO1, ep=2), {}, "requires a mixture of experts"),
    "tp experts": (replace(ZERO1, tp=2, dp_shard=4), {"model": MIXTRAL}, "AutoTP does not support mixtures of experts"),
    "images": (replace(ZERO1, tp=2, dp_shard=4), {"images_per_sample": 1}, "tp = 2: is not supported with images"),
    "teacher": (replace(ZERO1, tp=2, dp_shard=4), {"teacher": LLAMA}, "tp = 2: is not supported with a teacher"),
    "pp stage": (
        replace(ZERO3, pp=2, dp_shard=4),
        {},
        "zero_optimization.stage = 3: pipelines require ZeRO stage 0 or 1",
    ),
    "positions": (
        ZERO1,
        {"model": replace(LLAMA, learned_positions=512)},
        "must be at most 512, the learned positions",
    ),
    "chunked loss": (
        ZERO1,
        {"model": replace(LLAMA, model_type="t5", task="seq2seq"), "loss": "chunked"},
        "only causal language models have a loss that can be computed in parts; use --loss eager",
    ),
    "tiled MLP without MLPs": (
        replace(ZERO1, tiled_mlp=True),
        {"model": replace(LLAMA, parameters=tuple(p for p in LLAMA.parameters if p.group != "mlp"))},
        "has no module named mlp or feed_forward in its layers; use --tiled-mlp off",
    ),
    "tiled MLP with tp": (replace(ZERO1, tiled_mlp=True, tp=2, dp_shard=4), {}, "use tp = 1, or --tiled-mlp off"),
    "offload without recomputation": (
        replace(ZERO1, offloaded_checkpoints=2),
        {},
        "offload_activations = 'on': requires gradient checkpointing; use --gradient-checkpointing on",
    ),
    "reentrant recomputation in a pipeline": (
        replace(ZERO1, gradient_checkpointing=True, pp=2, dp_shard=4),
        {"gradient_checkpointing": "reentrant"},
        "use pp = 1, or --gradient-checkpointing on",
    ),
    "offload of too many layers": (
        replace(ZERO1, gradient_checkpointing=True, checkpointed_layers=2, offloaded_checkpoints=3),
        {},
        "must be at most the 2 recomputed layers, not 3",
    ),
    "lora targets": (ZERO1, {"method": "lora", "lora_targets": ("c_attn",)}, "names from down_proj, gate_proj"),
    "lora experts": (
        ZERO1,
        {"method": "lora", "lora_targets": ("gate_proj",), "model": MIXTRAL},
        "match no Linear module that PEFT adapts and no fused experts; use all-linear, or names from k_proj, o_proj, "
        "q_proj, v_proj, or experts (mlp.experts.down_proj, mlp.experts.gate_up_proj)",
    ),
    "dora experts": (
        ZERO1,
        {"method": "lora", "lora_variant": "dora", "model": MIXTRAL},
        "lora_variant = 'dora': is not supported for the router and fused experts",
    ),
    "pissa in 4 bit": (
        ZERO1,
        {"method": "qlora", "lora_variant": "pissa"},
        "which QLoRA loads in 4 bit; use --method lora, or --lora-variant lora",
    ),
    "whole tower in 4 bit": (
        ZERO1,
        {"method": "qlora", "vision_tower": "full"},
        "trains weights that QLoRA loads in 4 bit; use trained, or --method lora",
    ),
    "lora router": (ZERO1, {"method": "lora", "model": ROUTED}, "router, to whose output PEFT cannot add"),
    "qlora falcon": (
        *(ZERO1, {"method": "qlora", "model": replace(LLAMA, model_type="falcon")}),
        "packs no weights of falcon: bitsandbytes 0.50 replaces no subclasses of Linear; use --method lora",
    ),
    "lora mamba": (ZERO1, {"method": "lora", "model": MAMBA}, "mixer.out_proj, which PEFT rejects in Mamba layers"),
}


@pytest.mark.parametrize("name", CASES)
def test_violations_name_the_rule_and_the_fix(name):
    layout, settings, expected = CASES[name]
    found = errors(layout, **settings)
    assert any(expected in error for error in found), found


def test_zero_dimensional_parameters_require_ddp():
    rule = "zero-dimensional"
    assert not any(rule in error for error in errors(DDP, SCALAR))
    assert all(any(rule in error for error in errors(layout, SCALAR)) for layout in (ZERO1, ZERO3, FSDP2))


def test_torch_still_cannot_view_scalars_as_bytes():
    # What DeepSpeed's `_broadcast_model` runs into; once it passes, the rule can go.
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError, match="dim"):
        torch.zeros((), dtype=torch.bfloat16).view(torch.uint8)


def test_suggested_lora_targets_are_legal():
    for model in (ROUTED, MAMBA):
        error = next(error for error in errors(ZERO1, model, method="lora") if "use names from" in error)
        names = tuple(error.partition("use names from ")[2].split(", "))
        assert "router" not in names
        assert "out_proj" not in names
        assert not any("lora_targets" in error for error in errors(ZERO1, model, method="lora", lora_targets=names))


def test_every_rule_has_a_violation_above():
    triggered = set()
    for layout, settings, _ in CASES.values():
        options = dict(settings)
        model = options.pop("model", LLAMA)
        cluster = parse_hardware(options.pop("hardware", "8xA100-80GB"), nvme=options.pop("nvme", None))
        case = (model, layout, TrainingJob(**options), cluster)
        triggered |= {rule.__name__ for rule in RULES if any(rule(*case))}
    assert triggered == {rule.__name__ for rule in RULES}


@given(number=st.integers(1, 5000), value=st.integers(1, 5000))
def test_nearest_divisors_divide_and_enclose(number, value):
    found = [int(text) for text in nearest_divisors(number, value).split(", ")]
    assert all(number % divisor == 0 for divisor in found)
    if value <= number:
        assert min(found) <= value <= max(found)
