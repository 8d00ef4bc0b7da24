"""`shardwright cache-teacher`: stores a teacher's answers to a dataset, so that it needs no place beside a student."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...ds_configs.specs.units import gigabytes
from ...trainers.distillation.cache.cache_job import CacheSettings
from ..machines import ReplicaOptions, run_on_hosts, tell_place
from ..options import RunOptions
from ..progress import LinesAtTimes, note, progress_on_stderr
from ..settings import FILLED, Options, grouped

if TYPE_CHECKING:
    from ...trainers.distillation.cache.cache_job import CacheJob


grouped(CacheSettings)
grouped(ReplicaOptions)


@grouped
class CacheOptions(RunOptions):
    """Directory of the answers."""


def cache_teacher_command(
    teacher: str,
    *,
    settings: Annotated[CacheSettings, Options] = FILLED,
    options: Annotated[CacheOptions, Options] = FILLED,
    machines: Annotated[ReplicaOptions, Options] = FILLED,
) -> int:
    """Store what a teacher says of every token of a dataset; `distill --teacher-cache` then runs no teacher.

    Running it again goes on where it was interrupted, and adds samples that are new.

    Example: shardwright cache-teacher Qwen/Qwen3-8B --dataset corpus.jsonl --output-dir answers --temperature 2

    Parameters
    ----------
    teacher
        Hub id or directory; weights are read from safetensors.
    """
    if machines.on == "ssh":
        return run_on_hosts(machines)
    output_dir, dry_run, replicas = options.output_dir, options.dry_run, machines.replicas()
    from ...trainers.data.sources import PYTHON_HELP
    from ...trainers.distillation.cache.cache_job import prepare_cache, run_cache_job

    if "dataset" not in settings.model_fields_set:
        note(f"the dataset is {PYTHON_HELP}, Python's own help topics; --dataset names the student's")
    with redirect_stdout(sys.stderr):
        job = prepare_cache(teacher, settings, None if dry_run else output_dir, replicas=replicas)
        if not dry_run:
            assert output_dir is not None
            with progress_on_stderr("loading the teacher", LinesAtTimes()) as on_progress:
                run_cache_job(job, output_dir, replicas=replicas, notify=note, on_progress=on_progress)
    if replicas.result_is_here:
        _show(job, None if dry_run else output_dir, as_json=options.as_json)
    else:
        tell_place(replicas.place)
    return 0


def _show(job: CacheJob, output_dir: Path | None, *, as_json: bool) -> None:
    layout = job.key.layout
    tokens = sum(len(ids) for ids in job.samples)
    record: dict[str, Any] = {
        "schema_version": 1,
        "teacher": job.key.teacher,
        "samples": len(job.samples),
        "tokens": tokens,
        "bytes_per_token": layout.record_bytes,
        "bytes": tokens * layout.record_bytes,
        "top_k": layout.top_k,
        "temperatures": list(layout.temperatures),
        "vocab_size": layout.vocab_size,
        "output_dir": None if output_dir is None else str(output_dir),
    }
    if as_json:
        print(json.dumps(record))
        return
    temperatures = ", ".join(f"{one:g}" for one in layout.temperatures)
    print(f"{tokens:,} tokens in {len(job.samples):,} samples, {layout.record_bytes} bytes each: ", end="")
    print(f"{gigabytes(tokens * layout.record_bytes)} GB")
    print(f"top {layout.top_k} of {layout.vocab_size:,} tokens and the rest, at temperature {temperatures}")
    print("Nothing was run or written." if output_dir is None else f"Stored in {output_dir}")
