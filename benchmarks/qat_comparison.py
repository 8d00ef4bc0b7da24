"""QAT against fine-tuning and quantizing, at 2 bits: `python benchmarks/qat_comparison.py [--write] [--strict]`.

The model is the small Llama of `tests/small_llama.py`, trained further on its own text: 500 steps of every way, on one
core half an hour for three seeds. `--work-dir` keeps the model and what each seed gave, so that an interrupted run goes
on. With `--write` the figures, the table in docs/measurements/qat.md and its picture are replaced.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from page_parts import with_part
from qat_ways import Comparison, compare_qat
from qat_ways_report import comparison_table, draw_comparison, verdicts

ROOT = Path(__file__).parents[1]
MEASURED = Path(__file__).with_name("qat_comparison.json")
DOCUMENT = ROOT / "docs" / "measurements" / "qat.md"
PICTURE = ROOT / "docs" / "measurements" / "qat.png"
SCHEME, STEPS, LEARNING_RATE, SEEDS, BATCH_SIZE = "W2A16", 500, 1e-3, (0, 1, 2), 4
STORED_DTYPE = "bfloat16"
EXPORT_ALLOWED = 1e-3
"""Nats per token between the trained and the exported model."""


def main() -> int:
    """Measure and print; with `--strict`, return 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace figures, table and picture")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--work-dir", type=Path, help="where the model and finished seeds are kept for the next run")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = flags.work_dir or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        found = joined([measured(seed, flags.steps, directory) for seed in flags.seeds])
    print("\n".join([*comparison_table(found), "", *verdicts(found), "", *misses(found)]))
    if flags.write:
        write(found)
    return int(flags.strict and bool(misses(found)))


def measured(seed: int, steps: int, directory: Path) -> Comparison:
    """Return the comparison of one seed, from `directory` if it is there already."""
    kept = directory / f"{SCHEME}-{steps}-{LEARNING_RATE:g}-{seed}.json"
    if kept.is_file():
        return Comparison.from_json(json.loads(kept.read_text(encoding="utf-8")))
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    from small_llama import trained_llama

    torch.set_num_threads(1)
    llama = trained_llama(directory)
    found = compare_qat(
        llama.copy().requires_grad_(True),
        SCHEME,
        train_samples=[{"input_ids": row.tolist()} for row in llama.train_NS],
        evaluation_samples=[{"input_ids": row.tolist()} for row in llama.evaluation_NS],
        steps=steps,
        learning_rate=LEARNING_RATE,
        seeds=(seed,),
        batch_size=BATCH_SIZE,
        qat={"stored_dtype": STORED_DTYPE},
        on_progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    kept.write_text(json.dumps(found.to_json()), encoding="utf-8")
    return found


def joined(parts: Sequence[Comparison]) -> Comparison:
    """Return comparisons of single seeds as one."""
    return replace(
        parts[0],
        seeds=tuple(seed for part in parts for seed in part.seeds),
        measurements=tuple(each for part in parts for each in part.measurements),
    )


def misses(found: Comparison) -> list[str]:
    """Return what does not hold: QAT recovers more than GPTQ does, and what is exported is what was trained."""
    qat, gptq = found.recovered("qat"), found.recovered("ft-gptq")
    missed = []
    if qat is None or gptq is None or qat.value <= gptq.value:
        missed.append("QAT recovers no more than FT → GPTQ")
    for way in found.ways:
        difference = found.export_difference(way)
        if difference is not None and difference > EXPORT_ALLOWED:
            missed.append(f"{way}: the exported model is {difference:.4f} nats from the trained one")
    return missed


def stored() -> Comparison:
    """Return the figures that were written last."""
    return Comparison.from_json(json.loads(MEASURED.read_text(encoding="utf-8")))


def updated(document: str, found: Comparison) -> str:
    """Return the document with its table replaced."""
    return with_part(document, "comparison", "\n".join([*comparison_table(found), "", *verdicts(found)]))


def write(found: Comparison) -> None:
    """Keep the figures, put their table in the document, and draw them."""
    MEASURED.write_text(json.dumps(found.to_json()) + "\n", encoding="utf-8")
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8"), found), encoding="utf-8")
    draw_comparison(found, PICTURE, costs=False)


if __name__ == "__main__":
    sys.exit(main())
