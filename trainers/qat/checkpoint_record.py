"""State of quantization-aware training that a resumed run needs; `trainer_state.json` of every checkpoint holds it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, UsageError

if TYPE_CHECKING:
    from .rounding.attachment import Attachment

_COMPARED = ("weight_rule", "lora", "kv_cache")
"""Settings that change the numbers of the checkpoint; schedules may be changed when a run goes on."""


def checkpoint_record(attachment: Attachment) -> dict[str, Any]:
    """Return scheme, progress and ranges as numbers and names; fp32 numbers survive JSON exactly."""
    return {
        "scheme": _scheme(attachment),
        "settings": _settings(attachment),
        "trained_steps": attachment.state.trained_steps,
        "ranges": {name: one.record() for name, one in attachment.ranges.items()},
    }


def record_in(kept: Any) -> Mapping[str, Any]:
    """Return the record in what the Trainer keeps of a callback, of one or several of its kind; empty without one."""
    first = (kept[0] if kept else {}) if isinstance(kept, list) else kept or {}
    found: Mapping[str, Any] = first.get("attributes", {}).get("resumed") or {}
    return found


def resume_faults(
    attachment: Attachment, checkpoint: Path, callback_name: str = "QATCallback", *, demands_record: bool = False
) -> list[Fault]:
    """Return how a checkpoint's numbers differ from what is about to be trained, before anything of it is loaded.

    Optimizer states of other learned scales or adapters fail on loading, with an error that names none of this.

    Args:
        attachment: What is about to be trained.
        checkpoint: Directory that the Trainer wrote.
        callback_name: Class of the callback.
        demands_record: Whether a checkpoint of a training without rounding is a fault.
    """
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    record = record_in(state.get("stateful_callbacks", {}).get(callback_name))
    if record or not demands_record:
        return record_faults(attachment, record) if record else []
    rule = "was trained without rounding, and holds no ranges and no scheme"
    fix = "start from its weights in another output directory"
    return [Fault(where="resume", value=checkpoint.name, rule=rule, fix=fix)]


def record_faults(attachment: Attachment, record: Mapping[str, Any]) -> list[Fault]:
    """Return how a record's numbers differ from an attachment's."""
    faults = list(_differences("scheme", record["scheme"], _scheme(attachment)))
    return faults + list(_differences("settings", record["settings"], _settings(attachment)))


def take_up(attachment: Attachment, record: Mapping[str, Any]) -> None:
    """Go on where a checkpoint stopped.

    Raises:
        UsageError: the checkpoint was trained with other numbers; all differences at once.
    """
    faults = record_faults(attachment, record)
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
    return found | {
        "stored_dtype": str(attachment.stored_dtype).removeprefix("torch."),
        "learned_ranges": attachment.config.ranges == "learned",
        "lora_rank": attachment.lora_rank,
    }


def _differences(where: str, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[Fault]:
    for name, value in wanted.items():
        if isinstance(value, dict) and isinstance(stored.get(name), dict):
            yield from _differences(f"{where}.{name}", stored[name], value)
        elif stored.get(name) != value:
            rule = f"is not what the checkpoint was trained with ({stored.get(name)!r})"
            fix = "resume with the same, or start anew from the dense model"
            yield Fault(where=f"{where}.{name}", value=value, rule=rule, fix=fix)
