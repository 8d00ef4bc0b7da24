"""Predicted beside metered memory of eager attention, and of sdpa beside it, at three lengths.

`python benchmarks/eager_attention_memory.py` trains every case through the stock Trainer on two CPU ranks with the byte
meter on. `--write` stores the readings; `--stored` predicts the stored ones again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from memory_cases import AttentionCase
from metered_launch import measure_cases
from metered_table import STORED, metered_table, show, store

MEASURED = Path(__file__).with_name("eager_attention_memory.json")
LENGTHS = (128, 256, 512)


def cases() -> list[AttentionCase]:
    """Return both implementations at three lengths: a bf16 engine, autocast under DDP, and fp32 shards."""
    runs = [
        ("llama", "zero2", "bf16"),
        ("qwen3", "ddp", "bf16"),
        ("gemma2", "fsdp2", "fp32"),
        ("gpt2", "zero3", "bf16"),
    ]
    return [
        AttentionCase(
            model=model,
            layout=layout,
            precision=precision,
            accumulation=1,
            checkpointing=layout == "fsdp2",
            offload="none",
            ranks=2,
            method="full",
            attention=attention,
            seq_len_tokens=length,
        )
        for (model, layout, precision), attention, length in product(runs, ("eager", "sdpa"), LENGTHS)
        if attention == "eager" or model == "llama"
    ]


def table(records: Sequence[dict[str, Any]]) -> tuple[str, list[float]]:
    """Return the cases as Markdown, and the relative errors of their predictions."""
    return metered_table(records, AttentionCase)


def main() -> None:
    """Measure, or read what was measured, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="begin of the names of the cases to train")
    options = parser.parse_args()
    known = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else []
    if options.stored:
        records = known
    else:
        chosen = [case for case in cases() if case.name.startswith(options.only)]
        found = measure_cases(chosen, worker_file="memory_worker.py")
        records = [{name: record[name] for name in STORED if name in record} for record in found]
        done = [asdict(case) for case in chosen]
        records = [record for record in known if record["case"] not in done] + records
    show(table(records))
    if options.write:
        store(records, MEASURED)


if __name__ == "__main__":
    main()
