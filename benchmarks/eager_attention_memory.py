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
from statistics import mean
from typing import Any

from memory_cases import AttentionCase
from metered_launch import measure_cases
from shardwright.ds_configs.memory.cpu_memory import cpu_rank_terms

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


def predicted_bytes(case: AttentionCase) -> int:
    """Return the predicted peak of a rank after loading."""
    terms = cpu_rank_terms(case.strategy(), case.spec(), case.job())
    return max(sum(terms[name].values()) for name in terms if name != "init")


def table(records: Sequence[dict[str, Any]]) -> tuple[str, list[float]]:
    """Return the cases as Markdown, and the relative errors of their predictions."""
    lines, errors = ["| case | metered MB | predicted MB | error |", "|---|---|---|---|"], []
    for record in records:
        case, metered = AttentionCase(**record["case"]), record["peak_bytes"]
        found = predicted_bytes(case)
        errors.append(found / metered - 1)
        lines.append(f"| {case.name} | {metered / 1e6:.2f} | {found / 1e6:.2f} | {errors[-1]:+.1%} |")
    return "\n".join(lines), errors


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
        records = [{"case": record["case"], "peak_bytes": record["peak_bytes"]} for record in found]
        done = [asdict(case) for case in chosen]
        records = [record for record in known if record["case"] not in done] + records
    text, errors = table(records)
    print(text)
    print(f"{len(errors)} cases: MAPE {mean(map(abs, errors)):.2%}, worst {max(map(abs, errors)):.2%}")
    if options.write:
        MEASURED.write_text("[\n" + ",\n".join(json.dumps(r, sort_keys=True) for r in records) + "\n]\n", "utf-8")


if __name__ == "__main__":
    main()
