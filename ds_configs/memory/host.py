"""Host memory and NVMe of a node, for loading and for training, and the seconds that offload adds.

`model_states.py` omits from the accelerator what offload moves here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..specs.optimizers import OPTIMIZERS
from ..specs.second_models import SecondModel
from ..specs.tasks import in_sequences
from ..specs.terms import StepTerm, Term
from ..specs.units import pinned_block_bytes
from .activations import activation_mode, cached_activations
from .layers import checkpoint_bytes
from .model_states import optimizer_state_bytes
from .moments import Terms
from .rank_parameters import RankParameters, rank_parameters, rank_shares
from .second_models import frozen_model_host_terms, frozen_model_loading_bytes, terms_of_role

PROCESS_BYTES = 3 * 10**9
"""Resident memory of one rank's Python process with torch, DeepSpeed and its data workers (an assumption)."""

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
    Term(
        "processes",
        f"resident memory of the Python processes of a node: {PROCESS_BYTES / 1e9:g} GB each",
        lives_on="host",
    ),
    Term(
        "checkpoint_loading",
        "host memory of from_pretrained on the first node; FSDP2 and ZeRO-3 read weights on one rank",
        lives_on="host",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes that one node needs outside its accelerators."""

    peak_bytes_per_node: int
    """Largest host memory of one node during loading and training."""
    capacity_bytes_per_node: int
    terms: Terms
    nvme_bytes_per_node: int


def estimate_host_memory(
    layout: Layout,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    parameters: RankParameters,
) -> HostMemory:
    """Return host and NVMe bytes of one node, for loading or training, whichever needs more."""
    ranks = hardware.gpus_per_node
    processes: Terms = {"processes": ranks * PROCESS_BYTES}
    loading = loading_terms(layout, model, hardware, job, parameters)
    training = processes | {
        name: ranks * count for name, count in offload_terms(layout, model, job, parameters).items()
    }
    nvme = nvme_bytes(layout, model, job, parameters)
    for second in job.second_models:
        training |= second_model_host_terms(second, layout, hardware, job)[1]
        if second.trained:
            alone = job.without_second_models()
            nvme += nvme_bytes(layout, second.spec, alone, rank_parameters(second.spec, alone, layout))
    if count := layout.offloaded_layers(model.dimensions.num_layers):
        sequences = in_sequences(layout, job.task).micro_batch_size
        traced = cached_activations(model, job)(sequences, activation_mode(layout, job))
        size = checkpoint_bytes(layout, traced)
        training["offloaded_checkpoints"] = ranks * count * size
        rounding = ranks * count * (pinned_block_bytes(size) - size)
        training["pinned_rounding"] = training.get("pinned_rounding", 0) + rounding
    terms = max(loading, training, key=lambda candidate: sum(candidate.values()))
    return HostMemory(
        peak_bytes_per_node=sum(terms.values()),
        capacity_bytes_per_node=hardware.host_bytes_per_node,
        terms={name: count for name, count in terms.items() if count},
        nvme_bytes_per_node=ranks * nvme,
    )


def loading_terms(
    layout: Layout, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob, parameters: RankParameters
) -> Terms:
    """Return host bytes of one node while a checkpoint is loaded, which no batch or recomputation changes."""
    ranks, width = hardware.gpus_per_node, job.compute_bytes
    if job.method == "qlora":
        # Transformers reads and quantizes one tensor of the checkpoint after the other on the accelerator
        # (core_model_loading.py:1623). Every rank quantizes what an engine shards in host memory
        # (plugins/bitsandbytes.py, `on_host`).
        shards = layout.engine == "fsdp2" or layout.zero_stage == 3
        loaded = ranks * (width * model.largest_stored_tensor + (parameters.frozen_bytes if shards else 0))
    elif layout.zero_stage == 3:
        # ZeRO-3 copies from memory-mapped files module by module (transformers/modeling_utils.py:4397), except for
        # experts that are fused during loading, which the first rank materializes (loading.py).
        loaded = width * model.parameter_count if model.weight_conversion else 0
    elif layout.pp > 1:
        # A rank reads its stage layer by layer and keeps its tensor-parallel part of each.
        largest = max(share.model.parameter_count for share in rank_shares(layout, model, job))
        loaded = ranks * width * (largest + (model.layer_parameter_count if layout.tp > 1 else 0))
    elif layout.engine == "fsdp2" and job.precision == "fp8":
        # torchao's layers are made before FSDP2 shards them, so that every rank reads all weights.
        loaded = ranks * 4 * model.parameter_count
    elif layout.engine == "fsdp2":
        # Only the first rank holds the weights. It converts a tensor to fp32 when it distributes it
        # (plugins/transformers/loading.py).
        converted = 4 * model.largest_parameter if job.method == "full" and width < 4 else 0
        loaded = width * model.parameter_count + converted
    else:
        fp32_weights = job.method == "full" and layout.engine != "deepspeed"
        loaded = ranks * (4 if fp32_weights else width) * model.parameter_count
    for second in job.second_models:
        loaded += second_model_host_terms(second, layout, hardware, job)[0]["checkpoint_loading"]
    return {"processes": ranks * PROCESS_BYTES, "checkpoint_loading": loaded}


def second_model_host_terms(
    second: SecondModel, layout: Layout, hardware: HardwareSpec, job: TrainingJob
) -> tuple[Terms, Terms]:
    """Return the named host bytes of a second model on a node, while it is loaded and during training."""
    ranks = hardware.gpus_per_node
    if not second.trained:
        loading = {"checkpoint_loading": frozen_model_loading_bytes(second, layout, job, ranks)}
        return loading, frozen_model_host_terms(second, layout, job, ranks)
    alone = job.without_second_models()
    parameters = rank_parameters(second.spec, alone, layout)
    loading = loading_terms(layout, second.spec, hardware, alone, parameters)
    offloaded = terms_of_role(second.role, offload_terms(layout, second.spec, alone, parameters))
    training = {name: ranks * count for name, count in offloaded.items()}
    return {"checkpoint_loading": loading["checkpoint_loading"]}, training


def stock_loading_bytes(layout: Layout, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> int:
    """Return the host memory of one node while FSDP2 or ZeRO-3 loads without Shardwright's patches.

    Every rank holds the complete model, which Accelerate 1.15.0 converts to fp32 before FSDP2 shards it
    (accelerate/utils/fsdp_utils.py:813). Under ZeRO-3 every rank fuses experts before Transformers 5.24.0.
    """
    fuses = layout.zero_stage == 3 and model.weight_conversion
    if job.method == "qlora" or not (fuses or layout.engine == "fsdp2"):
        return 0
    width = 4 if job.method == "full" and layout.engine == "fsdp2" else job.compute_bytes
    return hardware.gpus_per_node * (PROCESS_BYTES + width * model.parameter_count)


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
