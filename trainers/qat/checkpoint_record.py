"""What a resumed run must know of quantization-aware training; it stands in `trainer_state.json` of every checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...ds_configs.errors import Fault, UsageError

if TYPE_CHECKING:
    from .attach import Attachment

_COMPARED = ("weight_rule", "lora", "kv_cache", "stored_dtype")
"""Settings that change the numbers of the checkpoint; schedules may be changed when a run goes on."""


def checkpoint_record(attachment: Attachment) -> dict[str, Any]:
    """Return scheme, progress and ranges as numbers and names; fp32 numbers survive JSON exactly."""
    return {
        "scheme": _scheme(attachment),
        "settings": _settings(attachment),
        "trained_steps": attachment.state.trained_steps,
        "ranges": {name: one.record() for name, one in attachment.ranges.items()},
    }


def take_up(attachment: Attachment, record: Mapping[str, Any]) -> None:
    """Go on where a checkpoint stopped.

    Raises:
        UsageError: the checkpoint was trained with other numbers; all differences at once.
    """
    faults = list(_differences("scheme", record["scheme"], _scheme(attachment)))
    faults += _differences("settings", record["settings"], _settings(attachment))
    if faults:
        raise UsageError(faults)
    attachment.state.trained_steps = record["trained_steps"]
    for name, found in record["ranges"].items():
        attachment.ranges[name].take_up(found)


def _scheme(attachment: Attachment) -> dict[str, Any]:
    found = asdict(attachment.scheme)
    # JSON has lists for tuples.
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _settings(attachment: Attachment) -> dict[str, Any]:
    found = {name: getattr(attachment.config, name) for name in _COMPARED}
    return found | {"stored_dtype": str(attachment.stored_dtype).removeprefix("torch.")}


def _differences(where: str, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[Fault]:
    for name, value in wanted.items():
        if isinstance(value, dict) and isinstance(stored.get(name), dict):
            yield from _differences(f"{where}.{name}", stored[name], value)
        elif stored.get(name) != value:
            rule = f"is not what the checkpoint was trained with ({stored.get(name)!r})"
            fix = "resume with the same, or start anew from the dense model"
            yield Fault(where=f"{where}.{name}", value=value, rule=rule, fix=fix)
