"""Predicted beside metered memory of QLoRA, whose 4-bit weights ZeRO-3 and FSDP2 divide.

`python benchmarks/qlora_memory.py` trains every case through the stock Trainer on two CPU ranks with the byte meter on.
`--write` stores the readings; `--stored` predicts the stored ones again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from memory_cases import Case
from metered_launch import measure_cases
from metered_table import STORED, metered_table, show, store

MEASURED = Path(__file__).with_name("qlora_memory.json")


def cases() -> list[Case]:
    """Return runs of the engines that divide 4-bit weights, and two that leave them whole."""
    shapes = [
        ("llama", "ddp", 1, False, "none"),
        ("llama", "zero2", 1, False, "none"),
        ("llama", "zero3", 1, False, "none"),
        ("qwen3", "zero3", 4, True, "none"),
        ("llama", "zero3", 1, True, "optimizer"),
        ("llama", "zero3", 1, True, "optimizer+param"),
        ("llama", "fsdp2", 1, False, "none"),
        ("qwen3", "fsdp2", 4, True, "none"),
        ("llama", "fsdp2", 1, True, "optimizer+param"),
    ]
    return [
        Case(
            model=model,
            layout=layout,
            precision="bf16",
            accumulation=accumulation,
            checkpointing=checkpointing,
            offload=offload,
            ranks=2,
            method="qlora",
        )
        for model, layout, accumulation, checkpointing, offload in shapes
    ]


def main() -> None:
    """Measure, or read what was measured, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    records = (
        json.loads(MEASURED.read_text(encoding="utf-8"))
        if options.stored
        else [
            {name: record[name] for name in STORED if name in record}
            for record in measure_cases(cases(), worker_file="memory_worker.py")
        ]
    )
    show(metered_table(records, Case))
    if options.write:
        store(records, MEASURED)


if __name__ == "__main__":
    main()
