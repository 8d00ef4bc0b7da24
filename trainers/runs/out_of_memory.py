"""Turns an out-of-memory error of a rank into one message: measured and planned memory, and plans that need less."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from traceback import walk_tb
from types import TracebackType

from ...ds_configs.plan.out_of_memory import OutOfMemory, out_of_memory_text
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import DoesNotFitError

LIMIT_VARIABLE = "SHARDWRIGHT_CPU_TENSOR_BYTES"
"""Environment variable with the bytes of tensors that a CPU rank may have: it stands in for an accelerator's memory."""
_HOST_ERRORS = ("DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory")

_EVALUATION = ("evaluation_loop", "prediction_step", "held_out_cross_entropy", "evaluate")
_PHASES = {"backward": "backward", "compute_loss": "forward", "training_step": "forward"}
_STEP_FILES = ("/torch/optim/", "/accelerate/optimizer.py", "/deepspeed/runtime/", "/bitsandbytes/optim/")


class RunOutOfMemoryError(DoesNotFitError):
    """A run that needed more memory than its plan predicted, or than there is."""


@contextmanager
def memory_errors(plan: Plan, *, command: str = "", options: Collection[str] = ()) -> Iterator[None]:
    """Raise `RunOutOfMemoryError` for a failed allocation inside the block.

    `command` and `options` are those of `out_of_memory_text`. Inner blocks have converted the error already. With
    `SHARDWRIGHT_CPU_TENSOR_BYTES`, a rank without an accelerator fails when its tensors need more bytes.
    """
    import torch

    from ...plugins.metering import ByteMeter

    has_accelerator = torch.cuda.is_available()
    limit = None if has_accelerator else os.environ.get(LIMIT_VARIABLE)
    meter = None if limit is None else ByteMeter(limit_bytes=int(limit))
    try:
        with meter or nullcontext():
            yield
    except (RuntimeError, MemoryError) as error:
        on_device = isinstance(error, torch.OutOfMemoryError)
        if (
            not on_device
            and not isinstance(error, MemoryError)
            and not any(text in str(error) for text in _HOST_ERRORS)
        ):
            raise
        peak_bytes = limit_bytes = None
        if meter is not None:
            peak_bytes, limit_bytes = max(meter.reading().peaks.values()), int(limit or 0)
        elif on_device and has_accelerator:
            peak_bytes = torch.cuda.max_memory_allocated()
            free_bytes, _ = torch.cuda.mem_get_info()
            limit_bytes = free_bytes + torch.cuda.memory_reserved()
        failure = OutOfMemory(
            phase=phase_of(error.__traceback__),
            error=(str(error).strip() or type(error).__name__).splitlines()[0],
            peak_bytes=peak_bytes,
            limit_bytes=limit_bytes,
            on_host=not on_device,
        )
        raise RunOutOfMemoryError(out_of_memory_text(plan, failure, command, options)) from error


def phase_of(trace: TracebackType | None) -> str:
    """Return the phase of a run in which an exception was raised: the innermost known function of the traceback.

    Recomputed layers run inside the backward pass; everything outside of a training step and an evaluation is loading.
    """
    phase = "loading"
    for frame, _ in walk_tb(trace):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name in _EVALUATION:
            return "evaluation"
        if "step" in name and any(part in file for part in _STEP_FILES):
            phase = "optimizer step"
        elif name in _PHASES:
            phase = _PHASES[name]
    return phase
