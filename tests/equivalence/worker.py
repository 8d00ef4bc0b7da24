"""Runs on every rank: trains all cases of its world size one after the other, in one process group."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from equivalence.cases import cases_of
from equivalence.training import train_cases

if __name__ == "__main__":
    models, output = Path(sys.argv[1]), Path(sys.argv[2])
    wanted = set(sys.argv[3:])
    cases = [
        case for case in cases_of(int(os.environ["WORLD_SIZE"])) if not wanted or wanted & {case.layout, case.name}
    ]
    train_cases(cases, models, output, int(os.environ["RANK"]))
