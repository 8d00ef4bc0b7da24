"""What tuning loses against measuring everything: `python benchmarks/tuner_choice.py [--tables DIR] [--write]`.

Every question of a published table (the same model, accelerators and global batch) is one tuning: the table is the
measurement, and predictions are those that ship with the package. The tuner measures the best predicted variant of
each layout, as `shardwright tune` does, and keeps the fastest. Regret is the measured time of what it keeps over that
of the fastest configuration of the question.

`--real DIRECTORY` instead runs `tune` on this machine's CPU ranks for a small model and job, once for every layout
that fits, and compares what a tuning would have kept after each of its trials.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import mean

from page_parts import with_part
from published_steps import TABLES, PublishedStep, published_steps
from shardwright.ds_configs.search.tuning import WORTH_MEASURING, Trial, layouts_to_measure
from step_time_accuracy import DOCUMENT, predictions_as_shipped

_SMALLEST_GROUP = 3
"""Configurations of a question from which on the best of them is a result."""


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
        strategy = case.strategy
        ranks = strategy.dp_replicate, strategy.dp_shard, case.software.optimizer_ranks
        layout = (strategy.engine, strategy.zero_stage, *strategy.axes.items(), *ranks)
        if layout not in variants or predicted < variants[layout][0]:
            variants[layout] = predicted, case.seconds
    # Equal predictions stay in the table's order: the measurement must not decide which is tried.
    fastest_first = sorted(variants.values(), key=lambda variant: variant[0])
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


def real(directory: Path) -> str:
    """Measure every layout of a small model on two CPU ranks, and return what a tuning would have kept."""
    from shardwright import plan as make
    from shardwright import tune
    from transformers import LlamaConfig

    model = directory / "model"
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(num_hidden_layers=4, vocab_size=2048, max_position_embeddings=256, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(model)
    words = {"seq_len": 64, "global_batch_size": 16, "precision": "fp32", "offload": "none"}
    plan = make(str(model), "2xCPU", calibration=None, **words)
    layouts = [plan.chosen, *(other for other in plan.rejected if other.memory.fits and other.strategy.pp == 1)]
    # One layout at a time, so that none ends early.
    trials = {
        layout.strategy: tune(replace(plan, chosen=layout, rejected=()), trials=1).trials[0] for layout in layouts
    }
    tried = [trials[layout.strategy] for layout in layouts_to_measure(plan.chosen, plan.rejected, trials=5)]
    others = [trial for trial in trials.values() if trial not in tried]
    return real_table(tried, others)


def real_table(tried: Sequence[Trial], others: Sequence[Trial]) -> str:
    """Return the trials of a tuning, the regret of having stopped after each, and the other layouts, as Markdown."""
    best = min(trial.step_seconds or inf for trial in (*tried, *others))
    lines = ["| trial | layout | predicted, s | measured, s | spread | regret so far |", "|---|---|---|---|---|---|"]
    kept = inf
    for number, trial in [*enumerate(tried, 1), *(("–", other) for other in others)]:
        measured = trial.outcome if trial.step_seconds is None else f"{trial.step_seconds:.3g}"
        varies = "–" if trial.spread is None else f"{trial.spread:.0%}"
        kept = min(kept, trial.step_seconds or inf)
        regret = f"{kept / best - 1:.1%}" if number != "–" else ""
        lines.append(f"| {number} | {trial.name} | {trial.predicted_seconds:.3g} | {measured} | {varies} | {regret} |")
    minutes = [sum(trial.wall_seconds for trial in trials) / 60 for trials in (tried, (*tried, *others))]
    return "\n".join([*lines, "", f"{minutes[0]:.1f} minutes for the tuning, {minutes[1]:.1f} for all layouts."])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--write", action="store_true", help=f"store the table in {DOCUMENT.name}")
    parser.add_argument("--real", type=Path, help="directory for a tuning on this machine's CPU ranks")
    arguments = parser.parse_args()
    if arguments.real is not None:
        print(real(arguments.real))
        return
    table = document_table(published_steps(arguments.tables))
    print(table)
    if arguments.write and arguments.tables == TABLES:
        DOCUMENT.write_text(with_part(DOCUMENT.read_text(encoding="utf-8"), "tuner", table), encoding="utf-8")


if __name__ == "__main__":
    main()
