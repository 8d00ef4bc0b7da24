"""`TrainingJob`: what to train, with which precision, optimizer and method, and what the user fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

from .errors import Fault
from .model import ModelSpec
from .teacher_placement import TeacherPlacementChoice

Precision = Literal["bf16", "fp16", "fp32"]
Method = Literal["full", "lora", "qlora"]
Recomputation = Literal["auto", "on", "off", "selective"]
StrategyName = Literal[
    "auto", "single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3-hpz", "fsdp2", "fsdp2-hybrid"
]
OffloadName = Literal["auto", "none", "cpu", "cpu-all", "nvme"]
ObjectiveName = Literal["throughput", "cost", "memory"]
"""What a plan maximises: tokens per second, tokens per accelerator-second, or memory that stays free."""
LossImplementation = Literal["auto", "eager", "chunked"]

CHUNKED_LOSS_FAMILIES = (
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
"""Model types whose head and loss liger-kernel fuses; for others it changes nothing, without an error."""


AXIS_FIELDS: Mapping[str, str] = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "sequence_parallel_size": "sp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
}
"""Fields of `TrainingJob` for the axes beyond data parallelism, with their names in `Strategy`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """Memory that one optimizer of the Trainer needs."""

    state_bytes_per_parameter: float
    """Bytes of state for each trainable parameter."""
    eight_bit: bool = False
    """Whether states are 8-bit blocks, except those of embeddings."""
    factored: bool = False
    """Whether a matrix keeps one row and one column of state instead (Adafactor)."""
    step_transient: Literal["none", "foreach"] = "none"
    """`foreach` holds one fp32 temporary of all parameters stepped together, fused kernels none, factored ones two."""
    cpu_kernel: bool = False
    """Whether DeepSpeed has a CPU kernel with the same arithmetic, which optimizer offload needs."""
    plain_tensors_only: bool = False
    """Whether its kernels refuse DTensors, so that FSDP2 cannot use it."""


_BLOCKWISE_8BIT = 1 + 4 / 256
"""One byte and an fp32 scale for each block of 256 (bitsandbytes/optim/optimizer.py, `blocksize=256`)."""

OPTIMIZERS: Mapping[str, OptimizerSpec] = {
    "adamw_torch_fused": OptimizerSpec(state_bytes_per_parameter=8, cpu_kernel=True),
    "adamw_torch": OptimizerSpec(state_bytes_per_parameter=8, step_transient="foreach", cpu_kernel=True),
    "adamw_8bit": OptimizerSpec(eight_bit=True, state_bytes_per_parameter=2 * _BLOCKWISE_8BIT, plain_tensors_only=True),
    "adamw_bnb_8bit": OptimizerSpec(
        eight_bit=True, state_bytes_per_parameter=2 * _BLOCKWISE_8BIT, plain_tensors_only=True
    ),
    "paged_adamw_8bit": OptimizerSpec(
        eight_bit=True, state_bytes_per_parameter=2 * _BLOCKWISE_8BIT, plain_tensors_only=True
    ),
    "paged_adamw_32bit": OptimizerSpec(state_bytes_per_parameter=8, plain_tensors_only=True),
    "lion_32bit": OptimizerSpec(state_bytes_per_parameter=4, plain_tensors_only=True),
    "lion_8bit": OptimizerSpec(eight_bit=True, state_bytes_per_parameter=_BLOCKWISE_8BIT, plain_tensors_only=True),
    "adagrad": OptimizerSpec(state_bytes_per_parameter=4, step_transient="foreach", cpu_kernel=True),
    "rmsprop": OptimizerSpec(state_bytes_per_parameter=4, step_transient="foreach"),
    "sgd": OptimizerSpec(state_bytes_per_parameter=0),
    "adafactor": OptimizerSpec(state_bytes_per_parameter=0, factored=True, step_transient="foreach"),
}
"""Trainer `optim` names whose memory is known (transformers/training_args.py `OptimizerNames`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """Training that the user wants; `auto` fields are the planner's to choose."""

    seq_len_tokens: int = 4096
    """Tokens of one training sequence."""
    micro_batch_size: int | None = None
    """Sequences of one forward pass on one rank; `None` lets the planner choose."""
    global_batch_size: int | None = None
    """Sequences of one optimizer step over all ranks; `None` means one micro-batch on each rank,
    and in a pipeline as many as fill its stages."""
    precision: Precision = "bf16"
    """Compute precision; bf16 and fp16 keep fp32 master weights."""
    optimizer: str = "adamw_torch_fused"
    """A name of the Trainer's `optim`."""
    method: Method = "full"
    """`lora` freezes the base model, `qlora` also keeps its Linear weights in 4 bit."""
    lora_rank: int = 16
    """Rank of the LoRA matrices; unused with `full`."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Module name endings that LoRA adapts, or `all-linear`; unused with `full`."""
    gradient_checkpointing: Recomputation = "auto"
    """Whether each layer is recomputed in the backward pass; `selective` keeps its products and attention."""
    strategy: StrategyName = "auto"
    """The engine and stage to use."""
    offload: OffloadName = "auto"
    """Where optimizer states (and with `cpu-all` and `nvme` also parameters) may live."""
    loss: LossImplementation = "auto"
    """`chunked` never materialises the logits of all tokens; `auto` takes it where that makes the plan faster."""
    teacher: ModelSpec | None = None
    """A frozen second model whose logits are distilled; `None` without distillation."""
    teacher_placement: TeacherPlacementChoice = "auto"
    """Where the teacher lives; unused without one."""
    tensor_parallel_size: int | None = None
    """Ranks that share each layer (AutoTP); `None` lets the planner choose, 1 means none.

    Once a size of any of these axes is above 1, the planner leaves the open ones at 1; only beside fixed tensor
    parallelism it still chooses pipeline stages, and beside these tensor parallelism.
    """
    pipeline_parallel_size: int | None = None
    """Pipeline stages; `None` lets the planner choose, 1 means none."""
    sequence_parallel_size: int | None = None
    """Ranks that share each sequence (Ulysses); `None` lets the planner choose, 1 means none."""
    context_parallel_size: int | None = None
    """Ranks that share each sequence (torch, FSDP2); `None` lets the planner choose, 1 means none."""
    expert_parallel_size: int | None = None
    """Ranks that share the experts of each layer (AutoEP); `None` lets the planner choose, 1 means none."""
    objective: ObjectiveName = "throughput"
    """What the plan is chosen for, among the layouts that fit: `cost` may leave accelerators idle."""
    zero_quantized_weights: bool = False
    """ZeRO++ qwZ: ZeRO-3 gathers weights in int8."""
    zero_quantized_gradients: bool = False
    """ZeRO++ qgZ: ZeRO-3 reduces gradients in int4 between nodes."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in the compute precision."""
        return 4 if self.precision == "fp32" else 2

    @property
    def axis_sizes(self) -> dict[str, int | None]:
        """The sizes of the axes beyond data parallelism that the user fixed, by the names of `Strategy`."""
        return {axis: getattr(self, field) for field, axis in AXIS_FIELDS.items()}


def job_faults(job: TrainingJob) -> list[Fault]:
    """Return what is wrong with the values of a job on their own; each fault bears the name of the option."""
    faults = []
    for field, limit in (
        ("seq_len_tokens", 100_000_000),
        ("micro_batch_size", 1_000_000),
        ("global_batch_size", 1_000_000_000),
        ("lora_rank", 100_000),
        *((field, 100_000) for field in AXIS_FIELDS),
    ):
        value = getattr(job, field)
        if value is None and field in ("micro_batch_size", "global_batch_size", *AXIS_FIELDS):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            where = "seq_len" if field == "seq_len_tokens" else field
            faults.append(Fault(where=where, value=value, rule=f"must be an integer from 1 to {limit:,}"))
    for field, choices in (
        ("precision", Precision),
        ("method", Method),
        ("gradient_checkpointing", Recomputation),
        ("strategy", StrategyName),
        ("offload", OffloadName),
        ("objective", ObjectiveName),
        ("loss", LossImplementation),
        ("teacher_placement", TeacherPlacementChoice),
        ("optimizer", tuple(OPTIMIZERS)),
    ):
        value = getattr(job, field)
        allowed = choices if isinstance(choices, tuple) else get_args(choices)
        if value not in allowed:
            near = get_close_matches(str(value), allowed, n=1, cutoff=0.4)
            fix = f"did you mean {near[0]}?" if near else ""
            faults.append(Fault(where=field, value=value, rule=f"must be one of {', '.join(allowed)}", fix=fix))
    if job.method != "full" and not job.lora_targets:
        faults.append(Fault(where="lora_targets", rule="must name at least one module", fix="use all-linear"))
    return faults
