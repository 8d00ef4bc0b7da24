"""A launch stops what hangs, shows the failing rank, and stale compilation locks are found."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from launches import torchrun
from shardwright.plugins.deepspeed.compiled_operators import (
    StaleLockError,
    break_abandoned_locks,
    is_abandoned,
    prepare_operators,
    stale_locks,
)
from shardwright.plugins.launching.elastic import ERROR_FILE, RankFailure, first_cause
from shardwright.plugins.launching.launch import Launch, LaunchFailedError, cpu_rank_environment, launch_ranks
from shardwright.plugins.launching.messages import (
    Figures,
    Message,
    Progress,
)

pytestmark = pytest.mark.once


def is_running(pid: int) -> bool:
    """A process that ended stays listed until its adopted parent asks for its exit code."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.distributed
def test_a_launch_that_hangs_is_stopped_with_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    # The first warm process of a session waits for the server's imports.
    launch_ranks(Launch(arguments=("-c", "")), timeout_seconds=120)
    started = time.monotonic()
    with pytest.raises(LaunchFailedError, match="stopped after 8 s"):
        torchrun([str(script), str(tmp_path)], timeout_seconds=8)
    assert time.monotonic() - started < 60
    ranks = [int((tmp_path / rank).read_text()) for rank in ("0", "1")]
    assert not [rank for rank in ranks if is_running(rank)]


def test_the_first_exception_is_the_cause_unless_a_signal_killed_a_rank() -> None:
    known = RankFailure(rank=1, message="labels: masked", exit_code=2, seconds=2.0)
    later = RankFailure(rank=0, message="RuntimeError: gloo", traceback="Traceback ...\n", seconds=3.0)
    killed = RankFailure(rank=3, message="", signal="SIGKILL")
    assert first_cause([]) is None
    assert first_cause([later, known]) == ("rank 1: labels: masked", 2)
    assert first_cause([later]) == ("rank 0: RuntimeError: gloo\nTraceback ...", 1)
    message, code = first_cause([later, killed]) or ("", 0)
    assert message.startswith("rank 3 was killed by SIGKILL (the kernel does so when memory runs out)") and code == 1


RANKS = """
import os, signal, time
from shardwright.ds_configs.specs.errors import ConfigError, UsageError
from shardwright.plugins.launching.elastic import recorded

def work():
    if os.environ["RANK"] == "0":
        time.sleep(600)
    if os.environ["HOW"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["HOW"] == "known":
        raise UsageError(ConfigError(where="labels", rule="are all masked"))
    {}["weight"]

recorded(work)()
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "said", "code"),
    [
        ("known", r"^rank 1: labels: are all masked$", 2),
        ("unknown", r"(?s)^rank 1: KeyError: 'weight'\nTraceback.*in work.*KeyError: 'weight'$", 1),
        ("killed", r"^rank 1 was killed by SIGKILL \(.*\); the other ranks were ended$", 1),
    ],
)
def test_ranks_record_why_they_fail_and_the_launcher_passes_it_on(
    how: str, said: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is ended by the launcher, and is no cause; nothing is left of torchrun's own directories."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    own = tmp_path / "temporary"
    own.mkdir()
    monkeypatch.setenv("TMPDIR", str(own))
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    with pytest.raises(LaunchFailedError, match=said) as caught:
        torchrun([str(script)], timeout_seconds=60, environment={"HOW": how})
    assert (caught.value.exit_code, caught.value.launcher_exit_code) == (code, 1)
    assert not list(own.iterdir())


WAITS = """
import datetime, time
import torch
import torch.distributed as dist
from shardwright.plugins.launching.elastic import recorded

def work():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_gather([torch.ones(8) for _ in range(2)], torch.ones(8))

recorded(work)()
"""


@pytest.mark.distributed
def test_a_timeout_names_the_collective_and_the_rank_that_lags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL writes these records itself; for gloo the rank that waited does."""
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "traces").mkdir()
    kept = tmp_path / "traces" / "rank_"
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(kept))
    (tmp_path / "traces" / "rank_1").write_text("of an earlier run")
    os.utime(tmp_path / "traces" / "rank_1", (1000, 1000))
    with pytest.raises(LaunchFailedError, match=r"rank 0: RuntimeError: .*Timed out waiting") as caught:
        torchrun([str(tmp_path / "waits.py")], timeout_seconds=120)
    message = str(caught.value)
    assert "rank 0 waited in gloo:all_gather number 2 of inputs [[8]]" in message and "in work)" in message
    assert "rank 1 has no record: it was busy elsewhere" in message
    # The files of the user's directory stay.
    assert (tmp_path / "traces" / "rank_0").is_file()


@pytest.mark.distributed
def test_when_one_of_two_launchers_fails_both_end(tmp_path: Path) -> None:
    lines: list[str] = []
    waits = Launch(arguments=("-c", "import time; print('waits', flush=True); time.sleep(600)"))
    fails = Launch(arguments=("-c", "import time; time.sleep(1); raise KeyError('no such node')"))
    started = time.monotonic()
    with pytest.raises(LaunchFailedError, match="KeyError: 'no such node'") as caught:
        launch_ranks(waits, fails, timeout_seconds=120, on_line=lines.append)
    assert caught.value.launcher_exit_code == 1
    assert time.monotonic() - started < 30
    assert lines[0] == "waits"


def test_the_failure_of_another_launcher_may_be_the_cause(cold: None) -> None:
    """The first launcher that ends has only lost its connection to the other one."""
    lost = Launch(arguments=("-c", "import sys, time; time.sleep(0.2); sys.exit('lost')"))
    failure = "[{'rank': 3, 'message': '', 'signal': 'SIGKILL'}]"
    code = f"import json, os, sys, time; time.sleep(1.5); json.dump({failure}, open(os.environ['{ERROR_FILE}'], 'w')); "
    with pytest.raises(LaunchFailedError, match="rank 3 was killed by SIGKILL"):
        launch_ranks(lost, Launch(arguments=("-c", f"{code}sys.exit(1)")), timeout_seconds=60)


@pytest.mark.distributed
def test_orphans_of_a_launcher_that_was_killed_are_ended(cold: None, tmp_path: Path) -> None:
    """The rank has a session of its own and its parent is dead: only its environment tells whose it is."""
    note = tmp_path / "pid"
    rank = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(600)"
    launcher = (
        "import os, pathlib, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)\n"
        f"while not pathlib.Path({str(note)!r}).exists(): time.sleep(0.05)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with pytest.raises(LaunchFailedError):
        launch_ranks(Launch(arguments=("-c", launcher, rank)), timeout_seconds=60)
    assert not is_running(int(note.read_text()))


@pytest.mark.distributed
def test_a_launcher_ends_when_who_started_it_is_killed(cold: None, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    launcher = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(600)"
    starter = (
        "import sys; from shardwright.plugins.launching import launch; "
        "launch.launch_ranks(launch.Launch(arguments=('-c', sys.argv[1])), timeout_seconds=600)"
    )
    with subprocess.Popen([sys.executable, "-c", starter, launcher]) as process:
        while not (note.is_file() and note.read_text()):
            time.sleep(0.05)
        process.kill()
    deadline = time.monotonic() + 20
    while is_running(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(int(note.read_text()))


def test_messages_of_ranks_reach_who_launched_them(cold: None) -> None:
    rank = (
        "from shardwright.plugins.launching.messages import Figures, Progress, note_on_first_rank, send; "
        "print('of a library', end='', flush=True); note_on_first_rank('two\\nlines of \"ü\"'); "
        "send(Progress(what='step', done=3, total=4, figures=Figures(loss=2.3126))); "
        'print(\'{"type": "shardwright.note", "te\')'
    )
    launches = [Launch(arguments=("-c", rank), environment={"RANK": number}) for number in ("0", "1")]
    messages: list[Message] = []
    lines: list[str] = []
    launch_ranks(*launches, timeout_seconds=60, on_message=messages.append, on_line=lines.append)
    step = Progress(what="step", done=3, total=4, figures=Figures(loss=2.3126))
    assert sorted(messages, key=str) == [step, step, 'two lines of "ü"']
    assert lines.count("of a library") == 2


def test_a_launch_does_not_read_the_variables_of_an_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = {"RANK": "3", "PET_NNODES": "4", "ACCELERATE_USE_FSDP": "true", "MASTER_PORT": "1"}
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    assert not outer.keys() & cpu_rank_environment().keys()


def test_a_lock_is_stale_when_no_process_has_it_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("cpu_adam", "pin_memory", "py311_cpu/async_io", "other_op")
    stale, along, held, foreign = (tmp_path / name / "lock" for name in names)
    for lock in (stale, along, held, foreign):
        lock.parent.mkdir(parents=True)
        lock.touch()
    code = "import sys; lock = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(held)], text=True, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        assert stale_locks(tmp_path) == [stale, along]
        holder.communicate()
    assert stale_locks(tmp_path) == [stale, along, held]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(StaleLockError, match=f"delete it: rm {stale}"):
        prepare_operators(["cpu_adam"])
    assert stale.exists(), "a lock is never deleted unasked"
    (stale.parent / "cpu_adam.so").touch()
    prepare_operators(["cpu_adam"])  # Another machine may be loading it.
    os.utime(stale, (0, 0))
    with pytest.raises(StaleLockError, match=f"delete it: rm {stale}"):
        prepare_operators(["cpu_adam"])


def test_a_rank_passes_a_lock_that_a_killed_one_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch 2.13.0 waits for ever; this fails when it no longer does, and the workaround can go."""
    from torch.utils import file_baton

    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - 60, time.time() - 60))
    waiting = threading.Thread(target=file_baton.FileBaton(str(lock), 0.01).wait, daemon=True)
    break_abandoned_locks()
    assert not is_abandoned(lock), "nothing is compiled yet: another host may be at it"
    (lock.parent / "cpu_adam.so").touch()
    with lock.open():
        assert not is_abandoned(lock)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive(), "a lock that somebody holds is waited for"
    file_baton.FileBaton(str(lock), 0.01).wait()
    waiting.join(10)
    assert not waiting.is_alive()
    assert "left by a killed process" in capsys.readouterr().err
    assert not lock.exists()
