"""Rank script: train and evaluate under layouts; the first rank writes the counts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from counting_cases import WORK
from fresh_process import forget_last_run


def main(directory: Path, names: list[str]) -> None:
    for name in names:
        work, _, layout = name.partition("-")
        record = WORK[work](layout, directory / name)
        if os.environ["RANK"] == "0":
            (directory / f"{name}.json").write_text(json.dumps(record))
        forget_last_run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
