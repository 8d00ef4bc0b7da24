"""Output directories: no source is written over, a disk that cannot be written is found first, two runs exclude."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from shardwright.ds_configs.plan.output import LOCK, STAGING, disk_errors, output_errors, reserved
from shardwright.ds_configs.specs.errors import UsageError


def test_only_allowed_files_may_be_replaced(tmp_path):
    out = tmp_path / "out"
    assert output_errors(out, force=False) == []
    out.mkdir()
    (out / "report-1.json").touch()
    assert output_errors(out, force=False, own=("report-*.json",)) == output_errors(out, force=True) == []
    (error,) = output_errors(out, force=False)
    assert "exists and is not empty; use --force" in str(error)
    (out / "notes.txt").touch()
    (error,) = output_errors(out, force=False, own=("report-*.json",))
    assert "contains 'notes.txt'" in error.rule
    (error,) = output_errors(out / "notes.txt", force=True)
    assert error.rule == "is a file"


def test_output_must_not_be_a_source_or_inside_one(tmp_path):
    model, link = tmp_path / "model", tmp_path / "link"
    model.mkdir()
    (model / "config.json").touch()
    link.symlink_to(model)
    itself, inside = "is the model itself, whose files would be replaced", "is inside the model"
    for output, rule in (
        (model, itself),
        (link, itself),
        (tmp_path / "model" / ".." / "link", itself),
        (model / "out", inside),
        (link / "new" / "out", inside),
    ):
        for source in (model, link, model / "config.json"):
            (error,) = output_errors(output, force=True, sources={"the model": str(source), "the teacher": None})
            assert error.rule == rule
    beside = {"the model": str(model), "the dataset": "org/data"}
    assert output_errors(tmp_path / "out", force=True, sources=beside) == []
    assert output_errors(tmp_path, force=True, sources=beside) == []


def test_unwritable_or_full_disk_is_detected_before_work(tmp_path, monkeypatch):
    assert disk_errors(tmp_path / "a" / "b") == [] and not list(tmp_path.iterdir())
    (error,) = disk_errors(tmp_path / "a", needed_bytes=10**18)
    assert error.rule.startswith(f"needs 1000000000.0 GB, but {tmp_path} has ") and error.rule.endswith(" GB free")
    (error,) = disk_errors(Path("/proc/nowhere/out"))
    assert error.rule.startswith("cannot be written (")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    (error,) = output_errors(tmp_path / "out", force=False)
    assert error.rule == "cannot be written (No space left on device)" and not list(tmp_path.iterdir())


@contextmanager
def another_run(out: Path) -> Iterator[int]:
    """Hold a directory in another process; yields its number, and kills it at the end."""
    code = (
        "import sys, time, pathlib; from shardwright.ds_configs.plan.output import reserved\n"
        "with reserved(pathlib.Path(sys.argv[1]), force=True): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGKILL)


def test_second_run_is_rejected_until_the_first_ends_or_is_killed(tmp_path):
    out, link = tmp_path / "runs" / "out", tmp_path / "link"
    with another_run(out) as process:
        link.symlink_to(out)
        for place in (out, link, tmp_path / "runs" / ".." / "runs" / "out"):
            held = rf"process {process} on .* is writing to it; wait"
            with pytest.raises(UsageError, match=held), reserved(place, force=True):
                pass
    # The file of the killed one is still there.
    assert (out.parent / f".out{LOCK}").exists()
    own = f"process {os.getpid()} is writing to it"
    with reserved(out, force=True), pytest.raises(UsageError, match=own), reserved(link, force=True):
        pass
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("moment", ["write", "fstat"])
def test_ctrl_c_while_a_directory_is_locked_leaves_no_file(moment, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(os, moment, interrupted)
        with reserved(tmp_path / "out", force=False):
            pass
    assert not list(tmp_path.iterdir())
    with reserved(tmp_path / "out", force=False):
        pass


def test_staged_files_of_a_killed_run_are_removed(tmp_path):
    out, other = tmp_path / "out", tmp_path / f".outer{STAGING}1"
    for place in (out / f".out{STAGING}abc", tmp_path / f".out{STAGING}abc", other):
        place.mkdir(parents=True)
        (place / "model.safetensors").touch()
    assert output_errors(out, force=False) == []
    with reserved(out, force=False):
        assert not list(out.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"out", other.name}
