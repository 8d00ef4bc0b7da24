"""The small format of SpQR and of low-rank corrections: safetensors of packed parts, and a JSON file that says how.

The directory's weight files are not named `model*.safetensors`, so that Transformers refuses them as missing instead of
filling a model with random numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, RefusedInputError
from .bit_packing import SparseRows
from .low_rank_residual import LowRankMatrix
from .model_directory import appearing_directory
from .spqr_matrix import SpQRMatrix

if TYPE_CHECKING:
    import torch

DESCRIPTION = "small_format.json"
SMALL_DIRECTORY = "small"
"""Where the small format lies in a checkpoint."""
_INDEX = "small.safetensors.index.json"
_SINGLE = "small.safetensors"
_PATTERN = "small{suffix}.safetensors"
_SCHEMA_VERSION = 1
_SHARD_BYTES = 5 * 10**9
_FLOATS = ("bfloat16", "float16", "float32")
_CSR = ("offsets", "columns", "values")

SmallMatrix = SpQRMatrix | LowRankMatrix
"""A quantized matrix of either method."""


def save_small_format(
    model: Any, matrices: Mapping[str, SmallMatrix], directory: Path, *, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write config, packed matrices and all other tensors of a model; the files appear together or not at all.

    Args:
        model: Transformers model; its other tensors are stored as they are.
        matrices: Quantized matrices by module name.
        directory: Where to.
        shard_bytes: Most bytes of one file, where a single tensor is not larger.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    tensors = {
        f"{layer}.{name}": tensor for layer, matrix in matrices.items() for name, tensor in matrix.tensors().items()
    }
    tensors |= _other_tensors(model, {f"{layer}.weight" for layer in matrices})
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=_PATTERN, max_shard_size=shard_bytes)
    with appearing_directory(directory) as place:
        for file, names in split.filename_to_tensors.items():
            shard = {name: tensors[name].detach().cpu().contiguous() for name in names}
            save_file(shard, str(place / file), metadata={"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            _write_json(place / _INDEX, index)
        model.config.save_pretrained(place)
        layers = {name: matrix_settings(matrix) for name, matrix in matrices.items()}
        _write_json(place / DESCRIPTION, {"schema_version": _SCHEMA_VERSION, "layers": layers})


def load_small_format(directory: Path) -> Any:
    """Return the model in a directory of the small format, with the dense weights that its matrices stand for.

    Raises:
        RefusedInputError: files are missing or damaged, or do not fit one another.
    """
    import transformers

    description = _description(directory)
    config = transformers.AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
    tensors = dict(_stored_tensors(directory))
    for layer, settings in description["layers"].items():
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


def load_spqr(directory: Path) -> Any:
    """Return the model of a checkpoint in the small format, from its directory or the one above.

    Raises:
        RefusedInputError: files are missing, damaged, or do not fit one another.
    """
    directory = Path(directory)
    inside = directory / SMALL_DIRECTORY
    return load_small_format(inside if (inside / DESCRIPTION).is_file() else directory)


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


def _description(directory: Path) -> dict[str, Any]:
    path = directory / DESCRIPTION
    try:
        found = json.loads(path.read_bytes())
        if found["schema_version"] == _SCHEMA_VERSION and isinstance(found["layers"], dict):
            return dict(found)
        rule = f"has schema_version {found['schema_version']}; this version reads {_SCHEMA_VERSION}"
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        rule = f"describes no small format ({error!r})"
    raise RefusedInputError(Fault(where=str(path), rule=rule))


def _stored_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    index = directory / _INDEX
    try:
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values())) if index.is_file() else [_SINGLE]
        for file in files:
            if Path(file).name != file:
                rule = "names a file outside of its directory"
                raise RefusedInputError(Fault(where=str(index), value=file, rule=rule))
            with safe_open(str(directory / file), framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    yield name, stored.get_tensor(name)
    except (SafetensorError, OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        rule = f"has missing or damaged weight files ({error})"
        raise RefusedInputError(Fault(where=str(directory), rule=rule, fix="quantize the model again")) from None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
