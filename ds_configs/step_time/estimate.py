"""`estimate_step_time`: seconds of a step under a layout, term by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Literal, NamedTuple

from ..memory.activations import has_fused_loss, mlp_tiles
from ..memory.communication import Gathered, reduced_buckets, zero3_gathers
from ..memory.estimate import MemoryEstimate, declared_terms
from ..memory.host import offload_seconds
from ..memory.model_states import is_stepped_by_muon
from ..memory.rank_parameters import (
    NF4_BYTES,
    engine_parameters,
    expert_parallel_share,
    pipeline_stages,
    shards,
    trained_parameters,
)
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob, without_kernels
from ..specs.layout import Layout, PipelineStage, ZeroOptions, contiguous_stages
from ..specs.model import ModelSpec, ParameterShape, lora_parameter_count, targeted_linears
from ..specs.optimizers import OPTIMIZERS
from ..specs.tasks import TASKS, in_sequences
from ..specs.terms import StepTerm, Term
from . import communication, generation
from .communication import Calls, DataTraffic, data_traffic, exchanges, transfer_seconds
from .generation import GENERATION_ERROR, generation_seconds
from .model_work import (
    Pass,
    StepInputs,
    before_attention,
    device_of,
    head_passes,
    layer_passes,
    model_work,
    product_seconds,
    tower_passes,
    with_host,
)
from .rates import GpuConstants, Software, constants_of, gather_seconds, group_of, software_of

COMPUTATION = (
    StepTerm(
        "matrix_products",
        "products with the layers' weights, forward and backward: FLOPs / (peak * efficiency), which is lower for "
        "small products",
    ),
    StepTerm(
        "attention", "scores, softmax and values of all layers; fused kernels skip masked scores of causal models"
    ),
    StepTerm(
        "memory_operations",
        "norms, residuals, activation functions, rotary embeddings and adding gradients: bytes / memory bandwidth",
        label="memory-bound operations",
    ),
    StepTerm("recomputation", "the second forward pass of recomputed layers"),
    StepTerm(
        "mlp_recomputation",
        "tiled MLPs compute each tile again before its backward pass and add its gradients",
        label="recomputation of MLP tiles",
    ),
    StepTerm("head_and_loss", "embedding, final norm, output head and loss, forward and backward"),
    StepTerm(
        "vision_tower",
        "vision tower and projector: products with the patches of all images and attention inside each image, forward, "
        "and backward for what is trained",
    ),
    StepTerm(
        "mismatched_forward",
        "the trained model's forward pass over prompts with answers of other rows, for the KL term of KTO",
        label="forward pass for the KL term",
    ),
    StepTerm(
        "kernel_launches",
        "time that the device waits while the host launches kernels and runs ZeRO-3 hooks, and host work per micro-"
        "batch",
    ),
)
"""Terms that can hide communication, together with `tensor_parallel`."""

_OTHERS = (
    StepTerm(
        "pipeline_bubble",
        "idle stages: before their first and after their last micro-batch, and while they wait for the slowest stage",
        label="idle stages",
    ),
    StepTerm(
        "overlap_slowdown",
        "slowdown of computation by concurrent communication, which uses bandwidth and processors",
        label="slowdown by concurrent communication",
    ),
    StepTerm("optimizer", "the optimizer step: bytes of gradients, states and weights / memory bandwidth"),
    StepTerm(
        "checkpoint_copies",
        "copies of offloaded layer inputs over PCIe that computation does not hide",
        label="copies of layer inputs over PCIe",
    ),
    StepTerm("step_overhead", "data loader, scheduler and logging, once per step"),
)

TERMS: Mapping[str, Term] = {
    term.name: term for term in (*declared_terms(), *COMPUTATION, *communication.TERMS, *generation.TERMS, *_OTHERS)
}
"""Every term of memory and time, by name."""


def valued_terms(memory: MemoryEstimate, time: StepTime) -> tuple[Term, ...]:
    """Return the terms of a layout: bytes on an accelerator or a host, or seconds of a step; the largest first."""
    valued = (
        *(replace(_declared(name), lives_on="accelerator", bytes=count) for name, count in memory.gpu.terms.items()),
        *(replace(_declared(name), lives_on="host", bytes=count) for name, count in memory.host.terms.items()),
        *(replace(_declared(name), lives_on="step", seconds=seconds) for name, seconds in time.terms.items()),
    )
    return tuple(sorted(valued, key=lambda term: -(term.bytes or term.seconds or 0)))


def _declared(name: str) -> Term:
    return TERMS.get(name, Term(name, "unknown to this version"))


def term_title(term: str) -> str:
    """Return the name of a term in tables.

    >>> term_title("pipeline_bubble"), term_title("head_and_loss")
    ('idle stages', 'head and loss')
    """
    return _declared(term).title


def stage_seconds(
    step: StepInputs, stage: PipelineStage, parameters: StageParameters, traffic: DataTraffic
) -> dict[str, float]:
    """Return the seconds of one micro-batch by term, with only the communication that computation does not hide."""
    layout, job, software, layers = step.layout, step.job, step.software, stage.num_layers
    full, element = job.method == "full", job.compute_bytes
    forward, backward = layer_passes_of(step)
    if not full:
        forward, backward = (
            replace(one, memory=one.memory + more.memory, kernels=one.kernels + more.kernels)
            for one, more in zip((forward, backward), _adapter_passes(step), strict=True)
        )
    if layout.cp > 1:
        # A ring step converts its output to fp32 (6 bytes per element), and three operations blend it with that of
        # earlier ones (32). In the backward pass it adds its gradients (10), and copies those of keys and values to
        # send them (8) (torch 2.13.0, `_context_parallel/_attention.py`: `_templated_ring_attention_backward`).
        rate, sizes = step.device.memory_bytes_per_s / step.tokens, step.work.share
        merged = 38 * (layout.cp - 1) * sizes.query_size
        added = layout.cp * (10 * sizes.query_size + 18 * 2 * sizes.key_value_size)
        forward = replace(forward, attention=forward.attention + merged / rate)
        backward = replace(backward, attention=backward.attention + added / rate)
    head, head_back = Pass(), Pass()
    if stage.has_head:
        chunked = job.loss == "chunked" or TASKS[job.task].head == "fused"
        head, head_back = head_passes(step.work, step.tokens, step.device, software, chunked, full)
    recomputed = layout.recomputed_layers(layers)
    again = layers * forward.attention if software.selective_recomputation else recomputed * forward.device
    terms = {
        "matrix_products": layers * (forward.products + backward.products),
        "attention": layers * (forward.attention + backward.attention),
        "memory_operations": layers * (forward.memory + backward.memory) + _weight_traffic(step, parameters),
        "recomputation": again,
        "head_and_loss": head.device + head_back.device,
    }
    tower, tower_back = tower_passes(step) if step.model.reads_images and stage.has_embedding else (Pass(), Pass())
    if tower.device:
        again = layout.gradient_checkpointing and job.vision_checkpointing == "auto" and tower_back.attention > 0
        terms["vision_tower"] = tower.device * (2 if again else 1) + tower_back.device
    # Host time to launch the layers' kernels and run their hooks.
    kernels = layers * (forward.kernels + backward.kernels) + recomputed * forward.kernels
    kernels += tower.kernels + tower_back.kernels
    host = kernels * step.constants.launch_seconds
    hooks = 0.0
    if layout.engine == "fsdp2":
        tensors = step.work.layer_tensors * layers
        hooks = (layers + 1) * step.constants.fsdp2_unit_seconds + tensors * step.constants.fsdp2_tensor_seconds
        # Forward and backward pass.
        host += 2 * hooks
    if layout.zero_stage == 3:
        parts: tuple[_Parameters, ...] = ("all",) if layout.ep == 1 else ("dense", "experts")
        for calls in (_sharded_calls(step, stage, part) for part in parts):
            for gathered in (calls.forward, calls.backward):
                host += gathered.modules * step.constants.zero3_module_seconds
                host += gathered.tensors * step.constants.zero3_gather_seconds
            host += calls.gradients * step.constants.zero3_gradient_seconds
            host += calls.reductions * step.constants.zero3_reduction_seconds
    if layout.tiled_mlp:
        terms["mlp_recomputation"] = layers * _mlp_seconds(step)
    if job.loss == "chunked" and not has_fused_loss(step.model, layout, job, gpu=step.hardware.gpu != "CPU"):
        # Tiles compute the logits again in the backward pass.
        terms["head_and_loss"] += head.device
    # Device time of the forward passes, and the gathers that they hide.
    ahead, gathers = layers * forward.device + head.device + tower.device, traffic.gathers_forward
    mismatched = TASKS[job.task].mismatched_passes
    if mismatched:
        terms["mismatched_forward"] = mismatched * ahead
        ahead, gathers = (1 + mismatched) * ahead, (1 + mismatched) * gathers
    for second in job.second_models if stage.has_head else ():
        placement, spec = second.planned_placement, second.spec
        if placement in ("cached", "layout"):
            continue
        work, is_quantized = model_work(spec), placement == "quantized"
        layer, _ = layer_passes(
            work, step.tokens, job.seq_len_tokens, step.device, software, element, False, is_quantized
        )
        its_head, _ = head_passes(work, step.tokens, step.device, software, False, False)
        seconds = work.whole.num_layers * layer.device + its_head.device
        if placement == "offloaded":
            # Its weights are copied from the host.
            seconds += spec.parameter_count * element / step.constants.host_link_bytes_per_s
        passes = 1 + mismatched
        terms[f"{second.role}_forward"] = passes * seconds
        ahead += passes * seconds
        if placement == "sharded":
            group = group_of(step.hardware, step.constants, ranks=layout.world_size)
            gathers += passes * gather_seconds(group, spec.parameter_count * element, calls=work.whole.num_layers + 1)
        elif placement == "shared":
            gathers += passes * traffic.gathers_forward
    inside, waiting = exchanges(step, layers=layers, recomputed=recomputed, with_head=stage.has_head)
    slowed = 0.0
    if layout.tp > 1:
        overlapped = software.overlapped_tensor_parallel
        shared = overlapped * inside["tensor_parallel"]
        rest, slowed = exposed(step, shared, overlapped * terms["matrix_products"])
        inside["tensor_parallel"] += rest - shared
        waiting *= 1 - overlapped
    terms |= inside
    device = sum(terms.values())
    # The head's products are few and long, so they do not hide slow launches elsewhere.
    head_seconds, products = terms["head_and_loss"], head.products + head_back.products
    launches = (head.kernels + head_back.kernels) * step.constants.launch_seconds
    busy = with_host(device - head_seconds, host, step.constants) + products
    busy += with_host(head_seconds - products, launches, step.constants)
    terms["kernel_launches"] = busy - device + software.micro_batch_seconds
    terms["waiting_for_ranks"] = waiting
    if layout.pp > 1 and not software.overlaps_transfers:
        terms["pipeline_transfers"] = transfer_seconds(step)
    ahead *= busy / device if device else 1.0
    hiding = ahead
    if software.waits_in_layers and layout.micro_batch_size == 1:
        # When attention starts, the host launches the rest of the layer and runs hooks. Then the next gather starts.
        start = before_attention(step)
        launches = (forward.kernels - start.kernels) * step.constants.launch_seconds
        hiding = max(0.0, layers * (forward.device - start.device - launches) - hooks)
    # Nothing hides the gather before the first layer and the reduction after the last one.
    edge = 1 / (layers + 1)
    in_forward, slowed_forward = exposed(step, (1 - edge) * gathers, hiding)
    alone = traffic.reductions_each * (edge if overlaps_reductions(step) else 1.0)
    in_backward, slowed_backward = exposed(
        step, traffic.gathers_backward + traffic.reductions_each - alone, busy - ahead
    )
    alone += edge * gathers
    terms["parameter_gathers"] = in_forward + in_backward + alone
    terms["overlap_slowdown"] = slowed + slowed_forward + slowed_backward
    # Copies of layer inputs to the host and back that these layers do not hide. Copy engines do not slow down
    # computation, but the copies of Transformers run on its stream (5.24.0, `activation_checkpointing_enable`).
    offloaded = layout.offloaded_layers(layers)
    width = 4 if layout.engine in ("single", "ddp") else element
    copied = offloaded * step.tokens * step.work.whole.hidden_size * width / step.constants.host_link_bytes_per_s
    terms["checkpoint_copies"] = 2 * copied
    if job.offload_activations != "transformers":
        share = offloaded / max(1, layers)
        terms["checkpoint_copies"] = sum(max(0.0, copied - share * seconds) for seconds in (ahead, busy - ahead))
    return terms


def _mlp_seconds(step: StepInputs) -> float:
    """Return the seconds that a layer's tiled MLP adds: each tile again before its backward pass, and its gradients.

    Each tile's weight gradients are added to those of earlier tiles: two reads and a write.
    """
    model, device, job = step.model, step.device, step.job
    tiles = mlp_tiles(model, ceil(step.job.seq_len_tokens / (step.layout.sp * step.layout.cp)))
    layers, routed = max(1, model.dimensions.num_layers), model.dimensions.experts_per_token
    products = weights = 0.0
    for parameter in model.parameters:
        if not parameter.in_layer or parameter.group != "mlp" or len(parameter.shape) < 2:
            continue
        *experts, out, within = parameter.shape
        count = parameter.count / layers * (experts[0] if experts else 1)
        tokens = step.tokens * (routed / experts[0] if experts else 1) / tiles
        products += tiles * count * product_seconds(device, tokens, out, within)
        weights += count * out * within
    gradients = 3 * job.compute_bytes * weights * (tiles - 1) if job.method == "full" else 0.0
    inner = step.software.inner_bytes_forward * step.tokens * step.work.inner_size * job.compute_bytes / 2
    return products + (gradients + inner) / device.memory_bytes_per_s


def layer_passes_of(step: StepInputs) -> tuple[Pass, Pass]:
    job = step.job
    full, quantized = job.method == "full", job.method == "qlora"
    return layer_passes(
        step.work, step.tokens, job.seq_len_tokens, step.device, step.software, job.compute_bytes, full, quantized
    )


def overlaps_reductions(step: StepInputs) -> bool:
    layout = step.layout
    return step.software.overlaps_reduction and (layout.engine != "deepspeed" or layout.zero.overlap_comm)


def exposed(step: StepInputs, communication: float, computation: float) -> tuple[float, float]:
    """Return the communication that concurrent computation does not hide, and the slowdown of that computation."""
    if communication <= 0:
        return 0.0, 0.0
    hidden = min(communication, computation)
    slowdown = step.constants.overlap_slowdown
    if step.work.expert_products:
        passes = layer_passes_of(step)
        more = (step.constants.grouped_slowdown - 1) * sum(one.grouped for one in passes)
        slowdown += more / (more + sum(one.device for one in passes))
    return communication - hidden, slowdown * hidden


class StageParameters(NamedTuple):
    """Parameters of a rank's stage, before sharding."""

    dense: float
    """Trainable elements outside experts."""
    experts: float
    """Trainable elements of experts."""
    frozen_bytes: float
    stepped: float
    """Trainable elements that the optimizer updates, after sharding."""


def stage_parameters(step: StepInputs, stage: PipelineStage) -> StageParameters:
    work, job, model, layout = step.work, step.job, step.model, step.layout
    outside = float(work.outside_parameters)
    if layout.pp > 1:
        embedding = float(model.embedding_parameters)
        if step.software.vocabulary_parallel:
            embedding /= layout.tp
        outside = embedding * (int(stage.has_embedding) + int(stage.has_head))
    dense = stage.num_layers * (work.layer_parameters - work.expert_parameters) + outside
    experts, frozen_bytes = stage.num_layers * work.expert_parameters, 0.0
    if job.method == "full" and work.frozen_parameters:
        dense, frozen_bytes = dense - work.frozen_parameters, float(work.frozen_parameters * job.compute_bytes)
    elif job.method != "full":
        # bitsandbytes leaves fused experts in 16 bit.
        frozen_bytes = dense * (NF4_BYTES if job.method == "qlora" else job.compute_bytes) + experts * job.compute_bytes
        whole = sum(parameter.total for parameter in model.parameters if parameter.whole)
        frozen_bytes -= whole * job.compute_bytes
        dense, experts = _adapters(model, job) / (layout.tp * layout.pp) + whole, 0.0
    stepped = dense + experts
    if layout.engine not in ("ddp", "single") and layout.zero_stage != 0:
        of_dense, of_experts = shards(layout, dense, experts)
        if ranks := step.software.optimizer_ranks:
            of_dense = dense / ranks
        stepped = of_dense + of_experts
    return StageParameters(dense, experts, frozen_bytes, stepped)


@lru_cache(maxsize=64)
def _adapters(model: ModelSpec, job: TrainingJob) -> int:
    return lora_parameter_count(model, rank=job.lora_rank, targets=job.lora_targets, variant=job.lora_variant)


def stage_traffic(step: StepInputs, stage: PipelineStage, parameters: StageParameters) -> DataTraffic:
    layout = step.layout
    ranks = layout.data_parallel_size * layout.sp * layout.cp
    separate = layout.ep > 1 and parameters.experts
    dense = data_traffic(
        step,
        trainable=parameters.dense if separate else parameters.dense + parameters.experts,
        frozen_bytes=parameters.frozen_bytes,
        calls=_sharded_calls(step, stage, "dense" if separate else "all"),
        ranks=ranks,
        stride=layout.tp,
    )
    if not separate:
        return dense
    experts = data_traffic(
        step,
        trainable=parameters.experts,
        frozen_bytes=0.0,
        calls=_sharded_calls(step, stage, "experts"),
        ranks=max(1, ranks // layout.ep),
        stride=layout.tp * layout.ep,
    )
    return DataTraffic(*map(sum, zip(dense, experts, strict=True)))


_Parameters = Literal["all", "dense", "experts"]


def _sharded_calls(step: StepInputs, stage: PipelineStage, parameters: _Parameters) -> Calls:
    """Return the collectives of these parameters, if the engine shards them."""
    layout, layers = step.layout, stage.num_layers
    if layout.zero_stage == 3:
        recomputed = layout.recomputed_layers(layers) / max(1, layers)
        return _zero3_calls(step.model, step.job, layout.zero, layout.ep, parameters, recomputed)
    # FSDP2 has a unit for each layer and one around them.
    unit = Gathered(share=1.0, calls=layers + 1)
    return Calls(forward=unit, backward=unit, reductions=layers + 1)


@lru_cache(maxsize=1024)
def _zero3_calls(
    model: ModelSpec, job: TrainingJob, zero: ZeroOptions, ep: int, parameters: _Parameters, recomputed: float
) -> Calls:
    gathered = engine_parameters(model, job)
    if ep > 1:
        gathered = expert_parallel_share(gathered, ep)
        kept = tuple(p for p in gathered.parameters if (p.kind == "experts") == (parameters == "experts"))
        gathered = replace(gathered, parameters=kept)
    forward, none = zero3_gathers(gathered, zero, recomputes=False)
    _, every = zero3_gathers(gathered, zero, recomputes=True)
    backward = Gathered(
        share=none.share + (every.share - none.share) * recomputed,
        calls=none.calls + (every.calls - none.calls) * recomputed,
        tensors=none.tensors + (every.tensors - none.tensors) * recomputed,
        modules=none.modules + (every.modules - none.modules) * recomputed,
    )
    trained: Sequence[ParameterShape] = gathered.parameters
    if job.method == "full":
        reductions = float(reduced_buckets(gathered.trained_part, zero.reduce_bucket_size))
    else:
        trained = trained_parameters(model, job).parameters
        # Gradients of adapters are small, so that they fill a bucket.
        reductions = max(1.0, sum(parameter.total for parameter in trained) / zero.reduce_bucket_size)
    gradients = sum(parameter.count for parameter in trained)
    return Calls(forward=forward, backward=backward, reductions=reductions, gradients=gradients)


def _adapter_passes(step: StepInputs) -> tuple[Pass, Pass]:
    """Return what LoRA adds to an average layer's passes, beside its small products.

    PEFT 0.21 (tuners/lora/layer.py, `Linear.forward`) scales the update and adds it to the output: 10 bytes per output
    element, 4 in the backward pass, which adds two gradients of the input (6 bytes). Adapters in fp32 also cast the
    input to fp32, and autocast casts it back: 12 bytes in either pass.
    """
    job, constants = step.job, step.constants
    adapted = targeted_linears(step.model, job.lora_targets)
    layers = max(1, step.model.dimensions.num_layers)
    share = step.tokens * job.compute_bytes / (2 * layers * step.layout.tp)
    outputs = share * sum(weight.count * weight.shape[0] for weight in adapted)
    inputs = share * sum(weight.count * weight.shape[1] for weight in adapted)
    casts = 12 if step.layout.engine != "deepspeed" and job.compute_bytes == 2 else 0
    count = sum(weight.count for weight in adapted) / layers

    def added(traffic: float, kernels: float) -> Pass:
        seconds = traffic / step.device.memory_bytes_per_s + kernels * constants.kernel_seconds
        return Pass(memory=seconds, kernels=kernels)

    return added(10 * outputs + casts * inputs, 6 * count), added(4 * outputs + (6 + casts) * inputs, 10 * count)


_CASTING_COPY = 1.2
"""Time of FSDP2's copy of gradients with a cast to fp32, relative to one of as many bytes without: 278 and 500 billion
elements per second on an H100, of 6 and 4 bytes (pytorch pull request 120678)."""


def _weight_traffic(step: StepInputs, parameters: StageParameters) -> float:
    """Return the seconds in which a micro-batch's gradients are added, and autocast casts weights and gradients.

    FSDP2 copies gathered parameters in both passes.

    Adding a gradient takes two reads and a write. If gradients are reduced in every micro-batch, they are copied into a
    bucket of the reduction's type instead, and only a partition is added. Autocast reads fp32 weights and writes 16-bit
    ones in the forward pass, and the reverse for gradients.
    """
    layout, job = step.layout, step.job
    trainable = parameters.dense + parameters.experts
    autocast = layout.engine in ("ddp", "single") and job.compute_bytes == 2
    gradient_bytes = step.software.gradient_bytes
    if gradient_bytes is None:
        reduces_each = layout.engine == "fsdp2" or (layout.zero_stage or 0) >= 2
        gradient_bytes = 3.0 * job.compute_bytes
        if reduces_each:
            reduced_bytes = step.software.reduction_bytes or job.compute_bytes
            gradient_bytes = float(job.compute_bytes + reduced_bytes)
            if step.software.copies_gathered and layout.engine == "fsdp2" and reduced_bytes > job.compute_bytes:
                gradient_bytes *= _CASTING_COPY
    traffic = (24.0 if autocast else gradient_bytes) * trainable
    if step.software.copies_gathered and layout.engine == "fsdp2" and layout.dp_shard > 1:
        # Read and written, in the forward and in the backward pass.
        traffic += 4 * (trainable * job.compute_bytes + parameters.frozen_bytes)
    return traffic / step.device.memory_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted time of one optimizer step."""

    seconds: float
    low_seconds: float
    high_seconds: float
    tokens_per_second: float
    terms: dict[str, float]
    learned_scale: float = 1.0
    """Factor from measured runs that `seconds` contains."""
    measured_runs: int = 0
    """Runs that this factor comes from."""


def estimate_step_time(
    layout: Layout,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    software: Software | None = None,
    constants: GpuConstants | None = None,
) -> StepTime:
    """Return the time of one optimizer step of a layout, including gradient accumulation, or raise `UsageError`."""
    constants = constants or constants_of(hardware.gpu)
    slowest_seconds = 0.0
    if software is None and (job.torch_compile or job.use_liger_kernel or job.precision == "fp8"):
        # No run of these layers corrects the prediction, so that the interval reaches to eager ones.
        eager = estimate_step_time(layout, model, hardware, without_kernels(job), constants=constants)
        slowest_seconds = eager.high_seconds
    software = software or software_of(job, attention=model.attention)
    shared, whole = layout.sp * layout.cp, layout.pp == 1
    layout = in_sequences(layout, job.task)
    step = StepInputs(
        layout=layout,
        model=model,
        hardware=hardware,
        job=job,
        software=software,
        constants=constants,
        device=device_of(hardware, job, software, constants),
        work=model_work(
            model, layout.tp, layout.ep, divides_head=whole, vocabulary_parallel=software.vocabulary_parallel
        ),
        tokens=layout.micro_batch_size * job.seq_len_tokens / shared,
    )
    layers = model.dimensions.num_layers
    stages: tuple[PipelineStage, ...]
    if layout.pp == 1:
        stages = (PipelineStage(index=0, first_layer=0, end_layer=layers, has_embedding=True, has_head=True),)
    elif software.even_stages:
        stages = contiguous_stages([(index + 1) * layers // layout.pp for index in range(layout.pp)])
    else:
        stages = pipeline_stages(model, job, layout.pp, tensor_parallel_size=layout.tp)
    # Middle stages with equally many layers cost the same.
    of_kind = {_kind(stage): stage for stage in stages}
    parameters = {kind: stage_parameters(step, stage) for kind, stage in of_kind.items()}
    traffic = {kind: stage_traffic(step, stage, parameters[kind]) for kind, stage in of_kind.items()}
    kinds = {kind: stage_seconds(step, stage, parameters[kind], traffic[kind]) for kind, stage in of_kind.items()}
    costs = {kind: sum(terms.values()) for kind, terms in kinds.items()}
    slowest = max(costs, key=lambda kind: costs[kind])
    micro_batches = layout.gradient_accumulation_steps
    terms = {name: micro_batches * value for name, value in kinds[slowest].items()}
    if layout.pp > 1:
        idle = sum(costs[_kind(stage)] for stage in stages) - costs[slowest]
        terms["pipeline_bubble"] = idle / software.virtual_stages
    # What occurs once per step, on the first stage, which has the most parameters.
    first, optimizer = _kind(stages[0]), OPTIMIZERS[job.optimizer]
    stepped, once = parameters[first].stepped, traffic[first]
    step_terms = offload_seconds(
        layout,
        hardware,
        job,
        parameters=stepped,
        frozen_bytes=parameters[first].frozen_bytes / layout.shard_size,
        passes=micro_batches * (3 if layout.recomputed_layers(layers) else 2),
        host_link_bytes_per_s=constants.host_link_bytes_per_s,
    )
    if not step_terms:
        # The memory bandwidth limits the step, so smaller states are faster. `optimizer_bytes` includes Adam's two
        # moments in fp32, which are read and written.
        moved = software.optimizer_bytes + 2 * (optimizer.state_bytes_per_parameter - 8)
        step_terms["optimizer"] = stepped * moved / step.device.memory_bytes_per_s
        if optimizer.matrix_states:
            # Five Newton-Schulz iterations of an m x n matrix, m <= n, multiply m x n by n x m, m x m by m x m and
            # m x m by m x n (torch/optim/_muon.py). FSDP2 and ZeRO divide the matrices over ranks.
            flops = 0.0
            for parameter in step.model.parameters:
                if is_stepped_by_muon(parameter):
                    small, large = min(parameter.shape), max(parameter.shape)
                    flops += parameter.count * 5 * (4 * small**2 * large + 2 * small**3)
            ranks = layout.shard_size if layout.engine == "fsdp2" or layout.zero_stage else 1
            step_terms["optimizer"] += flops / ranks / (step.hardware.flops_per_s * constants.matrix_efficiency)
    reduction, updates, slowed, slowed_updates = once.reductions_once, once.updates_once, 0.0, 0.0
    # Computation of a micro-batch that can hide reductions of gradients and gathers of updates.
    hiding = (*(term.name for term in COMPUTATION), "tensor_parallel")
    computed = sum(kinds[first].get(name, 0.0) for name in hiding)
    # A pipeline reduces after its last micro-batch, without overlap.
    if overlaps_reductions(step) and whole:
        reduction, slowed = exposed(step, reduction, computed * 2 / 3)
    if software.overlaps_updates:
        updates, slowed_updates = exposed(step, updates, computed / 3)
    step_terms |= {
        "gradient_reduction": reduction,
        "overlap_slowdown": slowed + slowed_updates,
        "parameter_updates": updates,
        "step_overhead": software.step_seconds,
    }
    for name, value in step_terms.items():
        terms[name] = terms.get(name, 0.0) + value
    for second in job.second_models:
        if second.trained:
            alone = job.without_second_models()
            own = estimate_step_time(layout, second.spec, hardware, alone, constants=constants).terms
            terms[f"{second.role}_step"] = sum(value for name, value in own.items() if name != "step_overhead")
    uncertain = 0.0
    if TASKS[job.task].generates and not model.has_score_head:
        generated = generation_seconds(step)
        uncertain = GENERATION_ERROR * sum(generated.values())
        terms |= generated
    terms = {name: value for name, value in terms.items() if value > 0}
    seconds = sum(terms.values())
    tokens = layout.global_batch_size * job.seq_len_tokens
    return StepTime(
        seconds=seconds,
        low_seconds=(seconds - uncertain / 2) / (1 + constants.error),
        high_seconds=max((seconds + uncertain) * (1 + constants.error), slowest_seconds),
        tokens_per_second=tokens / seconds,
        terms=terms,
    )


def _kind(stage: PipelineStage) -> tuple[int, bool, bool]:
    return stage.num_layers, stage.has_embedding, stage.has_head
