"""Fail if a package is installed that the constraints do not list, or in another version.

`python tests/environment.py [constraints.txt]`: a test that passes only because of such a package fails elsewhere.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

ALWAYS = {"pip", "shardwright"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constrained(file: str) -> dict[str, str]:
    lines = (Path(__file__).parent.parent / file).read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {normalized(name): version for name, version in pairs}


def main() -> int:
    """Print what differs and return how many packages do."""
    file = sys.argv[1] if len(sys.argv) > 1 else "constraints.txt"
    known = constrained(file)
    found = {normalized(each.metadata["Name"]): each.version for each in distributions()}
    wrong = [
        f"{name} {version} is installed; {file} has {known.get(name, 'no such package')}"
        for name, version in sorted(found.items())
        if name not in ALWAYS and known.get(name) != version.partition("+")[0]
    ]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
