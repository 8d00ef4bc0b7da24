"""The optimizer step on the accelerator, on the host and from NVMe, and the copies that offload makes."""

from __future__ import annotations

from ..specs.hardware import HardwareSpec
from ..specs.job import OPTIMIZERS, TrainingJob
from ..specs.strategy import Strategy
from .constants import GpuConstants
from .software import Software

HOST_MEMORY_BYTES_PER_S = 20e9
"""Bandwidth of host memory that CPU Adam reaches for each rank: 0.4 of two DDR4-3200 channels in a desktop (51 GB/s),
and of two channels for each of eight ranks in a server of two sockets (410 GB/s); an assumption."""

NVME_BYTES_PER_S = 6e9
"""Bandwidth of a node's NVMe, read and write: a pair of PCIe 4 drives; an assumption."""

HOST_ADAM_BYTES = 30
"""Traffic of CPU Adam for each parameter: reads of gradient, weight and two moments, writes of the latter three and of
the 16-bit weight (deepspeed/ops/csrc/adam/cpu_adam_impl.cpp)."""

# Two moments in fp32, which `Software.optimizer_bytes` holds already.
_ADAM_STATE_BYTES = 8


def optimizer_seconds(
    strategy: Strategy,
    hardware: HardwareSpec,
    job: TrainingJob,
    software: Software,
    constants: GpuConstants,
    *,
    parameters: float,
) -> dict[str, float]:
    """Return the seconds of stepping `parameters` on each rank, by term; gradients cross PCIe beside the backward pass.

    On the accelerator the step is bound by its memory; a small state is less traffic.
    """
    states = OPTIMIZERS[job.optimizer].state_bytes_per_parameter
    if strategy.offload_optimizer == "none":
        traffic = software.optimizer_bytes + 2 * (states - _ADAM_STATE_BYTES)
        return {
            "optimizer": parameters * traffic / (hardware.memory_bytes_per_s * constants.memory_efficiency),
        }
    ranks = min(strategy.world_size, hardware.gpus_per_node)
    host = parameters * HOST_ADAM_BYTES / HOST_MEMORY_BYTES_PER_S
    copies = 2 * parameters * job.compute_bytes / constants.host_link_bytes_per_s
    terms = {"host_optimizer": host, "host_copies": copies}
    if strategy.offload_optimizer == "nvme":
        # fp32 weights, moments and gradients come and go.
        terms["nvme"] = 2 * parameters * (8 + states) / (NVME_BYTES_PER_S / ranks)
    return terms


def parameter_copy_seconds(
    strategy: Strategy, hardware: HardwareSpec, constants: GpuConstants, *, size_bytes: float
) -> float:
    """Return the seconds in which a rank fetches its offloaded parameters, frozen ones too, for one pass over them."""
    if strategy.offload_param == "none":
        return 0.0
    seconds = size_bytes / constants.host_link_bytes_per_s
    if strategy.offload_param == "nvme":
        ranks = min(strategy.world_size, hardware.gpus_per_node)
        seconds = max(seconds, size_bytes / (NVME_BYTES_PER_S / ranks))
    return seconds
