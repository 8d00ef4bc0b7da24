"""Runs on every rank: a job of `train`, broken as the environment says."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from shardwright.trainers.rank_main import main
from train_jobs import recorded_losses

from faults.injection import install

if __name__ == "__main__":
    install()
    with recorded_losses(Path(sys.argv[2])):
        code = main(sys.argv[1:2])
    sys.exit(code)
