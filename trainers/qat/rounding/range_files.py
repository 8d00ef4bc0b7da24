"""Files of stored ranges: found in one process on the whole model, used in another that sees only parts of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.specs.errors import Fault, RefusedInputError, UsageError
from ....plugins.safetensors.reading import load_tensors, read_header
from ....plugins.safetensors.writing import save_tensors

if TYPE_CHECKING:
    from .attachment import Attachment

FORMAT, VERSION = "shardwright-activation-ranges", "1"
_SHOWN = 8


def save_ranges(path: Path | str, attachment: Attachment, *, method: str | None = None) -> Path:
    """Write all ranges, fp32 [2] under each name, with the numbers they are for; return the path.

    Args:
        path: A `.safetensors` file, which is replaced.
        attachment: What `attach` returned, with ranges that are known.
        method: How they were found; `None` for the scheme's `range_method`.

    Raises:
        UsageError: a range is not known yet.
        OSError: the system refuses to write.
    """
    import torch

    path = Path(path)
    unknown = [name for name, one in attachment.ranges.items() if one.bounds is None]
    if unknown or not attachment.ranges:
        rule = f"no range is known of {_some(unknown)}" if unknown else f"{attachment.scheme.name} stores no ranges"
        raise UsageError(Fault(where="save_ranges", value=str(path), rule=rule, fix="call calibrate_inputs first"))
    tensors = {name: torch.tensor(one.bounds, dtype=torch.float32) for name, one in attachment.ranges.items()}
    activations = attachment.scheme.activations
    stated = {
        "format": FORMAT,
        "version": VERSION,
        "scheme": attachment.scheme.name,
        "method": method or ("minmax" if activations is None else activations.range_method),
        "numbers": json.dumps(_numbers(attachment), sort_keys=True),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, path, stated)
    return path


def load_ranges(path: Path | str, attachment: Attachment) -> None:
    """Take the ranges of a file.

    Raises:
        RefusedInputError: the file is no such file, or it is damaged.
        UsageError: it is of other numbers or another model; all differences at once. Nothing was taken then.
    """
    path = Path(path)
    stated, found = _read(path)
    faults = _number_faults(path, stated, attachment)
    missing = [name for name in attachment.ranges if name not in found]
    foreign = [name for name in found if name not in attachment.ranges]
    where, fix = str(path), "calibrate this model with this scheme again"
    if missing:
        faults.append(Fault(where=where, rule=f"holds no range of {_some(missing)}", fix=fix))
    if foreign:
        faults.append(Fault(where=where, rule=f"holds ranges of what is not rounded here: {_some(foreign)}", fix=fix))
    if faults:
        raise UsageError(faults)
    for name, (low, high) in found.items():
        attachment.ranges[name].set_bounds(low, high)
        attachment.ranges[name].continue_with(attachment.ranges[name].observer)


def _read(path: Path) -> tuple[dict[str, str], dict[str, tuple[float, float]]]:
    if not path.is_file():
        raise UsageError(Fault(where="ranges", value=str(path), rule="there is no such file"))
    stated, tensors = read_header(path).metadata, load_tensors(path)
    if stated.get("format") != FORMAT or stated.get("version") != VERSION:
        rule = f"was not written by save_ranges (format {stated.get('format')!r}, version {stated.get('version')!r})"
        raise RefusedInputError(Fault(where="ranges", value=str(path), rule=rule))
    found, faults = {}, []
    for name, tensor in tensors.items():
        low, high = tensor.tolist() if tuple(tensor.shape) == (2,) else (math.nan, math.nan)
        if not (math.isfinite(low) and math.isfinite(high) and low <= 0 <= high):
            rule = "a range is two finite numbers with 0 between them"
            faults.append(Fault(where=f"{path}: {name}", value=tensor.tolist(), rule=rule))
        found[name] = (low, high)
    if faults:
        raise RefusedInputError(faults)
    return stated, found


def _numbers(attachment: Attachment) -> dict[str, Any]:
    """Return what codes the ranges are for; how a range was found matters to none of them."""
    activations = attachment.scheme.activations
    kept = None
    if activations is not None and attachment.scheme.activations_are_static:
        kept = {
            name: value for name, value in asdict(activations).items() if name not in ("range_method", "percentile")
        }
    return {"activations": kept, "kv_cache": attachment.config.kv_cache}


def _number_faults(path: Path, stated: Mapping[str, str], attachment: Attachment) -> list[Fault]:
    stored, wanted = json.loads(stated.get("numbers", "{}")), _numbers(attachment)
    return [
        Fault(where=f"{path}: {name}", value=stored.get(name), rule=f"{attachment.scheme.name} needs {value}")
        for name, value in wanted.items()
        if stored.get(name) != value
    ]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
