"""Runs on every rank: trains one case."""

from __future__ import annotations

import sys
from pathlib import Path

from equivalence.cases import CASES
from equivalence.training import train_case

if __name__ == "__main__":
    chosen = next(case for case in CASES if case.name == sys.argv[3])
    train_case(chosen, Path(sys.argv[1]), Path(sys.argv[2]))
