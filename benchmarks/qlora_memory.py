"""Predicted beside metered memory of QLoRA, whose 4-bit weights ZeRO-3 and FSDP2 divide.

`python benchmarks/qlora_memory.py` trains every case through the stock Trainer on two CPU ranks with the byte meter on.
`--write` stores the readings; `--stored` predicts the stored ones again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from memory_cases import Case
from metered_launch import measure_cases
from shardwright.ds_configs.memory.cpu_memory import cpu_rank_terms

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


def predicted_bytes(case: Case) -> int:
    """Return the predicted peak of a rank after loading."""
    terms = cpu_rank_terms(case.strategy(), case.spec(), case.job())
    return max(sum(terms[name].values()) for name in terms if name != "init")


def table(records: Sequence[dict[str, Any]]) -> tuple[str, list[float]]:
    """Return the cases as Markdown, and the relative errors of their predictions."""
    lines, errors = ["| case | metered MB | predicted MB | error |", "|---|---|---|---|"], []
    for record in records:
        case, metered = Case(**record["case"]), record["peak_bytes"]
        found = predicted_bytes(case)
        errors.append(found / metered - 1)
        lines.append(f"| {case.name} | {metered / 1e6:.2f} | {found / 1e6:.2f} | {errors[-1]:+.1%} |")
    return "\n".join(lines), errors


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
            {"case": record["case"], "peak_bytes": record["peak_bytes"]}
            for record in measure_cases(cases(), worker_file="memory_worker.py")
        ]
    )
    text, errors = table(records)
    print(text)
    print(f"{len(errors)} cases: MAPE {mean(map(abs, errors)):.2%}, worst {max(map(abs, errors)):.2%}")
    if options.write:
        MEASURED.write_text("[\n" + ",\n".join(json.dumps(r, sort_keys=True) for r in records) + "\n]\n", "utf-8")


if __name__ == "__main__":
    main()
