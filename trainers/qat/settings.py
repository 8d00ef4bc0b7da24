"""Number formats and settings of quantization-aware training, their checks, and the job of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from pydantic import Field

from ...ds_configs.quantization.scheme import QuantizationScheme, changed, combination_errors, scheme_named
from ...ds_configs.quantization.settings import SchemeSettings
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.job import adapter_errors
from ..distillation.settings import ObjectiveSettings
from ..losses.token_objective import Divergence
from ..runs.settings import LaunchedJob, LaunchedSettings, launched_errors
from .rounding import WeightRule


@dataclass(frozen=True, kw_only=True, slots=True)
class QATConfig:
    """Number formats of quantization-aware training and the steps at which they apply."""

    scheme: QuantizationScheme
    """Quantization scheme of the checkpoint, as for post-training quantization; integer weights."""
    weight_rule: WeightRule = "minmax"
    start_step: int = 0
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
        if activations is not None and activations.range_method != "minmax":
            rule = "is searched only after training, by `quantize`"
            yield ConfigError(where="range_method", value=activations.range_method, rule=rule, fix="use minmax")


class QATOptions(SchemeSettings):
    """Options of quantization-aware training: flags of `shardwright qat` and keywords of `QATCallback`."""

    group = "Quantization"

    weight_rule: WeightRule = Field(
        "minmax",
        description="Weight scales from the weight range (minmax), training (learned, LSQ), or mean magnitudes "
        "(ternary, binary)",
    )
    start_step: int = Field(0, ge=0, description="Optimizer steps in full precision before rounding starts")

    def config(self, *, scheme: QuantizationScheme | None = None, stored_dtype: str | None = None) -> QATConfig:
        """Return the number formats, by default those of the named scheme.

        Raises:
            UsageError: settings contradict one another; all errors together.
        """
        config = QATConfig(
            scheme=changed(scheme or scheme_named(self.scheme), **self.scheme_changes()),
            weight_rule=self.weight_rule,
            start_step=self.start_step,
            stored_dtype=stored_dtype,
        )
        if errors := list(config.errors()):
            raise UsageError(errors)
        return config


LabelLoss = Literal["eager", "chunked"]
"""How the loss of labels is computed without a teacher: from the logits of all tokens, or never storing them."""


class QATSettings(QATOptions, ObjectiveSettings, LaunchedSettings):
    """Every setting of `shardwright qat`."""

    group = "Quantization"

    method: Literal["full"] = Field("full", description="Full training")
    loss: Literal[Divergence, LabelLoss] = Field(  # type: ignore[assignment]
        "forward_kl", description="Distance to the teacher; without one eager, or chunked for long sequences"
    )
    teacher: Literal["self"] | None = Field(
        None, description="self: distill from the model in full precision. Default: labels only"
    )
    alpha: float = Field(1.0, description="Weight of the distillation loss, 0 to 1; the label loss gets the rest")


class QATJob(LaunchedJob):
    """Job of every rank."""

    task: Literal["qat"] = "qat"
    settings: QATSettings = Field(description="settings of the user")
    model: str = Field(description="Hub id or directory")
    source_directory: str = Field(description="local directory of the model's files")
    stored_dtype: str = Field(description="dtype of the checkpoint")
    vocab_size: int = Field(description="tokens of the tokenizer")


def qat_settings_errors(settings: QATSettings) -> list[ConfigError]:
    """Return contradictions that can be found without reading files."""
    errors = launched_errors(settings) + adapter_errors(settings.stated(), settings.method)
    explicit = settings.model_fields_set
    if settings.teacher is None:
        fix = "add --teacher self, or omit it"
        errors += [
            ConfigError(where=name, value=getattr(settings, name), rule="requires a teacher", fix=fix)
            for name in ("alpha", "temperature", "loss", "mixture", "teacher_placement")
            if name in explicit and getattr(settings, name) not in ("auto", *get_args(LabelLoss))
        ]
    elif settings.loss in get_args(LabelLoss):
        rule, fix = "is for training without a teacher; distances are always computed in chunks", "omit it"
        errors.append(ConfigError(where="loss", value=settings.loss, rule=rule, fix=fix))
    if settings.teacher_placement == "cached":
        rule, fix = "cached teacher outputs require `distill`", "use replica, sharded, offloaded or quantized"
        errors.append(ConfigError(where="teacher_placement", value="cached", rule=rule, fix=fix))
    return errors
