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
from shardwright.ds_configs.plan.output import LOCK, STAGING, disk_faults, output_faults, reserved
from shardwright.ds_configs.specs.errors import ShardwrightError, UsageError


def test_one_rule_on_what_may_be_replaced(tmp_path):
    out = tmp_path / "out"
    assert output_faults(out, force=False) == []
    out.mkdir()
    (out / "report-1.json").touch()
    assert output_faults(out, force=False, own=("report-*.json",)) == output_faults(out, force=True) == []
    (fault,) = output_faults(out, force=False)
    assert "exists and is not empty; use --force" in str(fault)
    (out / "notes.txt").touch()
    (fault,) = output_faults(out, force=False, own=("report-*.json",))
    assert "holds 'notes.txt'" in fault.rule
    (fault,) = output_faults(out / "notes.txt", force=True)
    assert fault.rule == "is a file"


def test_no_source_is_written_over_or_into_by_whatever_path(tmp_path):
    model, link = tmp_path / "model", tmp_path / "link"
    model.mkdir()
    (model / "config.json").touch()
    link.symlink_to(model)
    itself, inside = "is the model itself, whose files would be replaced", "lies inside the model"
    for output, rule in (
        (model, itself),
        (link, itself),
        (tmp_path / "model" / ".." / "link", itself),
        (model / "out", inside),
        (link / "new" / "out", inside),
    ):
        for source in (model, link, model / "config.json"):
            (fault,) = output_faults(output, force=True, sources={"the model": str(source), "the teacher": None})
            assert fault.rule == rule
    beside = {"the model": str(model), "the dataset": "org/data"}
    assert output_faults(tmp_path / "out", force=True, sources=beside) == []
    assert output_faults(tmp_path, force=True, sources=beside) == []


def test_a_disk_that_cannot_be_written_or_is_too_small_is_found_before_the_work(tmp_path, monkeypatch):
    assert disk_faults(tmp_path / "a" / "b") == [] and not list(tmp_path.iterdir())
    (fault,) = disk_faults(tmp_path / "a", needed_bytes=10**18)
    assert fault.rule.startswith("takes 1000000000.0 GB, and ") and fault.rule.endswith(f" GB are free in {tmp_path}")
    (fault,) = disk_faults(Path("/proc/nowhere/out"))
    assert fault.rule.startswith("cannot be written (")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    (fault,) = output_faults(tmp_path / "out", force=False)
    assert fault.rule == "cannot be written (No space left on device)" and not list(tmp_path.iterdir())


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


def test_a_second_run_is_refused_until_the_first_has_ended_in_whatever_way(tmp_path):
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


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    with reserved(tmp_path / "out", force=False):
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
    try:
        with another_run(tmp_path / "out"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_what_another_run_left_meanwhile_is_not_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    with pytest.raises(UsageError, match="exists and is not empty"), reserved(tmp_path / "out", force=False):
        raise AssertionError
    with reserved(tmp_path / "out", force=False, own=("*.safetensors",)):
        assert [path.name for path in tmp_path.iterdir()] != ["out"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_staged_files_of_a_killed_run_go_and_count_for_nothing(tmp_path):
    out, other = tmp_path / "out", tmp_path / f".outer{STAGING}1"
    for place in (out / f".out{STAGING}abc", tmp_path / f".out{STAGING}abc", other):
        place.mkdir(parents=True)
        (place / "model.safetensors").touch()
    assert output_faults(out, force=False) == []
    with reserved(out, force=False):
        assert not list(out.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"out", other.name}


def test_a_lock_lies_inside_where_the_place_beside_cannot_be_written(tmp_path, monkeypatch):
    out, real = tmp_path / "out", os.open
    out.mkdir()

    def only_inside(path, *how):
        if Path(path).parent == tmp_path:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, *how)

    monkeypatch.setattr(os, "open", only_inside)
    with reserved(out, force=False):
        assert [path.name for path in out.iterdir()] == [LOCK]
        assert output_faults(out, force=False) == []
    assert not list(out.iterdir())
    with pytest.raises(ShardwrightError, match="cannot be written"), reserved(tmp_path / "new", force=False):
        pass
