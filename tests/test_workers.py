"""Workers of pytest-xdist share tests by whole files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.mark.parametrize("test", range(8))
def test_a_file_stays_on_one_worker(test: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Otherwise each worker makes what the tests of a file share, which doubles the time of the suite."""
    base: Path = tmp_path_factory.getbasetemp()
    mark = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "one-worker"
    try:
        with mark.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        assert mark.read_text() == str(os.getpid())
