"""Fails where a package is installed that no extra asks for, or in another version than `constraints.txt` says.

`python tests/environment.py`: a test that passes only because of such a package would fail on another machine.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

ALWAYS = {"pip", "shardwright"}


def normalized(name: str) -> str:
    """The name under which an index knows a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def constrained() -> dict[str, str]:
    """Versions by name, from `constraints.txt`."""
    lines = (Path(__file__).parent.parent / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {normalized(name): version for name, version in pairs}


def main() -> int:
    """Print what differs and return how many packages do."""
    known = constrained()
    found = {normalized(each.metadata["Name"]): each.version for each in distributions()}
    wrong = [
        f"{name} {version} is installed; constraints.txt says {known.get(name, 'nothing of it')}"
        for name, version in sorted(found.items())
        if name not in ALWAYS and known.get(name) != version.partition("+")[0]
    ]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
