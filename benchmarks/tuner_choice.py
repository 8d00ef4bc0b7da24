"""What tuning loses against measuring everything: `python benchmarks/tuner_choice.py [--tables DIR] [--write]`.

Every question of a published table (the same model, accelerators and global batch) is one tuning: the table is the
measurement, and predictions are those that ship with the package. The tuner measures the best predicted variant of
each layout, as `shardwright tune` does, and keeps the fastest. Regret is the measured time of what it keeps over that
of the fastest configuration of the question.

`--real DIRECTORY` instead runs `tune` on two CPU ranks of this machine for three small models and three jobs, once for
each of up to twelve layouts, and compares what a tuning of five trials would have kept. It takes about half an hour.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any

from page_parts import with_part
from published_steps import TABLES, PublishedStep, published_steps
from shardwright import Plan, tune
from shardwright.ds_configs.search.tuning import WORTH_MEASURING, Trial, layouts_to_measure
from shardwright.ds_configs.specs.errors import ShardwrightError
from step_time_accuracy import DOCUMENT, predictions_as_shipped

_SMALLEST_GROUP = 3
"""Configurations of a question from which on the best of them is a result."""
_LAYOUTS = 12
COMMON = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 2048}),
    "wide": ("llama", {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "vocab_size": 32000}),
    "mixtral": (
        "mixtral",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "vocab_size": 2048,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
JOBS: dict[str, dict[str, Any]] = {
    "batch 16, 64 tokens": {"seq_len": 64, "global_batch_size": 16},
    "batch 4, 256 tokens": {"seq_len": 256, "global_batch_size": 4},
    "LoRA, batch 8, 64 tokens": {"seq_len": 64, "global_batch_size": 8, "method": "lora"},
}


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a number of trials gives on the questions of a table."""

    questions: int
    mean_regret: float
    worst_regret: float
    mean_trials: float
    configurations: int
    """Of all questions: what measuring everything takes."""


def kept_seconds(rows: Sequence[tuple[PublishedStep, float]], *, trials: int) -> tuple[float, int]:
    """Return the measured seconds of what a tuning keeps, and its trials; rows have predictions."""
    variants: dict[object, tuple[float, float]] = {}
    for case, predicted in rows:
        layout = case.layout
        ranks = layout.dp_replicate, layout.dp_shard, case.software.optimizer_ranks
        variant = (layout.engine, layout.zero_stage, *layout.axes.items(), *ranks)
        if variant not in variants or predicted < variants[variant][0]:
            variants[variant] = predicted, case.seconds
    # Equal predictions stay in the table's order: the measurement must not decide which is tried.
    fastest_first = sorted(variants.values(), key=lambda times: times[0])
    limit = fastest_first[0][0] * (1 + WORTH_MEASURING)
    measured = [seconds for predicted, seconds in fastest_first if predicted <= limit][:trials]
    return min(measured), len(measured)


def tuned(cases: Iterable[tuple[PublishedStep, float]], *, trials: int) -> Tuned | None:
    """Return the result of a number of trials; `None` for a table without questions."""
    groups: dict[str, list[tuple[PublishedStep, float]]] = defaultdict(list)
    for case, predicted in cases:
        if case.group:
            groups[case.group].append((case, predicted))
    questions = [rows for rows in groups.values() if len(rows) >= _SMALLEST_GROUP]
    if not questions:
        return None
    kept = [kept_seconds(rows, trials=trials) for rows in questions]
    regrets = [
        seconds / min(case.seconds for case, _ in rows) - 1 for (seconds, _), rows in zip(kept, questions, strict=True)
    ]
    return Tuned(
        questions=len(questions),
        mean_regret=mean(regrets),
        worst_regret=max(regrets),
        mean_trials=mean(count for _, count in kept),
        configurations=sum(map(len, questions)),
    )


def document_table(cases: Sequence[PublishedStep], most_trials: int = 5) -> str:
    """Return the results as Markdown."""
    predicted = list(zip(cases, predictions_as_shipped(cases), strict=True))
    lines = [
        "| table | questions | configurations | trials, at most | trials, mean | mean regret | worst regret |",
        "|---|---|---|---|---|---|---|",
    ]
    for table in dict.fromkeys(case.table for case in cases):
        own = [(case, seconds) for case, seconds in predicted if case.table == table]
        for trials in range(1, most_trials + 1):
            result = tuned(own, trials=trials)
            if result is not None:
                head = f"| {table} | {result.questions} | {result.configurations} " if trials == 1 else "| | | "
                figures = f"{result.mean_trials:.1f} | {result.mean_regret:.2%} | {result.worst_regret:.1%}"
                lines.append(f"{head}| {trials} | {figures} |")
    return "\n".join(lines)


def real(directory: Path, models: Sequence[str], jobs: Sequence[str]) -> str:
    """Measure every layout of small models on two CPU ranks, and return what tunings would have kept, as Markdown."""
    from shardwright import plan as make
    from transformers import AutoConfig

    lines = [
        "| model | job | layouts | spread | prediction loses | tuning loses | trials | minutes | minutes of all |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in models:
        model = directory / name
        kind, sizes = MODELS[name]
        AutoConfig.for_model(kind, **COMMON | sizes, architectures=[f"{kind.title()}ForCausalLM"]).save_pretrained(
            model
        )
        for job in jobs:
            plan = make(str(model), "2xCPU", calibration=None, precision="fp32", **JOBS[job])
            runnable = (other for other in plan.rejected if other.memory.fits and other.layout.pp == 1)
            layouts = [plan.chosen, *runnable][:_LAYOUTS]
            trials = {candidate.layout: alone(replace(plan, chosen=candidate, rejected=())) for candidate in layouts}
            tried = [trials[candidate.layout] for candidate in layouts_to_measure(plan.chosen, layouts[1:], trials=5)]
            lines.append(real_row(name, job, tried, list(trials.values())))
            print(lines[-1], flush=True)
    return "\n".join(lines)


def alone(plan: Plan) -> Trial:
    """Measure a plan's own layout, without another one beside which it could end early."""
    started = time.monotonic()
    try:
        return tune(plan, trials=1).trials[0]
    except ShardwrightError as error:
        # Ranks on processors cannot run FSDP2's offload, which a user's tuning would find in the same way.
        return Trial(
            layout=plan.chosen.layout,
            loss=plan.chosen.loss,
            outcome="failed",
            predicted_seconds=plan.chosen.time.seconds,
            predicted_allocated_bytes=plan.chosen.memory.gpu.allocated_bytes,
            detail=str(error),
            wall_seconds=time.monotonic() - started,
        )


def real_row(model: str, job: str, tried: Sequence[Trial], every: Sequence[Trial]) -> str:
    """Return what a tuning that tries `tried` loses against the fastest of `every` layout, as a row of Markdown."""
    best = min(trial.step_seconds or inf for trial in every)
    first, kept = tried[0].step_seconds or inf, min(trial.step_seconds or inf for trial in tried)
    varies = median(trial.spread for trial in every if trial.spread is not None)
    minutes = [sum(trial.wall_seconds for trial in trials) / 60 for trials in (tried, every)]
    figures = f"{first / best - 1:.1%} | {kept / best - 1:.1%} | {len(tried)} | {minutes[0]:.1f} | {minutes[1]:.1f}"
    return f"| {model} | {job} | {len(every)} | {varies:.0%} | {figures} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--write", action="store_true", help=f"store the printed table in {DOCUMENT.name}")
    parser.add_argument("--real", type=Path, help="directory for a tuning on this machine's CPU ranks")
    arguments = parser.parse_args()
    if arguments.real is not None:
        part, table = "tuner on CPU ranks", real(arguments.real, list(MODELS), list(JOBS))
    else:
        part, table = "tuner", document_table(published_steps(arguments.tables))
        print(table)
    if arguments.write and arguments.tables == TABLES:
        DOCUMENT.write_text(with_part(DOCUMENT.read_text(encoding="utf-8"), part, table), encoding="utf-8")


if __name__ == "__main__":
    main()
