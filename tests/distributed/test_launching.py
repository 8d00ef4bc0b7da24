"""The launch helper stops what hangs, shows the failing rank, and stale compilation locks are found."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import LaunchFailedError, first_traceback, torchrun
from operators import remove_stale_locks


@pytest.mark.distributed
def test_a_launch_that_hangs_is_stopped_with_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    started = time.monotonic()
    with pytest.raises(LaunchFailedError, match="stopped after 15 s"):
        torchrun([str(script), str(tmp_path)], timeout_seconds=15)
    assert time.monotonic() - started < 60
    ranks = [int((tmp_path / rank).read_text()) for rank in ("0", "1")]
    assert not [rank for rank in ranks if psutil.pid_exists(rank)]


@pytest.mark.distributed
def test_a_failing_rank_shows_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise KeyError('wrong weight')\n")
    with pytest.raises(LaunchFailedError, match="KeyError: 'wrong weight'"):
        torchrun([str(script)], timeout_seconds=60)


def test_the_first_traceback_is_the_ranks_and_not_the_launchers() -> None:
    text = (
        "noise\n[rank1]: Traceback (most recent call last):\n[rank1]:   File 'a.py', line 1\n[rank1]: ValueError: a\n"
        "Traceback (most recent call last):\n  File 'run.py', line 2\nChildFailedError: b\n"
    )
    shown = first_traceback(text)
    assert shown == "Traceback (most recent call last):\n  File 'a.py', line 1\nValueError: a"


def test_a_lock_is_stale_when_no_process_has_it_open(tmp_path: Path) -> None:
    stale, held, foreign = (tmp_path / name / "lock" for name in ("cpu_adam", "deepspeed_shm_comm", "other_op"))
    for lock in (stale, held, foreign):
        lock.parent.mkdir()
        lock.touch()
    code = "import sys; lock = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(held)], text=True, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        assert remove_stale_locks(tmp_path) == [stale]
        holder.communicate()
    assert held.exists() and foreign.exists() and not stale.exists()
