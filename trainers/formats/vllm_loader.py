"""vLLM's loader for the small format: packed matrices become dense weights while they are read.

Importing this module registers the quantization method and the load format; vLLM then runs a dense model:

    LLM("out/small", load_format="shardwright_small")

As a plugin of vLLM (entry point `vllm.general_plugins`) it is imported by every process of the engine. Written for vLLM
0.32.0: a quantization config cannot see names of stored tensors, so a loader of its own makes the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

from ...plugins.safetensors.reading import each_tensor, read_checkpoint
from .spqr_format import INDEX, PARTS, QUANT_METHOD, SINGLE, checked_layers, read_matrix, small_layers

_PARTS = tuple(f".{name}" for names in PARTS.values() for name in names)


@register_quantization_config(QUANT_METHOD)
class SmallFormatInVLLM(QuantizationConfig):
    """Section of `config.json` for the small format, whose layers run as dense ones."""

    @classmethod
    def get_name(cls) -> str:
        """Return the name that `quant_method` has in `config.json`."""
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return the types that dense layers compute in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute capability: that of any dense model."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no further files: `config.json` says all."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SmallFormatInVLLM:
        """Return the configuration of a checkpoint that this version reads.

        Raises:
            RefusedInputError: it was written by another version.
        """
        checked_layers(config.get("schema_version"), config.get("layers"), where="quantization_config")
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return what computes a layer: dense linear layers, and vLLM's own choice for all others."""
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


@register_model_loader(QUANT_METHOD)
class SmallFormatLoader(DefaultModelLoader):
    """Loader that gives each packed matrix to the model as its dense weight."""

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a dense checkpoint, one matrix at a time.

        Raises:
            RefusedInputError: files are missing or damaged, or do not fit one another.
        """
        directory = Path(model_config.model)
        layers = small_layers(directory) or {}
        stored = read_checkpoint(directory, index=INDEX, single=SINGLE)
        yield from each_tensor({name: tensor for name, tensor in stored.items() if not name.endswith(_PARTS)})
        for layer, settings in layers.items():
            packed = {name: tensor for name, tensor in stored.items() if name.startswith(f"{layer}.")}
            parts = {name: tensor for name, tensor in each_tensor(packed) if name.endswith(_PARTS)}
            yield f"{layer}.weight", read_matrix(layer, settings, parts, where=str(directory)).dequantize()


def register() -> None:
    """Do nothing more: importing this module has registered both classes."""
