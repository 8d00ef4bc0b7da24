"""`shardwright cache-teacher`: stores a teacher's answers to a dataset, so that it needs no place beside a student."""

from __future__ import annotations

import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from ..ds_configs.specs.errors import Fault, UsageError
from ..ds_configs.specs.units import gigabytes

if TYPE_CHECKING:
    from ..trainers.distillation.cache.cache_job import CacheJob
    from ..trainers.distillation.cache.cache_writer import Progress

_Flag = Parameter(negative="")
_PROGRESS_INTERVAL_S = 5.0


def cache_teacher_command(
    teacher: str,
    /,
    *,
    output_dir: Path | None = None,
    dataset: str = "python-help",
    dataset_split: str = "train",
    dataset_revision: str | None = None,
    seq_len: int = 512,
    packing: bool = True,
    evaluation_fraction: float = 0.05,
    seed: int = 0,
    top_k: int = 50,
    temperature: Annotated[list[float] | None, _Flag] = None,
    value_bits: int = 6,
    batch_size: int = 8,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    revision: str | None = None,
    dry_run: Annotated[bool, _Flag] = False,
    format: Literal["human", "json"] = "human",
) -> int:
    """Store what a teacher says of every token of a dataset; `distill --teacher-cache` then runs no teacher.

    Running it again goes on where it was interrupted, and adds samples that are new.

    Example: shardwright cache-teacher Qwen/Qwen3-8B --dataset corpus.jsonl --output-dir answers --temperature 2

    Parameters
    ----------
    teacher
        Hub id or directory; weights are read from safetensors.
    output_dir
        Where the answers go.
    dataset
        As for distill: ID[:config][#N] of the Hub, a file, a directory of files, or python-help.
    dataset_split
        Split of a Hub dataset.
    dataset_revision
        Branch, tag or commit of a Hub dataset.
    seq_len
        Tokens of one sample, the same as for distill.
    packing
        Join plain text to samples of equal length, the same as for distill.
    evaluation_fraction
        Share of the rows that distill will hold out; they are stored too.
    seed
        Chooses the rows to hold out, the same as for distill.
    top_k
        Likeliest tokens to store.
    temperature
        A temperature to distil at; repeatable. Default 1.
    value_bits
        Bits of each probability, 2 to 16.
    batch_size
        Samples of one forward pass.
    dtype
        Precision of the teacher. Default bfloat16 on an accelerator, float32 on the CPU.
    revision
        Branch, tag or commit of a Hub teacher.
    dry_run
        Show sizes, run and write nothing.
    format
        human or json; json prints one object on stdout.
    """
    _check(output_dir, dry_run=dry_run, batch_size=batch_size, seq_len=seq_len)
    from ..trainers.distillation.cache.cache_job import CacheSettings, prepare_cache, run_cache_job

    settings = CacheSettings(
        teacher=teacher,
        dataset=dataset,
        dataset_split=dataset_split,
        dataset_revision=dataset_revision,
        seq_len=seq_len,
        packing=packing,
        evaluation_fraction=evaluation_fraction,
        seed=seed,
        top_k=top_k,
        temperatures=tuple(temperature or (1.0,)),
        value_bits=value_bits,
        batch_size=batch_size,
        dtype=dtype,
        revision=revision,
    )
    with redirect_stdout(sys.stderr):
        job = prepare_cache(settings)
        if not dry_run:
            assert output_dir is not None
            run_cache_job(job, output_dir, on_progress=_ProgressLines().show)
    _show(job, None if dry_run else output_dir, as_json=format == "json")
    return 0


def _check(output_dir: Path | None, *, dry_run: bool, batch_size: int, seq_len: int) -> None:
    faults = []
    if output_dir is None and not dry_run:
        faults.append(Fault(where="--output-dir", rule="is needed", fix="give it, or --dry-run"))
    if batch_size < 1:
        faults.append(Fault(where="--batch-size", value=batch_size, rule="at least 1"))
    if seq_len < 2:
        faults.append(Fault(where="--seq-len", value=seq_len, rule="at least 2 tokens, to predict one"))
    if faults:
        raise UsageError(faults)


class _ProgressLines:
    """Prints how far writing is: first, last, and at most once in `_PROGRESS_INTERVAL_S`."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def show(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s and progress.done_samples < progress.all_samples:
            return
        self._next_s = now_s + _PROGRESS_INTERVAL_S
        print(
            f"{progress.done_samples} of {progress.all_samples} samples, {progress.tokens_per_s:,.0f} tokens/s, "
            f"{progress.remaining_s:.0f} s left",
            file=sys.stderr,
        )


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
