"""Rules of the axes beyond data parallelism: the ones that the trainers apply too, on the values of a candidate."""

from __future__ import annotations

from collections.abc import Callable

from ..specs.errors import Fault
from ..specs.model import ModelSpec
from .candidate import Candidate, Rule, divides
from .context import context_parallel_faults
from .expert import expert_faults
from .pipeline import pipeline_faults
from .sequence import equal_head_widths, sequence_parallel_faults
from .tensor import tensor_parallel_faults

AxisRule = Callable[[Candidate], list[Fault]]
"""A rule that may be broken in several ways at once."""


def hpz_partition_fits_the_node(candidate: Candidate) -> Fault | None:
    """The secondary shard of ZeRO++ stays within a node and needs stage 3."""
    size = candidate.strategy.zero.hpz_partition_size
    if size == 1:
        return None
    if candidate.strategy.zero_stage != 3:
        return Fault(where="hpz_partition_size", value=size, rule="needs ZeRO stage 3", fix="use 1")
    return divides("hpz_partition_size", size, candidate.hardware.gpus_per_node, "the accelerators of a node")


def quantized_weights_need_stage_three(candidate: Candidate) -> Fault | None:
    """qwZ quantizes what ZeRO-3 gathers, with CUDA kernels (deepspeed/runtime/zero/partition_parameters.py)."""
    if not candidate.strategy.zero.quantized_weights:
        return None
    if candidate.strategy.zero_stage != 3:
        rule = "has an effect only with ZeRO-3, which gathers weights"
        return Fault(where="zero_quantized_weights", value=True, rule=rule, fix="use --strategy zero3 or zero3-hpz")
    if candidate.hardware.gpu == "CPU":
        return Fault(where="zero_quantized_weights", value=True, rule="has no kernels for CPU ranks (DeepSpeed 0.19.8)")
    return None


def quantized_gradients_cross_nodes(candidate: Candidate) -> Fault | None:
    """qgZ works in stage 3 over more than one node (deepspeed/runtime/zero/stage3.py:1925)."""
    if not candidate.strategy.zero.quantized_gradients or (
        candidate.strategy.zero_stage == 3 and candidate.hardware.nodes > 1 and candidate.hardware.gpu != "CPU"
    ):
        return None
    rule = "has an effect only with ZeRO-3 on several nodes of GPUs"
    return Fault(where="zero_quantized_gradients", value=True, rule=rule, fix="use --strategy zero3 on several nodes")


def tensor_parallelism_with_fsdp2(candidate: Candidate) -> Fault | None:
    """FSDP2 with tensor parallelism cannot start: accelerate 1.15.0 imports a name that transformers 5.17.0 lacks.

    `accelerate/accelerator.py:1618` wants `transformers.integrations.tensor_parallel.ReplicateParallel`.
    """
    strategy = candidate.strategy
    if strategy.engine != "fsdp2" or strategy.tp == 1:
        return None
    rule = "cannot run with FSDP2: accelerate 1.15.0 imports a class that transformers 5.17.0 does not have"
    return Fault(where="tp", value=strategy.tp, rule=rule, fix="use a ZeRO stage up to 2, which runs on AutoTP")


def sequence_parallelism(candidate: Candidate) -> list[Fault]:
    """Heads, key/value heads and sequence divide over sp on DeepSpeed, whose attention has no mask (Ulysses)."""
    strategy, model = candidate.strategy, candidate.model
    return sequence_parallel_faults(
        sequence_parallel_size=strategy.sp,
        engine=strategy.engine,
        world_size=candidate.hardware.world_size,
        num_attention_heads=model.dimensions.num_attention_heads,
        num_key_value_heads=model.dimensions.num_key_value_heads,
        seq_len_tokens=candidate.job.seq_len_tokens,
        attention=model.attention or "sdpa",
        model_type=model.model_type,
        layer_types=model.layer_types,
        attention_window_tokens=model.sliding_window,
        has_equal_head_widths=_has_equal_head_widths(model),
        context_parallel_size=strategy.cp,
        tensor_parallel_size=strategy.tp,
        pipeline_parallel_size=strategy.pp,
        rope_type=model.rope_type,
    )


def context_parallelism(candidate: Candidate) -> list[Fault]:
    """cp runs on FSDP2 with full causal attention, and 2 * cp divides the sequence."""
    strategy, model = candidate.strategy, candidate.model
    return context_parallel_faults(
        context_parallel_size=strategy.cp,
        engine=strategy.engine,
        world_size=candidate.hardware.world_size,
        seq_len_tokens=candidate.job.seq_len_tokens,
        attention=model.attention or "sdpa",
        model_type=model.model_type,
        layer_types=model.layer_types,
        attention_window_tokens=model.sliding_window,
        has_equal_head_widths=_has_equal_head_widths(model),
        sequence_parallel_size=strategy.sp,
        tensor_parallel_size=strategy.tp,
        pipeline_parallel_size=strategy.pp,
        rope_type=model.rope_type,
        dp_replicate=strategy.dp_replicate,
        dp_shard=strategy.dp_shard,
    )


def _has_equal_head_widths(model: ModelSpec) -> bool:
    return equal_head_widths({name.removeprefix("text_config."): value for name, value in model.settings})


def expert_parallelism(candidate: Candidate) -> list[Fault]:
    """ep divides the experts and the data-parallel ranks, on DeepSpeed AutoEP with the models that it knows."""
    strategy, model = candidate.strategy, candidate.model
    return expert_faults(
        ep=strategy.ep,
        model_type=model.model_type,
        num_experts=model.dimensions.num_experts,
        data_parallel_size=strategy.data_parallel_size,
        engine=strategy.engine,
        zero_stage=strategy.zero_stage,
        tp=strategy.tp,
        pp=strategy.pp,
        sp=strategy.sp,
        cp=strategy.cp,
        hpz_partition_size=strategy.zero.hpz_partition_size,
        quantized_gradients=strategy.zero.quantized_gradients,
        offload_optimizer=strategy.offload_optimizer,
        offload_param=strategy.offload_param,
        method=candidate.job.method,
        precision=candidate.job.precision,
    )


def tensor_parallelism(candidate: Candidate) -> list[Fault]:
    """tp divides heads, MLP and node, on DeepSpeed AutoTP with ZeRO 0 to 2 and dense models.

    What it may not do inside the stages of a pipeline is a rule of pipelines.
    """
    strategy, sizes = candidate.strategy, candidate.model.dimensions
    return tensor_parallel_faults(
        tensor_parallel_size=strategy.tp,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        intermediate_size=sizes.intermediate_size,
        vocab_size=sizes.vocab_size,
        model_type=candidate.model.model_type,
        num_experts=sizes.num_experts,
        engine=strategy.engine,
        zero_stage=strategy.zero_stage,
        world_size=candidate.hardware.world_size,
        ranks_per_node=candidate.hardware.gpus_per_node,
        method=candidate.job.method,
        sequence_parallel_size=strategy.sp,
        context_parallel_size=strategy.cp,
        expert_parallel_size=strategy.ep,
    )


def pipeline_parallelism(candidate: Candidate) -> list[Fault]:
    """Pipelines run with ZeRO 0 or 1, alone with data parallelism, and hold a layer in each stage."""
    strategy, model = candidate.strategy, candidate.model
    return pipeline_faults(
        stages=strategy.pp,
        num_layers=model.dimensions.num_layers,
        model_type=model.model_type,
        zero_stage=strategy.zero_stage,
        engine=strategy.engine,
        offload_optimizer=strategy.offload_optimizer,
        offload_param=strategy.offload_param,
        tensor_parallel_size=strategy.tp,
        sequence_parallel_size=strategy.sp,
        context_parallel_size=strategy.cp,
        expert_parallel_size=strategy.ep,
        method=candidate.job.method,
        world_size=candidate.hardware.world_size,
        micro_batches=strategy.gradient_accumulation_steps,
    )


def losses_need_a_whole_head(candidate: Candidate) -> list[Fault]:
    """A chunked loss reads the weights of the head, which tensor parallelism divides and pipelines keep to a stage."""
    strategy, found = candidate.strategy, []
    if candidate.job.loss == "chunked":
        rule = "does not run with a chunked loss, which reads the weights of the output head past the trainer"
        for axis in ("tp", "pp"):
            if axis in strategy.axes:
                fix = f"use --loss eager, or {axis} = 1"
                found.append(Fault(where=axis, value=strategy.axes[axis], rule=rule, fix=fix))
    if strategy.pp > 1 and candidate.job.precision == "fp16":
        rule = "does not run in fp16: the loss scale is not carried between stages"
        found.append(Fault(where="pp", value=strategy.pp, rule=rule, fix="use bf16 or fp32"))
    return found


def teachers_stay_whole(candidate: Candidate) -> list[Fault]:
    """A distillation trains under data and sequence parallelism alone: a teacher is not cut with its student."""
    strategy = candidate.strategy
    cut = {axis: size for axis, size in strategy.axes.items() if axis != "sp"}
    if candidate.job.teacher is None:
        return []
    rule = "does not combine with a teacher, which is not cut with its student"
    return [Fault(where=axis, value=size, rule=rule, fix=f"use {axis} = 1, or sp") for axis, size in cut.items()]


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
    teachers_stay_whole,
)
"""Rules with several possible faults each, in the order in which they are checked."""
