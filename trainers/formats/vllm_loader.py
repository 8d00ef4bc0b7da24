"""Loader of vLLM for the small format: packed matrices are read as dense weights.

Importing this module registers the quantization method and the load format; vLLM then runs a dense model:

    LLM("out/small", load_format="shardwright_small")

It is a plugin of vLLM (entry point `vllm.general_plugins`), which every process of the engine imports. In vLLM 0.32.0 a
quantization config does not receive the names of stored tensors, so a separate loader creates the weights.
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
from .spqr import INDEX, PARTS, QUANT_METHOD, SINGLE, checked_layers, read_matrix, small_layers

_PARTS = tuple(f".{name}" for names in PARTS.values() for name in names)


@register_quantization_config(QUANT_METHOD)
class SmallFormatInVLLM(QuantizationConfig):
    """Section of `config.json` for the small format, whose layers run dense."""

    @classmethod
    def get_name(cls) -> str:
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0: dense models run on every GPU."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SmallFormatInVLLM:
        """Return the configuration of a checkpoint.

        Raises:
            RefusedInputError: another version of the format.
        """
        checked_layers(config.get("schema_version"), config.get("layers"), where="quantization_config")
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the dense method for linear layers, and `None` (vLLM's default) for others."""
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


@register_model_loader(QUANT_METHOD)
class SmallFormatLoader(DefaultModelLoader):
    """Loader that passes each packed matrix to the model as a dense weight."""

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a dense checkpoint, one matrix at a time.

        Raises:
            RefusedInputError: files are missing, damaged or inconsistent.
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
    """Entry point of the plugin; importing this module has registered both classes."""
