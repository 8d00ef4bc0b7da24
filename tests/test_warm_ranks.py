"""The ranks of tests: fresh processes that tell why they failed, end within seconds, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import session
from warm_ranks import NOTHING_IMPORTED, SERVER_NAME, RanksFailedError, run_ranks

pytestmark = pytest.mark.distributed


def script(directory: Path, text: str) -> Path:
    path = directory / "rank.py"
    path.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{text}\n")
    return path


def run(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [os.environ["PYTHON_EXEC"], *arguments]
    return subprocess.run(command, capture_output=True, text=True, **more)  # type: ignore[call-overload]


def test_ranks_have_an_environment_of_their_own_and_a_group(tmp_path: Path) -> None:
    text = (
        "import torch, torch.distributed as d\nd.init_process_group('gloo')\nseen = torch.tensor([10.0 + rank])\n"
        "d.all_reduce(seen)\nprint('rank', rank, 'of', d.get_world_size(), 'saw', seen.item(), sys.argv[1:])"
    )
    printed = run_ranks([script(tmp_path, text), "a b"], ranks=3)
    assert sorted(printed.splitlines()) == [f"rank {rank} of 3 saw 33.0 ['a b']" for rank in range(3)]


def test_nothing_passes_from_one_group_to_the_next(tmp_path: Path) -> None:
    """Each prints what it finds and leaves something: a module's attribute, a variable, a random state."""
    text = (
        "import torch, random\nprint(getattr(torch, 'left', None), os.environ.get('LEFT'), torch.initial_seed())\n"
        "torch.left = os.environ['LEFT'] = 'here'\ntorch.manual_seed(1)"
    )
    once, twice = (run_ranks([script(tmp_path, text)], ranks=1) for _ in range(2))
    assert once == twice and once.startswith("None None")


def test_a_rank_that_fails_ends_its_group_and_shows_its_traceback(tmp_path: Path) -> None:
    path = script(tmp_path, "print('said', flush=True)\nif rank == 1: raise KeyError('wrong weight')\ntime.sleep(600)")
    started = time.monotonic()
    with pytest.raises(
        RanksFailedError, match=r"(?s)rank 1 of 2 failed with exit code 1.*KeyError: 'wrong weight'"
    ) as e:
        run_ranks([path])
    # A group that hangs takes 120 s; the first of a session waits for its imports.
    assert time.monotonic() - started < 100
    assert e.value.output.count("said") >= 2


def test_a_rank_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    """Though another may have failed of its loss, and been heard, before."""
    path = script(tmp_path, "if rank == 0: sys.exit(1)\ntime.sleep(0.3)\nos.kill(os.getpid(), 9)")
    with pytest.raises(RanksFailedError, match="rank 1 of 2 was killed by SIGKILL"):
        run_ranks([path])


def test_ranks_that_hang_are_stopped_with_their_children(tmp_path: Path) -> None:
    text = "child = os.fork()\nopen(f'{sys.argv[1]}/{rank}-{os.getpid()}', 'w').close()\ntime.sleep(600)"
    with pytest.raises(RanksFailedError, match="2 of 2 ranks were stopped after 3 s"):
        run_ranks([script(tmp_path, text), tmp_path], timeout_seconds=3)
    started = [int(path.name.split("-")[1]) for path in tmp_path.glob("?-*")]
    assert len(started) == 4
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(each) for each in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [each for each in started if psutil.pid_exists(each)]


def test_the_interpreter_is_what_python_is(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import sys; print(__name__, sys.argv[1:], sys.stdin.read())")
    done = run("-u", "-m", "module", "x", cwd=tmp_path, input="in")
    assert (done.returncode, done.stdout, done.stderr) == (0, "__main__ ['x'] in\n", "")
    assert run("-c", "import sys; print('reported', file=sys.stderr); sys.exit(7)").stderr == "reported\n"
    assert run("-c", "raise SystemExit('bad')").returncode == 1
    assert run("-c", "import os; os.kill(os.getpid(), 15)").returncode == -signal.SIGTERM
    assert "ZeroDivisionError" in run("-c", "1 / 0").stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)])
def test_signals_reach_the_process_that_does_the_work(number: int, status: int) -> None:
    # A signal that arrives just before a sleep begins is handled after it, so the sleeps are short.
    code = "import os, time; print(os.getpid(), flush=True)\nfor _ in range(6000): time.sleep(0.1)"
    command = [os.environ["PYTHON_EXEC"], "-c", code]
    heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes, **heed) as process:  # type: ignore[call-overload]
        worker = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(timeout=10) == status
    deadline = time.monotonic() + 5
    while psutil.pid_exists(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(worker)


SESSION = """
import os, subprocess, sys, tempfile
import session
outer = tempfile.gettempdir()
opened = session.open_session()
assert tempfile.gettempdir() != outer
shown = subprocess.run([os.environ["PYTHON_EXEC"], "-c", "print('warm')"], capture_output=True, text=True)
assert shown.stdout == "warm\\n", shown
print(os.path.dirname(tempfile.gettempdir()), flush=True)
if "killed" in sys.argv:
    os.kill(os.getpid(), 9)
opened.close()
assert tempfile.gettempdir() == outer and os.listdir(outer) == [], os.listdir(outer)
"""


def in_session(temporary: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    temporary.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in (SERVER_NAME, "PYTHON_EXEC")}
    environment = kept | {"TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parent), NOTHING_IMPORTED: "1"}
    command = [sys.executable, "-c", SESSION, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_session_leaves_the_temporary_directory_as_it_was_and_one_that_was_killed_is_cleared(tmp_path: Path) -> None:
    """In a directory with a space in its name; the second session removes what the first could not."""
    temporary = tmp_path / "with space"
    killed = in_session(temporary, "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = temporary.iterdir()
    assert killed.stdout.strip() == str(left)
    done = in_session(temporary)
    assert done.returncode == 0, done.stderr
    assert not list(temporary.iterdir())


def test_another_session_s_directory_stays() -> None:
    mine = Path(tempfile.gettempdir()).parent
    assert mine not in list(session.abandoned(mine.parent))
