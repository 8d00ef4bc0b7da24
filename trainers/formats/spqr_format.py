"""The small format of SpQR and of low-rank corrections: packed parts in safetensors, described in `config.json`.

The directory's weight files are not named `model*.safetensors`, so that Transformers refuses them as missing instead of
filling a model with random numbers, unless it knows the format (`transformers_quantizer.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.write import write_files
from ...ds_configs.specs.errors import Fault, RefusedInputError
from ...plugins.safetensors.reading import each_tensor, read_checkpoint
from ...plugins.safetensors.writing import SHARD_BYTES, appearing_directory, save_checkpoint
from .bit_packing import SparseRows
from .low_rank_residual import LowRankMatrix
from .spqr_matrix import SpQRMatrix

if TYPE_CHECKING:
    import torch

QUANT_METHOD = "shardwright_small"
"""What `quantization_config` in `config.json` names the format."""
SMALL_DIRECTORY = "small"
"""Where the small format lies in a checkpoint."""
INDEX, SINGLE = "small.safetensors.index.json", "small.safetensors"
"""What its weights are found by."""
_CONFIG = "config.json"
_SCHEMA_VERSION = 2
"""Version 1 had its description in a file of its own."""
_FLOATS = ("bfloat16", "float16", "float32")
_CSR = ("offsets", "columns", "values")
PARTS = {
    "spqr": tuple(f"spqr_{name}" for name in ("codes", "scale_codes", "zero_codes", "levels"))
    + tuple(f"spqr_outlier_{name}" for name in _CSR),
    "low-rank": tuple(f"low_rank_{name}" for name in ("codes", "scales", "zeros", "left", "right"))
    + tuple(f"low_rank_sparse_{name}" for name in _CSR),
}
"""Names of the tensors that are stored for a matrix, by its kind."""

SmallMatrix = SpQRMatrix | LowRankMatrix
"""A quantized matrix of either method."""


def save_small_format(
    model: Any, matrices: Mapping[str, SmallMatrix], directory: Path, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write config, packed matrices and all other tensors of a model; the files appear together or not at all.

    Args:
        model: Transformers model; its other tensors are stored as they are.
        matrices: Quantized matrices by module name.
        directory: Where to.
        shard_bytes: Most bytes of one file, where a single tensor is not larger.
    """
    tensors = {
        f"{layer}.{name}": tensor for layer, matrix in matrices.items() for name, tensor in matrix.tensors().items()
    }
    tensors |= _other_tensors(model, {f"{layer}.weight" for layer in matrices})
    with appearing_directory(directory) as place:
        save_checkpoint(tensors, place, stem="small", shard_bytes=shard_bytes)
        layers = {name: matrix_settings(matrix) for name, matrix in matrices.items()}
        stated = {
            "quant_method": QUANT_METHOD,
            "schema_version": _SCHEMA_VERSION,
            "weights": INDEX if (place / INDEX).exists() else SINGLE,
            "layers": layers,
        }
        config = {**model.config.to_diff_dict(), "quantization_config": stated}
        write_files({_CONFIG: json.dumps(config, indent=1) + "\n"}, place, force=True)


def load_small_format(directory: Path) -> Any:
    """Return the model in a directory of the small format, with the dense weights that its matrices stand for.

    Raises:
        RefusedInputError: files are missing or damaged, or do not fit one another.
    """
    import transformers

    layers = small_layers(directory)
    if layers is None:
        rule = f"has no quantization_config of {QUANT_METHOD}"
        raise RefusedInputError(Fault(where=str(directory / _CONFIG), rule=rule))
    config = transformers.AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
    # Without it, the tensors at hand would be taken for packed ones.
    del config.quantization_config
    tensors = dict(each_tensor(read_checkpoint(directory, index=INDEX, single=SINGLE)))
    for layer, settings in layers.items():
        tensors[f"{layer}.weight"] = read_matrix(layer, settings, tensors, where=str(directory)).dequantize()
    # The automatic class looks for a directory (transformers 5.17.0), the model's own takes tensors at hand.
    model, found = transformers.AutoModelForCausalLM._model_mapping[type(config)].from_pretrained(
        None, config=config, state_dict=tensors, dtype=config.dtype, output_loading_info=True
    )
    faults = [
        Fault(where=str(directory), value=sorted(map(str, found[key]))[:3], rule=f"has {key.replace('_', ' ')}")
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if found.get(key)
    ]
    if faults:
        raise RefusedInputError(faults)
    return model.eval()


def register_small_format() -> None:
    """Let `AutoModelForCausalLM.from_pretrained` load the small format, as a dense model; again does no harm.

    >>> register_small_format()
    >>> AutoModelForCausalLM.from_pretrained("out/small", dtype="auto")  # doctest: +SKIP
    """
    from . import transformers_quantizer  # noqa: F401


def load_spqr(directory: Path) -> Any:
    """Return the model of a checkpoint in the small format, from its directory or the one above.

    Raises:
        RefusedInputError: files are missing, damaged, or do not fit one another.
    """
    directory = Path(directory)
    inside = directory / SMALL_DIRECTORY
    return load_small_format(inside if inside.is_dir() else directory)


def _other_tensors(model: Any, without: set[str]) -> dict[str, torch.Tensor]:
    """Return everything but these tensors, and of tied ones the first; views get a storage of their own."""
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if name in without or (tensor.numel() and key in seen):
            continue
        seen.add(key)
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        found[name] = tensor if whole else tensor.clone()
    return found


def matrix_settings(matrix: SmallMatrix) -> dict[str, Any]:
    """Return what has to be known to read a matrix, for JSON."""
    common = {"shape": list(matrix.shape), "bits": matrix.bits, "group_size": matrix.group_size}
    common["dtype"] = str(matrix.dtype).removeprefix("torch.")
    if isinstance(matrix, SpQRMatrix):
        own = {"scale_bits": matrix.scale_bits, "scale_group_size": matrix.scale_group_size}
        return {"kind": "spqr", **common, **own}
    return {"kind": "low-rank", **common, "symmetric": matrix.symmetric}


def read_matrix(
    layer: str, settings: Mapping[str, Any], tensors: dict[str, torch.Tensor], *, where: str
) -> SmallMatrix:
    """Take a layer's tensors out of `tensors` and return its matrix, checked."""
    import torch

    where = f"{where}: {layer}"
    prefix = "spqr_" if settings.get("kind") == "spqr" else "low_rank_"
    parts = {
        name.removeprefix(f"{layer}.{prefix}"): tensors.pop(name)
        for name in list(tensors)
        if name.startswith(f"{layer}.{prefix}")
    }
    sparse_name = "outlier" if prefix == "spqr_" else "sparse"
    try:
        common: dict[str, Any] = {name: int(settings[name]) for name in ("bits", "group_size")}
        common["shape"] = (int(settings["shape"][0]), int(settings["shape"][1]))
        common["dtype"] = getattr(torch, _FLOATS[_FLOATS.index(settings["dtype"])])
        sparse = SparseRows(**{name: parts.pop(f"{sparse_name}_{name}") for name in _CSR})
        if prefix == "spqr_":
            own: dict[str, Any] = {name: int(settings[name]) for name in ("scale_bits", "scale_group_size")}
            matrix: SmallMatrix = SpQRMatrix(**common, **own, **parts, outliers=sparse)
        else:
            matrix = LowRankMatrix(**common, symmetric=bool(settings["symmetric"]), **parts, sparse=sparse)
        sizes = [*matrix.shape, matrix.group_size, *(own.values() if prefix == "spqr_" else ())]
        sound = all(size > 0 for size in sizes) and 2 <= matrix.bits <= 8
        sound = sound and (not isinstance(matrix, SpQRMatrix) or matrix.levels.dtype == torch.bfloat16)
        expected = matrix.expected_shapes() if sound else {}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        rule = f"is not described whole ({type(error).__name__}: {error})"
        raise RefusedInputError(Fault(where=where, rule=rule, fix="quantize the model again")) from None
    stored = matrix.tensors()
    wrong = [name for name, shape in expected.items() if tuple(stored[name].shape) != shape]
    if wrong or not sound:
        rule = f"has tensors of other shapes than its settings say: {', '.join(wrong) or settings}"
        raise RefusedInputError(Fault(where=where, rule=rule, fix="quantize the model again"))
    sparse.check(matrix.shape, where)
    return matrix


def small_layers(directory: Path) -> dict[str, Any] | None:
    """Return the settings of every matrix by module name; `None` where the directory is of another format.

    Raises:
        RefusedInputError: `config.json` describes no small format that this version reads.
    """
    path = directory / _CONFIG
    if not path.exists():
        return None
    try:
        stated = json.loads(path.read_bytes()).get("quantization_config") or {}
        is_small = stated.get("quant_method") == QUANT_METHOD
    except OSError as error:
        raise RefusedInputError(Fault(where=str(path), rule=f"cannot be read ({error.strerror})")) from None
    except (ValueError, AttributeError, RecursionError) as error:
        raise RefusedInputError(Fault(where=str(path), rule=f"is no JSON object ({error!r})")) from None
    if not is_small:
        return None
    return checked_layers(stated.get("schema_version"), stated.get("layers"), where=str(path))


def checked_layers(schema_version: Any, layers: Any, *, where: str) -> dict[str, Any]:
    """Return the settings of a description, whose version this one reads."""
    if schema_version != _SCHEMA_VERSION:
        rule = f"has schema_version {schema_version}; this version reads {_SCHEMA_VERSION}"
        raise RefusedInputError(Fault(where=where, rule=rule, fix="quantize the model again"))
    if not isinstance(layers, dict) or not all(isinstance(settings, dict) for settings in layers.values()):
        rule = "names no layers with their settings"
        raise RefusedInputError(Fault(where=where, rule=rule, fix="quantize the model again"))
    return layers
