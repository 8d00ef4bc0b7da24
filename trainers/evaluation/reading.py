"""Reading of the windows by the models of an evaluation, one model in memory at a time, by one process or its share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...ds_configs.specs.units import gigabytes
from ...plugins.launching.notes import Notify, OnProgress
from ...plugins.lm_eval.tasks import TaskRequest, TaskScore, run_task
from ..replicas.share import ALONE, Share
from .loading import Subject, load_subject, local_directory
from .speed import Speed, measure_speed
from .stored_sizes import StoredSizes, stored_sizes
from .token_measures import AnswerSource, Batches, ModelReader, StoredAnswers, TokenMeasures, measure_tokens

_REMARKABLE_BYTES = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Settings that both models share."""

    batches: Batches
    """What they read."""
    dtype: str
    """Type to load weights as, or `auto`."""
    device: str
    """Where they are."""
    measure_speeds: bool
    """Whether tokens/s and memory are measured, by the first rank while the others wait."""
    tasks: TaskRequest | None
    """Tasks of lm-evaluation-harness."""
    on_progress: OnProgress
    """Hears how far it is."""
    share: Share = ALONE
    """Batches and tasks that are this process's."""


@dataclass(kw_only=True)
class Findings:
    """Findings about a model from the time it was in memory."""

    subject: Subject
    """The model."""
    dtype: str
    """Type that it computes in."""
    sizes: StoredSizes
    """The checkpoint."""
    speed: Speed | None = None
    """On this machine."""
    tasks: tuple[TaskScore, ...] = ()
    """Scores, complete on the first rank."""


def read_models(
    subjects: Sequence[Subject], run: Reading, tokenizer: Callable[[], Any], notify: Notify
) -> tuple[TokenMeasures, Findings, Findings | None]:
    """Let the baseline read first, where there is one, and then the model; every rank of a share must call it.

    Returns:
        What was measured of all tokens, and findings about the model and the baseline, complete on the first rank.
    """
    answers, compared = None, None
    if len(subjects) > 1:
        answers, compared = _read_baseline(subjects[1], run, tokenizer, notify)
    measures, found = _read_model(subjects[0], answers, run, tokenizer)
    return measures, found, compared


def _read_baseline(
    subject: Subject, run: Reading, tokenizer: Callable[[], Any], notify: Notify
) -> tuple[AnswerSource, Findings]:
    """Let the baseline read everything; where its head cannot be taken out of it, it stays in memory instead."""
    model, found = _loaded(subject, run)
    reader, rows = ModelReader(model, run.batches, name=subject.name), {}
    total = len(run.batches)
    for index in run.share.indices(total):
        answers = reader.answers(index)
        if reader.head is None:
            break
        rows[index] = answers.rows_ND.cpu()
        run.on_progress("reading by the baseline", min(total, index + run.share.ranks), total)
    if not all(run.share.told(reader.head is not None)):
        # Which process meets the batch that tells is chance; how the others are read must not be.
        reader.head = None
        reader.ways.clear()
    _measure_alone(model, found, run, tokenizer)
    if reader.head is None:
        notify(f"{subject.name}: its output head cannot run on its own, so both models stay in memory")
        return reader, found
    kept = sum(states.numel() * states.element_size() for states in rows.values())
    if kept >= _REMARKABLE_BYTES:
        notify(f"{subject.name}: {gigabytes(kept)} GB of hidden states wait on the host; --num-samples lowers that")
    return StoredAnswers(name=subject.name, rows=rows, head=reader.head, device=model.device), found


def _read_model(
    subject: Subject, baseline: AnswerSource | None, run: Reading, tokenizer: Callable[[], Any]
) -> tuple[TokenMeasures, Findings]:
    # What the baseline's frames held is garbage by now.
    gc.collect()
    model, found = _loaded(subject, run)
    reader = ModelReader(model, run.batches, name=subject.name)

    def on_batch(done: int, total: int) -> None:
        run.on_progress("reading by the model", done, total)

    measures = measure_tokens(reader, baseline, run.batches, on_batch=on_batch, share=run.share)
    _measure_alone(model, found, run, tokenizer)
    return measures, found


def _loaded(subject: Subject, run: Reading) -> tuple[Any, Findings]:
    directory = local_directory(subject)
    run.on_progress(f"loading of the {subject.role}", 0, 1)
    model = load_subject(subject, directory, dtype=run.dtype, device=run.device)
    run.on_progress(f"loading of the {subject.role}", 1, 1)
    dtype = str(model.dtype).removeprefix("torch.")
    sizes = stored_sizes(directory)
    return model, Findings(subject=subject, dtype=dtype, sizes=sizes)


def _measure_alone(model: Any, found: Findings, run: Reading, tokenizer: Callable[[], Any]) -> None:
    """Time the model on the first rank, and score each task on the rank whose turn it is."""
    role, share = found.subject.role, run.share
    if run.measure_speeds:
        # Neither a rank that still reads nor one that loads the next model may disturb it.
        share.wait()
        if share.is_first:
            run.on_progress(f"timing of the {role}", 0, 1)
            found.speed = measure_speed(model, run.batches.windows[0])
            run.on_progress(f"timing of the {role}", 1, 1)
        share.wait()
    if run.tasks is not None:
        names, size = run.tasks.names, run.batches.size
        run.on_progress(f"tasks of the {role}", 0, 1)
        own = [
            run_task(model, tokenizer(), run.tasks, names[index], batch_size=size)
            for index in share.indices(len(names))
        ]
        scores = [score for scored in share.gathered(own) or () for score in scored]
        # A task that is asked for by itself and by its group is told once.
        found.tasks = tuple({(score.task, score.metric): score for score in reversed(scores)}.values())[::-1]
        run.on_progress(f"tasks of the {role}", 1, 1)
