"""Compare the memory and speed of all layouts for one model on one machine, in Python.

python examples/compare_layouts.py path/to/config.json 8xA100-80GB
"""

from __future__ import annotations

import sys

import shardwright


def main(model: str, hardware: str) -> None:
    """Print the chosen layout and every other one, fullest accelerator first."""
    plan = shardwright.plan(model, hardware, shardwright.TrainingJob(seq_len_tokens=4096))
    print(plan.chosen.reason, end="\n\n")
    for candidate in sorted((plan.chosen, *plan.rejected), key=lambda c: -c.memory.gpu.high_bytes):
        gpu = candidate.memory.gpu
        mark = "chosen" if candidate is plan.chosen else "fits" if candidate.memory.fits else "too large"
        print(f"{gpu.high_bytes / 1e9:8.1f} GB  {mark:<10}  {candidate.layout.label}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
