"""Time that one micro-batch spends on collectives, as a lower bound from volumes and link bandwidths.

Volumes in parameters per step follow ZeRO (arXiv 1910.02054, section 7): 2 for DDP and ZeRO 0-2, 3 for ZeRO-3 and
FSDP2. A collective over several nodes runs as fast as the slower of the accelerator's link and the sum of its node's
network adapters.
"""

from __future__ import annotations

from ..memory.rank_parameters import RankParameters
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.strategy import Strategy


def communication_seconds(
    strategy: Strategy, hardware: HardwareSpec, job: TrainingJob, parameters: RankParameters
) -> float:
    """Return the seconds of collectives for one micro-batch with its optimizer step, nothing overlapped.

    Elements count in compute precision for every engine, so that equal volumes compare equal.
    """
    width = job.compute_bytes
    trainable = parameters.trainable * width
    everything = trainable + parameters.frozen * width
    gather = _fraction(strategy.shard_size)
    within, across = hardware.link_bytes_per_s, _bandwidth(strategy.shard_size, hardware)
    if strategy.engine == "single" or strategy.world_size == 1:
        return 0.0
    if strategy.engine == "fsdp2":
        seconds = gather * (2 * everything + trainable) / across
        if strategy.dp_replicate > 1:
            shard = trainable / strategy.dp_shard
            seconds += 2 * _fraction(strategy.dp_replicate) * shard / hardware.network_bytes_per_s
        return seconds
    if strategy.zero_stage == 3:
        backward = across
        if strategy.zero.hpz_partition_size > 1:
            backward = within
        return gather * ((everything + trainable) / across + everything / backward)
    ranks = strategy.world_size
    return 2 * _fraction(ranks) * trainable / _bandwidth(ranks, hardware)


def _fraction(ranks: int) -> float:
    return (ranks - 1) / ranks


def _bandwidth(ranks: int, hardware: HardwareSpec) -> float:
    if ranks <= hardware.gpus_per_node:
        return hardware.link_bytes_per_s
    return min(hardware.link_bytes_per_s, hardware.network_bytes_per_s * hardware.gpus_per_node)
