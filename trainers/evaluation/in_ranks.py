"""Reading by several ranks, each with the model and a share of the batches: this process's side, and `_read` theirs.

torchrun ... -m shardwright.trainers.evaluation.in_ranks job.json
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...plugins.launching.notes import Notify, note_on_first_rank
from ...plugins.lm_eval.tasks import TaskRequest, TaskScore
from ...plugins.planning.from_names import installed_versions
from ..replicas.launch import Replicas, run_replicas
from ..replicas.share import Share, run_share, tell_work
from .inputs import shared_tokenizer
from .loading import Subject, local_directory, read_subject
from .reading import Findings, Reading, read_models
from .speed import Speed
from .stored_sizes import stored_sizes
from .token_measures import Batches, TokenMeasures

if TYPE_CHECKING:
    import torch

_MEASURES, _FINDINGS = "measures.safetensors", "findings.json"


def read_in_ranks(
    replicas: Replicas, subjects: Sequence[Subject], run: Reading, notify: Notify
) -> tuple[TokenMeasures, Findings, Findings | None]:
    """Let ranks read, each its share of the batches; every machine gets what was measured of all of them.

    Raises:
        LaunchFailedError: a rank failed; says which and why.
    """
    # What the Hub has is fetched here, once for all ranks of this machine.
    directories = [local_directory(subject) for subject in subjects]
    tasks = None
    if run.tasks is not None:
        include = run.tasks.include_path
        tasks = asdict(run.tasks) | {"include_path": None if include is None else str(include.absolute())}
    job = {
        "subjects": [[_place(subject), subject.role, subject.source.revision] for subject in subjects],
        "windows": list(run.batches.windows),
        "batch_size": run.batches.size,
        "dtype": run.dtype,
        # Each rank has an accelerator of its own.
        "device": run.device.partition(":")[0],
        "measure_speeds": run.measure_speeds,
        "tasks": tasks,
    }
    with tempfile.TemporaryDirectory(prefix="shardwright-evaluate-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        on_cpu = run.device == "cpu"
        run_replicas(replicas, __name__, job, work, on_cpu=on_cpu, notify=notify, on_progress=run.on_progress)
        found = [
            Findings(subject=subject, dtype="", sizes=stored_sizes(place))
            for subject, place in zip(subjects, directories, strict=True)
        ]
        measures = _read_measures(work / _MEASURES)
        told = json.loads((work / _FINDINGS).read_text(encoding="utf-8"))
        for each, facts in zip(found, told, strict=True):
            each.dtype = facts["dtype"]
            each.speed = None if facts["speed"] is None else Speed(**facts["speed"])
            each.tasks = tuple(TaskScore(**score) for score in facts["tasks"])
    return measures, found[0], found[1] if len(found) > 1 else None


def _place(subject: Subject) -> str:
    """Return the model's name for another process: a local directory wherever that process works."""
    path = Path(subject.source.name)
    return str(path.absolute()) if path.exists() else subject.source.name


def _read(job: dict[str, Any], work: Path, share: Share) -> None:
    subjects = [read_subject(name, role, revision=revision) for name, role, revision in job["subjects"]]
    tasks = job["tasks"]
    if tasks is not None:
        include = tasks["include_path"]
        named = {"names": tuple(tasks["names"]), "include_path": None if include is None else Path(include)}
        tasks = TaskRequest(**{**tasks, **named})
    share.check_same(_parts(job, subjects, share))
    run = Reading(
        batches=Batches(windows=job["windows"], size=job["batch_size"]),
        dtype=job["dtype"],
        device=job["device"],
        measure_speeds=job["measure_speeds"],
        tasks=tasks,
        on_progress=tell_work if share.is_first else lambda _stage, _done, _total: None,
        share=share,
    )
    measures, found, compared = read_models(subjects, run, lambda: _tokenizer(subjects), note_on_first_rank)
    own = [
        {
            "dtype": each.dtype,
            "speed": None if each.speed is None else asdict(each.speed),
            "tasks": list(map(asdict, each.tasks)),
        }
        for each in (found, compared)
        if each is not None
    ]
    facts = share.from_first(lambda: own)
    if share.is_first_here:
        _write_measures(measures, work / _MEASURES)
        (work / _FINDINGS).write_text(json.dumps(facts), encoding="utf-8")


def _tokenizer(subjects: Sequence[Subject]) -> Any:
    # Its remarks were told when this was launched.
    return shared_tokenizer(subjects, lambda _: None)


def _parts(job: dict[str, Any], subjects: Sequence[Subject], share: Share) -> dict[str, Any]:
    """Return what all ranks must agree on; the windows as a digest."""
    parts = {name: job[name] for name in ("batch_size", "dtype", "measure_speeds", "tasks")}
    parts["versions"] = dict(installed_versions())
    if share.is_first_here:
        parts["text"] = hashlib.sha256(json.dumps(job["windows"]).encode()).hexdigest()
        sizes = [asdict(stored_sizes(local_directory(subject))) for subject in subjects]
        parts["weights"] = [[subject.source.revision for subject in subjects], sizes]
    return parts


def _write_measures(measures: TokenMeasures, file: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {"counts": torch.tensor(measures.counts, dtype=torch.int64)}
    for name in ("loss_N", "baseline_loss_N", "kl_N", "agreement_N"):
        values_N = getattr(measures, name)
        if values_N is not None:
            tensors[name] = values_N
    if measures.compared_vocabulary is not None:
        tensors["compared_vocabulary"] = torch.tensor(measures.compared_vocabulary)
    save_file(tensors, str(file))


def _read_measures(file: Path) -> TokenMeasures:
    from safetensors.torch import load_file

    tensors = load_file(str(file))
    counts = tuple(tensors.pop("counts").tolist())
    vocabulary = tensors.pop("compared_vocabulary", None)
    size = None if vocabulary is None else int(vocabulary)
    return TokenMeasures(**tensors, counts=counts, compared_vocabulary=size)


if __name__ == "__main__":
    run_share(_read)
