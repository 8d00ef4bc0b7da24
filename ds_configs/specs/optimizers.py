"""The optimizers that a job may use: what they keep, what a step allocates and which package has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Literal

from .errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """Memory and requirements of one optimizer of the Trainer."""

    state_bytes_per_parameter: float
    """Bytes of state per trainable parameter, with `low_rank` of those outside of linear layers."""
    eight_bit: bool = False
    """Whether states are 8-bit blocks, except those of embeddings."""
    factored: bool = False
    """Whether a matrix has one row and one column of state instead (Adafactor)."""
    low_rank: Literal["", "moments", "factored"] = ""
    """States of a linear layer: a projection of `LOW_RANK` columns and two moments, or their factors, in that space."""
    layerwise: bool = False
    """Whether each parameter is updated in the backward pass, so that no two gradients exist at the same time."""
    matrix_states: bool = False
    """Whether a matrix has one moment and other parameters have two (Muon)."""
    fp32_states: bool = False
    """Whether states are fp32 or blocks also with bf16 weights; others have the type of the weights."""
    foreach_temporaries: int = 0
    """Temporaries of all parameters, which `foreach` kernels step together; fused kernels have none."""
    matrix_transient: float = 0
    """Temporaries of the largest parameter, for optimizers that step one parameter after the other.

    They are fp32 if states are. For torchao they are buffers of the update that `torch.compile` makes on the CPU, in
    4 bit 26 to 28 bytes per element of fp32, int64 and uint8.
    """
    compensated: bool = False
    """Whether bf16 weights have a compensation of their type (Kahan summation)."""
    cpu_kernel: bool = False
    """Whether DeepSpeed has a CPU kernel with the same arithmetic, which optimizer offload requires."""
    plain_tensors_only: bool = False
    """Whether its kernels do not support DTensors, the parameters of FSDP2."""
    package: str = ""
    """Package that provides it, by its name for pip; empty if Shardwright requires it."""


LOW_RANK = 128
"""Rank of GaLore and APOLLO unless `optim_args` sets another (transformers/trainer_optimizer.py)."""

QUANTIZED_BLOCK = 256
"""Elements of a block of quantized states: bitsandbytes' and, as Transformers sets it, torchao's."""

_BLOCKWISE_8BIT = 1 + 4 / QUANTIZED_BLOCK
"""One byte, and an fp32 scale per block (bitsandbytes/optim/optimizer.py, `blocksize=256`)."""


def _bitsandbytes(moments: int, *, eight_bit: bool) -> OptimizerSpec:
    width = _BLOCKWISE_8BIT if eight_bit else 4
    return OptimizerSpec(
        eight_bit=eight_bit, state_bytes_per_parameter=moments * width, fp32_states=True, plain_tensors_only=True
    )


OPTIMIZERS: Mapping[str, OptimizerSpec] = {
    "adamw_torch_fused": OptimizerSpec(state_bytes_per_parameter=8, cpu_kernel=True),
    "adamw_torch": OptimizerSpec(state_bytes_per_parameter=8, foreach_temporaries=1, cpu_kernel=True),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), _bitsandbytes(2, eight_bit=True)),
    "paged_adamw_32bit": _bitsandbytes(2, eight_bit=False),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), _bitsandbytes(1, eight_bit=False)),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), _bitsandbytes(1, eight_bit=True)),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), _bitsandbytes(3, eight_bit=False)),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), _bitsandbytes(3, eight_bit=True)),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), _bitsandbytes(1, eight_bit=False)),
    "rmsprop_bnb_8bit": _bitsandbytes(1, eight_bit=True),
    "adagrad": OptimizerSpec(state_bytes_per_parameter=4, foreach_temporaries=2, cpu_kernel=True),
    "rmsprop": OptimizerSpec(state_bytes_per_parameter=4, foreach_temporaries=1),
    "sgd": OptimizerSpec(state_bytes_per_parameter=0),
    "adafactor": OptimizerSpec(state_bytes_per_parameter=0, factored=True, fp32_states=True),
    "adamw_torch_8bit": OptimizerSpec(
        state_bytes_per_parameter=2 * _BLOCKWISE_8BIT, fp32_states=True, matrix_transient=2, package="torchao"
    ),
    "adamw_torch_4bit": OptimizerSpec(
        state_bytes_per_parameter=2 * (_BLOCKWISE_8BIT - 1 / 2),
        fp32_states=True,
        matrix_transient=6.75,
        package="torchao",
    ),
    "schedule_free_adamw": OptimizerSpec(state_bytes_per_parameter=8, foreach_temporaries=1, package="schedulefree"),
    "schedule_free_radam": OptimizerSpec(state_bytes_per_parameter=8, package="schedulefree"),
    "schedule_free_sgd": OptimizerSpec(state_bytes_per_parameter=4, package="schedulefree"),
    "stable_adamw": OptimizerSpec(
        state_bytes_per_parameter=8, matrix_transient=2, compensated=True, package="torch-optimi"
    ),
    "galore_adamw": OptimizerSpec(
        state_bytes_per_parameter=8, low_rank="moments", matrix_transient=3.5, package="galore-torch"
    ),
    "galore_adafactor": OptimizerSpec(state_bytes_per_parameter=0, low_rank="factored", package="galore-torch"),
    "apollo_adamw": OptimizerSpec(
        state_bytes_per_parameter=8, low_rank="moments", matrix_transient=3.5, package="apollo-torch"
    ),
    "lomo": OptimizerSpec(state_bytes_per_parameter=0, layerwise=True, package="lomo-optim"),
    "muon": OptimizerSpec(state_bytes_per_parameter=8, matrix_states=True, matrix_transient=3),
}
"""Trainer `optim` names whose memory is known (transformers/training_args.py `OptimizerNames`)."""


PREPARED_UNDER_FSDP2 = ("adagrad", "sgd")
"""Optimizers that FSDP2 saves and restores only if their states are prepared (plugins/transformers/optimizers.py)."""

REJECTED: Mapping[str, tuple[str, str]] = {
    "auto": ("was removed", "use adamw_torch_fused; if it does not fit, the error names changes that do"),
    "adamw_torch_xla": ("needs torch_xla and a TPU, which Shardwright does not plan", "use adamw_torch_fused"),
    "adamw_torch_npu_fused": ("needs torch_npu and an Ascend NPU", "use adamw_torch_fused"),
    "adamw_anyprecision": (
        "needs torchdistx, which no package registry has and which is no longer developed",
        "use adamw_torch_8bit with --optim-args bf16_stochastic_round=true, or stable_adamw",
    ),
    **dict.fromkeys(
        ("galore_adamw_8bit", "galore_adamw_8bit_layerwise"),
        (
            "passes arguments that bitsandbytes removed: percentile_clipping arrives as max_unorm (galore-torch 1.0)",
            "use galore_adamw, or adamw_8bit",
        ),
    ),
    **dict.fromkeys(
        ("galore_adamw_layerwise", "galore_adafactor_layerwise", "apollo_adamw_layerwise"),
        ("keeps its states outside of the optimizer, so that a checkpoint lacks them", "use it without _layerwise"),
    ),
    "grokadamw": ("keeps its states where checkpoints do not restore them (grokadamw 0.1.2)", "use stable_adamw"),
    "adalomo": ("creates its states on CUDA devices, and a checkpoint lacks them (lomo-optim 0.1.1)", "use lomo"),
    **dict.fromkeys(
        ("onebitadam", "onebitlamb", "zerooneadam"),
        ("was removed from DeepSpeed (0.19.8 has no 1-bit optimizers)", "use adamw_torch_fused"),
    ),
    **dict.fromkeys(("adam", "adamw", "fusedadam"), ("is the name in a DeepSpeed file", "use adamw_torch_fused")),
    "cpuadam": ("is what DeepSpeed uses under offload", "use adamw_torch_fused with --offload cpu"),
    "lion": ("is the name in a DeepSpeed file", "use lion_32bit"),
}
"""Names of Transformers 5.17 to 5.24 and of DeepSpeed files that no layout trains: the rule and the fix."""

_LOW_RANK_ARGS = ("rank", "update_proj_gap", "scale", "proj_type")
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "weight_decay", "centered"),
    **dict.fromkeys(
        ("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
        ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3"),
    ),
    **dict.fromkeys((name for name in OPTIMIZERS if name.startswith("galore")), _LOW_RANK_ARGS),
    **dict.fromkeys(
        (name for name in OPTIMIZERS if name.startswith("apollo")), (*_LOW_RANK_ARGS, "proj", "scale_type")
    ),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), ("bf16_stochastic_round",)),
    **dict.fromkeys((name for name in OPTIMIZERS if name.startswith("schedule_free")), ("weight_lr_power", "r")),
    "stable_adamw": ("max_lr", "kahan_sum", "decouple_lr"),
    "muon": ("muon_lr", "momentum", "ns_steps"),
}
"""Keys of `optim_args` that are read (transformers/trainer_optimizer.py); others have no effect or fail there."""


def parsed_optim_args(text: str) -> dict[str, str]:
    """Return arguments by name; parts without `=` are omitted.

    >>> parsed_optim_args("rank=64, scale=0.5")
    {'rank': '64', 'scale': '0.5'}
    """
    pairs = (part.partition("=") for part in text.replace(" ", "").split(",") if "=" in part)
    return {key: value for key, _, value in pairs}


def optimizer_errors(name: str, optim_args: str) -> list[ConfigError]:
    """Return why a name is not an optimizer that can be planned, and which of its arguments it does not read."""
    if name not in OPTIMIZERS:
        known = REJECTED.get(name.lower().replace("_", "") if name not in REJECTED else name)
        if known is not None:
            return [ConfigError(where="optimizer", value=name, rule=known[0], fix=known[1])]
        near = get_close_matches(name, OPTIMIZERS, n=1, cutoff=0.4)
        fix = f"did you mean {near[0]}?" if near else "use adamw_torch_fused"
        rule = f"must be one of {', '.join(OPTIMIZERS)}"
        return [ConfigError(where="optimizer", value=name, rule=rule, fix=fix)]
    errors = []
    allowed = _ARGUMENTS.get(name, ())
    for part in filter(None, optim_args.replace(" ", "").split(",")):
        key, equals, value = part.partition("=")
        if equals and key in allowed:
            if rule := _value_rule(key, value):
                errors.append(ConfigError(where="optim_args", value=part, rule=f"{key} {rule}"))
            continue
        near = get_close_matches(key, allowed, n=1, cutoff=0.5)
        rule = f"{name} reads {', '.join(allowed)}" if allowed else f"{name} reads no optim_args"
        fix = f"did you mean {near[0]}=?" if near else "remove it"
        errors.append(ConfigError(where="optim_args", value=part, rule=rule, fix=fix))
    return errors


_INTEGERS = ("rank", "update_proj_gap", "t_alpha", "t_beta3", "ns_steps")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")
_WORDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("nesterov", "centered", "bf16_stochastic_round"), (*_TRUE, *_FALSE)),
    # Transformers reads any text as true (trainer_optimizer.py, `bool(kahan_sum)`).
    **dict.fromkeys(("kahan_sum", "decouple_lr"), _TRUE),
    "proj_type": ("std", "reverse_std", "right", "left", "full"),
    "proj": ("random", "svd"),
    "scale_type": ("channel", "tensor"),
}


def _value_rule(key: str, value: str) -> str:
    """Return what a value must be; empty if it is."""
    if key in _WORDS:
        return "" if value.lower() in _WORDS[key] else f"must be one of {', '.join(_WORDS[key])}"
    if key in _INTEGERS:
        return "" if value.isdigit() and int(value) > 0 else "must be a positive integer"
    try:
        return "" if isfinite(float(value)) else "must be a finite number"
    except ValueError:
        return "must be a number"


def added_state_bytes(name: str, optim_args: str) -> int:
    """Return the bytes per parameter that arguments add to the states of SGD and RMSprop.

    >>> added_state_bytes("sgd", "momentum=0.9"), added_state_bytes("rmsprop", "momentum=0.9,centered=true")
    (4, 8)
    """
    stated = parsed_optim_args(optim_args) if name in ("sgd", "rmsprop") else {}
    return 4 * (float(stated.get("momentum", 0)) > 0) + 4 * (stated.get("centered", "").lower() in _TRUE)
