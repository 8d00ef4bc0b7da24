"""Rules that a layout must satisfy: each returns the violated rule with the nearest legal values, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..memory.activations import UnknownFamilyError, activation_mode, cached_activations
from ..models.liger import liger_kernels
from ..specs.errors import ConfigError, divides, one_of
from ..specs.hardware import HardwareSpec, gpu_catalog
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import MAMBA_TYPES, NOT_ADAPTED_IN_MAMBA, ModelSpec, ParameterShape, targeted_linears
from ..specs.optimizers import OPTIMIZERS, parsed_optim_args
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
Verdict = ConfigError | None
Rule = Callable[[ModelSpec, Layout, TrainingJob, HardwareSpec], Verdict]


def kept_products_are_counted(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """Selective recomputation requires full training, data parallelism only, and a model whose activations are known.

    Tensor parallelism sums the ranks' results in place (deepspeed 0.19.8, `inference_all_reduce` in
    `module_inject/layers.py`). A kept result would be summed twice, which shifts losses by 1e-4.
    """
    if not layout.keeps_products:
        return None
    if layout.axes:
        rule = "supports data parallelism only"
    elif job.torch_compile:
        rule = "is not supported with torch.compile, which chooses itself what is kept"
    elif job.method != "full":
        rule = f"supports full training only: its memory with {job.method} is unknown"
    else:
        try:
            if cached_activations(model, job)(1, activation_mode(layout, job)).selective is not None:
                return None
        except UnknownFamilyError:
            pass
        rule = f"is not supported: its memory is unknown for {model.model_type} in {job.precision}"
    fix = "use --gradient-checkpointing auto"
    return ConfigError(where="gradient_checkpointing", value="selective", rule=rule, fix=fix)


_SHARED_LAYERS = frozenset({"zamba", "zamba2"})
"""`model_type`s of transformers 5.17.0 in which several layers share parameters."""


def sharded_parameters_have_dimensions(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Verdict:
    """DeepSpeed and FSDP2 do not support zero-dimensional parameters such as CLIP's `logit_scale`.

    DeepSpeed 0.19.8 broadcasts each one as bytes, which torch rejects (`_broadcast_model`, runtime/engine.py:2059).
    torch's `fully_shard` rejects them explicitly (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_init.py:336).
    """
    scalars = [parameter.name for parameter in model.parameters if not parameter.shape]
    if layout.engine not in ("deepspeed", "fsdp2") or not scalars:
        return None
    rule = f"does not support zero-dimensional parameters such as {scalars[0]}"
    fix = "use ddp, or give the parameter shape (1,) in the model's code"
    return ConfigError(where="engine", value=layout.engine, rule=rule, fix=fix)


def zero3_builds_the_model(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """ZeRO-3 partitions parameters while the model is built or loaded, which Whisper does not support.

    Whisper's initialization unpacks the shape of the position table into two sizes, but a partitioned parameter has
    one (transformers 5.17.0, models/whisper/modeling_whisper.py:528).
    """
    if layout.zero_stage != 3 or model.model_type != "whisper":
        return None
    rule = "partitions parameters while the model is built, but Whisper's constructor needs their full shapes"
    return ConfigError(where="zero_stage", value=3, rule=rule, fix="use ZeRO-2 or FSDP2")


def fsdp2_units_share_nothing(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """FSDP2 shards layer by layer, so that layers cannot share parameters as Zamba's attention does.

    torch 2.13 raises an error when the second layer is wrapped.
    """
    if layout.engine != "fsdp2" or model.model_type not in _SHARED_LAYERS:
        return None
    rule = f"shards each layer separately, but layers of {model.model_type} share parameters"
    return ConfigError(where="engine", value="fsdp2", rule=rule, fix="use a ZeRO stage")


def sequence_fits_the_positions(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """A learned position table limits the sequence length; rotary embeddings do not."""
    limit = model.learned_positions
    if limit is None or job.seq_len_tokens <= limit:
        return None
    rule = f"must be at most {limit}, the learned positions of {model.architecture}"
    return ConfigError(where="seq_len", value=job.seq_len_tokens, rule=rule, fix=f"use --seq-len {limit}")


def chunked_loss_is_supported(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """A chunked loss requires a causal language model: a Liger kernel, or tiles that the backward pass computes again.

    Source: liger_kernel/transformers/monkey_patch.py.
    """
    if job.loss != "chunked" or model.task == "causal_lm":
        return None
    rule = "is not supported: only causal language models have a loss that can be computed in parts"
    return ConfigError(where="loss", value="chunked", rule=rule, fix="use --loss eager")


def tiled_mlp_is_supported(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """A tiled MLP requires MLPs that the runtime finds by name, complete on a rank.

    Tensor, pipeline and expert parallelism replace or split the MLP.
    """
    if not layout.tiled_mlp:
        return None
    fix = "use --tiled-mlp off"
    if not any(f".{name}." in parameter.name for parameter in model.parameters for name in TILED_MLP_NAMES):
        rule = f"requires MLPs: {model.architecture} has no module named {' or '.join(TILED_MLP_NAMES)} in its layers"
    elif layout.keeps_products:
        rule, fix = "cannot be combined with selective recomputation", "use --gradient-checkpointing on"
    elif axes := [axis for axis in ("tp", "pp", "ep") if axis in layout.axes]:
        rule = f"is not supported with {axes[0]} = {layout.axes[axes[0]]}, which splits or replaces the MLP"
        fix = f"use {axes[0]} = 1, or --tiled-mlp off"
    else:
        return None
    return ConfigError(where="tiled_mlp", value="on", rule=rule, fix=fix)


TILED_MLP_NAMES = ("mlp", "feed_forward")
"""Names of the modules that `plugins/transformers/tiled_compute.py` tiles."""


def offloaded_checkpoints_are_recomputed(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Verdict:
    """Layer inputs can wait in host memory only if their layers are recomputed, outside of pipelines."""
    if not layout.offloaded_checkpoints:
        return None
    layers = layout.recomputed_layers(model.dimensions.num_layers)
    fix = "use --offload-activations off"
    if not layout.gradient_checkpointing:
        rule, fix = "requires gradient checkpointing", "use --gradient-checkpointing on"
    elif layout.offloaded_checkpoints > layers:
        rule = f"must be at most the {layers} recomputed layers, not {layout.offloaded_checkpoints}"
    elif layout.keeps_products:
        rule, fix = "cannot be combined with selective recomputation", "use --gradient-checkpointing on"
    elif layout.pp > 1:
        rule, fix = "is not supported in pipelines", "use pp = 1, or --offload-activations off"
    else:
        return None
    return ConfigError(where="offload_activations", value="on", rule=rule, fix=fix)


def lora_targets_exist(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """Each LoRA target matches a Linear module of the model."""
    if job.method == "full":
        return None
    missing = [target for target in job.lora_targets if not targeted_linears(model, (target,))]
    if not missing:
        return None
    names = ", ".join(_adaptable_names(model))
    fix = f"use all-linear, or names from {names}" if names else "use --method full"
    return ConfigError(where="lora_targets", value=",".join(missing), rule="match no Linear module", fix=fix)


def lora_targets_can_be_adapted(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """LoRA supports Linear modules that return one tensor, and not all of them in Mamba layers.

    PEFT 0.21 adapts every subclass of Linear. Llama 4's router returns scores and logits, and adding the adapter's
    output to that pair fails (tuners/lora/layer.py).
    """
    if job.method == "full":
        return None
    targets = job.lora_targets
    routers = [p for p in model.parameters if p.kind == "router" and p.name.endswith(".weight")]
    routers = [p for p in routers if "all-linear" in targets or p.module.rpartition(".")[2] in targets]
    rejected = [p for p in targeted_linears(model, targets) if _peft_rejects(p, model)]
    if routers:
        rule = f"match {routers[0].module}, which returns a tuple, but PEFT supports modules that return one tensor"
    elif rejected:
        rule = f"match {rejected[0].module}, which PEFT rejects in Mamba layers because their kernels read its weight"
    else:
        return None
    fix = f"use names from {', '.join(_adaptable_names(model))}"
    return ConfigError(where="lora_targets", value=",".join(targets), rule=rule, fix=fix)


def _adaptable_names(model: ModelSpec) -> list[str]:
    linears = targeted_linears(model, ("all-linear",))
    return sorted({linear.module.rpartition(".")[2] for linear in linears if not _peft_rejects(linear, model)})


def _peft_rejects(linear: ParameterShape, model: ModelSpec) -> bool:
    return model.model_type in MAMBA_TYPES and linear.module.rpartition(".")[2] in NOT_ADAPTED_IN_MAMBA


def unseen_code_is_trained_whole(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """A model with remote code supports ZeRO only: FSDP2 and parallel axes need its module names, which are unknown."""
    if model.source != "structure" or (layout.engine != "fsdp2" and not layout.axes):
        return None
    rule = "is defined by code in its repository, but FSDP2 and parallel axes need its module names"
    return ConfigError(where="model", value=model.architecture, rule=rule, fix="use a ZeRO stage")


def shared_sequences_are_causal(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """Sequence and context parallelism support causal language models only; no other model has been verified."""
    if model.task == "causal_lm" or layout.sp * layout.cp == 1:
        return None
    rule = "is not a causal language model, which sequence and context parallelism require"
    return ConfigError(where="model", value=model.architecture, rule=rule, fix="use sp = cp = 1")


MODEL_RULES: tuple[Rule, ...] = (
    sequence_fits_the_positions,
    chunked_loss_is_supported,
    tiled_mlp_is_supported,
    offloaded_checkpoints_are_recomputed,
    lora_targets_exist,
    lora_targets_can_be_adapted,
    unseen_code_is_trained_whole,
    shared_sequences_are_causal,
    sharded_parameters_have_dimensions,
    zero3_builds_the_model,
    fsdp2_units_share_nothing,
)
"""Rules about models, in the order in which they are checked."""


AxisRule = Callable[[ModelSpec, Layout, TrainingJob, HardwareSpec], list[ConfigError]]
"""A rule that can report several errors."""


def hpz_partition_fits_the_node(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """The secondary ZeRO++ shard requires ZeRO-3 and stays within a node."""
    size = layout.zero.hpz_partition_size
    if size == 1:
        return None
    if layout.zero_stage != 3:
        return ConfigError(where="hpz_partition_size", value=size, rule="requires ZeRO-3", fix="use 1")
    return divides("hpz_partition_size", size, hardware.gpus_per_node, "the accelerators of a node")


def quantized_weights_need_stage_three(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Verdict:
    """Quantized weight gathers (qwZ) require ZeRO-3 and GPUs.

    Source: deepspeed/runtime/zero/partition_parameters.py.
    """
    if not layout.zero.quantized_weights or (layout.zero_stage == 3 and hardware.gpu != "CPU"):
        return None
    rule = "requires ZeRO-3, which gathers weights"
    if layout.zero_stage == 3:
        rule = "is not supported on CPU ranks: DeepSpeed 0.19.8 has no CPU kernels for it"
    fix = "omit it" if layout.zero_stage == 3 else "use --strategy zero3 or zero3-hpz"
    return ConfigError(where="zero_quantized_weights", value=True, rule=rule, fix=fix)


def quantized_gradients_cross_nodes(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Verdict:
    """Quantized gradients (qgZ) require ZeRO-3 on several nodes of GPUs (deepspeed/runtime/zero/stage3.py:1925)."""
    if not layout.zero.quantized_gradients or (layout.zero_stage == 3 and hardware.nodes > 1 and hardware.gpu != "CPU"):
        return None
    rule, fix = "requires ZeRO-3 on several nodes of GPUs", "use --strategy zero3 on several nodes"
    return ConfigError(where="zero_quantized_gradients", value=True, rule=rule, fix=fix)


def tensor_parallelism_with_fsdp2(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Verdict:
    """Tensor parallelism is not supported with FSDP2: accelerate 1.15.0 imports a class that transformers removed.

    `accelerate/accelerator.py:1618` imports `transformers.integrations.tensor_parallel.ReplicateParallel`, which
    transformers 5.17.0 does not have.
    """
    if layout.engine != "fsdp2" or layout.tp == 1:
        return None
    rule = "is not supported with FSDP2: accelerate 1.15.0 imports a class that transformers 5.17.0 does not have"
    return ConfigError(where="tp", value=layout.tp, rule=rule, fix="use ZeRO stage 0, 1 or 2")


def sequence_parallelism(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> list[ConfigError]:
    """Sequence parallelism (sp) requires DeepSpeed, attention without a mask, and divides heads and the sequence."""
    if layout.sp == 1:
        return []
    return sequence_parallel_errors(
        model.traits, layout, world_size=hardware.world_size, seq_len_tokens=job.seq_len_tokens
    )


def context_parallelism(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> list[ConfigError]:
    """Context parallelism (cp) requires FSDP2 and full causal attention, and 2 * cp divides the sequence."""
    if layout.cp == 1:
        return []
    return context_parallel_errors(
        model.traits, layout, world_size=hardware.world_size, seq_len_tokens=job.seq_len_tokens
    )


def expert_parallelism(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> list[ConfigError]:
    """Expert parallelism (ep) requires DeepSpeed AutoEP and divides the experts and the data-parallel ranks."""
    if layout.ep == 1:
        return []
    return expert_errors(model.traits, layout, method=job.method, precision=job.precision)


def tensor_parallelism(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> list[ConfigError]:
    """Tensor parallelism (tp) requires AutoTP, ZeRO 0 to 2 and a dense model, and divides heads, MLP and node."""
    if layout.tp == 1:
        return []
    return tensor_parallel_errors(
        model.traits, layout, world_size=hardware.world_size, ranks_per_node=hardware.gpus_per_node, method=job.method
    )


def pipeline_parallelism(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> list[ConfigError]:
    """Pipelines (pp) require ZeRO 0 or 1 and at least one decoder layer in each stage."""
    if layout.pp == 1:
        return []
    return pipeline_errors(
        model.traits,
        layout,
        world_size=hardware.world_size,
        micro_batches=layout.gradient_accumulation_steps,
        method=job.method,
    )


def losses_need_a_whole_head(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> list[ConfigError]:
    """A chunked loss reads the output head, which tensor parallelism shards and a pipeline has on one stage only."""
    errors = []
    if job.loss == "chunked":
        rule = "is not supported with a chunked loss, which reads the weights of the output head directly"
        for axis in ("tp", "pp"):
            if axis in layout.axes:
                fix = f"use --loss eager, or {axis} = 1"
                errors.append(ConfigError(where=axis, value=layout.axes[axis], rule=rule, fix=fix))
    if layout.pp > 1 and job.precision == "fp16":
        rule = "is not supported in fp16: pipeline stages do not exchange the loss scale"
        errors.append(ConfigError(where="pp", value=layout.pp, rule=rule, fix="use bf16 or fp32"))
    return errors


def second_models_stay_whole(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> list[ConfigError]:
    """Second models support data and sequence parallelism only: they are not sharded along other axes."""
    return [
        ConfigError(
            where=axis,
            value=size,
            rule=f"is not supported with a {second.role}, which would not be sharded along this axis",
            fix=f"use {axis} = 1, or sp",
        )
        for second in job.second_models
        for axis, size in layout.axes.items()
        if axis != "sp"
    ]


def fp8_is_supported(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> list[ConfigError]:
    """fp8 requires NVIDIA compute capability 8.9, and one process, DDP or FSDP2 with full training.

    Accelerate 1.15.0 checks the capability (`check_cuda_fp8_capability`), and rejects `mixed_precision` beside a file
    of DeepSpeed (utils/dataclasses.py, `_deepspeed_config_checks`).
    """
    if job.precision != "fp8":
        return []
    errors = []

    def reject(where: str, value: object, rule: str, fix: str) -> None:
        errors.append(ConfigError(where=where, value=value, rule=rule, fix=fix))

    capability = gpu_catalog().get(hardware.gpu, {}).get("compute_capability")
    if capability is None or capability < FP8_CAPABILITY:
        known = "" if capability is None else f" of compute capability {capability / 10:.1f}"
        rule = f"needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper or later), not {hardware.gpu}{known}"
        reject("precision", "fp8", rule, "use bf16" if capability is None or capability >= 80 else "use fp16")
        return errors
    if layout.engine == "deepspeed":
        rule = "is not supported with DeepSpeed: accelerate 1.15.0 rejects mixed_precision beside a DeepSpeed file"
        reject("precision", "fp8", rule, "use --strategy fsdp2 or ddp, or bf16")
    elif layout.axes:
        rule = "supports data parallelism only; no test or published run covers other axes with the Trainer"
        reject("precision", "fp8", rule, "use bf16")
    if job.method != "full":
        reject("precision", "fp8", f"supports full training only, not {job.method}", "use bf16, or --method full")
    if job.weights_dtype == "bf16":
        reject(
            "weights_dtype", "bf16", "is not supported with fp8, which casts fp32 weights", "use --weights-dtype fp32"
        )
    return errors


def liger_has_kernels(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> list[ConfigError]:
    """Liger's kernels require Triton, so an accelerator, and a family that liger-kernel replaces.

    Pipeline stages, AutoTP and AutoEP replace the layers that Liger replaces.
    """
    errors: list[ConfigError] = []
    if job.torch_compile and (layout.tiled_mlp or layout.offloaded_checkpoints):
        # Both replace forward passes of layers; no test combines them.
        rule = "is not supported with tiled MLPs or offloaded inputs"
        errors.append(ConfigError(where="torch_compile", value=True, rule=rule, fix="omit it"))
    if not job.use_liger_kernel:
        return errors
    if model.model_type not in liger_kernels():
        rule, fix = f"has no kernels for {model.model_type}", f"supported: {', '.join(sorted(liger_kernels()))}"
        errors.append(ConfigError(where="use_liger_kernel", value=True, rule=rule, fix=fix))
    if hardware.gpu == "CPU":
        rule, fix = "needs Triton, which has no CPU ranks", "omit it, or plan for the accelerators of the run"
        errors.append(ConfigError(where="use_liger_kernel", value=True, rule=rule, fix=fix))
    errors += [
        ConfigError(where=axis, value=size, rule="replaces the layers that Liger replaces", fix="omit use_liger_kernel")
        for axis, size in layout.axes.items()
        if axis in ("tp", "pp", "ep")
    ]
    return errors


def offload_variant_is_supported(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> list[ConfigError]:
    """ZenFlow runs with ZeRO-2, SuperOffload with ZeRO-3 on NVIDIA GPUs; both train all weights with AdamW.

    Source: deepspeed 0.19.8, runtime/zenflow/zenflow_stage_1_and_2.py and runtime/superoffload/superoffload_stage3.py.
    """
    variant = layout.offload_variant if layout.engine == "deepspeed" else "none"
    if job.offload in ("zenflow", "superoffload") and layout.offload_variant == "none":
        rule, fix = "is an offload of DeepSpeed's ZeRO", "use a ZeRO stage, or --offload cpu-all"
        return [ConfigError(where="offload", value=job.offload, rule=rule, fix=fix)]
    if variant == "none":
        return []
    errors, plain = [], "or --offload cpu"
    stage = 2 if variant == "zenflow" else 3
    if layout.zero_stage != stage:
        errors.append((f"is supported with ZeRO-{stage} only", f"use --strategy zero{stage}, {plain}"))
    if variant == "superoffload" and "compute_capability" not in gpu_catalog().get(hardware.gpu, {}):
        errors.append((f"needs NVIDIA GPUs, not {hardware.gpu}: DeepSpeed asserts CUDA", "use --offload cpu"))
    if not job.optimizer.startswith("adamw_torch"):
        errors.append((f"has its own AdamW, which would replace {job.optimizer}", f"use adamw_torch_fused, {plain}"))
    if job.method != "full":
        errors.append((f"supports full training only, not {job.method}", "use --offload cpu"))
    if layout.axes:
        errors.append(("supports data parallelism only", "use --offload cpu"))
    return [ConfigError(where="offload", value=variant, rule=rule, fix=fix) for rule, fix in errors]


PARALLEL_RULES: tuple[Rule, ...] = (
    hpz_partition_fits_the_node,
    quantized_weights_need_stage_three,
    quantized_gradients_cross_nodes,
    tensor_parallelism_with_fsdp2,
)

AXIS_RULES: tuple[AxisRule, ...] = (
    sequence_parallelism,
    context_parallelism,
    expert_parallelism,
    tensor_parallelism,
    pipeline_parallelism,
    losses_need_a_whole_head,
    second_models_stay_whole,
    fp8_is_supported,
    liger_has_kernels,
    offload_variant_is_supported,
)
"""Rules about parallel axes, in the order in which they are checked."""


def sizes_are_positive(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """Every size of a layout is at least 1."""
    axes = ("dp_replicate", "dp_shard", "tp", "pp", "sp", "cp", "ep")
    for name in (*axes, "micro_batch_size", "gradient_accumulation_steps"):
        if getattr(layout, name) < 1:
            return ConfigError(where=name, value=getattr(layout, name), rule="must be at least 1")
    return None


def world_is_the_product(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """The parallel sizes multiply to the number of accelerators (accelerate/parallelism_config.py:274)."""
    if layout.world_size == hardware.world_size:
        return None
    others = layout.tp * layout.pp * layout.sp * layout.cp
    legal = hardware.world_size // others if others and hardware.world_size % others == 0 else None
    rule = f"dp_replicate * dp_shard * tp * pp * sp * cp must equal the {hardware.world_size} accelerators"
    fix = f"use dp_replicate * dp_shard = {legal}" if legal else f"choose tp * pp * sp * cp = {others} to divide them"
    return ConfigError(where="world_size", value=layout.world_size, rule=rule, fix=fix)


def batch_equation(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """Global batch = micro-batch * accumulation * data-parallel ranks (deepspeed/runtime/config.py:590)."""
    wanted = job.global_batch_size
    if wanted is None or layout.global_batch_size == wanted:
        return None
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
    return ConfigError(where="global_batch_size", value=wanted, rule=rule, fix=fix)


def stage_belongs_to_deepspeed(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """ZeRO stages 0 to 3 require DeepSpeed."""
    if layout.engine == "deepspeed":
        return one_of("zero_stage", layout.zero_stage, (0, 1, 2, 3), "must be 0, 1, 2 or 3")
    rule = f"must be None with engine {layout.engine}: ZeRO stages require DeepSpeed"
    return one_of("zero_stage", layout.zero_stage, (None,), rule)


def single_has_one_rank(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """The engine `single` runs on one accelerator; every other engine runs on any number."""
    if layout.engine != "single" or layout.world_size == 1:
        return None
    return ConfigError(where="engine", value="single", rule=f"requires 1 rank, not {layout.world_size}", fix="use ddp")


def replicas_belong_to_ddp_and_hybrid(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Verdict:
    """Only DDP, ZeRO-0 and hybrid FSDP2 replicate model states; ZeRO 1 to 3 shard over all data-parallel ranks."""
    if (layout.engine == "ddp" or layout.zero_stage == 0) and layout.dp_shard > 1:
        rule = "must be 1 with DDP and ZeRO-0, which do not shard"
        return ConfigError(where="dp_shard", value=layout.dp_shard, rule=rule, fix="set dp_replicate instead")
    if (layout.zero_stage or 0) >= 1 and layout.dp_replicate > 1:
        rule = "must be 1 with ZeRO 1 to 3"
        return ConfigError(where="dp_replicate", value=layout.dp_replicate, rule=rule, fix="set dp_shard instead")
    return None


def offload_needs_its_stage(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """DeepSpeed offloads optimizers in ZeRO 1 to 3 and parameters in ZeRO-3 (zero/offload_config.py)."""
    optimizer, parameters, stage = layout.offload_optimizer, layout.offload_param, layout.zero_stage or 0
    if layout.engine == "fsdp2":
        if optimizer in ("none", "cpu") and parameters == optimizer:
            return None
        rule = "FSDP2 offloads parameters, gradients and optimizer states together, and only to the CPU"
        return ConfigError(where="offload_param", value=parameters, rule=rule, fix="use ZeRO-3 for NVMe")
    if optimizer != "none" and stage < 1:
        rule, fix = "requires ZeRO stage 1, 2 or 3", "use --offload none, or one of these stages"
        return ConfigError(where="offload_optimizer", value=optimizer, rule=rule, fix=fix)
    if parameters != "none" and stage < 3:
        rule, fix = "requires ZeRO-3", "use --offload cpu, or --strategy zero3"
        return ConfigError(where="offload_param", value=parameters, rule=rule, fix=fix)
    if optimizer == "nvme" and stage < 3:
        rule = "requires ZeRO-3: ZeRO-1 and ZeRO-2 keep optimizer states in host memory instead"
        return ConfigError(where="offload_optimizer", value="nvme", rule=rule, fix="use ZeRO-3, or cpu")
    return None


def nvme_must_exist(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """NVMe offload requires an NVMe directory on every node."""
    if "nvme" not in (layout.offload_optimizer, layout.offload_param) or hardware.nvme_bytes_per_node:
        return None
    return ConfigError(where="offload", value="nvme", rule="requires NVMe on every node", fix="pass --nvme PATH:SIZE")


def offloaded_optimizer_has_cpu_kernel(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Verdict:
    """Optimizer offload requires an optimizer with a DeepSpeed CPU kernel.

    Accelerate replaces any optimizer with DeepSpeedCPUAdam under offload (accelerate/accelerator.py:2374). With
    optimizers other than AdamW and Adagrad, this silently changes the arithmetic.
    """
    offloads = layout.engine == "deepspeed" and layout.offload_optimizer != "none"
    if not offloads or OPTIMIZERS[job.optimizer].cpu_kernel or OPTIMIZERS[job.optimizer].matrix_states:
        return None
    rule = "has no DeepSpeed CPU kernel, so optimizer offload would replace it with CPU Adam"
    fix = f"use one of {', '.join(name for name, spec in OPTIMIZERS.items() if spec.cpu_kernel)}, or --offload none"
    return ConfigError(where="optimizer", value=job.optimizer, rule=rule, fix=fix)


def layerwise_updates_do_not_accumulate(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Verdict:
    """LOMO updates a parameter when its gradient of one micro-batch exists (lomo_optim/lomo.py)."""
    if not OPTIMIZERS[job.optimizer].layerwise or layout.gradient_accumulation_steps == 1:
        return None
    rule, fix = "updates weights after every micro-batch", "use a global batch of one micro-batch"
    return ConfigError(where="optimizer", value=job.optimizer, rule=rule, fix=fix)


def matrix_optimizers_train_whole_models(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Verdict:
    """Adapters are low-rank already: LOMO, GaLore, APOLLO and Muon are for full training."""
    spec = OPTIMIZERS[job.optimizer]
    if job.method == "full" or not (spec.layerwise or spec.low_rank or spec.matrix_states):
        return None
    rule, fix = f"is for full training, not for {job.method}", "use adamw_torch_fused, or --method full"
    return ConfigError(where="optimizer", value=job.optimizer, rule=rule, fix=fix)


def deepspeed_reads_no_ns_steps(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """DeepSpeed's Muon has no setting of the Newton-Schulz steps (`_MUON_HALF_KEYS`, deepspeed/runtime/engine.py)."""
    if layout.engine != "deepspeed" or job.optimizer != "muon" or "ns_steps" not in parsed_optim_args(job.optim_args):
        return None
    rule, fix = "ns_steps is not read by DeepSpeed, which takes 5 steps", "remove it, or use --strategy ddp or fsdp2"
    return ConfigError(where="optim_args", value=job.optim_args, rule=rule, fix=fix)


def optimizer_accepts_dtensors(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """FSDP2 parameters are DTensors, which bitsandbytes' optimizer kernels do not support."""
    if layout.engine != "fsdp2" or not OPTIMIZERS[job.optimizer].plain_tensors_only:
        return None
    rule, fix = "does not support DTensors, the parameters of FSDP2", "use adamw_torch_fused, or a ZeRO stage"
    return ConfigError(where="optimizer", value=job.optimizer, rule=rule, fix=fix)


def bf16_weights_have_no_master_copy(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Verdict:
    """bf16 weights are trained in bf16 by one process, DDP and FSDP2; DeepSpeed keeps fp32 master weights."""
    if job.weights_dtype != "bf16":
        return None
    if job.precision != "bf16":
        rule, fix = "requires bf16 as compute precision", "use --precision bf16, or --weights-dtype fp32"
    elif job.method != "full":
        rule, fix = "is for full training: frozen weights are in 16 bit already", "omit it"
    elif layout.engine == "deepspeed":
        rule, fix = "has no effect with DeepSpeed, which trains fp32 master weights", "use ddp or fsdp2, or omit it"
    else:
        return None
    return ConfigError(where="weights_dtype", value=job.weights_dtype, rule=rule, fix=fix)


def precision_is_supported(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """bf16 requires hardware support: NVIDIA compute capability 8.0, or an equivalent."""
    if job.precision != "bf16" or hardware.supports_bf16:
        return None
    rule = f"is not supported by {hardware.gpu}"
    return ConfigError(where="precision", value="bf16", rule=rule, fix="use fp16 or fp32")


def fp16_needs_an_accelerator(model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec) -> Verdict:
    """Neither DeepSpeed nor autocast supports fp16 training on CPU ranks (deepspeed/runtime/config.py)."""
    if job.precision != "fp16" or hardware.gpu != "CPU":
        return None
    rule = "is not supported on CPU ranks"
    return ConfigError(where="precision", value="fp16", rule=rule, fix="use bf16 or fp32")


def accumulation_dtype_is_supported(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Verdict:
    """ZeRO-0 with 16-bit weights does not support fp32 gradient accumulation (deepspeed/runtime/engine.py:2323)."""
    if layout.zero_stage != 0 or not layout.zero.gradient_accumulation_fp32 or job.precision == "fp32":
        return None
    rule, fix = "is not supported with ZeRO-0", "use ZeRO stage 1, 2 or 3"
    return ConfigError(where="gradient_accumulation_fp32", value=True, rule=rule, fix=fix)


def settings_are_proven(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> list[ConfigError]:
    """A test proves the optimizer, precision and other settings of a job with the layout's engine and axes."""
    settings = {
        "bf16": job.precision in ("bf16", "fp8"),
        "lora": job.method != "full",
        "gradient_checkpointing": layout.gradient_checkpointing,
        "compile": job.torch_compile,
        "distillation": job.teacher is not None,
    }
    return incompatibility_errors(
        (job.optimizer, *(name for name, is_set in settings.items() if is_set)), columns_of(layout)
    )


RULES: tuple[Rule, ...] = (
    sizes_are_positive,
    world_is_the_product,
    batch_equation,
    stage_belongs_to_deepspeed,
    single_has_one_rank,
    replicas_belong_to_ddp_and_hybrid,
    offload_needs_its_stage,
    nvme_must_exist,
    offloaded_optimizer_has_cpu_kernel,
    layerwise_updates_do_not_accumulate,
    matrix_optimizers_train_whole_models,
    deepspeed_reads_no_ns_steps,
    optimizer_accepts_dtensors,
    bf16_weights_have_no_master_copy,
    precision_is_supported,
    fp16_needs_an_accelerator,
    accumulation_dtype_is_supported,
    *MODEL_RULES,
    kept_products_are_counted,
    *PARALLEL_RULES,
)
"""Rules with one error each, in the order in which they are checked."""


BATCH_RULES: tuple[Rule | AxisRule, ...] = (
    sizes_are_positive,
    batch_equation,
    pipeline_parallelism,
    layerwise_updates_do_not_accumulate,
)
"""Rules that read the micro-batch size or the accumulation steps."""

_EVERY_RULE: tuple[Rule | AxisRule, ...] = (*RULES, *AXIS_RULES, settings_are_proven)

LAYOUT_RULES: tuple[Rule | AxisRule, ...] = tuple(rule for rule in _EVERY_RULE if rule not in BATCH_RULES)
"""All other rules: their verdict on a layout is the same for each of its batch sizes."""


def broken_rules(
    rules: Iterable[Rule | AxisRule], model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> Iterator[ConfigError]:
    """Yield the errors that the given rules find in a layout."""
    for rule in rules:
        errors = rule(model, layout, job, hardware)
        if isinstance(errors, list):
            yield from errors
        elif errors is not None:
            yield errors


def legality_errors(
    model: ModelSpec, layout: Layout, job: TrainingJob, hardware: HardwareSpec
) -> tuple[ConfigError, ...]:
    """Return the errors of all rules; empty when the layout is legal."""
    return tuple(broken_rules(_EVERY_RULE, model, layout, job, hardware))
