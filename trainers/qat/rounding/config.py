"""`QATConfig`: the settings of quantization-aware training."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ....ds_configs.quantization.combinations import combination_faults
from ....ds_configs.quantization.scheme import QuantizationScheme
from ....ds_configs.specs.errors import Fault
from .rounding import WeightRule

InputRanges = Literal["calibrated", "minmax", "moving_average", "percentile", "l2", "learned"]
LoraMode = Literal["merged", "on_quantized_base"]
KvCacheNumbers = Literal["fp8", "int8"]
BitSchedule = tuple[tuple[int, int], ...]

_STORED_DTYPES = ("bfloat16", "float16", "float32")
_OBSERVED: tuple[InputRanges, ...] = ("minmax", "moving_average", "percentile", "l2")


@dataclass(frozen=True, kw_only=True, slots=True)
class QATConfig:
    """Numbers that a model learns to live with, and the step from which it does."""

    scheme: QuantizationScheme
    """The numbers of the checkpoint, as for post-training quantization; integer weights."""
    weight_rule: WeightRule = "minmax"
    """Scales from the weight's own range, learned (LSQ), or mean magnitudes with three or two values a weight."""
    ranges: InputRanges = "calibrated"
    """Where stored ranges of activations come from: a pass before training, observers while it runs, or learning."""
    start_step: int = 0
    """Optimizer steps in full precision before numbers are rounded."""
    freeze_step: int | None = None
    """Optimizer step from which observed ranges stay as they are; `None`: they follow to the end."""
    bit_schedule: BitSchedule = ()
    """Pairs of an optimizer step and the bits of a weight from there on, the last being the scheme's; empty: those."""
    lora: LoraMode = "merged"
    """Round the sum of weight and adapter, which is then merged; or the frozen weight alone, beside its adapter."""
    kv_cache: KvCacheNumbers | None = None
    """Numbers of cached keys and values; `None` leaves them in 16 bit."""
    stored_dtype: str | None = None
    """Type of scales and of all that is not quantized, such as `bfloat16`; `None`: that of the training."""

    @property
    def learns_scales(self) -> bool:
        """Whether there are parameters that the optimizer must know."""
        return self.weight_rule == "learned" or (self.ranges == "learned" and self.scheme.activations_are_static)

    @property
    def observes(self) -> bool:
        """Whether ranges of activations are found while training runs."""
        return self.stores_ranges and self.ranges in _OBSERVED

    @property
    def stores_ranges(self) -> bool:
        """Whether the checkpoint holds ranges: of inputs, or of the cache."""
        return self.scheme.activations_are_static or self.kv_cache is not None

    @property
    def rounded_scheme(self) -> QuantizationScheme:
        """The scheme of the checkpoint: three and two values are stored as codes of 2 bits."""
        if self.weight_rule not in ("ternary", "binary"):
            return self.scheme
        return replace(self.scheme, weights=replace(self.scheme.weights, bits=2, symmetric=True))

    def bits_at(self, step: int) -> int:
        """Return the bits of a weight at an optimizer step."""
        bits = self.bit_schedule[0][1] if self.bit_schedule else self.rounded_scheme.weights.bits
        for first, wanted in self.bit_schedule:
            bits = wanted if step >= first else bits
        return bits

    def faults(self) -> list[Fault]:
        """Return everything that cannot be trained so, whatever the model."""
        unknown = list(_unknown_words(self))
        return unknown or [*_scheme_faults(self), *_step_faults(self), *_schedule_faults(self)]


def _unknown_words(config: QATConfig) -> Iterator[Fault]:
    words: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("weight_rule", config.weight_rule, get_args(WeightRule)),
        ("ranges", config.ranges, get_args(InputRanges)),
        ("lora", config.lora, get_args(LoraMode)),
        ("kv_cache", config.kv_cache, (None, *get_args(KvCacheNumbers))),
        ("stored_dtype", config.stored_dtype, (None, *_STORED_DTYPES)),
    )
    for where, value, known in words:
        if value not in known:
            named = [word for word in known if isinstance(word, str)]
            near = difflib.get_close_matches(str(value), named, n=1)
            fix = f"did you mean {near[0]}?" if near else f"known are {', '.join(named)}"
            yield Fault(where=where, value=str(value), rule="is not known", fix=fix)


def _scheme_faults(config: QATConfig) -> Iterator[Fault]:
    scheme = config.scheme
    yield from combination_faults(scheme)
    trained = "integer schemes stored as compressed-tensors are trained, such as W4A16, W8A8 or W2A16"
    numbers = (scheme.weights, scheme.activations)
    if scheme.storage != "compressed-tensors" or any(one and one.number_type != "int" for one in numbers):
        yield Fault(
            where="scheme", value=scheme.name, rule="has floating-point codes or a format of its own", fix=trained
        )
    activations = scheme.activations
    if activations is not None and activations.group_size is not None:
        yield Fault(where="scheme", value=scheme.name, rule="rounds activations in groups", fix=trained)
    if config.weight_rule in ("ternary", "binary") and (scheme.weights.bits != 2 or not scheme.weights.symmetric):
        yield _few_values_fault(config)
    if config.ranges == "learned" and not scheme.activations_are_static and config.kv_cache is not None:
        rule = f"trains stored ranges of inputs: {scheme.name} has none, and those of a cache are not trained"
        yield Fault(where="ranges", value="learned", rule=rule, fix="use W8A8_STATIC, or ranges calibrated")
    elif config.ranges != "calibrated" and not config.stores_ranges:
        rule = f"needs stored ranges of activations, and {scheme.name} has none"
        yield Fault(where="ranges", value=config.ranges, rule=rule, fix="use W8A8_STATIC, or drop it")


def _few_values_fault(config: QATConfig) -> Fault:
    """Return what a scheme has too much of for weights of three or two values."""
    weights = config.scheme.weights
    has = [f"{weights.bits} bits"] * (weights.bits != 2) + ["zero points"] * (not weights.symmetric)
    fix = "use scheme W2A16" if weights.symmetric else "use scheme W2A16 without --asymmetric"
    rule = f"are codes of 2 bits without zero points, and {config.scheme.name} here has {' and '.join(has)}"
    return Fault(where="weight_rule", value=config.weight_rule, rule=rule, fix=fix)


def _step_faults(config: QATConfig) -> Iterator[Fault]:
    if config.start_step < 0:
        yield Fault(where="start_step", value=config.start_step, rule="must be at least 0")
    if config.freeze_step is None:
        return
    if not config.observes:
        rule = "belongs to ranges that are observed while training runs"
        fix = f"use ranges {', '.join(_OBSERVED)} with a scheme of stored ranges, or drop it"
        yield Fault(where="freeze_step", value=config.freeze_step, rule=rule, fix=fix)
    elif config.freeze_step < 1:
        rule = "must be at least 1, or no range is ever seen: they are observed from the first step on"
        yield Fault(where="freeze_step", value=config.freeze_step, rule=rule)


def _schedule_faults(config: QATConfig) -> Iterator[Fault]:
    schedule = config.bit_schedule
    if not schedule:
        return
    value = ",".join(f"{step}:{bits}" for step, bits in schedule)
    if config.weight_rule != "minmax":
        rule = f"changes the grid, which {config.weight_rule} scales do not follow"
        yield Fault(where="bit_schedule", value=value, rule=rule, fix="use weight_rule minmax")
    steps = [step for step, _ in schedule]
    if steps != sorted(set(steps)) or steps[0] < 0:
        yield Fault(where="bit_schedule", value=value, rule="must name steps in rising order, from 0 on")
    if any(not 2 <= bits <= 8 for _, bits in schedule):
        yield Fault(where="bit_schedule", value=value, rule="integers have 2 to 8 bits")
    if schedule[-1][1] != config.scheme.weights.bits:
        rule = f"must end at the {config.scheme.weights.bits} bits of {config.scheme.name}"
        yield Fault(where="bit_schedule", value=value, rule=rule)
