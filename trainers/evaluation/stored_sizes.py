"""Size of a checkpoint: bytes on disk, and bits for each weight, from the safetensors headers.

What belongs to a quantized matrix is told by tensor names:

    compressed-tensors 0.19.0   weight_packed or an 8-bit weight, with weight_scale, weight_zero_point, weight_shape, …
    bitsandbytes 0.50.2         weight (uint8 codes) with weight.absmax, weight.quant_map, …; int8 weight with SCB
    GPTQ, AWQ                   qweight with qzeros, scales, g_idx
    SpQR and low rank           what begins with spqr_ or low_rank_; `config.json` states the shapes
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...plugins.safetensors.reading import StoredTensor, each_tensor, read_checkpoint
from ..formats.spqr_format import INDEX, SINGLE, small_layers

_PARTS = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx",
    "input_scale", "input_zero_point", "input_global_scale", "SCB", "weight_format",
    "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
"""Last parts of the names of tensors that exist in quantized checkpoints alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSizes:
    """Sizes of a checkpoint."""

    file_bytes: int
    """All safetensors files together."""
    parameters: int
    """Weights, biases and embeddings that the checkpoint stands for; scales and zero points are none."""
    bits_per_parameter: float
    """Stored bits of all tensors for each of them."""
    quantized_matrices: int
    """Matrices stored in fewer bits than a float of 16."""
    quantized_parameters: int
    """Elements of these matrices."""
    bits_per_quantized_parameter: float | None
    """Stored bits of these matrices, with scales, zero points and tables; `None` without any."""


_SHAPE = ".weight_shape"
"""Holds the rows and columns of a matrix of packed codes."""


def stored_sizes(directory: Path) -> StoredSizes:
    """Return the sizes of a checkpoint.

    Raises:
        RefusedInputError: there are no weights, or their files are damaged or missing.
    """
    layers = small_layers(directory)
    names = {} if layers is None else {"index": INDEX, "single": SINGLE}
    tensors = read_checkpoint(directory, **names)
    shapes = {name: tensor for name, tensor in tensors.items() if name.endswith(_SHAPE)}
    stated = {name.removesuffix(_SHAPE): math.prod(shape.tolist()) for name, shape in each_tensor(shapes)}
    stated |= {name: math.prod(layer["shape"]) for name, layer in (layers or {}).items()}
    files = {tensor.file for tensor in tensors.values()}
    return sizes_of(tensors, stated, file_bytes=sum(file.stat().st_size for file in files))


def sizes_of(tensors: Mapping[str, StoredTensor], stated: Mapping[str, int], *, file_bytes: int) -> StoredSizes:
    """Return the sizes of tensors by name; `stated` holds elements of matrices whose codes do not tell them."""
    matrices: dict[str, dict[str, StoredTensor]] = {}
    plain = 0
    for name, tensor in tensors.items():
        matrix, part = _matrix_and_part(name, tensors)
        if part is None:
            plain += tensor.elements
        else:
            matrices.setdefault(matrix, {})[part] = tensor
    elements = {matrix: _elements(parts, stated.get(matrix)) for matrix, parts in matrices.items()}
    quantized = sum(elements.values())
    bits = sum(tensor.bits for parts in matrices.values() for tensor in parts.values())
    return StoredSizes(
        file_bytes=file_bytes,
        parameters=plain + quantized,
        bits_per_parameter=sum(tensor.bits for tensor in tensors.values()) / max(1, plain + quantized),
        quantized_matrices=len(matrices),
        quantized_parameters=quantized,
        bits_per_quantized_parameter=bits / quantized if quantized else None,
    )


def _matrix_and_part(name: str, tensors: Mapping[str, StoredTensor]) -> tuple[str, str | None]:
    """Return the module that a tensor belongs to, and its part of a quantized matrix; `None` for a plain tensor."""
    module, _, last = name.rpartition(".")
    if ".weight." in name:
        # bitsandbytes puts what describes the codes below the weight's own name.
        module, _, last = name.partition(".weight.")
        return module, f"weight.{last}"
    if last in _PARTS or last.startswith(("spqr_", "low_rank_")):
        return module, last
    described = (f"{module}.weight_scale", f"{module}.SCB", f"{module}.weight.absmax")
    if last == "weight" and any(other in tensors for other in described):
        return module, last
    return module, None


def _elements(parts: Mapping[str, StoredTensor], stated: int | None) -> int:
    if stated is not None:
        return stated
    if "weight_packed" in parts:
        # FP4 formats state no shape: two codes in each byte.
        return parts["weight_packed"].elements * 2
    if "qweight" in parts:
        return _packed_elements(parts)
    weight = parts.get("weight")
    if weight is None:
        return 0
    return weight.elements * 2 if "weight.absmax" in parts else weight.elements


def _packed_elements(parts: Mapping[str, StoredTensor]) -> int:
    """Return in · out of GPTQ's and AWQ's packed matrices.

    GPTQ packs along the inputs, so that `scales` [groups, out] and `g_idx` [in] tell both. AWQ packs 8 codes of 4 bit
    along the outputs.
    """
    codes, inputs = parts["qweight"], parts.get("g_idx")
    if inputs is not None and "scales" in parts:
        return inputs.elements * parts["scales"].shape[-1]
    return codes.elements * 8
