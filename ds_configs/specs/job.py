"""`TrainingJob`: precision, optimizer, loss, batch and teacher of a training run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal, get_args

from .errors import ConfigError, count_fix
from .model import ModelSpec
from .optimizers import LOW_RANK, optimizer_errors, parsed_optim_args
from .second_models import Placement, PlacementOption, SecondModel, SecondModelRole
from .texts import NAMES_COMMA, flag_words

Precision = Literal["bf16", "fp16", "fp32", "fp8"]
Method = Literal["full", "lora", "qlora"]
Recomputation = Literal["auto", "on", "off", "selective"]
StrategyName = Literal[
    "auto", "single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3-hpz", "fsdp2", "fsdp2-hybrid"
]
OffloadName = Literal["auto", "none", "cpu", "cpu-all", "nvme", "zenflow", "superoffload"]
ObjectiveName = Literal["throughput", "memory"]
"""What a plan maximizes: tokens per second, tokens per accelerator-second, or free memory."""
LossImplementation = Literal["auto", "eager", "chunked"]
Switch = Literal["auto", "on", "off"]
WeightsType = Literal["auto", "fp32", "bf16"]


AXIS_FIELDS: Mapping[str, str] = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "sequence_parallel_size": "sp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
}
"""Fields of `TrainingJob` for the axes beyond data parallelism, and their names in `Layout`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """A training run; the planner chooses fields that are `auto` or `None`."""

    seq_len_tokens: int = 4096
    """Tokens of one training sequence."""
    micro_batch_size: int | None = None
    """Sequences per forward pass and rank; `None`: the planner chooses."""
    global_batch_size: int | None = None
    """Sequences per optimizer step over all ranks; `None`: one micro-batch per rank, or as many as fill a pipeline."""
    precision: Precision = "bf16"
    """Compute precision, with fp32 master weights; `fp8`: products of the layers in fp8, everything else in bf16."""
    optimizer: str = "adamw_torch_fused"
    """A key of `OPTIMIZERS`, or `auto`: the planner changes it if the job does not fit with AdamW or is slower."""
    optim_args: str = ""
    """Arguments of the optimizer as in `TrainingArguments.optim_args`, such as `rank=64, update_proj_gap=100`."""
    weights_dtype: WeightsType = "auto"
    """Type of the trained weights, their gradients and states under DDP and FSDP2. ZeRO keeps fp32 weights.

    `auto` is fp32, unless `optimizer` is `auto` and the planner needs bf16.
    """
    method: Method = "full"
    """`lora` freezes the base model; `qlora` also loads its Linear weights in 4 bit."""
    lora_rank: int = 16
    """Rank of the LoRA matrices; unused with `full`."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Module name endings that LoRA adapts, or `all-linear`; unused with `full`."""
    gradient_checkpointing: Recomputation = "auto"
    """Whether layers are recomputed in the backward pass; `selective` keeps matrix products and attention."""
    strategy: StrategyName = "auto"
    """Engine and ZeRO stage."""
    offload: OffloadName = "auto"
    """Device for offloaded optimizer states, with `cpu-all` and `nvme` also for parameters; `zenflow` and
    `superoffload` are variants of `cpu`, which `auto` never selects."""
    loss: LossImplementation = "auto"
    """`chunked` never allocates the logits of all tokens.

    `auto` selects it if the plan becomes faster, and with Liger's kernels wherever they compute it, as Transformers.
    """
    tiled_mlp: Switch = "auto"
    """Whether MLPs compute the sequence in tiles; `auto` uses tiles if the job does not fit without or is faster."""
    offload_activations: Switch = "auto"
    """Whether inputs of recomputed layers wait in host memory; `auto` like `tiled_mlp`, for as few layers as fit."""
    teacher: ModelSpec | None = None
    """Frozen teacher of a distillation; `None` without one."""
    teacher_placement: PlacementOption = "auto"
    """Placement of the teacher; unused without one."""
    tensor_parallel_size: int | None = None
    """Ranks that share each layer (AutoTP); `None`: the planner chooses, 1: disabled.

    If any of these axes is fixed above 1, the planner leaves the others at 1. There is one exception: with a fixed
    tensor parallelism it still chooses pipeline stages, and vice versa.
    """
    pipeline_parallel_size: int | None = None
    """Pipeline stages; `None`: the planner chooses, 1: disabled."""
    sequence_parallel_size: int | None = None
    """Ranks that share each sequence (Ulysses); `None`: the planner chooses, 1: disabled."""
    context_parallel_size: int | None = None
    """Ranks that share each sequence (torch, FSDP2); `None`: the planner chooses, 1: disabled."""
    expert_parallel_size: int | None = None
    """Ranks that share the experts of each layer (AutoEP); `None`: the planner chooses, 1: disabled."""
    objective: ObjectiveName = "throughput"
    """What the plan optimizes among the layouts that fit; `cost` may leave accelerators idle."""
    zero_quantized_weights: bool = False
    """ZeRO++ qwZ: ZeRO-3 gathers weights in int8."""
    zero_quantized_gradients: bool = False
    """ZeRO++ qgZ: ZeRO-3 reduces gradients in int4 between nodes."""
    torch_compile: bool = False
    """Whether `torch.compile` (inductor) compiles the model."""
    use_liger_kernel: bool = False
    """Whether Liger's kernels compute norms, rotary embeddings and MLPs, and head and loss unless `loss` is eager."""

    def options(self) -> dict[str, Any]:
        """Return the value of each option that makes this job, the inverse of `job_of`; a teacher by its name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {name: "auto" for name in _AUTO_SIZES if values[name] is None}
        values |= {"lora_targets": ",".join(self.lora_targets), "teacher": self.teacher and self.teacher.name}
        return {"seq_len": values.pop("seq_len_tokens"), "strategy": values.pop("strategy"), **values}

    def flags(self, base: TrainingJob | None = None, *, of: Collection[str] | None = None) -> list[str]:
        """Return the options of a command that make this job from another job, or of a command that has no options yet.

        The defaults of sequence length and precision depend on command, model and hardware, so that these are always
        returned without `base`. `of` are the options that the command has, by default those of `plan`.

        >>> TrainingJob(method="lora").flags(TrainingJob()), TrainingJob(torch_compile=True).flags()
        (['--method', 'lora'], ['--seq-len', '4096', '--precision', 'bf16', '--torch-compile'])
        """
        usual = TrainingJob().options()
        values, known = self.options(), usual if base is None else base.options()
        unused = {"lora_rank", "lora_targets"} if self.method == "full" else set()
        unused |= {"teacher_placement"} if self.teacher is None else set()
        if base is not None and base.method == "full":
            # A command of full training cannot have these.
            known |= {name: usual[name] for name in ("lora_rank", "lora_targets")}
        always = ("seq_len", "precision") if base is None else ()
        return flag_words(
            {
                name: value
                for name, value in values.items()
                if (value != known[name] or name in always) and name not in unused and (of is None or name in of)
            }
        )

    def __hash__(self) -> int:
        """Return a cheap hash, because jobs are keys of caches."""
        return hash((self.seq_len_tokens, self.global_batch_size, self.method, self.optimizer, self.loss))

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in the compute precision."""
        return 4 if self.precision == "fp32" else 2

    @property
    def trained_weight_bytes(self) -> int:
        """Bytes of one trained weight without ZeRO, which keeps fp32 weights."""
        return 2 if self.weights_dtype == "bf16" else 4

    @property
    def optimizer_rank(self) -> int:
        """Rank of the projections of GaLore and APOLLO."""
        return int(parsed_optim_args(self.optim_args).get("rank", LOW_RANK))

    @property
    def second_models(self) -> tuple[SecondModel, ...]:
        """The models that run beside the trained one."""
        if self.teacher is None:
            return ()
        return (SecondModel(role="teacher", spec=self.teacher, placement=self.teacher_placement),)

    def placed(self, role: SecondModelRole, placement: Placement) -> TrainingJob:
        """Return the job with another placement of a second model."""
        changed: dict[str, Any] = {f"{role}_placement": placement}
        return replace(self, **changed)

    @property
    def axis_sizes(self) -> dict[str, int | None]:
        """The fixed sizes of the axes beyond data parallelism, by their names in `Layout`; `None` if not fixed."""
        return {axis: getattr(self, field) for field, axis in AXIS_FIELDS.items()}


_AUTO_SIZES = ("micro_batch_size", *AXIS_FIELDS)
"""Fields that are `None` where their option is `auto`."""


def job_of(options: Mapping[str, Any]) -> TrainingJob:
    """Return the job of some options by name, the inverse of `TrainingJob.options`; the teacher is a specification.

    >>> job_of({"seq_len": 512, "micro_batch_size": "auto", "lora_targets": "q_proj, v_proj"}).lora_targets
    ('q_proj', 'v_proj')
    """
    values = {"seq_len_tokens" if name == "seq_len" else name: value for name, value in options.items()}
    for name in set(_AUTO_SIZES) & values.keys():
        values[name] = None if values[name] == "auto" else values[name]
    if isinstance(targets := values.get("lora_targets"), str):
        values["lora_targets"] = tuple(name.strip() for name in NAMES_COMMA.split(targets) if name.strip())
    elif isinstance(targets, list):
        values["lora_targets"] = tuple(targets)
    return TrainingJob(**values)


@lru_cache(maxsize=16)
def without_kernels(job: TrainingJob) -> TrainingJob:
    """Return a job with eager kernels in bf16 instead of compiled, Liger's or fp8 ones."""
    precision: Precision = "bf16" if job.precision == "fp8" else job.precision
    return replace(job, precision=precision, torch_compile=False, use_liger_kernel=False)


def job_errors(job: TrainingJob) -> list[ConfigError]:
    """Return the errors of single values of a job; each error has the name of the option."""
    errors = []
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
            rule = f"must be an integer from 1 to {limit:,}"
            errors.append(ConfigError(where=where, value=value, rule=rule, fix=count_fix(where, value)))
    for field in ("zero_quantized_weights", "zero_quantized_gradients", "torch_compile", "use_liger_kernel"):
        if not isinstance(getattr(job, field), bool):
            errors.append(ConfigError(where=field, value=getattr(job, field), rule="must be True or False"))
    for field, choices in (
        ("precision", Precision),
        ("method", Method),
        ("gradient_checkpointing", Recomputation),
        ("strategy", StrategyName),
        ("offload", OffloadName),
        ("objective", ObjectiveName),
        ("loss", LossImplementation),
        ("tiled_mlp", Switch),
        ("offload_activations", Switch),
        ("teacher_placement", PlacementOption),
        ("weights_dtype", WeightsType),
    ):
        value = getattr(job, field)
        allowed = get_args(choices)
        if value not in allowed:
            near = get_close_matches(str(value), allowed, n=1, cutoff=0.4)
            fix = f"did you mean {near[0]}?" if near else ""
            errors.append(ConfigError(where=field, value=value, rule=f"must be one of {', '.join(allowed)}", fix=fix))
    if job.optimizer != "auto":
        errors += optimizer_errors(job.optimizer, job.optim_args)
    if not isinstance(job.lora_targets, tuple) or not all(isinstance(name, str) for name in job.lora_targets):
        rule, fix = "must be names of modules", 'use "all-linear", or a list such as ["q_proj", "v_proj"]'
        errors.append(ConfigError(where="lora_targets", value=job.lora_targets, rule=rule, fix=fix))
    elif job.method != "full" and not job.lora_targets:
        errors.append(
            ConfigError(where="lora_targets", rule="must contain at least one module name", fix="use all-linear")
        )
    teacher: object = job.teacher
    if not isinstance(teacher, ModelSpec | None):
        rule, fix = "must be a model", "pass a Hub id, a local directory or a ModelSpec"
        errors.append(ConfigError(where="teacher", value=teacher, rule=rule, fix=fix))
    return errors
