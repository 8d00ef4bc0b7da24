"""The store of measured runs: concurrent writers, damaged files, and its use in plans."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from measuring import plan_on, run_of
from shardwright.ds_configs.memory.estimate import Calibration, MeasuredRun
from shardwright.ds_configs.specs.errors import RefusedInputError, ShardwrightError, UsageError
from shardwright.ds_configs.step_time.learning import MeasuredStep
from shardwright.plugins.planning import FILE_NAME, CalibrationStore

RUN = run_of(plan_on())


def numbered(number: int) -> MeasuredRun:
    return replace(RUN, identifier=f"{number:064x}")


@pytest.fixture
def store(tmp_path: Path) -> CalibrationStore:
    return CalibrationStore(tmp_path / "new" / FILE_NAME)


def test_stored_run_is_returned_once(store: CalibrationStore) -> None:
    assert store.calibration() == Calibration(runs=()) and not store.path.parent.exists()
    assert store.add(RUN) and not store.add(RUN)
    bare = replace(numbered(1), outside_allocator_bytes=None, step_seconds=None, model="päth'; DROP TABLE runs; --")
    assert store.add(bare)
    assert set(store.calibration().runs) == {RUN, bare}


def test_steps_without_later_fields_are_read(store: CalibrationStore) -> None:
    facts = {"gpu": "CPU", "engine": "ddp", "model": "model", "layout": "ddp", "ranks": 2}
    step = MeasuredStep(identifier="a" * 64, **facts, predicted_seconds=1.0, measured_seconds=2.0)
    later = replace(step, identifier="b" * 64, flops_per_s=1e12, release="0.1.0")
    assert store.add(step) and store.add(later)
    text = store.path.read_text()
    for name in ("flops_per_s", "release"):
        text = text.replace(f', "{name}": null', "")
    store.path.write_text(text.replace('"kind"', '"later": 1, "kind"'))
    assert "null" not in text and store.steps() == (step, later)


def test_runs_are_removed_by_prefix(store: CalibrationStore) -> None:
    assert store.forget("all") == 0
    with pytest.raises(UsageError, match="is not a stored run"):
        store.forget("0")
    for number in range(3):
        store.add(numbered(number))
    store.add(RUN)
    for wrong, message in (("0", "matches 3 runs"), ("", "is not a stored run"), ("%", "is not a stored run")):
        with pytest.raises(UsageError, match=message):
            store.forget(wrong)
    assert store.forget(RUN.identifier[:12]) == 1
    assert store.forget(f"{2:064x}") == 1
    assert set(store.calibration().runs) == {numbered(0), numbered(1)}
    assert store.forget("all") == 2
    assert store.calibration().runs == ()
    assert store.add(RUN) and store.calibration().runs == (RUN,)


def test_concurrent_processes_lose_no_run(tmp_path: Path) -> None:
    path = tmp_path / "shared" / FILE_NAME

    def write(number: int) -> bool:
        return CalibrationStore(path).add(numbered(number % 20))

    with ThreadPoolExecutor(max_workers=8) as pool:
        assert sum(pool.map(write, range(40))) >= 20
    assert set(CalibrationStore(path).calibration().runs) == {numbered(number) for number in range(20)}


def test_works_without_locks(store: CalibrationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert store.add(RUN) and store.calibration().runs == (RUN,)


NOT_OURS: dict[str, Callable[[Path], object]] = {
    "noise": lambda path: path.write_bytes(os.urandom(5000)),
    "a truncated line": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "a missing field": lambda path: path.write_text(path.read_text().replace('"gpu"', '"card"')),
}


@pytest.mark.parametrize("damage", NOT_OURS)
def test_rejects_other_files_without_changing_them(store: CalibrationStore, damage: str) -> None:
    store.add(RUN)
    NOT_OURS[damage](store.path)
    before = store.path.read_bytes()
    for act in (store.calibration, lambda: store.add(numbered(1)), lambda: store.forget("all")):
        with pytest.raises(RefusedInputError, match="line 1 is not a measurement") as caught:
            act()
        assert str(store.path) in str(caught.value) and "remove the line, or move the file" in str(caught.value)
    assert store.path.read_bytes() == before


def test_reports_a_path_without_write_access(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / FILE_NAME, tmp_path):
        with pytest.raises(ShardwrightError, match=r"cannot be used .*; set SHARDWRIGHT_DATA_DIR") as caught:
            CalibrationStore(place).add(RUN)
        assert caught.value.exit_code == 1
