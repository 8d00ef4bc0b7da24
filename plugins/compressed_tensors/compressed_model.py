"""Models that compressed-tensors rounds and writes: `CompressedModel`, and rounding to nearest without data."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.quantization.scheme import QuantizationScheme
from ..safetensors import rename_tensors
from ..transformers.quantized_model import EXPERT_WEIGHT
from .codes import to_upstream
from .layout import state_dequantize

_WRITTEN_EXPERT = re.compile(r"(.+\.experts\.\d+)\.(gate_proj|down_proj|up_proj)\.(\w+)")
_MIXTRAL_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3"))
"""Layers that vLLM computes as one, so that they need one scale per tensor (`FUSED_LAYER_NAMES` of llm-compressor)."""


@dataclass(kw_only=True)
class CompressedModel:
    """A model whose forward pass rounds like its checkpoint."""

    model: Any
    """Transformers model with the schemes and scales of compressed-tensors."""
    stored_names: Collection[str] = ()
    """Tensor names of the original checkpoint, to restore the names of experts."""

    def __post_init__(self) -> None:
        self.quantized_layers: tuple[str, ...] = tuple(
            name
            for name, module in self.model.named_modules()
            if getattr(getattr(module, "quantization_scheme", None), "weights", None) is not None
            and getattr(module, "weight", None) is not None
        )
        """Names of the linear layers that were quantized."""

    def save(self, directory: Path) -> None:
        """Compress the model in memory and write config and weights; can be called once."""
        from compressed_tensors import ModelCompressor
        from compressed_tensors.offload import OffloadCache, to_accelerate
        from compressed_tensors.utils import save_mtp_tensors_to_checkpoint

        model, text = self.model, self.model.config.get_text_config()
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model, skip_compressed=True)
        head = model.get_output_embeddings()
        if text.tie_word_embeddings and head is not None:
            # llm-compressor's pipeline keeps tied weights as two tensors; an offloaded module copies what is assigned.
            with OffloadCache.disable_onloading():
                head.weight = model.get_input_embeddings().weight
        to_accelerate(model)
        with warnings.catch_warnings():
            # It counts modules in host memory as offloaded.
            warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
            model.save_pretrained(directory)
        compressor.update_config(str(directory))
        if getattr(text, "num_mtp_layers", 0) or getattr(text, "mtp_num_hidden_layers", 0):
            # Layers that predict several tokens, which Transformers does not load.
            save_mtp_tensors_to_checkpoint(model.name_or_path, str(directory))
        restore_expert_names(directory, self.stored_names)
        state_dequantize(directory)


def restore_expert_names(directory: Path, stored: Collection[str]) -> int:
    """Restore the original names of experts in a written checkpoint, and return the number of renamed tensors.

    llmcompressor 0.14.0.1 writes the experts of Mixtral as `gate_proj`, `down_proj` and `up_proj`. Transformers 5.17.0
    and vLLM expect `w1`, `w2` and `w3`; Transformers only warns and runs with random experts.

    Args:
        directory: The checkpoint, changed in place.
        stored: Names of the tensors of the original checkpoint.
    """
    endings = {match[1].rpartition(".")[2] for match in map(EXPERT_WEIGHT.fullmatch, stored) if match}
    if endings != set(_MIXTRAL_NAMES.values()):
        return 0

    def original_name(name: str) -> str:
        match = _WRITTEN_EXPERT.fullmatch(name)
        return name if match is None else f"{match[1]}.{_MIXTRAL_NAMES[match[2]]}.{match[3]}"

    return rename_tensors(directory, original_name)


def round_to_nearest(model: Any, scheme: QuantizationScheme, *, stored_names: Collection[str] = ()) -> CompressedModel:
    """Round the weights of a model in place, with scales from their smallest and largest values; reads no data."""
    import torch
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    config = QuantizationConfig(
        config_groups={"group_0": to_upstream(scheme)},
        ignore=list(scheme.ignore),
        quantization_status=QuantizationStatus.INITIALIZED,
    )
    apply_quantization_config(model, config, show_progress=False)
    compressed = CompressedModel(model=model, stored_names=stored_names)
    with torch.no_grad():
        for modules in _fused(model, compressed.quantized_layers):
            for module in modules:
                weights = module.quantization_scheme.weights
                low, high = _ranges(module.weight, module.weight_scale.shape, weights.block_structure)
                global_scale = None
                if hasattr(module, "weight_global_scale"):
                    largest = torch.stack([each.weight.abs().amax() for each in modules]).amax().reshape(1)
                    global_scale = generate_gparam(-largest, largest)
                    module.weight_global_scale.copy_(global_scale)
                scale, zero_point = calculate_qparams(low, high, weights, global_scale=global_scale)
                module.weight_scale.copy_(scale)
                if hasattr(module, "weight_zero_point"):
                    module.weight_zero_point.copy_(zero_point)
                module.quantization_status = QuantizationStatus.FROZEN
    return compressed


def _fused(model: Any, names: Collection[str]) -> Iterator[list[Any]]:
    """Yield every layer once, together with the layers that it is fused with."""
    remaining = dict.fromkeys(names)
    for name in names:
        parent, _, own = name.rpartition(".")
        siblings = next((group for group in _FUSED if own in group), (own,))
        paths = [f"{parent}.{sibling}" if parent else sibling for sibling in siblings]
        if chosen := [path for path in paths if path in remaining]:
            for path in chosen:
                del remaining[path]
            yield [model.get_submodule(path) for path in chosen]


def _ranges(weight_OI: Any, shape: Any, block: Any) -> tuple[Any, Any]:
    """Return the smallest and largest weight of each scale, in the shape of the scales."""
    import torch

    if block is not None:
        height, width = block
        padding = (0, -weight_OI.shape[1] % width, 0, -weight_OI.shape[0] % height)
        weight_OI = torch.nn.functional.pad(weight_OI, padding)
    rows, columns = (*shape, 1)[:2]
    tiles = weight_OI.unflatten(1, (columns, -1)).unflatten(0, (rows, -1))
    return tiles.amin((1, 3)).reshape(shape), tiles.amax((1, 3)).reshape(shape)
