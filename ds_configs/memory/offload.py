"""Offload of optimizer states and parameters to the host or NVMe: its bytes there, and the seconds that it adds.

`model_states.py` omits from the accelerator what is here.
"""

from __future__ import annotations

from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..specs.optimizers import OPTIMIZERS
from ..specs.terms import StepTerm, Term
from ..specs.units import pinned_block_bytes
from .model_states import optimizer_state_bytes
from .moments import Terms
from .rank_parameters import RankParameters

TERMS = (
    StepTerm(
        "host_optimizer",
        "CPU Adam: bytes / bandwidth of host memory, which the ranks of a node share",
        label="optimizer on the host",
    ),
    StepTerm("host_copies", "copies of gradients and parameters over PCIe", label="copies over PCIe"),
    StepTerm("nvme", "reads and writes of optimizer states on NVMe"),
    Term("pinned_rounding", "torch rounds each pinned block up to a power of two", lives_on="host"),
    Term("nvme_optimizer_buffers", "pinned buffers: buffer_count * 4 B * the largest sub-group shard", lives_on="host"),
    Term("nvme_parameter_buffers", "pinned buffers: buffer_count * buffer_size in compute precision", lives_on="host"),
)


def offload_terms(layout: Layout, model: ModelSpec, job: TrainingJob, parameters: RankParameters) -> Terms:
    """Return host bytes of one rank under offload (DeepSpeed: measured 18/N to 22/N bytes per trainable element)."""
    if layout.offload_optimizer == "none":
        return {}
    width = job.compute_bytes
    shard = parameters.shard(layout)
    states = parameters.state_shard(optimizer_state_bytes(layout, model, job, parameters.trainable), layout)
    frozen = parameters.frozen_shard_bytes(layout) - parameters.scale_bytes
    if layout.engine == "fsdp2":
        return {
            "weights": 4 * shard + frozen,
            "gradients": 4 * shard,
            "optimizer_states": states,
        }
    if layout.zero_stage == 3:
        zero = layout.zero
        pinned = [width * shard]
        terms: Terms = {"gradients": width * shard}
        if layout.offload_optimizer == "cpu":
            # fp32 gradients are pinned per sub-group (stage3.py:1338).
            sub_group = min(shard, zero.sub_group_size)
            pinned += [4 * sub_group] * (shard // sub_group) + [4 * (shard % sub_group)]
            terms["gradients"] += 4 * shard
            terms |= {"master_weights": 4 * shard, "optimizer_states": states}
        else:
            swap = zero.optimizer_buffer_count * 4 * min(shard, zero.sub_group_size)
            pinned.append(swap)
            terms["nvme_optimizer_buffers"] = swap
        if layout.offload_param == "cpu":
            pinned.append(width * shard)
            terms["weights"] = width * shard + frozen
        elif layout.offload_param == "nvme":
            swap = zero.parameter_buffer_count * zero.parameter_buffer_elements * width
            pinned.append(swap)
            terms["nvme_parameter_buffers"] = swap
        terms["pinned_rounding"] = sum(pinned_block_bytes(block) - block for block in pinned)
        return terms
    pinned = [4 * shard, 4 * shard, width * shard]
    if layout.gradient_accumulation_steps > 1 and layout.zero_stage == 2:
        pinned.append(width * shard)
    return {
        "master_weights": 4 * shard,
        "optimizer_states": states,
        "gradients": sum(pinned) - 4 * shard + width * parameters.largest_trainable,
        "pinned_rounding": sum(pinned_block_bytes(block) - block for block in pinned),
    }


def nvme_bytes(layout: Layout, model: ModelSpec, job: TrainingJob, parameters: RankParameters) -> int:
    """Return the swap files of one rank: master weights, states and gradients, and with parameter offload weights."""
    shard, count = parameters.shard(layout), 0
    if layout.offload_optimizer == "nvme":
        states = optimizer_state_bytes(layout, model, job, parameters.trainable)
        count += 4 * shard + parameters.state_shard(states, layout) + 4 * shard
    if layout.offload_param == "nvme":
        count += job.compute_bytes * shard + parameters.frozen_shard_bytes(layout) - parameters.scale_bytes
    return count


HOST_MEMORY_BYTES_PER_S = 20e9
"""Assumed bandwidth of host memory for CPU Adam of one rank: 0.4 of two DDR4-3200 channels (51 GB/s)."""


NODE_MEMORY_BYTES_PER_S = 55e9
"""Bandwidth of host memory for CPU Adam of all ranks of a node, which share it: 73 billion parameters on four nodes of
eight A100 step in 10 s, 0.2 s without offload (https://github.com/deepspeedai/DeepSpeed/issues/6834). The ZeRO-Offload
paper has twice that for its best case, one process with all cores (arXiv 2101.06840)."""


NVME_BYTES_PER_S = 6e9
"""Assumed read and write bandwidth of a node's NVMe: a pair of PCIe 4 drives."""


HOST_ADAM_BYTES = 30
"""Memory traffic of CPU Adam per parameter: reads gradient, weight and two moments, writes the latter three and the
16-bit weight (deepspeed/ops/csrc/adam/cpu_adam_impl.cpp)."""


def offloaded_step_seconds(
    layout: Layout, hardware: HardwareSpec, job: TrainingJob, *, parameters: float, host_link_bytes_per_s: float
) -> dict[str, float]:
    """Return the seconds of an offloaded optimizer step for `parameters` per rank, by term.

    Gradients are copied during the backward pass, updated weights after the step.
    """
    ranks = min(layout.world_size, hardware.gpus_per_node)
    rate = min(HOST_MEMORY_BYTES_PER_S, NODE_MEMORY_BYTES_PER_S / ranks)
    terms = {
        "host_optimizer": parameters * HOST_ADAM_BYTES / rate,
        "host_copies": 2 * parameters * job.compute_bytes / host_link_bytes_per_s,
    }
    if layout.offload_optimizer == "nvme":
        # fp32 weights, moments and gradients are read and written.
        moments = OPTIMIZERS[job.optimizer].state_bytes_per_parameter
        terms["nvme"] = 2 * parameters * (8 + moments) / (NVME_BYTES_PER_S / ranks)
    return terms


def parameter_copy_seconds(
    layout: Layout, hardware: HardwareSpec, *, size_bytes: float, host_link_bytes_per_s: float
) -> float:
    """Return the seconds in which a rank copies its offloaded parameters, including frozen ones, for one pass."""
    if layout.offload_param == "none":
        return 0.0
    seconds = size_bytes / host_link_bytes_per_s
    if layout.offload_param == "nvme":
        ranks = min(layout.world_size, hardware.gpus_per_node)
        seconds = max(seconds, size_bytes / (NVME_BYTES_PER_S / ranks))
    return seconds
