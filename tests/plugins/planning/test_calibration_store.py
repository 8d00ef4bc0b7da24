"""The store of measured runs: concurrent writers, locked and damaged files, and its use in plans."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from measuring import plan_on, run_of
from paths import CONFIGS
from shardwright.ds_configs.memory.estimate import Calibration, MeasuredRun
from shardwright.ds_configs.specs.errors import RefusedInputError, ShardwrightError, UsageError
from shardwright.ds_configs.step_time.learning import MeasuredStep
from shardwright.plugins.planning.calibration_store import FILE_NAME, CalibrationStore, data_directory
from shardwright.plugins.planning.from_names import plan, stored_calibration

RUN = run_of(plan_on())


def numbered(number: int) -> MeasuredRun:
    return replace(RUN, identifier=f"{number:064x}")


@pytest.fixture
def store(tmp_path: Path) -> CalibrationStore:
    return CalibrationStore(tmp_path / "new" / FILE_NAME, wait_seconds=0.2)


def test_stored_run_is_returned_once(store: CalibrationStore) -> None:
    assert store.calibration() == Calibration(runs=()) and not store.path.parent.exists()
    assert store.add(RUN) and not store.add(RUN)
    bare = replace(numbered(1), outside_allocator_bytes=None, step_seconds=None, model="päth'; DROP TABLE runs; --")
    assert store.add(bare)
    assert set(store.calibration().runs) == {RUN, bare}
    assert all(stored.stored_at.endswith("+00:00") for stored in store.stored())


def test_steps_of_a_table_without_later_columns_are_kept(store: CalibrationStore) -> None:
    step = MeasuredStep(
        identifier="a" * 64,
        gpu="CPU",
        engine="ddp",
        model="model",
        layout="ddp",
        ranks=2,
        predicted_seconds=1.0,
        measured_seconds=2.0,
    )
    assert store.add_step(step)
    for column in ("network_seconds", "host_seconds", "flops_per_s", "release"):
        rewrite(store.path, f"ALTER TABLE steps DROP COLUMN {column}")
    assert store.steps() == (step,)
    later = replace(step, identifier="b" * 64, network_seconds=0.5, host_seconds=0.1, flops_per_s=1e12, release="0.1.0")
    assert store.add_step(later) and store.steps() == (step, later)
    rewrite(store.path, "UPDATE steps SET release = 7")
    with pytest.raises(RefusedInputError, match="steps: release = 7"):
        store.steps()


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
    assert store.stored() == ()


def test_concurrent_writers_lose_no_run(tmp_path: Path) -> None:
    path = tmp_path / "shared" / FILE_NAME

    def write(number: int) -> bool:
        return CalibrationStore(path, wait_seconds=60).add(numbered(number % 20))

    with ThreadPoolExecutor(max_workers=8) as pool:
        added = list(pool.map(write, range(40)))
    assert sum(added) == 20
    assert set(CalibrationStore(path).calibration().runs) == {numbered(number) for number in range(20)}


def test_reports_a_locked_database(store: CalibrationStore) -> None:
    store.add(RUN)
    holder = sqlite3.connect(store.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    for act in (store.calibration, lambda: store.add(numbered(1)), lambda: store.forget("all")):
        with pytest.raises(ShardwrightError, match=r"is locked by another command for over 0\.2 s") as caught:
            act()
        assert caught.value.exit_code == 1
    holder.rollback()
    holder.close()
    assert store.calibration().runs == (RUN,)


@pytest.mark.slow
def test_killed_writer_keeps_stored_runs(store: CalibrationStore) -> None:
    store.add(RUN)
    program = (
        "import os, sqlite3, sys\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('PRAGMA cache_size = 1')\n"
        "c.execute('BEGIN IMMEDIATE')\n"
        "c.execute('DELETE FROM runs')\n"
        "c.execute('CREATE TABLE filler (x)')\n"
        "c.executemany('INSERT INTO filler VALUES (?)', [('x' * 4000,)] * 500)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([os.environ["PYTHON_EXEC"], "-c", program, str(store.path)]).returncode == -9
    assert store.path.with_name(f"{FILE_NAME}-journal").exists()
    assert store.calibration().runs == (RUN,)


def rewrite(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


NOT_OURS = {
    "noise": lambda path: path.write_bytes(os.urandom(5000)),
    "a truncated file": lambda path: path.write_bytes(path.read_bytes()[:3000]),
    "another program's": lambda path: (path.unlink(), rewrite(path, "CREATE TABLE cookies (name TEXT)")),
    "a missing table": lambda path: rewrite(path, "DROP TABLE runs"),
    "a missing column": lambda path: rewrite(path, "ALTER TABLE runs DROP COLUMN gpu"),
    "text for a number": lambda path: rewrite(path, "UPDATE runs SET reserved_peak_bytes = 'many'"),
    "bytes for text": lambda path: rewrite(path, "UPDATE runs SET gpu = x'00ff'"),
    "a negative version": lambda path: rewrite(path, "PRAGMA user_version = -1"),
}


@pytest.mark.parametrize("damage", NOT_OURS)
def test_rejects_other_files_without_changing_them(store: CalibrationStore, damage: str) -> None:
    store.add(RUN)
    NOT_OURS[damage](store.path)
    before = store.path.read_bytes()
    with pytest.raises(RefusedInputError, match="is not a database of measured runs") as caught:
        store.calibration()
    assert str(store.path) in str(caught.value) and "move the file" in str(caught.value)
    assert store.path.read_bytes() == before


def test_rejects_a_newer_database(store: CalibrationStore) -> None:
    store.add(RUN)
    rewrite(store.path, "PRAGMA user_version = 2")
    for act in (store.calibration, lambda: store.add(numbered(1)), lambda: store.forget("all")):
        with pytest.raises(
            RefusedInputError, match=r"newer version of Shardwright \(schema 2, this version reads 1\); upgrade"
        ):
            act()


def test_empty_file_is_a_new_database(store: CalibrationStore) -> None:
    store.path.parent.mkdir()
    store.path.touch()
    assert store.calibration().runs == ()
    assert store.add(RUN)
    assert store.calibration().runs == (RUN,)


def test_reports_a_path_without_write_access(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / FILE_NAME, tmp_path):
        with pytest.raises(ShardwrightError, match=r"cannot be used .*; set SHARDWRIGHT_DATA_DIR") as caught:
            CalibrationStore(place).add(RUN)
        assert caught.value.exit_code == 1


def test_data_directory_is_the_users_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDWRIGHT_DATA_DIR", str(tmp_path))
    assert data_directory() == tmp_path
    monkeypatch.setenv("SHARDWRIGHT_DATA_DIR", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert data_directory() == tmp_path / "xdg" / "shardwright"


def test_planning_uses_the_users_runs_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDWRIGHT_DATA_DIR", str(tmp_path))
    model = str(CONFIGS / "meta-llama--Llama-3.1-8B")
    CalibrationStore().add(RUN)
    assert plan(model, "8xH100-80GB").chosen.memory.gpu.calibrated_runs == 1
    assert plan(model, "8xA100-80GB").chosen.memory.gpu.calibrated_runs == 0
    assert plan(model, "8xH100-80GB", calibration=None).chosen.memory.gpu.calibrated_runs == 0
    runs = Calibration(runs=(RUN, numbered(1)))
    assert plan(model, "8xH100-80GB", calibration=runs).chosen.memory.gpu.calibrated_runs == 2
    (tmp_path / FILE_NAME).write_text("not a database, " * 100)
    reported: list[str] = []
    assert stored_calibration(reported.append) is None
    assert reported and reported[0].startswith("planning without measured runs: calibration database ")
    assert plan(model, "8xH100-80GB").chosen.memory.gpu.calibrated_runs == 0
