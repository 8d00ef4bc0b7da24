"""Speed of a model on this machine, reading and writing, and the memory that it takes."""

from __future__ import annotations

import inspect
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .measures import Window

if TYPE_CHECKING:
    import torch

REPEATS = 5
"""Timed runs; the median counts. One more comes first and does not count."""
DECODED_TOKENS = 16
"""Tokens that are written one after another in each run."""
LONGEST_PROMPT = 512
"""Maximum prompt tokens, taken from a window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Medians of several runs with a batch of one."""

    machine: str
    """Processor or accelerator, with the threads that torch used."""
    prompt_tokens: int
    prefill_tokens_per_second: float
    """Tokens read in a second."""
    decode_tokens_per_second: float | None
    """Tokens written in a second, one after another behind the prompt; `None` for a model without a key/value cache."""
    weight_bytes: int | None
    """Parameters and buffers of the loaded model; `None` in an engine that takes its memory beforehand."""
    peak_bytes: int | None
    """Largest live bytes of tensors while a prompt was read, weights included; `None` likewise."""


def measure_speed(model: Any, window: Window) -> Speed:
    """Time a loaded model on the start of a window; tokens are chosen greedily, the model's own end is ignored."""
    import torch

    prompt_1S = torch.tensor([window["input_ids"][:LONGEST_PROMPT]], device=model.device)

    # Only the last token's logits, as `generate` computes them.
    parameters = inspect.signature(type(model).forward).parameters
    options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    # Transformers 5.24 renamed the argument and the field.
    cache = "cache" if "cache" in parameters else "past_key_values"

    def read() -> Any:
        return model(input_ids=prompt_1S, use_cache=True, **options)

    def write(last: Any) -> None:
        for _ in range(DECODED_TOKENS):
            token_11 = last.logits[:, -1:].argmax(dim=-1)
            last = model(input_ids=token_11, use_cache=True, **{cache: last[cache]})

    with torch.inference_mode():
        peak, weights = _peak_bytes(model, read)
        prefill, decode = [], []
        for _ in range(REPEATS + 1):
            seconds, outputs = _timed(read, model.device)
            prefill.append(seconds)
            if getattr(outputs, cache, None) is not None:
                decode.append(_timed(partial(write, outputs), model.device)[0])
    return Speed(
        machine=str(torch.cuda.get_device_name(model.device))
        if model.device.type == "cuda"
        else processor_name(torch.get_num_threads()),
        prompt_tokens=prompt_1S.shape[1],
        prefill_tokens_per_second=prompt_1S.shape[1] / statistics.median(prefill[1:]),
        decode_tokens_per_second=DECODED_TOKENS / statistics.median(decode[1:]) if decode else None,
        weight_bytes=weights,
        peak_bytes=peak,
    )


def _timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    _wait(device)
    start = time.perf_counter()
    result = work()
    _wait(device)
    return time.perf_counter() - start, result


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_bytes(model: Any, read: Callable[[], Any]) -> tuple[int, int]:
    """Return the largest live bytes of reading a prompt, and those of the weights."""
    import torch

    kept = [*model.parameters(), *model.buffers()]
    if model.device.type == "cuda":
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        weights = sum(storages.values())
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        read()
        return weights + torch.cuda.max_memory_allocated(model.device) - before, weights
    from ...plugins.metering import ByteMeter

    with ByteMeter() as meter:
        meter.label(kept, "weights")
        weights = meter.reading().current_bytes
        meter.enter("forward")
        read()
    return meter.reading().peak_bytes, weights


def processor_name(threads: int) -> str:
    """Return the processor's name, with the threads that compute."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(named, "") or platform.processor() or platform.machine()
    return f"{processor}, {threads} thread{'s' if threads > 1 else ''} of {os.cpu_count()}"
