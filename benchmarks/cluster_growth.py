"""One model on 1 to 2,048 nodes, on paper: plan, time, checkpoints, reading, start, and every assumption.

    python benchmarks/cluster_growth.py [--write]

`--write` puts the table into docs/measurements/cluster_growth.md.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from page_parts import with_part
from shardwright.ds_configs.plan.plan import Plan
from shardwright.plugins.planning.from_names import plan as make_plan

PAGE = Path(__file__).parent.parent / "docs" / "measurements" / "cluster_growth.md"
MODEL = Path(__file__).parent.parent / "tests" / "data" / "models" / "meta-llama--Llama-3.1-70B"
NODES = (1, 8, 64, 512, 2048)
TOKENS = 1e12
SEQ_LEN = 8192
CHECKPOINT_BYTES = 14
"""Of a parameter: 2 of weights in 16 bit, 12 of fp32 weights and two moments."""
WRITE_BYTES_PER_S = 2e9
"""Of one node to a parallel file system."""
LARGEST_WRITE_BYTES_PER_S = 200e9
"""Of the file system, whatever the nodes ask for."""
GPU_HOURS_BETWEEN_FAILURES = 16_384 * 54 * 24 / 419
"""419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3, arXiv:2407.21783, section 3.3.4)."""
TOKEN_BYTES = 4
"""Of a token id in a file."""
IMPORT_SECONDS = 20.0
"""Imports of a rank, as measured on CPU ranks; ranks of a node share the page cache."""
MEETING_SECONDS = 0.005
"""Of each rank at the one store where all meet: connections are accepted one after the other."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A cluster's size with what follows from it."""

    plan: Plan

    @property
    def tokens_per_second(self) -> float:
        time = self.plan.chosen.time
        assert time is not None, "the hardware is in the catalog"
        return time.tokens_per_second

    @property
    def write_seconds(self) -> float:
        rate = min(self.plan.hardware.nodes * WRITE_BYTES_PER_S, LARGEST_WRITE_BYTES_PER_S)
        return self.plan.model.parameter_count * CHECKPOINT_BYTES / rate

    @property
    def failure_seconds(self) -> float:
        return GPU_HOURS_BETWEEN_FAILURES * 3600 / self.plan.hardware.world_size

    @property
    def interval_seconds(self) -> float:
        """Young's interval, sqrt(2 x time to write x time between failures)."""
        return math.sqrt(2 * self.write_seconds * self.failure_seconds)

    @property
    def start_seconds(self) -> float:
        weights = (
            2
            * self.plan.model.parameter_count
            / min(self.plan.hardware.nodes * WRITE_BYTES_PER_S, LARGEST_WRITE_BYTES_PER_S)
        )
        # Every node reads the whole model once.
        return IMPORT_SECONDS + MEETING_SECONDS * self.plan.hardware.world_size + weights * self.plan.hardware.nodes

    @property
    def lost(self) -> float:
        """Share of time that goes to writing, to what is trained twice, and to starting again."""
        twice = (self.interval_seconds / 2 + self.start_seconds) / self.failure_seconds
        return self.write_seconds / self.interval_seconds + twice

    def row(self) -> str:
        strategy, hardware = self.plan.chosen.strategy, self.plan.hardware
        days = TOKENS / self.tokens_per_second / 86400 / (1 - min(self.lost, 0.99))
        cells = [
            f"{hardware.nodes:,}",
            strategy.label,
            f"{self.tokens_per_second:,.0f}",
            f"{days:,.1f}",
            _time(self.write_seconds),
            _time(self.failure_seconds),
            _time(self.interval_seconds),
            f"{self.lost:.1%}",
            f"{self.tokens_per_second * TOKEN_BYTES / hardware.nodes / 1e6:.2f}",
            _time(self.start_seconds),
        ]
        return f"| {' | '.join(cells)} |"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def table() -> str:
    """Return the table with its assumptions."""
    sizes = [
        Size(plan=make_plan(str(MODEL), f"{nodes}x8xH100-80GB", seq_len=SEQ_LEN, calibration=None)) for nodes in NODES
    ]
    head = (
        "| nodes | layout | tokens/s | days for 10^12 tokens | checkpoint written in | between failures | "
        "save every | time lost | MB/s of tokens each node reads | start |"
    )
    node, every = WRITE_BYTES_PER_S / 1e9, LARGEST_WRITE_BYTES_PER_S / 1e9
    node, every = WRITE_BYTES_PER_S / 1e9, LARGEST_WRITE_BYTES_PER_S / 1e9
    assumed = [
        f"Llama-3.1-70B on nodes of 8 H100 at sequences of {SEQ_LEN:,}, each plan chosen by `plan`.",
        f"A checkpoint has {CHECKPOINT_BYTES} bytes a parameter; a node writes and reads {node:g} GB/s, "
        f"all at most {every:g}.",
        f"A GPU fails every {GPU_HOURS_BETWEEN_FAILURES:,.0f} hours: 419 unexpected interruptions in 54 days on "
        "16,384 H100 (arXiv:2407.21783).",
        "The interval is Young's: the square root of 2 x writing x time between failures. Lost is what is written, "
        "what is trained twice, and starts.",
        f"A start is {IMPORT_SECONDS:g} s of imports, {MEETING_SECONDS * 1000:g} ms for each rank to meet, and the "
        "weights read once by every node. A queue's wait is not counted.",
        "The global batch grows with the nodes; what it does to the loss is not a question of time.",
    ]
    return "\n".join(
        [head, "|--:|---|" + "--:|" * 8, *(size.row() for size in sizes), "", *(f"- {line}" for line in assumed)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    text = table()
    if parser.parse_args().write:
        PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), "growth", text), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
