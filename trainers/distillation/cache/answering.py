"""A teacher that answers samples, in this process or in ranks that divide the batches; `_answer` is the ranks' side.

torchrun ... -m shardwright.trainers.distillation.cache.answering job.json
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from ....plugins.huggingface_hub.model_directory import model_directory
from ....plugins.launching.notes import Notify, OnProgress
from ....plugins.planning.from_names import installed_versions
from ...replicas.launch import Replicas, run_replicas
from ...replicas.share import ALONE, Share, run_share, tell_work
from .cache_writer import write_cache
from .teacher_cache import CacheKey, file_sha256

_TOKENS, _ENDS = "tokens.npy", "ends.npy"


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """Samples for a teacher, and the way it is to answer."""

    teacher: str
    """Hub id or directory."""
    revision: str | None
    """Branch, tag or commit of a Hub teacher."""
    dtype: str | None
    """Precision; `None`: bfloat16 on an accelerator, float32 on the CPU."""
    batch_size: int
    """Samples of one forward pass."""
    key: CacheKey
    """Whose answers they are."""
    samples: Sequence[Sequence[int]]
    """Token ids of each."""


def store_answers(request: AnswerRequest, directory: Path, *, on_progress: OnProgress, share: Share = ALONE) -> None:
    """Load the teacher and store its answers, or this rank's share of them; every rank of a share must call it."""
    import torch

    from ....plugins.transformers.teacher_placement import PlacedTeacher, load_teacher

    accelerated = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if accelerated else torch.device("cpu")
    dtype = getattr(torch, request.dtype or ("bfloat16" if accelerated else "float32"))
    model = load_teacher(request.teacher, revision=request.revision, dtype=dtype).to(device)
    write_cache(
        directory,
        request.key,
        PlacedTeacher(model, model, "replica"),
        request.samples,
        batch_size=request.batch_size,
        device=device,
        on_progress=on_progress,
        share=share,
    )


def answer_in_ranks(
    request: AnswerRequest, directory: Path, replicas: Replicas, *, notify: Notify, on_progress: OnProgress
) -> None:
    """Let ranks answer, each its share of the batches; the first writes.

    Raises:
        LaunchFailedError: a rank failed; says which and why.
    """
    import torch

    path = Path(request.teacher)
    # What the Hub has is fetched here, once for all ranks of this machine.
    teacher = path.absolute() if path.exists() else model_directory(request.teacher, revision=request.revision)
    job = {
        "teacher": str(teacher),
        "dtype": request.dtype,
        "batch_size": request.batch_size,
        "key": asdict(request.key),
        "directory": str(directory.absolute()),
    }
    with tempfile.TemporaryDirectory(prefix="shardwright-cache-", ignore_cleanup_errors=True) as made:
        work = Path(made)
        # Ranks map what they read, so that a machine holds the samples once.
        np.save(work / _ENDS, np.cumsum([len(ids) for ids in request.samples], dtype=np.int64))
        np.save(work / _TOKENS, np.concatenate([np.asarray(ids, dtype=np.int64) for ids in request.samples]))
        on_cpu = not torch.accelerator.is_available()
        run_replicas(replicas, __name__, job, work, on_cpu=on_cpu, notify=notify, on_progress=on_progress)


class _MappedSamples(Sequence[Any]):
    """Token ids of samples, one behind another in a file."""

    def __init__(self, work: Path) -> None:
        self._ends = np.load(work / _ENDS, mmap_mode="r", allow_pickle=False)
        self._tokens = np.load(work / _TOKENS, mmap_mode="r", allow_pickle=False)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        first = int(self._ends[index - 1]) if index else 0
        return self._tokens[first : int(self._ends[index])]


def _answer(job: dict[str, Any], work: Path, share: Share) -> None:
    samples = _MappedSamples(work)
    parts = {name: job[name] for name in ("dtype", "batch_size")}
    parts |= {"key": {**job["key"], "teacher": ""}, "versions": dict(installed_versions())}
    if share.is_first_here:
        parts["samples"] = [file_sha256(work / name) for name in (_TOKENS, _ENDS)]
    share.check_same(parts)
    request = AnswerRequest(
        teacher=job["teacher"],
        revision=None,
        dtype=job["dtype"],
        batch_size=job["batch_size"],
        key=TypeAdapter(CacheKey).validate_python(job["key"]),
        samples=samples,
    )
    on_progress = tell_work if share.is_first else lambda _what, _done, _total: None
    store_answers(request, Path(job["directory"]), on_progress=on_progress, share=share)


if __name__ == "__main__":
    run_share(_answer)
