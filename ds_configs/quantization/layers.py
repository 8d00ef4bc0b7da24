"""Layers selected for quantization, schemes of experts, and `quantization_config` of a checkpoint."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from ..specs.errors import ConfigError
from ..specs.images import IMAGE_PARTS, image_part, names_of_parts
from .scheme import ActivationQuantization, QuantizationScheme, WeightQuantization

LINEAR_CLASSES = ("Linear", "Module")
"""Class names that match every linear layer."""
DEFAULT_IGNORE = ("lm_head",)
"""Layers that a scheme ignores by default; a model without such layers is allowed."""
_KERNEL_GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
_SHOWN_LAYERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLayer:
    """One linear layer, weight [out, in]."""

    name: str
    """Module name in the checkpoint, such as `model.layers.0.self_attn.q_proj`."""
    out_features: int
    in_features: int
    is_expert: bool = False
    is_tied: bool = False
    """Shares its weight with the token embedding."""
    is_head: bool = False

    @property
    def numel(self) -> int:
        return self.out_features * self.in_features


def selected_layers(scheme: QuantizationScheme, layers: Iterable[LinearLayer]) -> tuple[LinearLayer, ...]:
    """Return the layers that a scheme quantizes, in the order given.

    >>> [layer.name for layer in selected_layers(scheme_named("W4A16"), [q_proj, lm_head])]
    ['model.layers.0.self_attn.q_proj']
    """
    return tuple(
        layer
        for layer in layers
        if any(is_match(layer.name, target) for target in scheme.targets)
        and not any(is_match(layer.name, pattern) for pattern in scheme.ignore)
    )


def is_match(name: str, pattern: str) -> bool:
    """Return whether an entry of `targets` or `ignore` matches the linear layer of this name."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return pattern == name or pattern in LINEAR_CLASSES


_IMAGES = f"re:{names_of_parts(IMAGE_PARTS)}$"


def with_default_ignore(
    scheme: QuantizationScheme, patterns: Iterable[str], layers: Sequence[LinearLayer]
) -> QuantizationScheme:
    """Return a scheme that ignores by default what a model should keep dense.

    These are output heads and routers by name, and the parts for images unless a target names one of their layers.
    """
    parts = [layer.name for layer in layers if image_part(layer.name) is not None]
    named = [target for target in scheme.targets if target not in LINEAR_CLASSES]
    images = (_IMAGES,) if parts and not any(is_match(name, target) for name in parts for target in named) else ()
    return replace(scheme, ignore=tuple(dict.fromkeys((*DEFAULT_IGNORE, *patterns, *images))))


def with_named_heads(scheme: QuantizationScheme, chosen: Iterable[LinearLayer]) -> QuantizationScheme:
    """Return a scheme that also targets output heads by name, if it matches them by class.

    vLLM 0.32.0 builds a head as `ParallelLMHead`, which the target `Linear` does not match, so it would reject the
    packed weight. For Transformers the additional name changes nothing.
    """
    unnamed = tuple(
        layer.name
        for layer in chosen
        if layer.is_head and all(target in LINEAR_CLASSES for target in scheme.targets if is_match(layer.name, target))
    )
    return replace(scheme, targets=(*scheme.targets, *unnamed)) if unnamed else scheme


def pattern_errors(targets: Sequence[str], ignore: Sequence[str], names: Sequence[str]) -> list[ConfigError]:
    """Return an error for each target and each entry of `ignore` that matches none of the layers' names."""
    rule = "matches no linear layer of the model"
    return [
        ConfigError(where=where, value=pattern, rule=rule, fix=_nearest_names(pattern, names))
        for where, patterns in (("targets", targets), ("ignore", ignore))
        for pattern in patterns
        if not (where == "ignore" and pattern in DEFAULT_IGNORE) and not any(is_match(name, pattern) for name in names)
    ]


def scheme_errors(
    scheme: QuantizationScheme, layers: Sequence[LinearLayer], chosen: Sequence[LinearLayer]
) -> list[ConfigError]:
    """Return all errors of applying a scheme to a model."""
    errors = pattern_errors(scheme.targets, scheme.ignore, [layer.name for layer in layers])
    if not chosen and not any(error.where == "targets" for error in errors):
        rule = f"excludes all {len(layers)} linear layers"
        errors.append(ConfigError(where="ignore", value=", ".join(scheme.ignore), rule=rule))
    # compressed-tensors 0.19 unties the embedding, keeps it dense and adds the packed head, so the checkpoint grows.
    rule = "shares its weight with the token embedding, which stays dense, so the checkpoint would grow"
    errors += [
        ConfigError(where="targets", value=layer.name, rule=rule, fix=f"add {layer.name} to ignore")
        for layer in chosen
        if layer.is_tied
    ]
    size = scheme.weights.group_size
    if scheme.storage == "bitsandbytes" or size is None or size < 1:
        return errors
    unfit = [layer for layer in chosen if layer.in_features % size]
    if not unfit:
        return errors
    shown = ", ".join(f"{layer.name} ({layer.in_features})" for layer in unfit[:_SHOWN_LAYERS])
    more = f" and {len(unfit) - _SHOWN_LAYERS} more" if len(unfit) > _SHOWN_LAYERS else ""
    rule = f"must divide the input width of every layer, but does not divide those of {shown}{more}"
    fix = f"the format supports only groups of {size}: add these layers to ignore, or use FP8_DYNAMIC"
    if scheme.weights.number_type == "int":
        common = gcd(*(layer.in_features for layer in chosen))
        legal = ", ".join(str(legal) for legal in _KERNEL_GROUP_SIZES if common % legal == 0)
        ways = [f"group sizes that divide all: {legal}"] if legal else []
        fix = "; ".join([*ways, "or -1 for one scale per output channel", "or add these layers to ignore"])
    return [*errors, ConfigError(where="group_size", value=size, rule=rule, fix=fix)]


def scheme_warnings(scheme: QuantizationScheme, chosen: Sequence[LinearLayer]) -> list[str]:
    """Return warnings about legal schemes whose checkpoints are slow, large, or not loadable everywhere.

    Those about vLLM are from its documentation and source, not from runs.
    """
    weights, warnings = scheme.weights, []
    experts = sum(layer.is_expert for layer in chosen)
    if experts and scheme.format == "int-quantized":
        warnings.append(
            f"{experts} matrices of experts are packed with {weights.bits}-bit weights and keep 16-bit inputs: "
            "Transformers 5.17 cannot load experts in another form"
        )
    if scheme.format == "int-quantized" and weights.bits < 8:
        warnings.append(
            f"{scheme.name} stores each {weights.bits}-bit code in one byte: compressed-tensors packs codes only if "
            "activations are in 16 bit"
        )
    if scheme.format == "pack-quantized":
        if weights.bits not in (4, 8):
            warnings.append(
                f"vLLM has kernels for packed codes of 4 and 8 bits; {weights.bits} bits run only in Transformers"
            )
        elif weights.strategy == "group" and weights.group_size not in (32, 64, 128):
            warnings.append(f"vLLM's kernels support groups of 32, 64 and 128, but not of {weights.group_size}")
    heads = [layer.name for layer in chosen if layer.is_head]
    if heads:
        warnings.append(f"{', '.join(heads)} is quantized: output heads are the most sensitive layers")
    return warnings


def _nearest_names(pattern: str, names: Sequence[str]) -> str:
    example = f"layers have names such as {names[0]}" if names else ""
    if pattern.startswith("re:"):
        return example
    if any(name.startswith(f"{pattern}.") for name in names):
        escaped = pattern.replace(".", r"\.")
        return rf"names must match completely: use re:{escaped}\. for all layers in it"
    if any(name.endswith(f".{pattern}") for name in names):
        return f"names must match completely: use re:.*{pattern}"
    near = difflib.get_close_matches(pattern, [*names, "Linear"], n=3, cutoff=0.5)
    return f"did you mean {', '.join(near)}?" if near else example


DEQUANTIZE = "dequantize"
"""Key that makes Transformers decompress weights during loading; required for packed zero points.

Without it, Transformers 5.23 compares the shapes of stored and expected zero points, and compressed-tensors 0.19.0 and
0.20.0 (`compressors/pack_quantized/base.py`, `compress` on the meta device) expect unpacked ones.
"""


def quantization_config(
    scheme: QuantizationScheme, layers: Iterable[LinearLayer] = (), *, ignore: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return `quantization_config` of `config.json`, as compressed-tensors 0.19.0 writes it.

    Experts and other layers are separate groups where their formats differ; see `expert_scheme`.
    """
    chosen = tuple(layers)
    scheme = with_named_heads(scheme, chosen)
    groups = [scheme]
    if expert_scheme(scheme) is not scheme and any(layer.is_expert for layer in chosen):
        groups = [replace(expert_scheme(scheme), targets=(EXPERTS_TARGET,))]
        if endings := sorted({layer.name.rpartition(".")[2] for layer in chosen if not layer.is_expert}):
            # Match by name, because some releases of vLLM apply a group for `Linear` to experts too.
            groups.append(replace(scheme, targets=(rf"re:(?:.*\.)?(?:{'|'.join(endings)})$",)))
    config = {
        "quant_method": "compressed-tensors",
        "version": "0.19.0",
        "format": groups[0].format if len(groups) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(scheme.ignore if ignore is None else ignore),
        "config_groups": {f"group_{index}": config_group(group) for index, group in enumerate(groups)},
        "sparsity_config": {},
        "transform_config": {},
    }
    return config | {DEQUANTIZE: True} if needs_dequantize(config) else config


def needs_dequantize(config: Mapping[str, Any]) -> bool:
    """Return whether Transformers 5.23 loads a checkpoint only with the key `dequantize` in `quantization_config`.

    With several groups or a quantized KV cache, the key would change what Transformers computes.
    """
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or config.get("kv_cache_scheme") is not None:
        return False
    weights = groups[0].get("weights") or {}
    is_packed = (groups[0].get("format") or config.get("format")) == "pack-quantized"
    return is_packed and weights.get("symmetric") is False and weights.get("strategy") in ("channel", "group")


def config_group(scheme: QuantizationScheme) -> dict[str, Any]:
    """Return one entry of `config_groups`, valid for `QuantizationScheme` of compressed-tensors too."""
    assert scheme.storage == "compressed-tensors", f"{scheme.name} is stored by {scheme.storage}"
    weights, activations = scheme.weights, scheme.activations

    def arguments(
        numbers: WeightQuantization | ActivationQuantization, dynamic: bool | str, **others: Any
    ) -> dict[str, Any]:
        return {
            "num_bits": numbers.bits,
            "type": numbers.number_type,
            "symmetric": numbers.symmetric,
            "group_size": numbers.group_size,
            "strategy": numbers.strategy,
            "block_structure": None,
            "dynamic": dynamic,
            "actorder": None,
            "scale_dtype": None if numbers.scale_dtype is None else f"torch.{numbers.scale_dtype}",
            "zp_dtype": None if numbers.symmetric else "torch.int8",
            "observer": None,
            "observer_kwargs": {},
            **others,
        }

    inputs = None
    if activations is not None:
        # NVFP4 computes group scales at run time and stores the tensor's; upstream calls that "local".
        dynamic = "local" if activations.strategy == "tensor_group" else activations.dynamic
        is_minmax = dynamic is not True and activations.range_method == "minmax"
        # Loaders do not read `observer`; minmax is the only range for which upstream has an equal one.
        inputs = arguments(activations, dynamic, observer="static_minmax" if is_minmax else None)
    block = None if weights.block_shape is None else list(weights.block_shape)
    return {
        "targets": list(scheme.targets),
        "weights": arguments(weights, False, block_structure=block),
        "input_activations": inputs,
        "output_activations": None,
        "format": scheme.format,
    }


EXPERTS_TARGET = r"re:.*\.experts\.\d+\."
"""Matches every matrix of an expert by its name in checkpoints; Transformers looks for the word `experts`."""


def expert_scheme(scheme: QuantizationScheme) -> QuantizationScheme:
    """Return the scheme of experts: integers are packed, with inputs in 16 bit; floats are unchanged.

    >>> expert_scheme(scheme_named("W8A8")).format
    'pack-quantized'
    """
    return replace(scheme, activations=None) if scheme.format == "int-quantized" else scheme


def unloadable_expert_errors(
    scheme: QuantizationScheme, chosen: Sequence[LinearLayer], layers: Sequence[LinearLayer]
) -> list[ConfigError]:
    """Return the errors of schemes whose experts Transformers cannot load.

    transformers 5.17.0, `integrations/compressed_tensors.py`, decompresses experts from `weight_packed` without
    `weight_zero_point`. Loading zero points or integers fails with a RuntimeError, and no key finds dense experts. With
    FP8 schemes, it reads `weight` itself.
    """
    if scheme.storage != "compressed-tensors":
        return []
    experts = [layer for layer in chosen if layer.is_expert]
    packed = {layer.name for layer in experts}
    dense = [layer.name for layer in layers if layer.is_expert and layer.name not in packed]
    if chosen and dense and (scheme.weights.number_type, scheme.weights.bits) != ("float", 8):
        rule = (
            f"{dense[0]} and {len(dense) - 1} other matrices of experts would stay dense while other layers are "
            "packed, which Transformers 5.17 cannot load"
        )
        fix = "quantize the experts too, or use FP8_DYNAMIC, with which they may stay dense"
        return [ConfigError(where="ignore", value=", ".join(scheme.ignore), rule=rule, fix=fix)]
    if not experts:
        return []
    if not scheme.weights.symmetric:
        rule = f"{len(experts)} matrices of experts would have zero points, which Transformers 5.17 cannot load"
        return [ConfigError(where="scheme", value=scheme.name, rule=rule, fix="use a symmetric scheme such as W4A16")]
    if scheme.format == "int-quantized":
        rule = f"{len(experts)} matrices of experts would be stored as integers that Transformers 5.17 cannot load"
        fix = f"use W{scheme.weights.bits}A16, whose codes are packed"
        return [ConfigError(where="scheme", value=scheme.name, rule=rule, fix=fix)]
    return []
