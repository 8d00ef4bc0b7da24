"""Measured runs and step times: one file in the user's data directory, which processes share.

Each line is a JSON object that one write appends under a lock, so that processes lose nothing and none reads half a
line. To forget is a line too. The file is read from top to bottom:

    {"kind": "run", "stored_at": ..., fields of MeasuredRun}
    {"kind": "step", "stored_at": ..., fields of MeasuredStep}
    {"kind": "forget", "stored_at": ..., "identifier": of a run and its step, or "all"}
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from ...ds_configs.memory.estimate import Calibration, MeasuredRun
from ...ds_configs.plan.output import NO_LOCKS
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError, UsageError
from ...ds_configs.specs.synonyms import REMOVED
from ...ds_configs.specs.texts import strict_json
from ...ds_configs.step_time.learning import MeasuredStep

DATA_DIRECTORY_VARIABLE = "SHARDWRIGHT_DATA_DIR"
FILE_NAME = "calibration.jsonl"
Measured = MeasuredRun | MeasuredStep
_KINDS: dict[str, type[Measured]] = {"run": MeasuredRun, "step": MeasuredStep}
_POSITIVE = {
    "run": ("ranks", "predicted_allocated_bytes", "reserved_peak_bytes"),
    "step": ("ranks", "predicted_seconds", "measured_seconds"),
}
"""Fields that plans divide by, of each kind."""


def _lock(stream: IO[bytes], *, exclusive: bool) -> None:
    """Lock a file until it is closed, where the file system has locks."""
    import fcntl

    try:
        fcntl.flock(stream, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def data_directory() -> Path:
    """Return the directory of this user's measurements: `SHARDWRIGHT_DATA_DIR`, else the platform's data directory."""
    directory = os.environ.get(DATA_DIRECTORY_VARIABLE)
    if directory:
        return Path(directory).absolute()
    from platformdirs import user_data_path

    return user_data_path("shardwright", appauthor=False)


class CalibrationStore:
    """Measurements on disk.

    Raises, from every method:
        RefusedInputError: The file is not such a file.
        ShardwrightError: The file cannot be accessed.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or data_directory() / FILE_NAME

    def add(self, measured: Measured) -> bool:
        """Store a measurement, which later plans use, and return whether it was new."""
        if measured in self._measurements():
            return False
        kind = next(kind for kind, each in _KINDS.items() if isinstance(measured, each))
        self._append(kind, asdict(measured))
        return True

    def calibration(self) -> Calibration:
        """Return the runs with memory peaks, oldest first."""
        return Calibration(runs=tuple(each for each in self._measurements() if isinstance(each, MeasuredRun)))

    def steps(self) -> tuple[MeasuredStep, ...]:
        """Return the measured step times, oldest first."""
        return tuple(each for each in self._measurements() if isinstance(each, MeasuredStep))

    def forget(self, identifier: str) -> int:
        """Remove one run by a prefix of its identifier, or `all`; return the number of removed runs.

        A run may have memory peaks, a step time, or both.

        Raises:
            UsageError: No run, or several runs, have this prefix.
        """
        stored = self._measurements()
        runs = sorted({each.identifier for each in stored})
        if identifier == "all":
            if stored:
                self._append("forget", {"identifier": identifier})
            return len(runs)
        matches = [name for name in runs if identifier and name.startswith(identifier)]
        if len(matches) != 1:
            rule = "is not a stored run"
            fix = REMOVED.get(f"forget={identifier}", "`shardwright calibrate --list` lists the runs")
            if matches:
                rule = f"matches {len(matches)} runs"
                fix = f"write a longer prefix: {', '.join(name[:16] for name in matches[:4])}"
            raise UsageError(ConfigError(where="--forget", value=identifier, rule=rule, fix=fix))
        self._append("forget", {"identifier": matches[0]})
        return 1

    def _append(self, kind: str, values: dict[str, object]) -> None:
        stored_at = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"kind": kind, "stored_at": stored_at, **values}) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer, the line is one write to the end of the file.
            with self.path.open("ab", buffering=0) as stream:
                _lock(stream, exclusive=True)
                stream.write(line.encode())
                os.fsync(stream.fileno())
        except OSError as error:
            raise self._unusable(error) from None

    def _measurements(self) -> list[Measured]:
        """Return everything that was stored and not removed, each once, oldest first."""
        try:
            with self.path.open("rb") as stream:
                _lock(stream, exclusive=False)
                lines = stream.read().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable(error) from None
        # Keys keep their order.
        stored: dict[Measured, None] = {}
        for number, line in enumerate(lines, start=1):
            try:
                values = strict_json(line)
                kind, _ = values.pop("kind"), values.pop("stored_at")
                if kind == "forget":
                    forgotten = values["identifier"]
                    stored = {each: None for each in stored if forgotten not in ("all", each.identifier)}
                    continue
                if kind == "cpu":
                    # Rates of CPU ranks, which earlier versions stored.
                    continue
                stored[TypeAdapter(_KINDS[kind]).validate_json(json.dumps(values), strict=True)] = None
                if zero := [name for name in _POSITIVE[kind] if not values[name] > 0]:
                    raise ValueError(f"{zero[0]} = {values[zero[0]]}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                where, detail = f"calibration file {self.path}", " ".join(str(error).split())[:200]
                rule, fix = f"line {number} is not a measurement ({detail})", "remove the line, or move the file"
                raise RefusedInputError(ConfigError(where=where, rule=rule, fix=fix)) from None
        return list(stored)

    def _unusable(self, error: OSError) -> ShardwrightError:
        detail = f"cannot be used ({error.strerror}); set {DATA_DIRECTORY_VARIABLE}"
        return ShardwrightError(f"calibration file {self.path}: {detail}")
