"""The session's own directory and server of warm processes, DeepSpeed's CPU operators, and what this host lacks."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from small_models import llama

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests are collected with importlib, which puts no test directory on the path.
sys.path.insert(0, str(Path(__file__).parent / "distributed"))

import host
import session
import warm_ranks

# The first example of a process pays for imports, and no test is about time.
# Examples are a function of the test: one that passed on a machine does not fail on the next for what was drawn there.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("tests")

SHARED = dict.fromkeys(("test_qat_quality.py", "test_quantize_quality.py"), "small-llama")
"""Groups of files that wait for each other's fixtures otherwise."""
WEIGHTS = {"install": 60, "distributed": 10, "slow": 10, "browser": 5, "trace": 2}
"""How much longer a test with this marker takes than another."""
_SESSION = pytest.StashKey[session.Session]()
_MODULES = pytest.StashKey[int]()
"""Modules that are left out of collections of garbage."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run say how many combinations of layouts and settings it draws."""
    parser.addoption("--draw", type=int, default=6, help="combinations that tests/equivalence draws")
    parser.addoption("--seed", type=int, default=1, help="of these draws")
    parser.addoption("--pictures", type=Path, help="directory for what tests/browser sees")


def pytest_configure(config: pytest.Config) -> None:
    """Open the session where it is controlled; workers of xdist inherit its environment."""
    # The width of whoever runs the tests, which xdist hands on, is not the one that shown tables are compared with.
    os.environ.pop("COLUMNS", None)
    # Until all is collected: what is imported and rewritten meanwhile stays, and would be walked through each time.
    # Where workers collect, whoever controls them does not.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", default=None):
        gc.disable()
    if not hasattr(config, "workerinput"):
        config.stash[_SESSION] = session.open_session()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave the machine as it was, however the session ended."""
    if _SESSION in config.stash:
        config.stash[_SESSION].close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On workers, put the files first that take longest, so that all workers end together."""
    if not hasattr(config, "workerinput"):
        return
    weights: Counter[str] = Counter()
    for item in items:
        weights[unit_of(item.nodeid)] += max([WEIGHTS.get(marker.name, 1) for marker in item.iter_markers()], default=1)
    items.sort(key=lambda item: -weights[unit_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One worker more than processors: launchers, browsers, time limits and ranks at their store are waited for."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep each file on one worker, so that what its tests share is made once.

    Groups of `--dist loadgroup` do nothing with pytest 9.2.0 and pytest-xdist 3.8.0, which writes their names into an
    attribute of tests that pytest no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        """Files in the order of collection."""

        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return FileScheduling(config, log)


def unit_of(nodeid: str) -> str:
    """Return what stays on one worker with a test: its file, or those of `SHARED`."""
    file = nodeid.partition("::")[0]
    return SHARED.get(Path(file).name, file)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was imported out of every later collection of garbage."""
    _leave_out(session.config)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what tests imported since: each training collects garbage, and walks all that is not left out."""
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > item.config.stash[_MODULES]:
        _leave_out(item.config)


def _leave_out(config: pytest.Config) -> None:
    gc.collect()
    gc.freeze()
    config.stash[_MODULES] = len(sys.modules)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Pass a test over whose marker `needs` names what this host lacks, and say how to get it."""
    for marker in item.iter_markers("needs"):
        host.require(*marker.args)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what did not run here, with the line that would let it."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        # File, line and reason, where a test was passed over.
        reasons[report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
    if reasons:
        terminalreporter.section("not run on this machine")
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{count} x {reason.removeprefix('Skipped: ')}")


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launchers, ranks and commands be what users start, with all their imports."""
    monkeypatch.delenv("PYTHON_EXEC")


@pytest.fixture(scope="session")
def deepspeed_cpu_ops() -> None:
    """Compile cpu_adam and the shared-memory operator; the first run takes 1 to 3 minutes, later ones seconds."""
    from filelock import FileLock
    from shardwright.plugins.deepspeed.compiled_operators import extensions_directory, prepare_operators, stale_locks

    with FileLock(Path(os.environ["SHARDWRIGHT_DATA_DIR"]).parent / "operators.lock"):
        for lock in stale_locks(extensions_directory()):
            lock.unlink()
            print(f"removed {lock}: a compilation was killed and left it behind", file=sys.stderr)
        prepare_operators(warm_ranks.OPERATORS)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a Llama with 2 layers, hidden size 64, grouped-query attention and random weights."""
    directory = tmp_path_factory.mktemp("tiny-llama")
    llama().save_pretrained(directory)
    return directory
