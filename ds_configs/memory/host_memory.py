"""Host memory and NVMe that one node needs: offloaded states, pinned blocks, checkpoint loading, processes."""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from ..specs.units import pinned_block_bytes as pinned_block_bytes
from .distillation_memory import teacher_host_terms, teacher_loading_bytes
from .model_states import optimizer_state_bytes
from .moments import Terms
from .rank_parameters import RankParameters
from .shares import rank_shares

PROCESS_BYTES = 3 * 10**9
"""Resident memory of one rank's Python process with torch, DeepSpeed and its data workers (an assumption)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes that one node needs outside its accelerators."""

    peak_bytes_per_node: int
    """Largest host memory of one node, over loading and training."""
    capacity_bytes_per_node: int
    """Host memory of one node."""
    terms: Terms
    """What makes up the peak, by name."""
    nvme_bytes_per_node: int
    """Bytes written to the NVMe of one node."""


def estimate_host_memory(
    strategy: Strategy, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob, parameters: RankParameters
) -> HostMemory:
    """Return host and NVMe bytes of one node, the larger of loading and training."""
    ranks = hardware.gpus_per_node
    processes: Terms = {"processes": ranks * PROCESS_BYTES}
    loading = loading_terms(strategy, model, hardware, job, parameters)
    training = processes | {
        name: ranks * count for name, count in offload_terms(strategy, model, job, parameters).items()
    }
    training |= teacher_host_terms(strategy, job, ranks)
    terms = max(loading, training, key=lambda candidate: sum(candidate.values()))
    return HostMemory(
        peak_bytes_per_node=sum(terms.values()),
        capacity_bytes_per_node=hardware.host_bytes_per_node,
        terms={name: count for name, count in terms.items() if count},
        nvme_bytes_per_node=ranks * _nvme_bytes(strategy, model, job, parameters),
    )


def loading_terms(
    strategy: Strategy, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob, parameters: RankParameters
) -> Terms:
    """Return host bytes of one node while a checkpoint is loaded, which no batch or recomputation changes."""
    ranks = hardware.gpus_per_node
    loaded = _loading_bytes(strategy, model, job, parameters, ranks) + teacher_loading_bytes(strategy, job, ranks)
    return {"processes": ranks * PROCESS_BYTES, "checkpoint_loading": loaded}


def _loading_bytes(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters, ranks: int
) -> int:
    """Bytes that `from_pretrained` holds on one node.

    ZeRO-3 copies from memory-mapped shards module by module (transformers/modeling_utils.py:4397), except where
    loading fuses experts, which every rank materialises. A pipeline's rank reads its stage layer by layer and keeps its
    tensor-parallel share of each before the next. Elsewhere every rank holds the whole model; Accelerate makes it fp32
    on every rank before FSDP2 shards it (accelerate/utils/fsdp_utils.py:813).
    """
    if job.method == "qlora":
        return ranks * parameters.frozen_bytes
    if strategy.zero_stage == 3:
        return ranks * job.compute_bytes * model.parameter_count if model.weight_conversion else 0
    if strategy.pp > 1:
        largest = max(share.model.parameter_count for share in rank_shares(strategy, model, job))
        return ranks * job.compute_bytes * (largest + (model.layer_parameter_count if strategy.tp > 1 else 0))
    fp32_weights = job.method == "full" and strategy.engine != "deepspeed"
    width = 4 if fp32_weights else job.compute_bytes
    return ranks * width * model.parameter_count


def offload_terms(strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters) -> Terms:
    """Host bytes of one rank under offload (DeepSpeed: measured 18/N to 22/N bytes of trainable elements)."""
    if strategy.offload_optimizer == "none":
        return {}
    width = job.compute_bytes
    shard = parameters.shard(strategy)
    states = parameters.state_shard(optimizer_state_bytes(strategy, model, job, parameters.trainable), strategy)
    frozen = parameters.frozen_shard_bytes(strategy) - parameters.scale_bytes
    if strategy.engine == "fsdp2":
        return {
            "offloaded_parameters": 4 * shard + frozen,
            "offloaded_gradients": 4 * shard,
            "offloaded_optimizer_states": states,
        }
    if strategy.zero_stage == 3:
        return _stage3_offload_terms(strategy, job, shard, states, frozen)
    pinned = [4 * shard, 4 * shard, width * shard]
    if strategy.gradient_accumulation_steps > 1 and strategy.zero_stage == 2:
        pinned.append(width * shard)
    return {
        "offloaded_master_weights": 4 * shard,
        "offloaded_optimizer_states": states,
        "offloaded_gradients": sum(pinned) - 4 * shard + width * parameters.largest_trainable,
        "pinned_rounding": sum(pinned_block_bytes(block) - block for block in pinned),
    }


def _stage3_offload_terms(strategy: Strategy, job: TrainingJob, shard: int, states: int, frozen: int) -> Terms:
    width, zero = job.compute_bytes, strategy.zero
    accumulation = 4 if zero.gradient_accumulation_fp32 else width
    pinned = [accumulation * shard]
    terms: Terms = {"offloaded_gradients": accumulation * shard}
    if strategy.offload_optimizer == "cpu":
        # fp32 gradients are pinned one sub-group at a time (stage3.py:1338).
        sub_group = min(shard, zero.sub_group_size)
        pinned += [4 * sub_group] * (shard // sub_group) + [4 * (shard % sub_group)]
        terms["offloaded_gradients"] += 4 * shard
        terms |= {"offloaded_master_weights": 4 * shard, "offloaded_optimizer_states": states}
    else:
        swap = zero.optimizer_buffer_count * 4 * min(shard, zero.sub_group_size)
        pinned.append(swap)
        terms["nvme_optimizer_buffers"] = swap
    if strategy.offload_param == "cpu":
        pinned.append(width * shard)
        terms["offloaded_parameters"] = width * shard + frozen
    elif strategy.offload_param == "nvme":
        swap = zero.parameter_buffer_count * zero.parameter_buffer_elements * width
        pinned.append(swap)
        terms["nvme_parameter_buffers"] = swap
    terms["pinned_rounding"] = sum(pinned_block_bytes(block) - block for block in pinned)
    return terms


def _nvme_bytes(strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters) -> int:
    """Swap files of one rank: master weights and states, their gradients, and with parameter offload the weights."""
    shard = parameters.shard(strategy)
    count = 0
    if strategy.offload_optimizer == "nvme":
        states = parameters.state_shard(optimizer_state_bytes(strategy, model, job, parameters.trainable), strategy)
        count += 4 * shard + states + 4 * shard
    if strategy.offload_param == "nvme":
        count += job.compute_bytes * shard + parameters.frozen_shard_bytes(strategy) - parameters.scale_bytes
    return count
