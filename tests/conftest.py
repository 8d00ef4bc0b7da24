"""The session's directory and server of warm processes, DeepSpeed's CPU operators, and what this host lacks."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from itertools import compress
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import settings
from small_models import llama

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests are collected with importlib, which puts no test directory on the path.
sys.path.insert(0, str(Path(__file__).parent / "distributed"))

import host
import session
import warm_ranks

# The first example of a process pays for imports, and no test measures time.
# Every machine draws the same examples.
settings.register_profile("tests", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("random", deadline=None)
settings.load_profile("tests")

WEIGHTS = {"install": 60, "distributed": 10, "slow": 10, "browser": 5, "trace": 2}
"""How much longer a test with this marker takes than another."""
LONG_FILES = (
    "test_equivalence",
    "test_hub",
    "test_job_flags",
    "test_memory_metered",
    "test_own_script",
    "test_rehearse",
    "test_tasks",
    "test_train",
    "test_trainer_layouts",
    "test_unused_parameters",
)
"""Files of a minute or more that few tests share."""
FULL = (
    "family_sweep/",
    "test_add_family.py",
    "test_every_model.py",
    "test_docs_site.py",
    "distributed/test_drawn_trainers.py",
    "trainers/quantization/test_quantize_quality.py",
)
"""Sweeps, comparisons of quality, and what builds the documentation."""
_SESSION = pytest.StashKey[session.Session]()
_MODULES = pytest.StashKey[int]()
"""Number of imported modules at the last `gc.freeze`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run say how many trainers with options and layouts it draws."""
    parser.addoption("--draw", type=int, default=6, help="trainers that test_drawn_trainers.py draws")
    parser.addoption("--seed", type=int, default=1, help="of these draws")
    parser.addoption("--part", default="1/1", help="of what make test does not run: 2/3 is the second third of it")
    parser.addoption("--pictures", type=Path, help="directory for what tests/browser sees")


def pytest_configure(config: pytest.Config) -> None:
    """Open the session in the controlling process; workers of xdist inherit its environment."""
    # Comparisons that tests share show both sides when they fail.
    pytest.register_assert_rewrite("equivalence.comparison")
    # Tables of the docs are compared at a fixed width, and xdist passes the width of the terminal on.
    os.environ.pop("COLUMNS", None)
    # Collecting tests creates objects that live as long as the process: garbage collections meanwhile find nothing.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", default=None):
        gc.disable()
    if not hasattr(config, "workerinput"):
        config.stash[_SESSION] = session.open_session()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the session's processes and remove its files."""
    if _SESSION in config.stash:
        config.stash[_SESSION].close()


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what only `make test-full` runs."""
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    if path.startswith(FULL) or any(item.get_closest_marker(name) for name in ("browser", "install", "trace")):
        item.add_marker("full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a part of what `make test` does not run; on workers, sort files by duration, longest first."""
    part, parts = map(int, config.getoption("part").split("/"))
    drawn = [not item.get_closest_marker("full") or crc32(item.nodeid.encode()) % parts == part - 1 for item in items]
    config.hook.pytest_deselected(items=[item for item, is_drawn in zip(items, drawn, strict=True) if not is_drawn])
    items[:] = compress(items, drawn)
    if not hasattr(config, "workerinput"):
        return
    weights: Counter[Path] = Counter()
    for item in items:
        weights[item.path] += max([WEIGHTS.get(marker.name, 1) for marker in item.iter_markers()], default=1)
    items.sort(key=lambda item: (item.path.stem not in LONG_FILES, -weights[item.path]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude what was imported from garbage collections."""
    _freeze_imported(session.config)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exclude what tests imported since: the Trainer collects garbage in each training, over all that is not frozen."""
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > item.config.stash[_MODULES]:
        _freeze_imported(item.config)


def _freeze_imported(config: pytest.Config) -> None:
    gc.collect()
    gc.freeze()
    config.stash[_MODULES] = len(sys.modules)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose marker `needs` names something that this host lacks, with the line that installs it."""
    for marker in item.iter_markers("needs"):
        host.require(*marker.args)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the skipped tests by reason, with the line that would let them run."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reasons[report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
    if reasons:
        terminalreporter.section("not run on this machine")
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{count} x {reason.removeprefix('Skipped: ')}")


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start launchers, ranks and commands as users do, with all their imports."""
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
