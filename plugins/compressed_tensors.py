"""Integer codes, scales and zero points, as compressed-tensors 0.19.0 and 0.20.0 compute and store them.

A code is an integer in [-2^(b-1), 2^(b-1) - 1], b bits; `low` and `high` are the ends of a range that holds 0:

    symmetric     scale = max(|low|, |high|) / ((2^b - 1) / 2)       code = round(clamp(x / scale))
    asymmetric    scale = (high - low) / (2^b - 1)                   code = round(clamp(x / scale + zero_point))
                  zero_point = round(clamp(-2^(b-1) - low / scale))
    both          x' = (code - zero_point) · scale

Halves round to even. Source: `quantization/utils/helpers.py` (`calculate_qparams`), `quantization/lifecycle/
forward_helpers.py` (`_quantize`, `_dequantize`).

The type in which upstream computes decides about codes at a half: `x / scale` happens in the wider type of both, and
`x'` in the type of the scale, which is the one that the checkpoint holds. A bf16 weight therefore gives other codes
than the same numbers in fp32; convert the weight first to divide in fp32. No function changes its arguments.

Shapes: O output channels, I input channels, G = I / group size, S: the scale's shape and the elements that share it.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ds_configs.quantization.layers import (
    DEQUANTIZE,
    LinearLayer,
    config_group,
    expert_scheme,
    needs_dequantize,
    quantization_config,
)
from ..ds_configs.quantization.scheme import ActivationQuantization, QuantizationScheme, WeightQuantization
from ..ds_configs.quantization.sizes import TensorShape, packed_tensors, tensor_bytes
from ..ds_configs.specs.errors import RefusedInputError
from . import patches
from .safetensors import rename_tensors
from .transformers.meta_model import EXPERT_WEIGHT, stored_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def code_range(bits: int) -> tuple[int, int]:
    """Return the least and the largest code.

    >>> code_range(4)
    (-8, 7)
    """
    return -(1 << bits - 1), (1 << bits - 1) - 1


def range_scale_and_zero_point(
    low: Tensor, high: Tensor, *, bits: int, symmetric: bool, stored_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the scale, in the type that is stored, and the int8 zero point of ranges of any shape, to which 0 is
    added.

    The scale is rounded to the stored type before anything is computed from it; where that leaves 0, it becomes the
    type's epsilon, as upstream's does.
    """
    import torch

    least, largest = code_range(bits)
    zero = torch.zeros_like(low)
    low, high = torch.minimum(low, zero), torch.maximum(high, zero)
    steps = float(largest - least)
    scale = torch.maximum(low.abs(), high.abs()) / (steps / 2) if symmetric else (high - low) / steps
    scale = scale.to(stored_dtype)
    scale = torch.where(scale == 0, torch.full_like(scale, torch.finfo(scale.dtype).eps), scale)
    if symmetric:
        return scale, None
    zero_point = torch.round(torch.clamp(least - low / scale, least, largest))
    # Upstream divides 0 by 0 for a range of zeros alone, and its NaN becomes the integer 0.
    zero_point = torch.where(low == high, torch.zeros_like(zero_point), zero_point)
    return scale, zero_point.to(torch.int8)


def weight_scale_and_zero_point(
    weight: Tensor, quantization: WeightQuantization, stored_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points of a weight [O, I], from the least and largest number of what shares them.

    They have shape [1] by tensor, [O, 1] by channel, [O, G] by group; the zero point is `None` if symmetric. The scales
    are stored in the type of the weight by default.
    """
    assert quantization.number_type == "int", "floats have no integer codes"
    shared_S = sharing(weight, quantization)
    return range_scale_and_zero_point(
        shared_S.amin(dim=-1),
        shared_S.amax(dim=-1),
        bits=quantization.bits,
        symmetric=quantization.symmetric,
        stored_dtype=weight.dtype if stored_dtype is None else stored_dtype,
    )


def weight_levels(weight: Tensor, scale: Tensor, zero_point: Tensor | None, quantization: WeightQuantization) -> Tensor:
    """Return the codes of a weight [O, I] as floats, with what `weight_scale_and_zero_point` returns."""
    zero_S1 = None if zero_point is None else zero_point.unsqueeze(-1)
    levels_S = levels_of(sharing(weight, quantization), scale.unsqueeze(-1), zero_S1, quantization.bits)
    return levels_S.reshape(weight.shape)


def activation_scale_and_zero_point(
    values: Tensor, quantization: ActivationQuantization
) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points that activations [..., I] get while a model runs.

    One for each token, [..., 1]. Inputs of two dimensions share a single one, [1]: upstream takes the first two
    dimensions for batch and sequence (`compute_dynamic_scales_and_zp` of 0.19.0).
    """
    import torch

    assert quantization.number_type == "int", "floats have no integer codes"
    if values.ndim <= 2:
        low, high = (end.reshape(1) for end in torch.aminmax(values))
    else:
        over = tuple(range(2, values.ndim))
        low, high = values.amin(dim=over, keepdim=True), values.amax(dim=over, keepdim=True)
    return range_scale_and_zero_point(
        low, high, bits=quantization.bits, symmetric=quantization.symmetric, stored_dtype=values.dtype
    )


@dataclass(frozen=True, kw_only=True)
class RoundedWeight:
    """A rounded matrix as codes, scales and zero points, as it is computed and as a checkpoint stores it."""

    codes: Tensor
    """[O, I]: floats while computing, int8 from a checkpoint."""
    scale: Tensor
    """[1], [O, 1] or [O, G], in the stored dtype."""
    zero_point: Tensor | None
    """int8, with the scale's shape; `None` if symmetric."""
    input_scale: Tensor | None = None
    """[1], of the layer's inputs; `None` unless ranges of activations are stored."""
    input_zero_point: Tensor | None = None
    """int8 [1]; `None` unless they are asymmetric."""

    def value(self, quantization: WeightQuantization) -> Tensor:
        """Return the weight [O, I] in the dtype of the scale, as loading a checkpoint does."""
        zero_S1 = None if self.zero_point is None else self.zero_point.unsqueeze(-1)
        value_S = values_of(sharing(self.codes, quantization), self.scale.unsqueeze(-1), zero_S1)
        return value_S.reshape(self.codes.shape)


def pack_tensors(layer_name: str, matrix: RoundedWeight, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """Return the tensors of one layer, named `layer_name` in the checkpoint, as a checkpoint stores them.

    The scheme is of format `pack-quantized` or `int-quantized`.
    """
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    weights, codes, zero_point = scheme.weights, matrix.codes.to(torch.int8), matrix.zero_point
    assert (zero_point is None) == weights.symmetric, "only asymmetric weights have zero points"
    assert (matrix.input_scale is not None) == scheme.activations_are_static, "only stored ranges have input scales"
    parts: dict[str, Tensor | None]
    if scheme.format == "pack-quantized":
        parts = {
            "weight_packed": pack_to_int32(codes, weights.bits),
            "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
        }
        if zero_point is not None and weights.strategy != "tensor":
            zero_point = pack_to_int32(zero_point, weights.bits, packed_dim=0)
    else:
        assert scheme.format == "int-quantized", f"{scheme.format} has no integer codes"
        parts = {"weight": codes}
    parts |= {"weight_scale": matrix.scale, "weight_zero_point": zero_point}
    parts |= {"input_scale": matrix.input_scale, "input_zero_point": matrix.input_zero_point}
    return {f"{layer_name}.{part}": tensor.contiguous() for part, tensor in parts.items() if tensor is not None}


def unpack_tensors(layer_name: str, tensors: Mapping[str, Tensor], scheme: QuantizationScheme) -> RoundedWeight:
    """Return codes, scales and zero points of one layer from the tensors of a checkpoint.

    Raises:
        KeyError: a tensor that the scheme demands is not there.
    """
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    weights, activations = scheme.weights, scheme.activations
    scale = tensors[f"{layer_name}.weight_scale"]
    zero_point = None if weights.symmetric else tensors[f"{layer_name}.weight_zero_point"]
    if scheme.format == "pack-quantized":
        shape = torch.Size(tensors[f"{layer_name}.weight_shape"].tolist())
        codes = unpack_from_int32(tensors[f"{layer_name}.weight_packed"], weights.bits, shape)
        if zero_point is not None and weights.strategy != "tensor":
            # Transposed here: with `packed_dim=0` release 0.20.0 fails on the strides of a single row of words.
            words = zero_point.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            zero_shape = torch.Size((scale.shape[-1], shape[0]))
            zero_point = unpack_from_int32(words, weights.bits, zero_shape).transpose(0, 1).contiguous()
    else:
        assert scheme.format == "int-quantized", f"{scheme.format} has no integer codes"
        codes = tensors[f"{layer_name}.weight"]
    static = activations if scheme.activations_are_static else None
    asymmetric = static is not None and not static.symmetric
    return RoundedWeight(
        codes=codes,
        scale=scale,
        zero_point=zero_point,
        input_scale=None if static is None else tensors[f"{layer_name}.input_scale"],
        input_zero_point=tensors[f"{layer_name}.input_zero_point"] if asymmetric else None,
    )


def to_upstream(scheme: QuantizationScheme) -> Any:
    """Convert a scheme to the `QuantizationScheme` of compressed-tensors."""
    from compressed_tensors.quantization import QuantizationScheme as UpstreamScheme

    return UpstreamScheme.model_validate(config_group(scheme))


def levels_of(values: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int) -> Tensor:
    """Return the codes of values as floats, with scales that fit their shape."""
    import torch

    scaled = values / scale
    if zero_point is not None:
        scaled = scaled + zero_point.to(values.dtype)
    return torch.round(torch.clamp(scaled, *code_range(bits)))


def values_of(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Return the values that codes represent, in the dtype of the scale."""
    levels = codes.to(scale.dtype)
    if zero_point is not None:
        levels = levels - zero_point.to(scale.dtype)
    return levels * scale


def sharing(matrix: Tensor, quantization: WeightQuantization) -> Tensor:
    """Return a view [*scale shape, elements per scale] of a matrix [O, I]."""
    if quantization.strategy == "tensor":
        return matrix.reshape(1, -1)
    columns = matrix.shape[-1]
    size = columns if quantization.strategy == "channel" else quantization.group_size
    assert size is not None and columns % size == 0, f"groups of {size} do not divide {columns} input channels"
    return matrix.unflatten(-1, (columns // size, size))


_PACKED_PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "SCB",
    "weight_format",
)
"""Suffixes of tensor names that only quantized layers have."""


def layout_differences(
    directory: Path,
    scheme: QuantizationScheme | None,
    layers: Iterable[LinearLayer],
    *,
    expected_bytes: int | None = None,
) -> list[str]:
    """Return every difference between a checkpoint's files and the expected layout, one sentence each.

    `scheme` is `None` for a dense checkpoint, in which nothing may be packed; `layers` have their names in the
    checkpoint.
    """
    try:
        stored = stored_tensors(directory)
    except RefusedInputError as error:
        return [str(config_error) for config_error in error.errors]
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"config.json cannot be read ({error})"]
    chosen, errors = (() if scheme is None else tuple(layers)), []
    expected: dict[str, TensorShape] = {}
    if scheme is not None:
        texts: Sequence[Any] = [config, config.get("text_config") or {}]
        dtypes = (part.get(key) for part in texts for key in ("dtype", "torch_dtype"))
        dtype = next((value.removeprefix("torch.") for value in dtypes if isinstance(value, str)), "float32")
        for layer in chosen:
            parts = packed_tensors(expert_scheme(scheme) if layer.is_expert else scheme, layer, dtype)
            expected |= {f"{layer.name}.{part}": tensor for part, tensor in parts.items()}
        errors += _config_errors(config.get("quantization_config"), scheme, chosen)
    for name, tensor in expected.items():
        if name not in stored:
            errors.append(f"{name} is missing; expected {_described(tensor)}")
        elif stored[name] != tensor:
            errors.append(f"{name} is {_described(stored[name])}, not {_described(tensor)}")
    quantized = {layer.name for layer in chosen}
    for name in sorted(stored.keys() - expected.keys()):
        layer_name, _, part = name.partition(".weight.") if ".weight." in name else name.rpartition(".")
        if part in _PACKED_PARTS or ".weight." in name or (layer_name in quantized and part != "bias"):
            errors.append(f"{name} is unexpected: {_described(stored[name])}")
    total = tensor_bytes(stored.values())
    if expected_bytes is not None and total != expected_bytes:
        errors.append(f"tensors have {total} bytes, but {expected_bytes} were expected")
    return errors


def _config_errors(stated: Any, scheme: QuantizationScheme, layers: Sequence[LinearLayer]) -> list[str]:
    """Return where `quantization_config` has another format; wrong numbers in it change the reloaded logits."""
    where = "config.json: quantization_config"
    if not isinstance(stated, dict):
        return [f"{where} is missing"]
    if stated.get("quant_method") != scheme.storage:
        return [f"{where}.quant_method is {stated.get('quant_method')!r}, not {scheme.storage!r}"]
    if scheme.storage != "compressed-tensors":
        wanted_flag = "load_in_4bit" if scheme.weights.bits == 4 else "load_in_8bit"
        return [] if stated.get(wanted_flag) else [f"{where}.{wanted_flag} is not set"]
    wanted = quantization_config(scheme, layers)
    return [
        f"{where}.{key} is {stated.get(key)!r}, not {wanted[key]!r}"
        for key in ("format", "quantization_status")
        if stated.get(key) != wanted[key]
    ]


def _described(tensor: TensorShape) -> str:
    shape, dtype = tensor
    return f"{dtype} {list(shape)}"


def state_dequantize(section: dict[str, Any]) -> None:
    """Add `dequantize` to a `quantization_config` that Transformers 5.23 does not load without it."""
    if section.get("quant_method") == "compressed-tensors" and needs_dequantize(section):
        section[DEQUANTIZE] = True


def load_packed_zero_points() -> None:
    """Make this process load packed zero points from any checkpoint, regardless of its `quantization_config`."""

    def with_packed_shape(original: Any) -> Any:
        def compress(state_dict: dict[str, Any], scheme: Any) -> dict[str, Any]:
            import torch

            compressed: dict[str, Any] = original(state_dict, scheme)
            zero_point, weights = compressed.get("weight_zero_point"), scheme.weights
            if zero_point is not None and state_dict["weight"].is_meta and weights.strategy in ("channel", "group"):
                words = math.ceil(zero_point.shape[0] * weights.num_bits / 32)
                shape = (words, *zero_point.shape[1:])
                compressed["weight_zero_point"] = torch.empty(shape, dtype=torch.int32, device=zero_point.device)
            return compressed

        return staticmethod(compress)

    patches.apply("packed-zero-points", with_packed_shape)


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
        self._complete_config(directory)
        if getattr(text, "num_mtp_layers", 0) or getattr(text, "mtp_num_hidden_layers", 0):
            # Layers that predict several tokens, which Transformers does not load.
            save_mtp_tensors_to_checkpoint(model.name_or_path, str(directory))
        restore_expert_names(directory, self.stored_names)

    def _complete_config(self, directory: Path) -> None:
        """Add names in the model to `ignore`, and `dequantize` where Transformers 5.23 does not load without it.

        compressed-tensors 0.19.0 writes `ignore` with the names of the checkpoint. Transformers 5.17.0 looks for the
        names of its modules, which differ for models with images.
        """
        import torch

        from .transformers.loading import checkpoint_module_names

        file = directory / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        section = config.get("quantization_config", {})
        ignored = section.get("ignore") or []
        linears = [name for name, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)]
        if not set(ignored).issubset(linears):
            stored = checkpoint_module_names(self.model, linears)
            section["ignore"] = [
                *ignored,
                *(name for name in linears if stored[name] in ignored and name not in ignored),
            ]
        state_dequantize(section)
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def restore_expert_names(directory: Path, stored: Collection[str]) -> int:
    """Restore the names of experts of the original checkpoint in a written one, and return the number of renamed
    tensors.

    llmcompressor 0.14.0.1 writes the experts of Mixtral as `gate_proj`, `down_proj` and `up_proj`. Transformers 5.17.0
    and vLLM expect `w1`, `w2` and `w3`; Transformers only warns and runs with random experts.
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
                # The smallest and largest weight of each scale, in the shape of the scales.
                shape, weight_OI = module.weight_scale.shape, module.weight
                if weights.block_structure is not None:
                    height, width = weights.block_structure
                    padding = (0, -weight_OI.shape[1] % width, 0, -weight_OI.shape[0] % height)
                    weight_OI = torch.nn.functional.pad(weight_OI, padding)
                rows, columns = (*shape, 1)[:2]
                tiles = weight_OI.unflatten(1, (columns, -1)).unflatten(0, (rows, -1))
                low, high = tiles.amin((1, 3)).reshape(shape), tiles.amax((1, 3)).reshape(shape)
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
