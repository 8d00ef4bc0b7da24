"""Predicted beside metered memory where only the first layers are recomputed, or all of them but for their products.

`python benchmarks/partial_checkpointing.py` trains every case through the stock Trainer, those of pipelines through
`PipelineTrainer`, on two CPU ranks with the byte meter on. `--write` stores the readings; `--stored` predicts the
stored ones again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memory_cases import MODELS, Case
from metered_launch import measure_cases
from metered_table import metered_table, show, store
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.releases import transformers_release

MEASURED = Path(__file__).with_name("partial_checkpointing.json")


@dataclass(frozen=True, kw_only=True)
class PartialCase(Case):
    """A training run that recomputes the first layers of a model; the layout `pp` is a pipeline of all ranks."""

    checkpointed_layers: int
    keeps_products: bool = False

    @property
    def name(self) -> str:
        """The name of the run with the count of layers."""
        return f"{super().name}-first{self.checkpointed_layers}{'-kept-products' if self.keeps_products else ''}"

    @property
    def config(self) -> dict[str, Any]:
        """Eight layers, so that counts differ."""
        depth = "n_layer" if self.model == "gpt2" else "num_hidden_layers"
        return {"model_type": self.model, **MODELS[self.model], depth: 8}

    def strategy(self) -> Layout:
        """The layout, with the layers that are recomputed."""
        if self.layout == "pp":
            plain = replace(self, layout="zero1").strategy()
            strategy = replace(plain, dp_shard=1, pp=self.ranks)
        else:
            strategy = super().strategy()
        return replace(strategy, checkpointed_layers=self.checkpointed_layers, keeps_products=self.keeps_products)


def cases() -> list[PartialCase]:
    """Return runs of all engines over counts of layers, precisions and families."""
    # Pipelines first: their trainer rejects the changed loss that the meter of the others leaves.
    shapes = [
        ("llama", "pp", "fp32", 4, 1),
        ("qwen3", "pp", "bf16", 4, 3),
        ("gpt2", "pp", "fp32", 4, 2),
        ("llama", "ddp", "bf16", 1, 2),
        ("qwen3", "ddp", "fp32", 1, 5),
        ("llama", "zero1", "fp32", 4, 3),
        ("gpt2", "zero1", "bf16", 1, 6),
        ("qwen3", "zero2", "fp32", 1, 2),
        ("llama", "zero2", "bf16", 4, 4),
        ("gemma2", "zero2", "bf16", 1, 7),
        ("llama", "zero3", "fp32", 1, 6),
        ("qwen3", "zero3", "bf16", 4, 2),
        ("llama", "fsdp2", "bf16", 1, 1),
        ("qwen3", "fsdp2", "fp32", 1, 4),
        ("gpt2", "fsdp2", "bf16", 1, 6),
    ]
    keeping = [
        ("llama", "ddp", "bf16", 1, 8),
        ("gpt2", "ddp", "fp32", 4, 8),
        ("qwen3", "zero1", "bf16", 4, 8),
        ("gpt2", "zero2", "fp32", 1, 8),
        ("gemma2", "zero2", "bf16", 4, 8),
        ("llama", "zero3", "bf16", 1, 8),
        ("qwen3", "zero3", "bf16", 4, 8),
        ("llama", "fsdp2", "bf16", 4, 8),
        ("gpt2", "fsdp2", "fp32", 1, 8),
        ("qwen3", "fsdp2", "bf16", 1, 5),
    ]
    return [
        PartialCase(
            model=model,
            layout=layout,
            precision=precision,
            accumulation=accumulation,
            checkpointing=True,
            offload="none",
            ranks=2,
            method="full",
            checkpointed_layers=layers,
            keeps_products=keeps,
        )
        for keeps, group in ((False, shapes), (True, keeping))
        for model, layout, precision, accumulation, layers in group
    ]


def work(wanted: Path, output: Path) -> None:
    """Train every case on this rank; rank 0 appends the fullest rank's reading."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fresh_process import forget_last_run

    for values in json.loads(wanted.read_text(encoding="utf-8")):
        case = PartialCase(**values)
        reading = _metered(case)
        peaks: list[Any] = [None] * case.ranks
        phases = {name: peak for name, peak in reading.peaks.items() if name not in ("init", "other")}
        torch.distributed.all_gather_object(peaks, max(phases.values()))
        if os.environ["RANK"] == "0":
            record = {"case": values, "peak_bytes": max(peaks), "release": transformers_release()}
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print("measured", case.name, flush=True)
        forget_last_run()


def _metered(case: PartialCase) -> Any:
    from metered_training import plan_of, train_metered
    from shardwright.ds_configs.specs.hardware import parse_hardware
    from shardwright.plugins.metering import ByteMeter

    plan = plan_of(case.strategy(), case.spec(), parse_hardware(f"{case.ranks}xCPU"), case.job())
    return train_metered(plan, case.config, ByteMeter())


def table(records: Sequence[dict[str, Any]]) -> tuple[str, list[float]]:
    """Return the cases as Markdown, and the relative errors of their predictions."""
    return metered_table(records, PartialCase)


def main() -> None:
    """Measure, or read what was measured, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--kept-products", action="store_true", help="measure these cases alone, beside the stored")
    parser.add_argument("files", nargs="*", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.files:
        work(*options.files)
        return
    stored = json.loads(MEASURED.read_text(encoding="utf-8"))
    wanted = [case for case in cases() if case.keeps_products or not options.kept_products]
    records = stored
    if not options.stored:
        kept = [record for record in stored if options.kept_products and PartialCase(**record["case"]) not in wanted]
        records = kept + measure_cases(wanted, worker_file=Path(__file__).name)
    show(table(records))
    if options.write:
        store(records, MEASURED)


if __name__ == "__main__":
    main()
