"""Rules of what combines with what: each returns the violated equation and the nearest legal values, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..specs.errors import Fault
from ..specs.job import OPTIMIZERS
from .candidate import Candidate, Rule, one_of
from .combinations import columns_of, incompatibility_faults
from .kept_products import kept_products_are_counted
from .model_rules import MODEL_RULES
from .parallel_rules import AXIS_RULES, PARALLEL_RULES, AxisRule, pipeline_parallelism


def sizes_are_positive(candidate: Candidate) -> Fault | None:
    """Every size of a strategy counts something."""
    names = (
        "dp_replicate",
        "dp_shard",
        "tp",
        "pp",
        "sp",
        "cp",
        "ep",
        "micro_batch_size",
        "gradient_accumulation_steps",
    )
    for name in names:
        if getattr(candidate.strategy, name) < 1:
            return Fault(where=name, value=getattr(candidate.strategy, name), rule="must be at least 1")
    return None


def world_is_the_product(candidate: Candidate) -> Fault | None:
    """The axes multiply to the number of accelerators (accelerate/parallelism_config.py:274)."""
    if candidate.strategy.world_size == candidate.hardware.world_size:
        return None
    others = candidate.strategy.tp * candidate.strategy.pp * candidate.strategy.sp * candidate.strategy.cp
    legal = candidate.hardware.world_size // others if others and candidate.hardware.world_size % others == 0 else None
    return Fault(
        where="world_size",
        value=candidate.strategy.world_size,
        rule=f"dp_replicate * dp_shard * tp * pp * sp * cp must equal {candidate.hardware.world_size} accelerators",
        fix=f"use dp_replicate * dp_shard = {legal}" if legal else f"tp * pp * sp * cp = {others} does not divide it",
    )


def batch_equation(candidate: Candidate) -> Fault | None:
    """Global batch = micro-batch * accumulation * data-parallel ranks (deepspeed/runtime/config.py:590)."""
    wanted, strategy = candidate.job.global_batch_size, candidate.strategy
    if wanted is None or strategy.global_batch_size == wanted:
        return None
    # A micro-batch that nobody fixed is not what makes a batch illegal.
    unit = (candidate.job.micro_batch_size or 1) * strategy.data_parallel_size
    is_multiple = wanted % unit == 0
    unit = strategy.micro_batch_size * strategy.data_parallel_size if is_multiple else unit
    lower, upper = wanted // unit * unit, -(-wanted // unit) * unit
    return Fault(
        where="global_batch_size",
        value=wanted,
        rule=(
            f"must equal micro_batch_size {strategy.micro_batch_size} * gradient_accumulation_steps "
            f"{strategy.gradient_accumulation_steps} * data-parallel ranks {strategy.data_parallel_size}"
            if is_multiple or candidate.job.micro_batch_size
            else f"must be a multiple of the {strategy.data_parallel_size} data-parallel ranks"
        ),
        fix=f"nearest legal values: {', '.join(str(n) for n in sorted({lower, upper}) if n)}",
    )


def stage_belongs_to_deepspeed(candidate: Candidate) -> Fault | None:
    """ZeRO stages 0 to 3 exist with DeepSpeed alone."""
    legal = (0, 1, 2, 3) if candidate.strategy.engine == "deepspeed" else (None,)
    return one_of(
        "zero_stage",
        candidate.strategy.zero_stage,
        legal,
        f"with engine {candidate.strategy.engine} must be one of {list(legal)}",
    )


def single_has_one_rank(candidate: Candidate) -> Fault | None:
    """An unsharded single process has one accelerator, and every other engine may have any number."""
    if candidate.strategy.engine != "single" or candidate.strategy.world_size == 1:
        return None
    return Fault(
        where="engine",
        value="single",
        rule=f"needs 1 rank, not {candidate.strategy.world_size}",
        fix="use ddp",
    )


def replicas_belong_to_ddp_and_hybrid(candidate: Candidate) -> Fault | None:
    """Only DDP, ZeRO-0 and hybrid FSDP2 replicate model states; ZeRO 1-3 shard over all data-parallel ranks."""
    replicating = candidate.strategy.engine == "ddp" or candidate.strategy.zero_stage == 0
    if replicating and candidate.strategy.dp_shard > 1:
        return Fault(where="dp_shard", value=candidate.strategy.dp_shard, rule="must be 1 where nothing is sharded")
    if (candidate.strategy.zero_stage or 0) >= 1 and candidate.strategy.dp_replicate > 1:
        return Fault(where="dp_replicate", value=candidate.strategy.dp_replicate, rule="must be 1 with ZeRO 1 to 3")
    return None


def offload_needs_its_stage(candidate: Candidate) -> Fault | None:
    """DeepSpeed offloads optimizers in stages 1-3 and parameters in stage 3 (zero/offload_config.py)."""
    if candidate.strategy.engine == "fsdp2":
        legal = ("none", "cpu")
        if (
            candidate.strategy.offload_optimizer not in legal
            or candidate.strategy.offload_param != candidate.strategy.offload_optimizer
        ):
            return Fault(
                where="offload_param",
                value=candidate.strategy.offload_param,
                rule="FSDP2 offloads parameters, gradients and optimizer together, to the CPU",
                fix="use ZeRO-3 for NVMe",
            )
        return None
    stage = candidate.strategy.zero_stage or 0
    if candidate.strategy.offload_optimizer != "none" and stage < 1:
        return Fault(
            where="offload_optimizer",
            value=candidate.strategy.offload_optimizer,
            rule="needs ZeRO stage 1, 2 or 3",
        )
    if candidate.strategy.offload_param != "none" and stage < 3:
        return Fault(where="offload_param", value=candidate.strategy.offload_param, rule="needs ZeRO stage 3")
    if candidate.strategy.offload_optimizer == "nvme" and stage < 3:
        return Fault(
            where="offload_optimizer",
            value="nvme",
            rule="needs ZeRO stage 3; stages 1 and 2 keep the states in host memory instead",
            fix="use stage 3 or cpu",
        )
    return None


def nvme_must_exist(candidate: Candidate) -> Fault | None:
    """NVMe offload needs a path on every node."""
    if (
        "nvme" not in (candidate.strategy.offload_optimizer, candidate.strategy.offload_param)
        or candidate.hardware.nvme_bytes_per_node
    ):
        return None
    return Fault(where="offload", value="nvme", rule="needs NVMe on each node", fix="state it with --nvme PATH:SIZE")


def offloaded_optimizer_has_cpu_kernel(candidate: Candidate) -> Fault | None:
    """Accelerate replaces any optimizer by DeepSpeedCPUAdam under offload (accelerate/accelerator.py:2374).

    With another optimizer than AdamW or Adagrad that changes the arithmetic without a word.
    """
    if candidate.strategy.engine != "deepspeed" or candidate.strategy.offload_optimizer == "none":
        return None
    if OPTIMIZERS[candidate.job.optimizer].cpu_kernel:
        return None
    legal = ", ".join(name for name, spec in OPTIMIZERS.items() if spec.cpu_kernel)
    return Fault(
        where="optimizer",
        value=candidate.job.optimizer,
        rule="has no DeepSpeed CPU kernel, so optimizer offload would replace it by CPU Adam",
        fix=f"use one of {legal}, or --offload none",
    )


def optimizer_accepts_dtensors(candidate: Candidate) -> Fault | None:
    """FSDP2 parameters are DTensors, which bitsandbytes' optimizer kernels do not take."""
    if candidate.strategy.engine != "fsdp2" or not OPTIMIZERS[candidate.job.optimizer].plain_tensors_only:
        return None
    return Fault(
        where="optimizer",
        value=candidate.job.optimizer,
        rule="has kernels for plain tensors only, and FSDP2 parameters are DTensors",
        fix="use adamw_torch_fused, or a ZeRO stage",
    )


def precision_is_supported(candidate: Candidate) -> Fault | None:
    """bf16 needs hardware of NVIDIA's compute capability 8.0 or an equal."""
    if candidate.job.precision != "bf16" or candidate.hardware.supports_bf16:
        return None
    return Fault(
        where="precision",
        value="bf16",
        rule=f"is not computed by {candidate.hardware.gpu}",
        fix="use fp16 or fp32",
    )


def fp16_needs_an_accelerator(candidate: Candidate) -> Fault | None:
    """Neither DeepSpeed nor autocast trains fp16 on CPU ranks (deepspeed/runtime/config.py)."""
    if candidate.job.precision != "fp16" or candidate.hardware.gpu != "CPU":
        return None
    return Fault(where="precision", value="fp16", rule="is not trained on CPU ranks", fix="use bf16 or fp32")


def accumulation_dtype_is_supported(candidate: Candidate) -> Fault | None:
    """Stage 0 with 16-bit weights has no fp32 accumulation (deepspeed/runtime/engine.py:2323)."""
    if (
        candidate.strategy.zero_stage == 0
        and candidate.strategy.zero.gradient_accumulation_fp32
        and candidate.job.precision != "fp32"
    ):
        return Fault(where="gradient_accumulation_fp32", value=True, rule="is not supported with ZeRO stage 0")
    return None


def settings_are_proven(candidate: Candidate) -> list[Fault]:
    """The optimizer, the precision and what else a job has go with the engine and the axes of the layout."""
    job, strategy = candidate.job, candidate.strategy
    stated = {
        "bf16": job.precision == "bf16",
        "lora": job.method != "full",
        "gradient_checkpointing": strategy.gradient_checkpointing,
        "distillation": job.teacher is not None,
    }
    return incompatibility_faults(
        (job.optimizer, *(name for name, is_set in stated.items() if is_set)), columns_of(strategy)
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
    optimizer_accepts_dtensors,
    precision_is_supported,
    fp16_needs_an_accelerator,
    accumulation_dtype_is_supported,
    *MODEL_RULES,
    kept_products_are_counted,
    *PARALLEL_RULES,
)
"""All rules, in the order in which they are checked."""


SIZE_RULES: tuple[Rule, ...] = (sizes_are_positive, world_is_the_product, batch_equation)
"""Rules that hold for any layout, whether something runs it or not."""

BATCH_RULES: tuple[Rule | AxisRule, ...] = (sizes_are_positive, batch_equation, pipeline_parallelism)
"""Rules that read the micro-batch or its accumulation."""

_EVERY_RULE: tuple[Rule | AxisRule, ...] = (*RULES, *AXIS_RULES, settings_are_proven)

LAYOUT_RULES: tuple[Rule | AxisRule, ...] = tuple(rule for rule in _EVERY_RULE if rule not in BATCH_RULES)
"""All others: what they say of a layout holds for each of its batches."""


def broken_rules(rules: Iterable[Rule | AxisRule], candidate: Candidate) -> Iterator[Fault]:
    """Yield the faults of a candidate by some rules."""
    for rule in rules:
        found = rule(candidate)
        if isinstance(found, list):
            yield from found
        elif found is not None:
            yield found


def legality_faults(candidate: Candidate) -> tuple[Fault, ...]:
    """Return every rule that the candidate violates; empty when it is legal."""
    return tuple(broken_rules(_EVERY_RULE, candidate))
