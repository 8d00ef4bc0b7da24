"""Number formats of quantization-aware training: `QATOptions` as settings, `QATConfig` with their scheme."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from ....ds_configs.quantization.scheme import QuantizationScheme, changed, combination_errors, scheme_named
from ....ds_configs.quantization.settings import SchemeSettings
from ....ds_configs.specs.errors import ConfigError, UsageError
from .rounding import WeightRule

ObserverMethod = Literal["minmax", "moving_average", "percentile"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QATConfig:
    """Number formats of quantization-aware training and the steps at which they apply."""

    scheme: QuantizationScheme
    """Quantization scheme of the checkpoint, as for post-training quantization; integer weights."""
    weight_rule: WeightRule = "minmax"
    ranges: ObserverMethod | None = None
    """Method that observes stored activation ranges during training; `None`: `moving_average`."""
    start_step: int = 0
    freeze_step: int | None = None
    stored_dtype: str | None = None
    """Dtype of scales and unquantized tensors, such as `bfloat16`; `None`: the training dtype."""

    @property
    def learns_scales(self) -> bool:
        """Whether scales are parameters of the optimizer."""
        return self.weight_rule == "learned"

    @property
    def rounded_scheme(self) -> QuantizationScheme:
        """The scheme of the checkpoint; ternary and binary weights are stored as 2-bit codes."""
        if self.weight_rule not in ("ternary", "binary"):
            return self.scheme
        return replace(self.scheme, weights=replace(self.scheme.weights, bits=2, symmetric=True))

    def errors(self) -> Iterator[ConfigError]:
        """Yield every error that does not depend on the model."""
        scheme = self.scheme
        weights, activations = scheme.weights, scheme.activations
        yield from combination_errors(scheme)
        trainable = "use an integer scheme stored as compressed-tensors, such as W4A16, W8A8 or W2A16"
        number_types = {numbers.number_type for numbers in (weights, activations) if numbers}
        if scheme.storage != "compressed-tensors" or number_types != {"int"}:
            rule = "has floating-point codes or is not stored as compressed-tensors"
            yield ConfigError(where="scheme", value=scheme.name, rule=rule, fix=trainable)
        if self.stored_dtype not in (None, "bfloat16", "float16", "float32"):
            fix = "use bfloat16, float16 or float32"
            yield ConfigError(where="stored_dtype", value=self.stored_dtype, rule="is unknown", fix=fix)
        if self.weight_rule in ("ternary", "binary") and (weights.bits != 2 or not weights.symmetric):
            differences = [f"{weights.bits} bits"] * (weights.bits != 2) + ["zero points"] * (not weights.symmetric)
            rule = f"requires 2-bit codes without zero points, but {scheme.name} has {' and '.join(differences)}"
            fix = "use scheme W2A16" if weights.symmetric else "use scheme W2A16 without --asymmetric"
            yield ConfigError(where="weight_rule", value=self.weight_rule, rule=rule, fix=fix)
        for name, value in (("ranges", self.ranges), ("freeze_step", self.freeze_step)):
            if value is not None and not scheme.activations_are_static:
                rule = f"requires stored activation ranges, which {scheme.name} lacks"
                yield ConfigError(where=name, value=value, rule=rule, fix="use W8A8_STATIC, or omit it")
        if activations is not None and activations.range_method in ("l2", "kl"):
            rule = "is searched only after training, by `quantize`"
            yield ConfigError(where="range_method", value=activations.range_method, rule=rule, fix="use percentile")


class QATOptions(SchemeSettings):
    """Options of quantization-aware training: flags of `shardwright qat` and keywords of `QATCallback`."""

    group = "Quantization"

    weight_rule: WeightRule = Field(
        "minmax",
        description="Weight scales from the weight range (minmax), training (learned, LSQ), or mean magnitudes "
        "(ternary, binary)",
    )
    ranges: ObserverMethod | None = Field(
        None, description="Method that observes stored activation ranges. Default: moving_average"
    )
    start_step: int = Field(0, ge=0, description="Optimizer steps in full precision before rounding starts")
    freeze_step: int | None = Field(
        None, ge=1, description="Optimizer step from which observed ranges are fixed. Default: never"
    )

    def config(self, *, scheme: QuantizationScheme | None = None, stored_dtype: str | None = None) -> QATConfig:
        """Return the number formats, by default those of the named scheme.

        Raises:
            UsageError: settings contradict one another; all errors together.
        """
        config = QATConfig(
            scheme=changed(scheme or scheme_named(self.scheme), **self.scheme_changes()),
            weight_rule=self.weight_rule,
            ranges=self.ranges,
            start_step=self.start_step,
            freeze_step=self.freeze_step,
            stored_dtype=stored_dtype,
        )
        if errors := list(config.errors()):
            raise UsageError(errors)
        return config
