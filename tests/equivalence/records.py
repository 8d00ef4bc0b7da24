"""Runs many cases in as few forks as their ranks allow, and keeps what came of each."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fresh_process import forget_last_run
from shardwright.ds_configs.specs.errors import ShardwrightError
from warm_ranks import RanksFailedError, run_ranks

Record = dict[str, Any]
Value = TypeVar("Value")
_SECONDS_OF_A_RUN = 60.0
_RUNS_OF_A_LAUNCH = 30
"""Every engine leaves groups of ranks with their threads in its process; more of them make the next runs slower."""


def marked(cases: Iterable[Value], values_of: Callable[[Value], Iterable[Any]]) -> list[Any]:
    """Return parameters of tests in which a case stays in `make test` if it is the first with one of its values.

    All others, the rest of a grid, run in `make test-full` and `make test-grid`.
    """
    seen: set[Any] = set()
    parameters = []
    for case in cases:
        values = set(values_of(case))
        parameters.append(pytest.param(case, marks=[pytest.mark.full] if values <= seen else []))
        seen |= values
    return parameters


def each_record(cases: Iterable[Any], directory: Path, worker: Path) -> Iterator[tuple[Any, Record]]:
    """Train cases and yield each with its record; one that ends its ranks ends no other.

    Args:
        cases: Dataclasses with a `name` and a `full_layout`.
        directory: Where ranks put their records.
        worker: Rank script that calls `write_records`.
    """
    by_ranks: dict[int, list[Any]] = {}
    for case in dict.fromkeys(cases):
        by_ranks.setdefault(case.full_layout.world_size, []).append(case)
    for ranks, waiting in by_ranks.items():
        while waiting:
            records = _attempt(waiting[:_RUNS_OF_A_LAUNCH], ranks, directory, worker)
            yield from zip(waiting, records, strict=False)
            waiting = waiting[len(records) :]


def records_of(cases: Iterable[Any], directory: Path, worker: Path) -> dict[str, Record]:
    return {case.name: record for case, record in each_record(cases, directory, worker)}


def _attempt(cases: Sequence[Any], ranks: int, directory: Path, worker: Path) -> list[Record]:
    """Return the records of the first cases, up to one that ended its ranks."""
    failure = "no record"
    try:
        timeout = min(30 + _SECONDS_OF_A_RUN * len(cases), 800)
        run_ranks([worker, directory, json.dumps(list(map(asdict, cases)))], ranks=ranks, timeout_seconds=timeout)
    except RanksFailedError as error:
        failure = str(error)
    found: list[Record] = []
    for case in cases:
        files = [directory / f"{case.name}.{rank}.json" for rank in range(ranks)]
        records = [json.loads(file.read_text()) for file in files if file.is_file()]
        wrong = next((record for record in records if "error" in record), None)
        if wrong is not None or len(records) < ranks:
            return [*found, wrong or {"error": failure}]
        found.append(records[0])
    return found


def write_records(kind: type[Any], record: Callable[[Any, Path], Record]) -> None:
    """Record every case that `records_of` names, one file per case and rank as it comes; called by a rank script."""
    output = Path(sys.argv[1])
    for fields in json.loads(sys.argv[2]):
        case = kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
        found = record(case, output)
        (output / f"{case.name}.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
        if "error" in found:
            raise SystemExit(1)
        if case.full_layout.engine != "single":
            forget_last_run()


def logged(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def losses_of(trainer: Any) -> Record:
    return {"losses": logged(trainer)}


def training_record(
    make_trainer: Callable[[], Any],
    result: Callable[[Any], Record] = losses_of,
    *,
    trains: bool = True,
    **settings: Any,
) -> Record:
    """Train, and return `result` of the trainer, a rejection with the number of steps before it, or an error."""
    trainer = None
    try:
        trainer = make_trainer()
        if trains:
            trainer.train(**settings)
        return result(trainer)
    except ShardwrightError as error:
        return {"refused": str(error), "steps": 0 if trainer is None else trainer.state.global_step}
    except Exception:
        return {"error": traceback.format_exc()}
