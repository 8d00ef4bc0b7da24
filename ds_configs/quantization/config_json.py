"""The `quantization_config` of a compressed-tensors checkpoint's `config.json`, key for key as 0.19.0 writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .scheme import ActivationQuantization, QuantizationScheme, WeightQuantization

WRITTEN_FOR = "0.19.0"
"""Version of compressed-tensors whose layout this is."""


def quantization_config(
    scheme: QuantizationScheme, *, ignore: Sequence[str] | None = None, version: str = WRITTEN_FOR
) -> dict[str, Any]:
    """Return what `config.json` states under `quantization_config`.

    Args:
        scheme: What is quantized, and how; stored as compressed-tensors.
        ignore: Names of the linear layers that stay dense, as the checkpoint has them; `None` writes the scheme's own
            patterns.
        version: Version of compressed-tensors to state.
    """
    return {
        "quant_method": "compressed-tensors",
        "version": version,
        "format": scheme.format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(scheme.ignore if ignore is None else ignore),
        "config_groups": {"group_0": config_group(scheme)},
        "sparsity_config": {},
        "transform_config": {},
    }


def config_group(scheme: QuantizationScheme) -> dict[str, Any]:
    """Return the only entry of `config_groups`, from which compressed-tensors also builds its `QuantizationScheme`."""
    assert scheme.storage == "compressed-tensors", f"{scheme.name} is stored by {scheme.storage}"
    return {
        "targets": list(scheme.targets),
        "weights": _weight_arguments(scheme.weights),
        "input_activations": None if scheme.activations is None else _activation_arguments(scheme.activations),
        "output_activations": None,
        "format": scheme.format,
    }


def _weight_arguments(weights: WeightQuantization) -> dict[str, Any]:
    return _arguments(
        weights,
        strategy=weights.strategy,
        dynamic=False,
        block_structure=None if weights.block_shape is None else list(weights.block_shape),
    )


def _activation_arguments(activations: ActivationQuantization) -> dict[str, Any]:
    # NVFP4: scales of groups are found at run time, the tensor's is stored; upstream calls that "local".
    dynamic = "local" if activations.strategy == "tensor_group" else activations.dynamic
    stored = dynamic is not True
    return _arguments(
        activations,
        strategy=activations.strategy,
        dynamic=dynamic,
        # The only range that upstream's own observers find as we mean it; loaders do not read the field.
        observer="static_minmax" if stored and activations.range_method == "minmax" else None,
    )


def _arguments(
    numbers: WeightQuantization | ActivationQuantization,
    *,
    strategy: str,
    dynamic: bool | str,
    block_structure: list[int] | None = None,
    observer: str | None = None,
) -> dict[str, Any]:
    zero_point = None if numbers.symmetric else "torch.int8"
    return {
        "num_bits": numbers.bits,
        "type": numbers.number_type,
        "symmetric": numbers.symmetric,
        "group_size": numbers.group_size,
        "strategy": strategy,
        "block_structure": block_structure,
        "dynamic": dynamic,
        "actorder": None,
        "scale_dtype": None if numbers.scale_dtype is None else f"torch.{numbers.scale_dtype}",
        "zp_dtype": zero_point,
        "observer": observer,
        "observer_kwargs": {},
    }
