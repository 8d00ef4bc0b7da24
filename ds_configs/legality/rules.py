"""Rules that a layout must satisfy: each yields what is violated, with the nearest legal values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from ..specs.errors import ConfigError, divides
from ..specs.hardware import HardwareSpec, gpu_catalog
from ..specs.images import IMAGE_PARTS
from ..specs.job import GROUPED_TASKS, TrainingJob
from ..specs.layout import Layout
from ..specs.model import (
    ALL_LINEAR,
    MAMBA_TYPES,
    NOT_ADAPTED_IN_MAMBA,
    ModelSpec,
    ParameterShape,
    adapted_experts,
    is_within,
    liger_kernels,
    targeted_linears,
)
from ..specs.optimizers import OPTIMIZERS, parsed_optim_args
from ..specs.tasks import TASKS
from .axes import (
    context_parallel_errors,
    expert_errors,
    pipeline_errors,
    sequence_parallel_errors,
    tensor_parallel_errors,
)
from .combinations import columns_of, incompatibility_errors

FP8_CAPABILITY = 89
"""Smallest compute capability, times ten, with products in fp8."""
Errors = Iterator[ConfigError]
Rule = Callable[[ModelSpec, Layout, TrainingJob, HardwareSpec], Errors]


# Sizes and batches.


def sizes_are_positive(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Every size of a layout is at least 1."""
    axes = ("dp_replicate", "dp_shard", "tp", "pp", "sp", "cp", "ep")
    for name in (*axes, "micro_batch_size", "gradient_accumulation_steps"):
        if getattr(layout, name) < 1:
            yield ConfigError(where=name, value=getattr(layout, name), rule="must be at least 1")


def world_is_the_product(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """The parallel sizes multiply to the number of accelerators (accelerate/parallelism_config.py:274)."""
    if layout.world_size == hardware.world_size:
        return
    others = layout.tp * layout.pp * layout.sp * layout.cp
    legal = hardware.world_size // others if others and hardware.world_size % others == 0 else None
    rule = f"dp_replicate * dp_shard * tp * pp * sp * cp must equal the number of accelerators, {hardware.world_size}"
    fix = (
        f"use dp_replicate * dp_shard = {legal}"
        if legal
        else f"choose axes whose product divides it; tp * pp * sp * cp is {others}"
    )
    yield ConfigError(where="world_size", value=layout.world_size, rule=rule, fix=fix)


def batch_equation(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Global batch = micro-batch * accumulation * data-parallel ranks (deepspeed/runtime/config.py:590)."""
    wanted = job.global_batch_size
    if wanted is None or layout.global_batch_size == wanted:
        return
    # Only a micro-batch size that the user fixed can make a global batch illegal.
    unit = (job.micro_batch_size or 1) * layout.data_parallel_size
    is_multiple = wanted % unit == 0
    unit = layout.micro_batch_size * layout.data_parallel_size if is_multiple else unit
    lower, upper = wanted // unit * unit, -(-wanted // unit) * unit
    rule = f"must be a multiple of the {layout.data_parallel_size} data-parallel ranks"
    if is_multiple or job.micro_batch_size:
        rule = (
            f"must equal micro_batch_size {layout.micro_batch_size} * gradient_accumulation_steps "
            f"{layout.gradient_accumulation_steps} * data-parallel ranks {layout.data_parallel_size}"
        )
    fix = f"nearest legal values: {', '.join(str(n) for n in sorted({lower, upper}) if n)}"
    yield ConfigError(where="global_batch_size", value=wanted, rule=rule, fix=fix)


def sequence_fits_the_positions(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """A learned position table limits the sequence length; rotary embeddings do not."""
    limit = model.learned_positions
    if limit is not None and job.seq_len_tokens > limit:
        rule = f"must be at most {limit}, the learned positions of {model.architecture}"
        yield ConfigError(where="seq_len", value=job.seq_len_tokens, rule=rule, fix=f"use --seq-len {limit}")


# Engines, stages and offload.


def stage_belongs_to_deepspeed(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """ZeRO stages 0 to 3 require DeepSpeed."""
    legal: tuple[int | None, ...] = (0, 1, 2, 3)
    rule = "must be 0, 1, 2 or 3"
    if layout.engine != "deepspeed":
        legal, rule = (None,), f"must be None with engine {layout.engine}: ZeRO stages require DeepSpeed"
    if layout.zero_stage not in legal:
        yield ConfigError(where="zero_stage", value=layout.zero_stage, rule=rule)


def single_has_one_rank(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """The engine `single` runs on one accelerator; every other engine runs on any number."""
    if layout.engine == "single" and layout.world_size > 1:
        rule = f"requires 1 rank, not {layout.world_size}"
        yield ConfigError(where="engine", value="single", rule=rule, fix="use ddp")


def replicas_fit_the_engine(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Only DDP, ZeRO-0 and hybrid FSDP2 replicate model states; ZeRO 1 to 3 shard over all data-parallel ranks."""
    if (layout.engine == "ddp" or layout.zero_stage == 0) and layout.dp_shard > 1:
        rule = "must be 1 with DDP and ZeRO-0, which do not shard"
        yield ConfigError(where="dp_shard", value=layout.dp_shard, rule=rule, fix="set dp_replicate instead")
    if (layout.zero_stage or 0) >= 1 and layout.dp_replicate > 1:
        rule = "must be 1 with ZeRO 1 to 3"
        yield ConfigError(where="dp_replicate", value=layout.dp_replicate, rule=rule, fix="set dp_shard instead")


def offload_needs_its_stage(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """DeepSpeed offloads optimizers in ZeRO 1 to 3 and parameters in ZeRO-3 (zero/offload_config.py)."""
    optimizer, parameters, stage = layout.offload_optimizer, layout.offload_param, layout.zero_stage or 0
    if layout.engine == "fsdp2":
        if optimizer not in ("none", "cpu") or parameters != optimizer:
            rule = "FSDP2 offloads parameters, gradients and optimizer states together, and only to the CPU"
            yield ConfigError(where="offload_param", value=parameters, rule=rule, fix="use ZeRO-3 for NVMe")
    elif optimizer != "none" and stage < 1:
        rule, fix = "requires ZeRO stage 1, 2 or 3", "use --offload none, or one of these stages"
        yield ConfigError(where="offload_optimizer", value=optimizer, rule=rule, fix=fix)
    elif parameters != "none" and stage < 3:
        rule, fix = "requires ZeRO-3", "use --offload cpu, or --strategy zero3"
        yield ConfigError(where="offload_param", value=parameters, rule=rule, fix=fix)
    elif optimizer == "nvme" and stage < 3:
        rule = "requires ZeRO-3: ZeRO-1 and ZeRO-2 keep optimizer states in host memory instead"
        yield ConfigError(where="offload_optimizer", value="nvme", rule=rule, fix="use ZeRO-3, or cpu")


def nvme_must_exist(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """NVMe offload requires an NVMe directory on every node."""
    if "nvme" in (layout.offload_optimizer, layout.offload_param) and not hardware.nvme_bytes_per_node:
        rule = "requires NVMe on every node"
        yield ConfigError(where="offload", value="nvme", rule=rule, fix="pass --nvme PATH:SIZE")


def hpz_partition_fits_the_node(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """The secondary ZeRO++ shard requires ZeRO-3 and stays within a node."""
    where, size = "hpz_partition_size", layout.zero.hpz_partition_size
    if size > 1 and layout.zero_stage != 3:
        yield ConfigError(where=where, value=size, rule="requires ZeRO-3", fix="use 1")
    elif size > 1 and (error := divides(where, size, hardware.gpus_per_node, "the accelerators of a node")):
        yield error


def quantized_collectives(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """ZeRO++ quantizes gathers of weights (qwZ) in ZeRO-3 on GPUs, reductions of gradients (qgZ) also between nodes.

    Source: deepspeed/runtime/zero/partition_parameters.py and stage3.py:1925.
    """
    runs = layout.zero_stage == 3 and hardware.gpu != "CPU"
    if layout.zero.quantized_weights and not runs:
        rule, fix = "requires ZeRO-3, which gathers weights", "use --strategy zero3 or zero3-hpz"
        if layout.zero_stage == 3:
            rule, fix = "is not supported on CPU ranks: DeepSpeed 0.19.8 has no CPU kernels for it", "omit it"
        yield ConfigError(where="zero_quantized_weights", value=True, rule=rule, fix=fix)
    if layout.zero.quantized_gradients and not (runs and hardware.nodes > 1):
        rule, fix = "requires ZeRO-3 on several nodes of GPUs", "use --strategy zero3 on several nodes"
        yield ConfigError(where="zero_quantized_gradients", value=True, rule=rule, fix=fix)


# Models.

_SHARED_LAYERS = frozenset({"zamba", "zamba2"})
"""`model_type`s of transformers 5.17.0 in which several layers share parameters."""


def engine_supports_the_model(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Some models have scalars, shared layers or constructors that DeepSpeed or FSDP2 cannot shard.

    DeepSpeed 0.19.8 broadcasts each zero-dimensional parameter, such as CLIP's `logit_scale`, as bytes, which torch
    rejects (`_broadcast_model`, runtime/engine.py:2059); torch's `fully_shard` rejects them explicitly (torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_init.py:336), and fails when it wraps a second layer with shared parameters.
    Whisper's initialization unpacks the shape of the position table into two sizes, but a partitioned parameter has
    one (transformers 5.17.0, models/whisper/modeling_whisper.py:528).
    """
    scalars = [parameter.name for parameter in model.parameters if not parameter.shape]
    if layout.engine in ("deepspeed", "fsdp2") and scalars:
        rule = f"does not support zero-dimensional parameters such as {scalars[0]}"
        fix = "use ddp, or give the parameter shape (1,) in the model's code"
        yield ConfigError(where="engine", value=layout.engine, rule=rule, fix=fix)
    if layout.zero_stage == 3 and model.model_type == "whisper":
        rule = "partitions parameters while the model is built, but Whisper's constructor needs their full shapes"
        yield ConfigError(where="zero_stage", value=3, rule=rule, fix="use ZeRO-2 or FSDP2")
    if layout.engine == "fsdp2" and model.model_type in _SHARED_LAYERS:
        rule = f"shards each layer separately, but layers of {model.model_type} share parameters"
        yield ConfigError(where="engine", value="fsdp2", rule=rule, fix="use a ZeRO stage")


def unseen_code_is_trained_whole(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """A model with remote code supports ZeRO only: FSDP2 and parallel axes need its module names, which are unknown."""
    if model.source == "structure" and (layout.engine == "fsdp2" or layout.axes):
        rule = "is defined by code in its repository, but FSDP2 and parallel axes need its module names"
        yield ConfigError(where="model", value=model.architecture, rule=rule, fix="use a ZeRO stage")


def lora_targets_can_be_adapted(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Each LoRA target matches fused experts, or Linear modules that return one tensor, and not all in Mamba layers.

    PEFT 0.21 adapts every subclass of Linear. Llama 4's router returns scores and logits, and adding the adapter's
    output to that pair fails (tuners/lora/layer.py), as does adding it to the groups of DeepSeek-V4's `o_a_proj`.
    """
    if job.method == "full":
        return
    targets = job.lora_targets

    def peft_rejects(linear: ParameterShape) -> bool:
        return model.model_type in MAMBA_TYPES and linear.module.rpartition(".")[2] in NOT_ADAPTED_IN_MAMBA

    linears = targeted_linears(model, (ALL_LINEAR,))
    names = ", ".join(sorted({p.module.rpartition(".")[2] for p in linears if not peft_rejects(p)}))
    experts = sorted({p.name.rpartition(".*.")[2] for p in model.parameters if p.kind == "experts"})
    matched = {target: targeted_linears(model, (target,)) or adapted_experts(model, (target,)) for target in targets}
    if missing := [target for target, matrices in matched.items() if not matrices]:
        where = " outside of frozen parts for images" if model.trained_part != model else ""
        rule = f"match no Linear module{where}" + (" that PEFT adapts and no fused experts" if experts else "")
        fix = f"use all-linear, or names from {names}" if names else "use --method full"
        fix += f", or experts ({', '.join(experts)})" if experts else ""
        yield ConfigError(where="lora_targets", value=",".join(missing), rule=rule, fix=fix)
    routers = [p for p in model.parameters if p.kind == "router" and p.name.endswith(".weight")]
    routers = [p for p in routers if ALL_LINEAR in targets or p.module.rpartition(".")[2] in targets]
    rejected = [p for p in targeted_linears(model, targets) if peft_rejects(p)]
    if routers:
        rule = f"match {routers[0].module}, to whose output PEFT cannot add an adapter's"
    elif rejected:
        rule = f"match {rejected[0].module}, which PEFT rejects in Mamba layers because their kernels read its weight"
    else:
        return
    yield ConfigError(where="lora_targets", value=",".join(targets), rule=rule, fix=f"use names from {names}")


def trained_parts_are_dense(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """QLoRA loads the Linear weights of a vision tower in 4 bit too, which have no gradients."""
    for part in IMAGE_PARTS:
        if job.method == "qlora" and getattr(job, part) == "full":
            rule, fix = "trains weights that QLoRA loads in 4 bit", "use trained, or --method lora"
            yield ConfigError(where=part, value="full", rule=rule, fix=fix)


def qlora_packs_weights(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """QLoRA has at least one Linear module that bitsandbytes packs; otherwise it is LoRA under another name."""
    if job.method == "qlora" and not model.packed_parameters:
        rule = f"packs no weights of {model.model_type}: bitsandbytes 0.50 replaces no subclasses of Linear"
        yield ConfigError(where="method", value="qlora", rule=rule, fix="use --method lora")


def lora_variants_are_supported(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """DoRA and PiSSA read the weights of Linear modules, PiSSA those that are not in 4 bit.

    PEFT 0.21 rejects DoRA in the wrappers of parameters, and looks there for a module's weight (`pissa_init`).
    """
    if job.method == "full" or job.lora_variant not in ("dora", "pissa"):
        return
    error = partial(ConfigError, where="lora_variant", value=job.lora_variant)
    if adapted_experts(model, job.lora_targets):
        fix = "use lora or rslora, or --lora-targets with names of Linear modules"
        yield error(rule="is not supported for the router and fused experts, which PEFT adapts as parameters", fix=fix)
    if job.lora_variant == "pissa" and job.method == "qlora":
        rule = "computes singular vectors of the weights, which QLoRA loads in 4 bit"
        yield error(rule=rule, fix="use --method lora, or --lora-variant lora")


def shared_sequences_are_causal(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Sequence and context parallelism support causal language models only; no other model has been verified."""
    if model.task != "causal_lm" and layout.sp * layout.cp > 1:
        rule = "is not a causal language model, which sequence and context parallelism require"
        yield ConfigError(where="model", value=model.architecture, rule=rule, fix="use sp = cp = 1")


def images_stay_whole(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Samples with images are trained on complete ranks: no axis splits a vision tower or the places of its outputs."""
    if job.images_per_sample:
        rule = "is not supported with images, whose tokens and vision tower are not split"
        for axis, size in layout.axes.items():
            yield ConfigError(where=axis, value=size, rule=rule, fix=f"use {axis} = 1 and ZeRO or FSDP2")


def second_models_stay_whole(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Second models support data and sequence parallelism only: they are not sharded along other axes."""
    for second in job.second_models:
        rule = f"is not supported with a {second.role}, which would not be sharded along this axis"
        for axis, size in layout.axes.items():
            if axis != "sp":
                yield ConfigError(where=axis, value=size, rule=rule, fix=f"use {axis} = 1, or sp")


# Preference and reinforcement learning.


def second_models_are_placed(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """TRL shards second models under ZeRO-3 and FSDP2 and copies them to every rank under other engines.

    `prepare_deepspeed` and `prepare_fsdp` of trl 1.16.0, models/utils.py. A reference can also be the trained model
    without its adapters, or have been computed ahead for a fixed dataset. FSDP2 does not shard a reward model, and a
    task that generates loads its reference itself, which under FSDP2 only the first rank would have.
    """
    if TASKS[job.task].head == "model":
        return
    for second in job.second_models:
        is_fsdp2 = layout.engine == "fsdp2"
        sharded = layout.zero_stage == 3 or (is_fsdp2 and second.role != "reward")
        engine = "ZeRO-3 and FSDP2" if sharded else "this engine"
        placed = "sharded" if sharded else "replica"
        if is_fsdp2 and second.role == "reference" and job.task in GROUPED_TASKS:
            if second.planned_placement != "shared":
                rule = f"is not supported with a reference of task {job.task}, whose weights only the first rank has"
                yield ConfigError(where="strategy", value="fsdp2", rule=rule, fix="use ZeRO-3, adapters, or --beta 0")
            continue
        allowed = {placed, "layout" if second.trained else placed}
        if second.role == "reference":
            allowed.add("shared")
            if not TASKS[job.task].generates and not is_fsdp2:
                # Under FSDP2 TRL needs a reference to compute them, and keeps it.
                allowed.add("cached")
        if second.planned_placement not in allowed:
            rule = f"is not how TRL places a {second.role} under {engine}"
            others = [name for name in ("cached",) if name in allowed]
            fix = f"use {' or '.join([placed, *others])}"
            yield ConfigError(where=f"{second.role}_placement", value=second.planned_placement, rule=rule, fix=fix)


def groups_are_complete(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """A generation has complete groups of completions: `num_generations` divides it (trl 1.16.0, grpo_config.py)."""
    if job.task not in GROUPED_TASKS:
        return
    steps = job.steps_per_generation or layout.gradient_accumulation_steps
    completions = layout.micro_batch_size * layout.data_parallel_size * steps
    if completions % job.generations:
        rule = (
            f"must divide the {completions} completions of a generation: micro-batch {layout.micro_batch_size} * "
            f"data-parallel ranks {layout.data_parallel_size} * steps per generation {steps}"
        )
        fix = "use another --num-generations, --global-batch-size or --steps-per-generation"
        yield ConfigError(where="num_generations", value=job.generations, rule=rule, fix=fix)


def micro_batch_is_large_enough(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """KTO estimates a divergence from the answers of other rows of a micro-batch (trl 1.16.0, kto_trainer.py:844)."""
    least = TASKS[job.task].least_micro_batch
    if layout.micro_batch_size < least:
        rule, value = f"must be at least {least} for task {job.task}", layout.micro_batch_size
        fix = f"use --micro-batch-size {least}, and a global batch of at least {least} per data-parallel rank"
        yield ConfigError(where="micro_batch_size", value=value, rule=rule, fix=fix)


def losses_read_whole_heads(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Tasks run no pipeline and no context parallelism: TRL's trainers have neither."""
    if TASKS[job.task].head == "model":
        return
    for axis in ("pp", "cp"):
        if axis in layout.axes:
            rule = f"is not supported with task {job.task}, whose trainer has none"
            yield ConfigError(where=axis, value=layout.axes[axis], rule=rule, fix=f"use {axis} = 1")


# Activations and loss.


def chunked_loss_is_supported(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """A chunked loss requires a causal language model whose output head is complete on a rank.

    A Liger kernel computes it, or tiles that the backward pass computes again
    (liger_kernel/transformers/monkey_patch.py). Tensor parallelism shards the head, a pipeline has it on one stage.
    """
    if job.loss != "chunked":
        return
    if model.task != "causal_lm":
        rule = "is not supported: only causal language models have a loss that can be computed in parts"
        yield ConfigError(where="loss", value="chunked", rule=rule, fix="use --loss eager")
    rule = "is not supported with a chunked loss, which reads the weights of the output head directly"
    for axis in ("tp", "pp"):
        if axis in layout.axes:
            fix = f"use --loss eager, or {axis} = 1"
            yield ConfigError(where=axis, value=layout.axes[axis], rule=rule, fix=fix)


TILED_MLP_NAMES = ("mlp", "feed_forward")
"""Names of the modules that `plugins/transformers/tiled_compute.py` tiles."""


def tiled_mlp_is_supported(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """A tiled MLP requires MLPs that the runtime finds by name, complete on a rank.

    Tensor, pipeline and expert parallelism replace or split the MLP.
    """
    if not layout.tiled_mlp:
        return
    fix = "use --tiled-mlp off"
    if not any(f".{name}." in parameter.name for parameter in model.parameters for name in TILED_MLP_NAMES):
        rule = f"requires MLPs: {model.architecture} has no module named {' or '.join(TILED_MLP_NAMES)} in its layers"
    elif axes := [axis for axis in ("tp", "pp", "ep") if axis in layout.axes]:
        rule = f"is not supported with {axes[0]} = {layout.axes[axes[0]]}, which splits or replaces the MLP"
        fix = f"use {axes[0]} = 1, or --tiled-mlp off"
    else:
        return
    yield ConfigError(where="tiled_mlp", value="on", rule=rule, fix=fix)


def layer_inputs_are_offloaded(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Layer inputs can wait in host memory only if their layers are recomputed, outside of pipelines."""
    layers, fix = layout.recomputed_layers(model.dimensions.num_layers), "use --offload-activations off"
    if not layout.offloaded_checkpoints:
        return
    if not layout.gradient_checkpointing:
        rule, fix = "requires gradient checkpointing", "use --gradient-checkpointing on"
    elif layout.offloaded_checkpoints > layers:
        rule = f"must be at most the {layers} recomputed layers, not {layout.offloaded_checkpoints}"
    elif layout.pp > 1:
        rule, fix = "is not supported in pipelines", "use pp = 1, or --offload-activations off"
    elif job.offload_activations == "transformers" and not is_within(model.release, ">=5.24"):
        rule = f"requires Transformers 5.24 or newer, not {model.release}"
        fix = "install it, or use --offload-activations on, which copies beside the computation"
    else:
        return
    value = "transformers" if job.offload_activations == "transformers" else "on"
    yield ConfigError(where="offload_activations", value=value, rule=rule, fix=fix)


def reentrant_recomputation(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Pipeline stages recompute without reentrant checkpointing."""
    if job.gradient_checkpointing == "reentrant" and layout.pp > 1:
        rule, fix = "is not supported in pipelines", "use pp = 1, or --gradient-checkpointing on"
        yield ConfigError(where="gradient_checkpointing", value="reentrant", rule=rule, fix=fix)


# Axes.


def sequence_parallelism(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Sequence parallelism (sp) requires DeepSpeed, attention without a mask, and divides heads and the sequence."""
    world, length = hardware.world_size, job.seq_len_tokens
    yield from sequence_parallel_errors(model.traits, layout, world_size=world, seq_len_tokens=length)


def context_parallelism(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Context parallelism (cp) requires FSDP2 and full causal attention, and 2 * cp divides the sequence."""
    world, length = hardware.world_size, job.seq_len_tokens
    yield from context_parallel_errors(model.traits, layout, world_size=world, seq_len_tokens=length)


def expert_parallelism(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Expert parallelism (ep) requires DeepSpeed AutoEP and divides the experts and the data-parallel ranks."""
    yield from expert_errors(model.traits, layout, method=job.method, precision=job.precision)


def tensor_parallelism(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Tensor parallelism (tp) requires AutoTP, ZeRO 0 to 2 and a dense model, and divides heads, MLP and node."""
    world, node = hardware.world_size, hardware.gpus_per_node
    yield from tensor_parallel_errors(model.traits, layout, world_size=world, ranks_per_node=node, method=job.method)


def pipeline_parallelism(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Pipelines (pp) require ZeRO 0 or 1, at least one decoder layer in each stage, and no loss scale of fp16."""
    world, micro_batches = hardware.world_size, layout.gradient_accumulation_steps
    yield from pipeline_errors(model.traits, layout, world_size=world, micro_batches=micro_batches, method=job.method)
    if layout.pp > 1 and job.precision == "fp16":
        rule = "is not supported in fp16: pipeline stages do not exchange the loss scale"
        yield ConfigError(where="pp", value=layout.pp, rule=rule, fix="use bf16 or fp32")


# Optimizers, precision and kernels.


def layerwise_updates(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """LOMO updates a parameter when its gradient of one micro-batch exists (lomo_optim/lomo.py)."""
    if OPTIMIZERS[job.optimizer].layerwise and layout.gradient_accumulation_steps > 1:
        rule, fix = "updates weights after every micro-batch", "use a global batch of one micro-batch"
        yield ConfigError(where="optimizer", value=job.optimizer, rule=rule, fix=fix)


def optimizer_is_supported(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """LOMO, GaLore, APOLLO and Muon are for full training, because adapters are low-rank already.

    DeepSpeed's Muon has no setting of the Newton-Schulz steps (`_MUON_HALF_KEYS`, deepspeed/runtime/engine.py).
    """
    spec = OPTIMIZERS[job.optimizer]
    if job.method != "full" and (spec.layerwise or spec.low_rank or spec.matrix_states):
        rule, fix = f"is for full training, not for {job.method}", "use adamw_torch_fused, or --method full"
        yield ConfigError(where="optimizer", value=job.optimizer, rule=rule, fix=fix)
    if layout.engine == "deepspeed" and job.optimizer == "muon" and "ns_steps" in parsed_optim_args(job.optim_args):
        rule = "ns_steps is not read by DeepSpeed, which takes 5 steps"
        fix = "remove it, or use --strategy ddp or fsdp2"
        yield ConfigError(where="optim_args", value=job.optim_args, rule=rule, fix=fix)


def bf16_weights_are_legal(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """bf16 weights are trained in bf16 by one process, DDP and FSDP2; DeepSpeed keeps fp32 master weights."""
    if job.weights_dtype != "bf16":
        return
    if job.precision != "bf16":
        rule, fix = "requires bf16 as compute precision", "use --precision bf16, or --weights-dtype fp32"
    elif job.method != "full":
        rule, fix = "is for full training: frozen weights are in 16 bit already", "omit it"
    elif layout.engine == "deepspeed":
        rule, fix = "has no effect with DeepSpeed, which trains fp32 master weights", "use ddp or fsdp2, or omit it"
    else:
        return
    yield ConfigError(where="weights_dtype", value=job.weights_dtype, rule=rule, fix=fix)


def precision_is_supported(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """bf16 requires NVIDIA compute capability 8.0 or an equivalent, fp16 an accelerator (deepspeed/runtime/config.py).

    Neither DeepSpeed nor autocast supports fp16 training on CPU ranks.
    """
    if job.precision == "bf16" and not hardware.supports_bf16:
        rule = f"is not supported by {hardware.gpu}"
        yield ConfigError(where="precision", value="bf16", rule=rule, fix="use fp16 or fp32")
    if job.precision == "fp16" and hardware.gpu == "CPU":
        rule = "is not supported on CPU ranks"
        yield ConfigError(where="precision", value="fp16", rule=rule, fix="use bf16 or fp32")


def fp8_is_supported(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """fp8 requires NVIDIA compute capability 8.9, and one process, DDP or FSDP2 with full training.

    Accelerate 1.15.0 checks the capability (`check_cuda_fp8_capability`), and rejects `mixed_precision` beside a file
    of DeepSpeed (utils/dataclasses.py, `_deepspeed_config_checks`).
    """
    if job.precision != "fp8":
        return
    capability = gpu_catalog().get(hardware.gpu, {}).get("compute_capability")
    if capability is None or capability < FP8_CAPABILITY:
        known = "" if capability is None else f" of compute capability {capability / 10:.1f}"
        rule = f"needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper or later), not {hardware.gpu}{known}"
        fix = "use bf16" if capability is None or capability >= 80 else "use fp16"
        yield ConfigError(where="precision", value="fp8", rule=rule, fix=fix)
        return
    errors = []
    if layout.engine == "deepspeed":
        rule = "is not supported with DeepSpeed: accelerate 1.15.0 rejects mixed_precision beside a DeepSpeed file"
        errors.append((rule, "use --strategy fsdp2 or ddp, or bf16"))
    elif layout.axes:
        rule = "supports data parallelism only; no test or published run covers other axes with the Trainer"
        errors.append((rule, "use bf16"))
    if job.method != "full":
        errors.append((f"supports full training only, not {job.method}", "use bf16, or --method full"))
    for rule, fix in errors:
        yield ConfigError(where="precision", value="fp8", rule=rule, fix=fix)


def liger_has_kernels(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """Liger's kernels require Triton, so an accelerator, and a family that liger-kernel replaces.

    Pipeline stages, AutoTP and AutoEP replace the layers that Liger replaces.
    """
    if not job.use_liger_kernel:
        return
    if model.model_type not in liger_kernels():
        rule, fix = f"has no kernels for {model.model_type}", f"supported: {', '.join(sorted(liger_kernels()))}"
        yield ConfigError(where="use_liger_kernel", value=True, rule=rule, fix=fix)
    if hardware.gpu == "CPU":
        rule, fix = "needs Triton, which has no CPU ranks", "omit it, or plan for the accelerators of the run"
        yield ConfigError(where="use_liger_kernel", value=True, rule=rule, fix=fix)
    for axis, size in layout.axes.items():
        if axis in ("tp", "pp", "ep"):
            rule = "replaces the layers that Liger replaces"
            yield ConfigError(where=axis, value=size, rule=rule, fix="omit use_liger_kernel")


def settings_are_proven(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Errors:
    """A test proves the optimizer, precision and other settings of a job with the layout's engine and axes."""
    settings = {
        "bf16": job.precision in ("bf16", "fp8"),
        "lora": job.method != "full",
        "gradient_checkpointing": layout.gradient_checkpointing,
        "compile": job.torch_compile,
        "distillation": job.imitated is not None,
    }
    names = (job.optimizer, *(name for name, is_set in settings.items() if is_set))
    yield from incompatibility_errors(names, columns_of(layout))
    if job.torch_compile and (layout.tiled_mlp or layout.offloaded_checkpoints):
        # Both replace forward passes of layers; no test combines them.
        rule = "is not supported with tiled MLPs or offloaded inputs"
        yield ConfigError(where="torch_compile", value=True, rule=rule, fix="omit it")


AXIS_RULES: tuple[Rule, ...] = (
    sequence_parallelism,
    context_parallelism,
    expert_parallelism,
    tensor_parallelism,
    pipeline_parallelism,
    chunked_loss_is_supported,
    images_stay_whole,
    second_models_stay_whole,
    second_models_are_placed,
    losses_read_whole_heads,
    groups_are_complete,
    micro_batch_is_large_enough,
    fp8_is_supported,
    liger_has_kernels,
)
"""Rules that also decide which layouts of several axes an analysis shows."""

RULES: tuple[Rule, ...] = (
    sizes_are_positive,
    world_is_the_product,
    batch_equation,
    stage_belongs_to_deepspeed,
    single_has_one_rank,
    replicas_fit_the_engine,
    offload_needs_its_stage,
    nvme_must_exist,
    layerwise_updates,
    optimizer_is_supported,
    bf16_weights_are_legal,
    precision_is_supported,
    sequence_fits_the_positions,
    tiled_mlp_is_supported,
    layer_inputs_are_offloaded,
    reentrant_recomputation,
    lora_targets_can_be_adapted,
    qlora_packs_weights,
    lora_variants_are_supported,
    trained_parts_are_dense,
    unseen_code_is_trained_whole,
    shared_sequences_are_causal,
    engine_supports_the_model,
    hpz_partition_fits_the_node,
    quantized_collectives,
    *AXIS_RULES,
    settings_are_proven,
)
"""Every rule, in the order in which they are checked."""

BATCH_RULES: tuple[Rule, ...] = (
    sizes_are_positive,
    batch_equation,
    groups_are_complete,
    micro_batch_is_large_enough,
    pipeline_parallelism,
    layerwise_updates,
)
"""Rules that read the micro-batch size or the accumulation steps."""

LAYOUT_RULES: tuple[Rule, ...] = tuple(rule for rule in RULES if rule not in BATCH_RULES)
"""All other rules: their verdict on a layout is the same for each of its batch sizes."""


def broken_rules(
    rules: Iterable[Rule], model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Errors:
    """Yield the errors that the given rules find in a layout."""
    for rule in rules:
        yield from rule(model, layout, job, hardware)


def legality_errors(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> tuple[ConfigError, ...]:
    """Return the errors of all rules; empty when the layout is legal."""
    return tuple(broken_rules(RULES, model, layout, job, hardware))
