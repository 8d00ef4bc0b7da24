"""No grid of runs loses a case unseen."""

from __future__ import annotations

from capabilities import STORED, collected


def test_every_run_of_every_grid_is_still_there() -> None:
    names = collected()
    assert len(set(names)) == len(names)
    assert names == STORED.read_text().splitlines(), "python tests/capabilities.py, and say in the change why"
