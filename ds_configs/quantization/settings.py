"""Settings of quantization, and their resolution for a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from ..specs.errors import ConfigError, UsageError
from ..specs.settings import NamedValues, Names, Settings
from .layers import (
    LinearLayer,
    scheme_errors,
    scheme_warnings,
    selected_layers,
    unloadable_expert_errors,
    with_default_ignore,
    with_named_heads,
)
from .scheme import (
    METHODS,
    MethodName,
    QuantizationScheme,
    RangeMethod,
    changed,
    combination_with_method_errors,
    default_method,
    needs_calibration,
    scheme_named,
)
from .sizes import TensorShape, quantized_tensors, tensor_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedQuantization:
    """A scheme and a method that support each other, and the layers of a model that they quantize."""

    scheme: QuantizationScheme
    """After `of_layers` with the model's ignored layers, and output heads by name."""
    method: MethodName
    method_reason: str
    """Why the method was chosen; `named` if the user requested it."""
    layers: tuple[LinearLayer, ...] = ()
    candidates: tuple[LinearLayer, ...] = ()
    """Every linear layer of the model."""

    def of_layers(
        self, layers: Sequence[LinearLayer], *, default_ignore: Sequence[str] | None = None
    ) -> ResolvedQuantization:
        """Select the layers to quantize; `None` as `default_ignore` leaves the scheme's."""
        scheme = self.scheme if default_ignore is None else with_default_ignore(self.scheme, default_ignore, layers)
        chosen = selected_layers(scheme, layers)
        return replace(self, scheme=with_named_heads(scheme, chosen), layers=chosen, candidates=tuple(layers))

    @property
    def has_own_format(self) -> bool:
        """Whether the checkpoint has dense weights plus files in a format of this package."""
        return METHODS[self.method].engine == "shardwright"

    def errors(self) -> list[ConfigError]:
        errors = scheme_errors(self.scheme, self.candidates, self.layers)
        experts = [layer.name for layer in self.layers if layer.is_expert]
        if experts and self.has_own_format:
            # Experts are linear layers only during calibration: the format would name modules that a model created
            # from its config does not have.
            rule = f"{self.method} supports only plain linear layers, but {len(experts)} layers are parts of experts"
            fix = "use --method gptq, or ignore experts"
            errors.append(ConfigError(where="method", value=experts[0], rule=rule, fix=fix))
        return errors + unloadable_expert_errors(self.scheme, self.layers, self.candidates)

    def warnings(self) -> list[str]:
        """Return warnings about the checkpoint; a dense export has none, because it needs no special kernels."""
        return [] if self.has_own_format else scheme_warnings(self.scheme, self.layers)

    def checkpoint_bytes(
        self, tensors: Mapping[str, TensorShape], *, dtype: str, kept_in_fp32: Collection[str] = ()
    ) -> int:
        """Return the bytes of the checkpoint, including the dense weights of own formats."""
        if self.has_own_format:
            return 2 * tensor_bytes(tensors.values())
        written = quantized_tensors(self.scheme, self.layers, tensors, dtype=dtype, kept_in_fp32=kept_in_fp32)
        return tensor_bytes(written.values())


class SchemeSettings(Settings):
    """Settings of the scheme and the quantized layers."""

    group = "Quantization"

    scheme: str = Field("W4A16", description="Named scheme, such as W4A16, W8A8, W8A8_STATIC, FP8_DYNAMIC or NF4")
    group_size: int | None = Field(
        None, ge=-1, description="Input channels per scale; -1 for one scale per output channel. Default: by the scheme"
    )
    symmetric: bool | None = Field(
        None,
        description="Quantize without zero points. Default: by the scheme",
        json_schema_extra={"negative": "asymmetric"},
    )
    targets: Names | None = Field(
        None, description="Layers to quantize: Linear, names, or re: patterns. Default: Linear"
    )
    ignore: Names | None = Field(
        None, description="Layers that stay dense, in the same form. Default: output head and routers"
    )

    def scheme_changes(self) -> dict[str, Any]:
        """Return the changes of the named scheme, as keywords of `changed`."""
        return {name: getattr(self, name) for name in SchemeSettings.model_fields if name != "scheme"}


class QuantizeSettings(SchemeSettings):
    """Every setting of `shardwright quantize`."""

    group = "Quantization"

    method: MethodName | None = Field(
        None, description="Quantization method. Default: chosen by the scheme and reported with its reason"
    )
    ranges: RangeMethod | None = Field(None, description="Method for static ranges of activations. Default: minmax")
    percentile: float | None = Field(
        None, description="Percent of values inside the range, for ranges percentile. Default: 99.9"
    )
    method_options: NamedValues = Field(
        default_factory=dict,
        alias="method_option",
        description="NAME=VALUE for the method, such as dampening_frac=0.05; repeat the flag, or use a mapping",
    )
    dataset: str | None = Field(
        None,
        description="Calibration text: Hub ID[:config][#N], a .jsonl, .json, .parquet or .txt file, or python-help",
    )
    chat_template: str | None = Field(
        None, description="Jinja file, or alpaca, chatml, llama3, zephyr. Default: the tokenizer's"
    )
    num_samples: int = Field(512, ge=1, description="Calibration samples")
    seq_len: int = Field(2048, ge=2, description="Maximum tokens per sample")
    batch_size: int = Field(1, ge=1, description="Samples per forward pass")
    seed: int = Field(0, ge=0, description="Seed for the selection of calibration rows")

    def resolved(self) -> ResolvedQuantization:
        """Return the scheme and the method of these settings, or raise `UsageError`."""
        scheme = scheme_named(self.scheme)
        errors: list[ConfigError] = []
        try:
            scheme = changed(scheme, ranges=self.ranges, percentile=self.percentile, **self.scheme_changes())
        except UsageError as error:
            errors += error.errors
        method, reason = self.method, "named"
        if method is None:
            method, reason = default_method(scheme, has_dataset=self.dataset is not None)
        errors += method_errors(self, scheme=scheme, method=method)
        if errors:
            raise UsageError(errors)
        return ResolvedQuantization(scheme=scheme, method=method, method_reason=reason)


_WITHOUT_TEXT = {"FP8": "FP8_DYNAMIC", "W8A8_STATIC": "W8A8", "NVFP4": "NVFP4A16"}
"""The closest scheme without static ranges of activations."""


def method_errors(settings: QuantizeSettings, *, scheme: QuantizationScheme, method: MethodName) -> list[ConfigError]:
    errors = combination_with_method_errors(method, scheme, settings.method_options)
    if settings.dataset is None and not errors and needs_calibration(method, scheme):
        calibrates = METHODS[method].needs_calibration
        needed = method if calibrates else f"{scheme.name}, which stores static ranges,"
        other = ["--method rtn"] if calibrates else []
        if scheme.activations_are_static:
            other.append(f"--scheme {_WITHOUT_TEXT[scheme.name]}")
        fix = f"pass one, such as --dataset python-help, or use {' '.join(other)}, which needs none"
        errors.append(ConfigError(where="dataset", rule=f"{needed} needs calibration text", fix=fix))
    return errors
