"""Runs on every rank: `train_causal_lm`, broken as the environment says."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from shardwright.trainers.train_causal_lm import main

from faults.injection import install

if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
