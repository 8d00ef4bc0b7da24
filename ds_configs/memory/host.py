"""Host memory and NVMe of a node, for loading and for training: what offload moves there, and the seconds it adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..specs.optimizers import OPTIMIZERS
from ..specs.second_models import SecondModel
from ..specs.terms import StepTerm, Term
from ..specs.units import pinned_block_bytes
from .layers import offloaded_inputs
from .model_states import loaded_unit, optimizer_state_bytes, zero3_weights
from .rank_parameters import Moment, RankParameters, Terms, at_moments, growing_gradients, rank_parameters, rank_shares
from .second_models import frozen_model_host_terms, terms_of_role

PROCESS_BYTES = 3 * 10**9
"""Resident memory of one rank's Python process with torch, DeepSpeed and its data workers (an assumption)."""

TERMS = (
    StepTerm(
        "host_optimizer",
        "CPU Adam: bytes / bandwidth of host memory, which the ranks of a node share",
        label="optimizer on the host",
    ),
    StepTerm("host_copies", "copies of gradients and parameters over PCIe", label="copies over PCIe"),
    StepTerm("nvme", "reads and writes of optimizer states on NVMe", label="NVMe"),
    Term("pinned_rounding", "torch rounds pinned blocks of up to 64 MiB up to powers of two", lives_on="host"),
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


def estimate_host_memory(layout: Layout, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> HostMemory:
    """Return host and NVMe bytes of one node, for loading or training, whichever needs more."""
    ranks = hardware.gpus_per_node
    processes: Terms = {"processes": ranks * PROCESS_BYTES}
    loading = loading_terms(layout, model, hardware, job)
    offloaded = offloaded_states(layout, model, job, rank_parameters(model, job, layout))
    training = processes | {name: ranks * count for name, count in offloaded.host.items()}
    nvme = offloaded.nvme_bytes
    for second in job.second_models:
        training |= second_model_host_terms(second, layout, hardware, job)[1]
        if second.trained:
            alone = job.without_second_models()
            nvme += offloaded_states(layout, second.spec, alone, rank_parameters(second.spec, alone, layout)).nvme_bytes
    count, size = offloaded_inputs(layout, model, job)
    if count:
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


def loading_terms(layout: Layout, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> Terms:
    """Return host bytes of one node while a checkpoint is loaded, which no batch or recomputation changes."""
    ranks, width = hardware.gpus_per_node, job.compute_bytes
    if job.method == "qlora":
        # Transformers reads and quantizes one tensor of the checkpoint after the other on the accelerator
        # (core_model_loading.py:1623). Every rank quantizes what an engine shards in host memory
        # (plugins/bitsandbytes.py, `on_host`).
        frozen = rank_parameters(model, job, layout).frozen_bytes if layout.shards_parameters else 0
        loaded = ranks * (width * model.largest_stored_tensor + frozen)
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
        loaded += second_model_host_terms(second, layout, hardware, job)[0]
    return {"processes": ranks * PROCESS_BYTES, "checkpoint_loading": loaded}


def second_model_host_terms(
    second: SecondModel, layout: Layout, hardware: HardwareSpec, job: TrainingJob
) -> tuple[int, Terms]:
    """Return the host bytes of a second model on a node: while it is loaded, and by name during training."""
    ranks = hardware.gpus_per_node
    if not second.trained:
        return frozen_model_host_terms(second, layout, job, ranks)
    alone = job.without_second_models()
    parameters = rank_parameters(second.spec, alone, layout)
    loading = loading_terms(layout, second.spec, hardware, alone)
    offloaded = terms_of_role(second.role, offloaded_states(layout, second.spec, alone, parameters).host)
    return loading["checkpoint_loading"], {name: ranks * count for name, count in offloaded.items()}


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


class OffloadedStates(NamedTuple):
    """Where offload keeps the model states of a rank."""

    accelerator: dict[Moment, Terms] | None
    """What stays on the accelerator; `None` if everything does, as `model_state_terms` says."""
    host: Terms
    nvme_bytes: int
    """Bytes of the swap files."""


def offloaded_states(layout: Layout, model: ModelSpec, job: TrainingJob, parameters: RankParameters) -> OffloadedStates:
    """Return what offload leaves on the accelerator of a rank, and what it keeps on the host and on NVMe.

    DeepSpeed was measured to hold 18/N to 22/N bytes per trainable element on the host. `offload_seconds` has the time
    of these bytes; `communication.py` has the copies of gradients that a reduction makes under offload.
    """
    if layout.offload_optimizer == "none":
        return OffloadedStates(None, {}, 0)
    width, shard, zero = job.compute_bytes, parameters.shard(layout), layout.zero
    states = parameters.state_shard(optimizer_state_bytes(layout, model, job, parameters.trainable), layout)
    frozen = parameters.frozen_shard_bytes(layout) - parameters.scale_bytes
    if layout.engine == "fsdp2":
        host = {"weights": 4 * shard + frozen, "gradients": 4 * shard, "optimizer_states": states}
        return OffloadedStates(at_moments({"weights": parameters.scale_bytes}, init=loaded_unit(model, job)), host, 0)
    if layout.zero_stage != 3:
        # Complete weights, and a buffer of the largest tensor from initialization on (stage_1_and_2.py:659).
        staging = width * parameters.largest_trainable
        always = {"weights": width * parameters.trainable + parameters.frozen_bytes, "offload_staging": staging}
        # Gradients that stage 1 accumulates are on the host when the step begins.
        accumulates = layout.zero_stage == 1 and layout.gradient_accumulation_steps > 1
        growing = growing_gradients(layout, parameters, width * parameters.trainable) if accumulates else {}
        pinned = [4 * shard, 4 * shard, width * shard]
        if layout.gradient_accumulation_steps > 1 and layout.zero_stage == 2:
            pinned.append(width * shard)
        host = {
            "master_weights": 4 * shard,
            "optimizer_states": states,
            "gradients": sum(pinned) - 4 * shard + staging,
            "pinned_rounding": sum(pinned_block_bytes(block) - block for block in pinned),
        }
        return OffloadedStates(at_moments(always, **growing), host, 0)
    always, nvme = zero3_weights(layout, job, parameters), 0
    host, pinned = {"gradients": width * shard}, [width * shard]
    if layout.offload_optimizer == "cpu":
        # fp32 gradients are pinned per sub-group (stage3.py:1338).
        sub_group = min(shard, zero.sub_group_size)
        pinned += [4 * sub_group] * (shard // sub_group) + [4 * (shard % sub_group)]
        host["gradients"] += 4 * shard
        host |= {"master_weights": 4 * shard, "optimizer_states": states}
    else:
        host["nvme_optimizer_buffers"] = zero.optimizer_buffer_count * 4 * min(shard, zero.sub_group_size)
        pinned.append(host["nvme_optimizer_buffers"])
        nvme += SWAPPED_BYTES * shard + states
    if layout.offload_param != "none":
        always["weights"] = parameters.scale_bytes
    if layout.offload_param == "cpu":
        pinned.append(width * shard)
        host["weights"] = width * shard + frozen
    elif layout.offload_param == "nvme":
        host["nvme_parameter_buffers"] = zero.parameter_buffer_count * zero.parameter_buffer_elements * width
        pinned.append(host["nvme_parameter_buffers"])
        nvme += width * shard + frozen
    host["pinned_rounding"] = sum(pinned_block_bytes(block) - block for block in pinned)
    return OffloadedStates(at_moments(always, init=loaded_unit(model, job)), host, nvme)


SWAPPED_BYTES = 8
"""Bytes of an element on NVMe beside its optimizer states: weight and gradient in fp32."""

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


def offload_seconds(
    layout: Layout,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    parameters: float,
    frozen_bytes: float,
    passes: int,
    host_link_bytes_per_s: float,
) -> dict[str, float]:
    """Return the seconds of what `offloaded_states` keeps on the host, by term, for one optimizer step of a rank.

    Gradients are copied during the backward pass, updated weights after the step, and offloaded parameters before each
    of `passes` through the layers. FSDP2 copies weights before both passes of each micro-batch and gradients after it,
    in the type in which it keeps them, and adds the gradients on the host (torch 2.13.0, `FSDPParam.all_gather_inputs`
    and `foreach_reduce`).

    `parameters` and `frozen_bytes` are those of the rank's shard; the link's rate is that of one direction.
    """
    if layout.offload_optimizer == "none":
        return {}
    ranks = min(layout.world_size, hardware.gpus_per_node)
    rate, nvme_rate = min(HOST_MEMORY_BYTES_PER_S, NODE_MEMORY_BYTES_PER_S / ranks), NVME_BYTES_PER_S / ranks
    states = OPTIMIZERS[job.optimizer].state_bytes_per_parameter
    if layout.engine == "fsdp2":
        width, micro_batches = job.trained_weight_bytes, layout.gradient_accumulation_steps
        copies = micro_batches * (3 * width * parameters + 2 * frozen_bytes) / host_link_bytes_per_s
        # Moments, which have the type of the weights, are read and written.
        moved = 3 * width * micro_batches + 2 * states * width / 4
    else:
        weights = parameters * job.compute_bytes
        copies = 2 * weights / host_link_bytes_per_s
        if layout.offload_param != "none":
            slowest = min(host_link_bytes_per_s, nvme_rate) if layout.offload_param == "nvme" else host_link_bytes_per_s
            copies += passes * (weights + frozen_bytes) / slowest
        moved = HOST_ADAM_BYTES + 2 * (states - 8)
    terms = {"host_optimizer": parameters * moved / rate, "host_copies": copies}
    if layout.offload_optimizer == "nvme":
        # Everything is read and written.
        terms["nvme"] = 2 * parameters * (SWAPPED_BYTES + states) / nvme_rate
    return terms
