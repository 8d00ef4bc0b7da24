"""Measure what CPU ranks of this host reach, in seconds, and store it for later plans.

torchrun ... -m shardwright.plugins.planning.cpu_host RESULT_FILE, one process per rank
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ...ds_configs.specs.hardware import HardwareSpec
from ...ds_configs.step_time.cpu_ranks import NOISY_RATES, MeasuredCpu, cpu_hardware
from ...ds_configs.step_time.rates import constants_of, others
from ..launching.elastic import recorded
from ..launching.launch import Launch, cpu_rank_environment, launch_ranks, python_arguments
from .calibration_store import CalibrationStore

DEFAULT_RANKS = 2
_LIMIT_SECONDS = 600.0
"""A measurement takes seconds, but importing torch takes minutes on an overloaded machine."""
_SECONDS_OF_A_RATE = 0.4
"""Time for the rounds of one rate."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 50
_PRODUCT_SIZE = 512
"""Some milliseconds, so that the scheduler of a busy machine lets some rounds run without interruption."""
_ATTENTION_SHAPE = (4, 4, 128, 32)
"""Sequences, heads, tokens and width of a head, as in a small model."""
_COPY_ELEMENTS = 8 * 2**20
"""32 MiB of fp32, beyond the caches of a core."""
_REDUCED_ELEMENTS = 2 * 2**20
"""8 MiB of fp32: bound by bandwidth, and as short as a product."""


def local_cpu_hardware(
    ranks: int = DEFAULT_RANKS, *, tell: Callable[[str], None] = lambda _: None, **overrides: Any
) -> HardwareSpec:
    """Return this host as CPU ranks with measured rates; measure and store them if they are not stored yet.

    Args:
        ranks: Number of ranks.
        tell: Function that receives what was measured, and doubts about it.
        **overrides: Fields of the hardware that the user set.

    Raises:
        UsageError: the host has fewer cores than ranks.
        ShardwrightError: the ranks failed.
    """
    cores = os.cpu_count() or 1
    if not 1 <= ranks <= max(DEFAULT_RANKS, cores):
        rule = f"must be from 1 to {max(DEFAULT_RANKS, cores)}, the cores of this machine, for CPU ranks"
        fix = f"or plan without measuring: --hardware {ranks}xCPU"
        raise UsageError(ConfigError(where="num_processes", value=ranks, rule=rule, fix=fix))
    threads = int(cpu_rank_environment()["OMP_NUM_THREADS"])
    key = (_cpu_model(), cores, ranks, threads, metadata.version("torch"))
    store = CalibrationStore()
    stored: tuple[MeasuredCpu, ...] = ()
    with suppress(ShardwrightError):
        # `stored_calibration` reports a store that cannot be read.
        stored = store.cpus()
    measured = next((cpu for cpu in reversed(stored) if cpu.key == key), None)
    if measured is None:
        if any(cpu.key[:4] == key[:4] for cpu in stored):
            tell(f"the stored rates of CPU ranks are of another release of torch: measuring again with {key[4]}")
        measured = MeasuredCpu(
            cpu=key[0], cores=cores, ranks=ranks, threads=threads, torch=key[4], **_measured_rates(ranks)
        )
        try:
            store.add(measured)
        except ShardwrightError as error:
            tell(f"the measured rates are not stored: {error}")
        tell(f"measured {measured}")
    else:
        tell(f"using stored rates of {measured} (`shardwright calibrate --forget cpu` to measure again)")
    if measured.spread > NOISY_RATES:
        tell(
            f"the rates varied by {100 * measured.spread:.0f} % while they were measured: another job may use this "
            "machine. The fastest count; on an idle machine, measure again after `shardwright calibrate --forget cpu`"
        )
    host_bytes = overrides.pop("host_bytes_per_node", None) or host_memory_bytes()
    return cpu_hardware(measured, host_bytes=host_bytes, **overrides)


def host_memory_bytes() -> int:
    """Return the memory of this machine, or of the control group that limits this process."""
    import psutil

    total = int(psutil.virtual_memory().total)
    with suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def _cpu_model() -> str:
    """Return the processor's model. Virtual machines give many the same name, so that the model's number is added."""
    values: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            values.setdefault(name.strip(), value.strip())
    name = values.get("model name") or platform.processor() or platform.machine() or "CPU"
    numbers = [f"{key.removeprefix('cpu ')} {values[key]}" for key in ("cpu family", "model") if values.get(key)]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _measured_rates(ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="shardwright-rates-", ignore_cleanup_errors=True) as directory:
        file = Path(directory) / "rates.json"
        command = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", "-m", __name__, str(file)]
        try:
            launch_ranks(Launch(arguments=python_arguments(command)), timeout_seconds=_LIMIT_SECONDS)
            return dict(json.loads(file.read_text(encoding="utf-8")))
        except ShardwrightError as error:
            fix = f"pass --hardware {ranks}xCPU to plan with assumed rates"
            raise ShardwrightError(f"CPU ranks of this host cannot be measured; {fix}: {str(error).strip()}") from None


def _measure(file: Path) -> None:
    """Measure on this rank while the others do the same; the first one writes the slowest rank's rates."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    ranks = distributed.get_world_size()
    constants = constants_of("CPU")
    # A product of this size, by the rule of `product_seconds`.
    flops = 2.0 * (_PRODUCT_SIZE + constants.product_border) ** 2 * (_PRODUCT_SIZE + constants.product_depth)
    # Two products of half of the scores forward, 2.5 times that backward, as the step time model counts.
    batch, heads, length, width = _ATTENTION_SHAPE
    attention_flops = 3.5 * 2.0 * batch * heads * length**2 * width
    left, right = torch.rand(_PRODUCT_SIZE, _PRODUCT_SIZE), torch.rand(_PRODUCT_SIZE, _PRODUCT_SIZE)
    half_left, half_right = left.bfloat16(), right.bfloat16()
    large, target = torch.rand(_COPY_ELEMENTS), torch.empty(_COPY_ELEMENTS)
    reduced = torch.rand(_REDUCED_ELEMENTS)
    work: dict[str, tuple[float, Callable[[], object]]] = {
        "fp32_flops_per_s": (flops, lambda: torch.mm(left, right)),
        "bf16_flops_per_s": (flops, lambda: torch.mm(half_left, half_right)),
        "fp32_attention_flops_per_s": (attention_flops, _attention(torch.float32)),
        "bf16_attention_flops_per_s": (attention_flops, _attention(torch.bfloat16)),
        "memory_bytes_per_s": (8.0 * _COPY_ELEMENTS, lambda: target.copy_(large)),
    }
    if ranks > 1:
        moved = 2 * others(ranks) * 4.0 * _REDUCED_ELEMENTS
        work["link_bytes_per_s"] = (moved, lambda: distributed.all_reduce(reduced))
    own = {name: _timed(run) for name, (_, run) in work.items()}
    everyone: list[Any] = [None] * ranks
    distributed.all_gather_object(everyone, own)
    if distributed.get_rank() == 0:
        # Other jobs only ever add time. Each rank has its fastest round, and the slowest rank limits a step.
        rates = {name: amount / max(min(rank[name]) for rank in everyone) for name, (amount, _) in work.items()}
        spread = max(statistics.median(times) / min(times) - 1 for rank in everyone for times in rank.values())
        file.write_text(json.dumps({"link_bytes_per_s": 0.0} | rates | {"spread": spread}), encoding="utf-8")
    distributed.destroy_process_group()


def _attention(dtype: Any) -> Callable[[], object]:
    """Return fused causal attention, forward and backward. On CPUs its backward pass is far from products in bf16."""
    import torch

    tensors = [torch.rand(_ATTENTION_SHAPE).to(dtype).requires_grad_() for _ in range(3)]
    gradient = torch.rand(_ATTENTION_SHAPE).to(dtype)

    def run() -> object:
        output = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
        return torch.autograd.grad(output, tensors, gradient)

    return run


def _timed(run: Callable[[], object]) -> list[float]:
    """Return the seconds of this rank's rounds, which all ranks begin together, after one that does not count."""
    import torch
    from torch import distributed

    def round_seconds() -> float:
        distributed.barrier()
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    first = torch.tensor([round_seconds()])
    distributed.all_reduce(first, distributed.ReduceOp.MAX)
    rounds = min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, int(_SECONDS_OF_A_RATE / first.item())))
    return [round_seconds() for _ in range(rounds)]


if __name__ == "__main__":
    recorded(lambda: _measure(Path(sys.argv[1])))()
