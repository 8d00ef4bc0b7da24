"""`QATConfig`: the settings of quantization-aware training."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ....ds_configs.quantization.scheme import QuantizationScheme, combination_errors
from ....ds_configs.specs.errors import ConfigError
from ....ds_configs.specs.synonyms import REMOVED
from .observers import METHODS, ObserverMethod
from .rounding import WeightRule

InputRanges = Literal["calibrated", ObserverMethod]
LoraMode = Literal["merged", "on_quantized_base"]
BitSchedule = tuple[tuple[int, int], ...]

_ALLOWED: dict[str, tuple[str, ...]] = {
    "weight_rule": get_args(WeightRule),
    "ranges": get_args(InputRanges),
    "lora": get_args(LoraMode),
    "stored_dtype": ("bfloat16", "float16", "float32"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class QATConfig:
    """Number formats of quantization-aware training and the steps at which they apply."""

    scheme: QuantizationScheme
    """Quantization scheme of the checkpoint, as for post-training quantization; integer weights."""
    weight_rule: WeightRule = "minmax"
    """Weight scales from the weight's own range, learned (LSQ), or from mean magnitudes (ternary, binary)."""
    ranges: InputRanges = "calibrated"
    """Source of stored activation ranges: calibration before training, or observation during training."""
    start_step: int = 0
    """Optimizer steps in full precision before rounding starts."""
    freeze_step: int | None = None
    """Optimizer step from which observed ranges stay fixed; `None`: never."""
    bit_schedule: BitSchedule = ()
    """Pairs (first optimizer step, bits per weight), ending at the scheme's bits; empty: always the scheme's bits."""
    lora: LoraMode = "merged"
    """Round the sum of weight and adapter and merge it, or round the frozen weight only and keep the adapter."""
    stored_dtype: str | None = None
    """Dtype of scales and unquantized tensors, such as `bfloat16`; `None`: the training dtype."""

    @property
    def learns_scales(self) -> bool:
        """Whether scales are parameters of the optimizer."""
        return self.weight_rule == "learned"

    @property
    def observes(self) -> bool:
        """Whether activation ranges are observed during training."""
        return self.scheme.activations_are_static and self.ranges != "calibrated"

    @property
    def rounded_scheme(self) -> QuantizationScheme:
        """The scheme of the checkpoint; ternary and binary weights are stored as 2-bit codes."""
        if self.weight_rule not in ("ternary", "binary"):
            return self.scheme
        return replace(self.scheme, weights=replace(self.scheme.weights, bits=2, symmetric=True))

    def bits_at(self, step: int) -> int:
        """Return the bits per weight at an optimizer step."""
        bits = self.bit_schedule[0][1] if self.bit_schedule else self.rounded_scheme.weights.bits
        for first, scheduled in self.bit_schedule:
            bits = scheduled if step >= first else bits
        return bits

    def errors(self) -> list[ConfigError]:
        """Return every error that does not depend on the model."""
        unknown = []
        for where, allowed in _ALLOWED.items():
            value = getattr(self, where)
            if value in allowed or (value is None and where == "stored_dtype"):
                continue
            near = difflib.get_close_matches(str(value), allowed, n=1)
            fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(allowed)}"
            fix = REMOVED.get(f"{where}={value}", fix)
            unknown.append(ConfigError(where=where, value=str(value), rule="is unknown", fix=fix))
        return unknown or [*_scheme_errors(self), *_schedule_errors(self)]


def _scheme_errors(config: QATConfig) -> Iterator[ConfigError]:
    scheme = config.scheme
    weights, activations = scheme.weights, scheme.activations
    yield from combination_errors(scheme)
    trainable = "use an integer scheme stored as compressed-tensors, such as W4A16, W8A8 or W2A16"
    number_types = {numbers.number_type for numbers in (weights, activations) if numbers}
    if scheme.storage != "compressed-tensors" or number_types != {"int"}:
        rule = "has floating-point codes or is not stored as compressed-tensors"
        yield ConfigError(where="scheme", value=scheme.name, rule=rule, fix=trainable)
    if activations is not None and activations.group_size is not None:
        yield ConfigError(where="scheme", value=scheme.name, rule="rounds activations in groups", fix=trainable)
    if config.weight_rule in ("ternary", "binary") and (weights.bits != 2 or not weights.symmetric):
        differences = [f"{weights.bits} bits"] * (weights.bits != 2) + ["zero points"] * (not weights.symmetric)
        rule = f"requires 2-bit codes without zero points, but {scheme.name} has {' and '.join(differences)}"
        fix = "use scheme W2A16" if weights.symmetric else "use scheme W2A16 without --asymmetric"
        yield ConfigError(where="weight_rule", value=config.weight_rule, rule=rule, fix=fix)
    if config.ranges != "calibrated" and not scheme.activations_are_static:
        rule = f"requires stored activation ranges, which {scheme.name} lacks"
        yield ConfigError(where="ranges", value=config.ranges, rule=rule, fix="use W8A8_STATIC, or omit it")
    if activations is not None and activations.range_method in ("l2", "kl"):
        rule = "is searched only after training, by `quantize`"
        yield ConfigError(where="range_method", value=activations.range_method, rule=rule, fix="use percentile")


def _schedule_errors(config: QATConfig) -> Iterator[ConfigError]:
    if config.start_step < 0:
        yield ConfigError(where="start_step", value=config.start_step, rule="must be at least 0")
    if config.freeze_step is not None and not config.observes:
        rule = "requires ranges that are observed during training"
        fix = f"use ranges {', '.join(METHODS)} with a scheme that stores ranges, or omit it"
        yield ConfigError(where="freeze_step", value=config.freeze_step, rule=rule, fix=fix)
    elif config.freeze_step is not None and config.freeze_step < 1:
        rule = "must be at least 1: ranges need at least one observed step"
        yield ConfigError(where="freeze_step", value=config.freeze_step, rule=rule)
    schedule = config.bit_schedule
    if not schedule:
        return
    value = ",".join(f"{step}:{bits}" for step, bits in schedule)
    if config.weight_rule != "minmax":
        rule = f"cannot change the bits of {config.weight_rule} scales"
        yield ConfigError(where="bit_schedule", value=value, rule=rule, fix="use weight_rule minmax")
    steps = [step for step, _ in schedule]
    if steps != sorted(set(steps)) or steps[0] < 0:
        yield ConfigError(where="bit_schedule", value=value, rule="steps must be at least 0 and increase")
    if any(not 2 <= bits <= 8 for _, bits in schedule):
        yield ConfigError(where="bit_schedule", value=value, rule="bits must be from 2 to 8")
    if schedule[-1][1] != config.scheme.weights.bits:
        rule = f"must end at the {config.scheme.weights.bits} bits of {config.scheme.name}"
        yield ConfigError(where="bit_schedule", value=value, rule=rule)
