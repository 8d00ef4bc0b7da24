"""`shardwright cache-teacher`: store the outputs of a teacher, so that distillation does not run it."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Any

from ...ds_configs.specs.units import gigabytes
from ...trainers.distillation.teacher_cache import CacheSettings
from ..options import ResultDirectory
from ..progress import note, progress_on_stderr
from ..settings import FILLED, Options


def cache_teacher_command(
    teacher: str,
    *,
    settings: Options[CacheSettings] = FILLED,
    options: Options[ResultDirectory] = FILLED,
) -> int:
    """Store the outputs of a teacher for a dataset, which `distill --teacher-cache` reads instead of running it.

    Run it again to resume after an interruption, or to add new samples.

    Parameters
    ----------
    teacher
        Hub id or directory; weights are read from safetensors.
    """
    from ...trainers.data.sources import PYTHON_HELP
    from ...trainers.distillation.teacher_cache import prepare_cache, run_cache_job

    if "dataset" not in settings.model_fields_set:
        note(f"using {PYTHON_HELP}, Python's help topics; pass the student's --dataset instead")
    with redirect_stdout(sys.stderr):
        output_dir = None if options.dry_run else options.output_dir
        job = prepare_cache(teacher, settings, output_dir)
        if output_dir is not None:
            with progress_on_stderr("loading the teacher"):
                run_cache_job(job, output_dir)
    key, tokens = job.key, sum(len(ids) for ids in job.samples)
    record: dict[str, Any] = {
        "schema_version": 1,
        "teacher": key.teacher,
        "samples": len(job.samples),
        "tokens": tokens,
        "bytes_per_token": key.bytes_per_token,
        "bytes": tokens * key.bytes_per_token,
        "top_k": key.top_k,
        "temperatures": list(key.temperatures),
        "vocab_size": key.vocab_size,
        "output_dir": None if output_dir is None else str(output_dir),
    }
    if options.as_json:
        print(json.dumps(record))
        return 0
    temperatures = ", ".join(f"{temperature:g}" for temperature in key.temperatures)
    print(f"{tokens:,} tokens in {len(job.samples):,} samples, {key.bytes_per_token} bytes each: ", end="")
    print(f"{gigabytes(tokens * key.bytes_per_token)} GB")
    print(f"top {key.top_k} of {key.vocab_size:,} tokens and the sum of the others, at temperature {temperatures}")
    print("Dry run: nothing was run or written." if output_dir is None else f"Stored in {output_dir}")
    return 0
