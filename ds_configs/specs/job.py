"""`TrainingJob`: the one declaration of a training run, and the settings of commands that have its fields."""

# Without `from __future__ import annotations`: pydantic and cyclopts would evaluate every annotation as text.
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass as stdlib_dataclass
from dataclasses import fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast, dataclass_transform, get_args

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, create_model
from pydantic.dataclasses import dataclass

from .errors import ConfigError
from .images import IMAGE_PARTS, image_part
from .model import ModelSpec
from .optimizers import optimizer_errors
from .second_models import TRAINED_ROLES, Placement, PlacementOption, SecondModel, SecondModelRole
from .settings import Count, HardwareFields, Names, RevisionFields, raises_all_errors
from .tasks import TASKS, TaskName
from .texts import flag_words

Precision = Literal["bf16", "fp16", "fp32", "fp8"]
Method = Literal["full", "lora", "qlora"]
LoraVariant = Literal["lora", "dora", "rslora", "pissa"]
Recomputation = Literal["auto", "on", "off", "reentrant"]
StrategyName = Literal[
    "auto", "single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero3-hpz", "fsdp2", "fsdp2-hybrid"
]
OffloadName = Literal["auto", "none", "cpu", "cpu-all", "nvme"]
LossImplementation = Literal["auto", "eager", "chunked"]
Switch = Literal["auto", "on", "off"]
InputOffload = Literal["auto", "on", "off", "transformers"]
"""Whether the inputs of recomputed layers are kept in host memory, and whether Transformers copies them."""
PartTraining = Literal["frozen", "trained", "full"]
"""With adapters, `trained` adds some to a part for images, and `full` trains its weights beside those of the text."""
"""Whether a part of a model with images is trained: with LoRA, whether its Linear layers are adapted."""
GenerationEngine = Literal["auto", "transformers", "vllm", "vllm-server"]
WeightsType = Literal["auto", "fp32", "bf16"]


Group = TypeVar("Group")

_OF_LORA = ("lora_rank", "lora_targets", "lora_variant")
"""Fields of `TrainingJob` for adapters."""
AXIS_FIELDS: Mapping[str, str] = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "sequence_parallel_size": "sp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
}
"""Fields of `TrainingJob` for the axes beyond data parallelism, and their names in `Layout`."""


def _option(description: str, *, unit: str = "", hugging_face: Sequence[str] = ()) -> Any:
    """Return the help of a field, its unit, and its names in `TrainingArguments`, TRL and PEFT."""
    extra: dict[str, Any] = ({"unit": unit} if unit else {}) | (
        {"hugging_face": [*hugging_face]} if hugging_face else {}
    )
    return Field(description=description, json_schema_extra=extra or None)


_AUTO = BeforeValidator(lambda value: None if value == "auto" else value)
Ranks = Annotated[int | None, Count(100_000), Field(json_schema_extra={"unit": "ranks"})]


@dataclass_transform(kw_only_default=True)
def _fields(kind: type[Group]) -> type[Group]:
    """Declare a group of fields; for type checkers it is not frozen, because settings inherit it."""
    return stdlib_dataclass(frozen=True, kw_only=True)(kind)


@_fields
class TrainingFields:
    """Fields that every command has that trains; `None` of an optional field: the planner chooses."""

    group: ClassVar[str] = "Training"

    micro_batch_size: Annotated[
        int | None,
        Count(1_000_000),
        _option(
            "Sequences per forward pass and rank (per-device batch size), or auto",
            unit="sequences",
            hugging_face=["per_device_train_batch_size"],
        ),
    ] = None
    global_batch_size: Annotated[
        int | None,
        Count(1_000_000_000),
        _option("Sequences per optimizer step over all ranks (effective batch size)", unit="sequences"),
    ] = None
    """`None`: one micro-batch per rank, or as many as fill a pipeline."""
    optimizer: Annotated[
        str, _option("Optimizer, by its name in the Trainer's optim, or muon", hugging_face=["optim"])
    ] = "adamw_torch_fused"
    """A key of `OPTIMIZERS`."""
    optim_args: Annotated[str, _option("Arguments of the optimizer (e.g. rank=64,update_proj_gap=100)")] = ""
    weights_dtype: Annotated[WeightsType, _option("Type of trained weights under DDP and FSDP2; auto: fp32")] = "auto"
    """Type of the trained weights, their gradients and states. ZeRO keeps fp32 weights."""
    lora_rank: Annotated[int, Count(100_000), _option("Rank of the LoRA matrices", hugging_face=["lora_r"])] = 16
    lora_targets: Annotated[
        Names,
        _option(
            "Names of modules or fused experts, separated by commas, all-linear, or experts",
            hugging_face=["lora_target_modules"],
        ),
    ] = ("all-linear",)
    """Name endings of modules and fused expert matrices that LoRA adapts, `all-linear` or `experts`; unused with
    `full`, as the rank."""
    lora_variant: Annotated[
        LoraVariant, _option("LoRA, DoRA (trains norms too), rsLoRA (scale alpha / sqrt(rank)), or PiSSA (from an SVD)")
    ] = "lora"
    """How adapters start, are scaled and are added to weights; unused with `full`, as the rank."""
    gradient_checkpointing: Annotated[
        Recomputation, _option("Recompute layers in the backward pass; reentrant as use_reentrant=True does")
    ] = "auto"
    strategy: Annotated[StrategyName, _option("Engine and ZeRO stage")] = "auto"
    offload: Annotated[OffloadName, _option("Offload optimizer states; with cpu-all and nvme, also parameters")] = (
        "auto"
    )
    """`search.candidates` makes layouts of it; `memory.host` has its bytes and its seconds."""
    tiled_mlp: Annotated[Switch, _option("Compute MLPs in tiles of the sequence, for long sequences")] = "auto"
    """`auto` uses tiles if the job does not fit without or is faster."""
    offload_activations: Annotated[
        InputOffload, _option("Keep the inputs of recomputed layers in host memory, or Transformers does")
    ] = "auto"
    """`auto` like `tiled_mlp`, for as few layers as fit. `transformers`: `gradient_checkpointing_kwargs={"offload":
    True}`, for all recomputed layers, without overlap."""


@_fields
class TeacherFields:
    """The field of a training run with a teacher."""

    group: ClassVar[str] = "Training"

    teacher_placement: Annotated[
        PlacementOption, _option("replica (full copy per rank), sharded, offloaded (host), quantized (4 bit) or cached")
    ] = "auto"
    """Unused without a teacher."""


@_fields
class LayoutFields:
    """Sizes of the parallel axes; `None`: the planner chooses.

    If any axis is fixed above 1, the planner leaves the others at 1. There is one exception: with a fixed tensor
    parallelism it still chooses pipeline stages, and vice versa.
    """

    group: ClassVar[str] = "Parallel layout"

    tensor_parallel_size: Annotated[Ranks, _option("Ranks that share each layer (AutoTP); 1 disables")] = None
    pipeline_parallel_size: Annotated[Ranks, _option("Pipeline stages; 1 disables")] = None
    sequence_parallel_size: Annotated[Ranks, _option("Ranks that share each sequence (Ulysses); 1 disables")] = None
    context_parallel_size: Annotated[
        Ranks, _option("Ranks that share each sequence (torch context parallelism, FSDP2); 1 disables")
    ] = None
    expert_parallel_size: Annotated[Ranks, _option("Ranks that share experts of a layer (AutoEP); 1 disables")] = None
    zero_quantized_weights: Annotated[bool, _option("ZeRO++ qwZ: ZeRO-3 gathers weights in int8")] = False
    zero_quantized_gradients: Annotated[bool, _option("ZeRO++ qgZ: ZeRO-3 reduces gradients in int4 between nodes")] = (
        False
    )


@_fields
class TaskFields:
    """The objective of a training run, and how a task that generates does so; `None`: the task's default."""

    group: ClassVar[str] = "Task"

    task: Annotated[
        TaskName, _option("Objective: supervised, preferences (dpo to reward), or reinforcement (grpo to gkd)")
    ] = "sft"
    beta: Annotated[
        Annotated[float, Field(ge=0)] | None,
        _AUTO,
        _option("Weight of the divergence from the reference; with 0, grpo, rloo and ppo have none"),
    ] = None
    completion_tokens: Annotated[
        int | None,
        Count(100_000_000),
        _option(
            "Longest completion, which is part of --seq-len. Default: half of it if the task generates",
            unit="tokens",
            hugging_face=["max_completion_length", "max_new_tokens", "response_length"],
        ),
    ] = None
    num_generations: Annotated[int | None, Count(100_000), _option("Completions per prompt")] = None
    steps_per_generation: Annotated[
        int | None, Count(100_000), _option("Micro-batches per generation. Default: those of an optimizer step")
    ] = None
    generation: Annotated[
        GenerationEngine,
        _option("Generate with transformers, vllm on the training GPUs, or vllm-server on GPUs of its own"),
    ] = "auto"
    vllm_memory_share: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        _AUTO,
        _option("Share of a GPU for vLLM", hugging_face=["vllm_gpu_memory_utilization"]),
    ] = None
    vllm_tensor_parallel_size: Annotated[Ranks, _option("GPUs that share vLLM's weights")] = None
    vllm_gpus: Annotated[Ranks, _option("GPUs of the vLLM server, which do not train. Default: planned")] = None
    vllm_sleep: Annotated[
        Switch, _option("Free vLLM's memory during the update", hugging_face=["vllm_enable_sleep_mode"])
    ] = "auto"
    reference_placement: Annotated[
        PlacementOption,
        _option("replica, sharded, offloaded (host), cached (computed ahead) or shared (adapters disabled)"),
    ] = "auto"
    """Unused without a reference, as those of reward and value model."""
    reward_placement: Annotated[PlacementOption, _option("replica, sharded or offloaded (host)")] = "auto"
    value_placement: Annotated[Literal["auto", "layout"], _option("layout: trained as the layout trains")] = "auto"


@_fields
class ImageFields:
    """Images of the samples of a vision-language model, and which of its parts are trained."""

    group: ClassVar[str] = "Images"

    images_per_sample: Annotated[
        int, Count(100_000, lowest=0), _option("Images (or videos) of a sequence, whose tokens are part of --seq-len")
    ] = 0
    image_size: Annotated[
        str, _option("Width and height of an image before the processor resizes it", unit="pixels")
    ] = "1024x1024"
    max_pixels: Annotated[
        int | None,
        Count(1_000_000_000),
        _option("Largest area of a resized image. Default: of the family's processor", unit="pixels"),
    ] = None
    frames: Annotated[int, Count(100_000, lowest=0), _option("Frames of a video; 0: images")] = 0
    vision_tower: Annotated[
        PartTraining, _option("Vision tower: frozen, trained (LoRA: by adapters), or full: all weights")
    ] = "frozen"
    vision_checkpointing: Annotated[
        Literal["auto", "off"], _option("Recompute a trained vision tower: auto if the layers of the text are, or off")
    ] = "auto"
    projector: Annotated[PartTraining, _option("Projector to the text model: as the vision tower")] = "frozen"


@_fields
class KernelFields:
    """Switches of the kernels that compute a model."""

    group: ClassVar[str] = "Training"

    torch_compile: Annotated[bool, _option("Compile the model (torch.compile with inductor)")] = False
    use_liger_kernel: Annotated[
        bool, _option("Use Liger's kernels for norms, rotary embeddings, MLPs and, unless it is eager, the loss")
    ] = False


@_fields
class PlanFields:
    """Fields with other choices or defaults in commands that train."""

    group: ClassVar[str] = "Training"

    precision: Annotated[Precision, _option("Compute precision, with fp32 master weights; fp8 needs Ada or later")] = (
        "bf16"
    )
    """`fp8`: products of the layers in fp8, everything else in bf16."""
    method: Annotated[Method, _option("Full training, LoRA, or QLoRA")] = "full"
    """`lora` freezes the base model; `qlora` also loads its Linear weights in 4 bit."""
    loss: Annotated[LossImplementation, _option("Loss computation; chunked never stores the logits of all tokens")] = (
        "auto"
    )
    """`auto` selects `chunked` if the plan becomes faster, and with Liger's kernels wherever they compute it."""


@raises_all_errors
@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class TrainingJob(  # type: ignore[misc]
    KernelFields, ImageFields, LayoutFields, TaskFields, TeacherFields, PlanFields, TrainingFields
):
    """A training run; the planner chooses fields that are `auto` or `None`.

    Flags, YAML, environment, `plan.json`, page and proposed commands are made from these fields: a new one needs no
    other declaration. A second model is a field with its role as name, one with its placement, its entry of
    `SecondModelRole`, and those tasks of `TASKS` that read it.
    """

    seq_len_tokens: Annotated[
        int,
        Count(100_000_000),
        Field(validation_alias=AliasChoices("seq_len_tokens", "seq_len")),
        _option("Tokens of one training sequence", unit="tokens", hugging_face=["max_length", "max_seq_length"]),
    ] = 4096
    teacher: Annotated[ModelSpec | None, _option("Frozen teacher model for distillation")] = None
    reference: Annotated[
        ModelSpec | None, _option("Frozen model whose log-probabilities a task compares. Default: the model itself")
    ] = None
    reward: Annotated[ModelSpec | None, _option("Frozen reward model that scores completions")] = None
    value: Annotated[ModelSpec | None, _option("Value model of ppo, trained too")] = None

    def options(self) -> dict[str, Any]:
        """Return the fields by the names of their options."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"seq_len": values.pop("seq_len_tokens"), "strategy": values.pop("strategy"), **values}

    def flags(self, base: "TrainingJob | None" = None, *, of: Collection[str] | None = None) -> list[str]:
        """Return the options of a command that make this job from another job, or of a command that has no options yet.

        The defaults of sequence length and precision depend on command, model and hardware, so that these are always
        returned without `base`. `of` are the options that the command has, by default those of `plan`.

        >>> TrainingJob(method="lora").flags(TrainingJob()), TrainingJob(torch_compile=True).flags()
        (['--method', 'lora'], ['--seq-len', '4096', '--precision', 'bf16', '--torch-compile'])
        """
        usual = TrainingJob().options()
        values, known = self.options(), usual if base is None else base.options()
        unused = set(_OF_LORA) if self.method == "full" else set()
        unused |= {f"{role}_placement" for role in MODEL_ROLES if not self.needs(role)}
        if base is not None and base.method == "full":
            # A command of full training cannot have these.
            known |= {name: usual[name] for name in _OF_LORA}
        always = ("seq_len", "precision") if base is None else ()
        changed: dict[str, Any] = {
            name: ",".join(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if (value != known[name] or name in always) and name not in unused and (of is None or name in of)
        }
        for name, value in changed.items():
            if name in MODEL_ROLES:
                changed[name] = value and value.name
            elif value is None:
                changed[name] = "auto"
        return flag_words(changed)

    @cached_property
    def second_models(self) -> tuple[SecondModel, ...]:
        return tuple(
            SecondModel(
                role=role, spec=spec, placement=getattr(self, f"{role}_placement"), trained=role in TRAINED_ROLES
            )
            for role in MODEL_ROLES
            if (spec := getattr(self, role)) is not None
        )

    @property
    def imitated(self) -> ModelSpec | None:
        """The second model whose logits the loss compares with those of the trained model."""
        return next((second.spec for second in self.second_models if second.is_imitated), None)

    def needs(self, role: SecondModelRole) -> bool:
        """Return whether the job has a second model; `completed` adds the trained model as reference to some."""
        is_own = role == "reference" and role in TASKS[self.task].second_models and self.divergence_weight > 0
        return is_own or getattr(self, role) is not None

    @property
    def divergence_weight(self) -> float:
        """`beta`, or that of the task."""
        return TASKS[self.task].beta if self.beta is None else self.beta

    @property
    def generated_tokens(self) -> int:
        """Tokens of the longest completion of a task that generates."""
        return min(self.seq_len_tokens - 1, self.completion_tokens or -(-self.seq_len_tokens // 2))

    @property
    def generations(self) -> int:
        """Completions per prompt."""
        return TASKS[self.task].num_generations if self.num_generations is None else self.num_generations

    def completed(self, model: ModelSpec) -> "TrainingJob":
        """Return the job with what its task needs: the trained model as reference, and models with a score as output.

        GRPO, RLOO and PPO need no reference without a weight of the divergence from it.
        """
        needed = TASKS[self.task].second_models
        changed: dict[str, Any] = {}
        if self.reference is None and self.needs("reference"):
            changed["reference"] = model
        for role in ("reward", "value"):
            if role in needed and (spec := getattr(self, role)) is not None:
                changed[role] = spec.with_score_head()
        return replace(self, **changed) if changed else self

    def freeze(self, model: ModelSpec) -> ModelSpec:
        """Return the model with its vision tower and its projector frozen or trained, as the job says."""
        if not model.reads_images:
            return model
        by_part = {part: getattr(self, part) for part in IMAGE_PARTS} | {None: "trained"}
        parameters = (
            replace(p, frozen=training == "frozen", whole=training == "full")
            for p in model.parameters
            for training in (by_part[image_part(p.name)],)
        )
        return replace(model, parameters=tuple(parameters))

    def without_second_models(self) -> "TrainingJob":
        """Return the supervised job of the trained model alone."""
        if not self.second_models and self.task == "sft":
            return self
        usual: dict[str, Any] = {field.name: field.default for field in fields(TaskFields)}
        return replace(self, **usual | dict.fromkeys(MODEL_ROLES))

    def placed(self, role: SecondModelRole, placement: Placement) -> "TrainingJob":
        """Return the job with another placement of a second model."""
        changed: dict[str, Any] = {f"{role}_placement": placement}
        return replace(self, **changed)

    def __hash__(self) -> int:
        """Return a cheap hash, because jobs are keys of caches."""
        return hash((self.seq_len_tokens, self.global_batch_size, self.method, self.optimizer, self.loss))

    @property
    def image_sides(self) -> tuple[int, int]:
        """Height and width of an image in pixels."""
        width, height = map(int, self.image_size.split("x"))
        return height, width

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in the compute precision."""
        return 4 if self.precision == "fp32" else 2

    @property
    def trained_weight_bytes(self) -> int:
        """Bytes of one trained weight without ZeRO, which keeps fp32 weights."""
        return 2 if self.weights_dtype == "bf16" else 4

    @property
    def axis_sizes(self) -> dict[str, int | None]:
        """The fixed sizes of the axes beyond data parallelism, by their names in `Layout`; `None` if not fixed."""
        return {axis: getattr(self, field) for field, axis in AXIS_FIELDS.items()}


_FIELDS: Mapping[str, Any] = getattr(TrainingJob, "__pydantic_fields__", {})
MODEL_ROLES = tuple(
    cast(SecondModelRole, name) for name, field in _FIELDS.items() if ModelSpec in get_args(field.annotation)
)
"""Roles of the second models that a job can have."""
PLACEMENT_FIELDS = tuple(f"{role}_placement" for role in MODEL_ROLES)
"""Fields of `TrainingJob` with the placement of a second model."""


HUGGING_FACE_NAMES: Mapping[str, tuple[str, ...]] = {
    ("seq_len" if name == "seq_len_tokens" else name): tuple(names)
    for name, field in _FIELDS.items()
    if (names := (field.json_schema_extra or {}).get("hugging_face"))
}
"""Names of options in `TrainingArguments`, TRL and PEFT that are accepted too."""


@lru_cache(maxsize=16)
def without_kernels(job: TrainingJob) -> TrainingJob:
    """Return a job with eager kernels in bf16 instead of compiled, Liger's or fp8 ones."""
    precision: Precision = "bf16" if job.precision == "fp8" else job.precision
    return replace(job, precision=precision, torch_compile=False, use_liger_kernel=False)


def job_errors(job: TrainingJob) -> list[ConfigError]:
    """Return the errors of values that depend on other values of a job; each error has the name of the option."""
    errors = optimizer_errors(job.optimizer, job.optim_args)
    if job.method != "full" and not job.lora_targets:
        rule = "must contain at least one module name"
        errors.append(ConfigError(where="lora_targets", rule=rule, fix="use all-linear"))
    if not re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,5}", job.image_size):
        rule = "must be width and height in pixels"
        errors.append(ConfigError(where="image_size", value=job.image_size, rule=rule, fix="write 1280x720"))
    if job.task != "sft" or job.teacher is not None:
        trained = [part for part in IMAGE_PARTS if getattr(job, part) != "frozen"]
        rule = "is supported for supervised fine-tuning only"
        errors += [
            ConfigError(where=name, value=getattr(job, name), rule=rule, fix="omit it")
            for name in (*(["images_per_sample"] if job.images_per_sample else []), *trained)
        ]
    if not job.images_per_sample:
        rule, fix = "is not used without images", "add --images-per-sample, or omit it"
        errors += [
            ConfigError(where=name, value=value, rule=rule, fix=fix)
            for name in ("image_size", "max_pixels", "frames")
            if (value := getattr(job, name)) != getattr(TrainingJob, name)
        ]
    return errors + _task_errors(job)


_OF_GENERATION = (
    "completion_tokens",
    "num_generations",
    "steps_per_generation",
    "generation",
    "vllm_memory_share",
    "vllm_tensor_parallel_size",
    "vllm_gpus",
    "vllm_sleep",
)
"""Fields of tasks that generate; the first also limits the answers of preferences."""
GROUPED_TASKS: tuple[TaskName, ...] = ("grpo", "rloo")
"""Tasks whose samples are completions in groups of `num_generations` with one prompt, and that vLLM generates for."""


def _task_errors(job: TrainingJob) -> list[ConfigError]:
    """Return the errors of fields that the job's task does not read or lacks."""
    task, usual = TASKS[job.task], TrainingJob()
    grouped, on_vllm = job.task in GROUPED_TASKS, job.generation in ("vllm", "vllm-server")
    reads = {
        "beta": "reference" in task.second_models,
        **dict.fromkeys(_OF_GENERATION[1:], grouped),
        "completion_tokens": task.head != "model",
        "generation": grouped or (task.generates and not on_vllm),
    } | {role: role in task.second_models or (role, job.task) == ("teacher", "sft") for role in MODEL_ROLES}
    errors = []
    for name, is_read in reads.items():
        value = getattr(job, name)
        if value != getattr(usual, name) and not is_read:
            shown = value.name if isinstance(value, ModelSpec) else value
            role = "reference" if name == "beta" else name
            tasks = [other.name for other in TASKS.values() if role in other.second_models]
            fix = f"use --task {' or '.join(tasks)}, or omit it" if tasks else "use --task grpo or rloo, or omit it"
            errors.append(ConfigError(where=name, value=shown, rule=f"is not used by task {job.task}", fix=fix))
    required = {"gkd": ("teacher",), "ppo": ("reward", "value")}.get(job.task, ())
    for role in required:
        if getattr(job, role) is None:
            errors.append(ConfigError(where=role, rule=f"is required by task {job.task}", fix=f"pass --{role} MODEL"))
    if job.completion_tokens is not None and job.completion_tokens >= job.seq_len_tokens:
        rule = f"must be less than the {job.seq_len_tokens} tokens of a sequence, which contains the prompt too"
        fix = f"use --seq-len {job.seq_len_tokens + job.completion_tokens}, or a smaller value"
        errors.append(ConfigError(where="completion_tokens", value=job.completion_tokens, rule=rule, fix=fix))
    if grouped and job.generations < 2:
        rule = "must be at least 2: an advantage compares completions of one prompt"
        errors.append(ConfigError(where="num_generations", value=job.generations, rule=rule))
    if task.head != "model" and job.loss == "chunked":
        rule = f"is not used by task {job.task}, whose loss reads the output head itself"
        errors.append(ConfigError(where="loss", value=job.loss, rule=rule, fix="omit it"))
    if task.head != "model" and job.use_liger_kernel:
        rule = f"is not supported with task {job.task}: TRL replaces the model's forward pass"
        errors.append(ConfigError(where="use_liger_kernel", value=True, rule=rule, fix="omit it"))
    on_engine = ("vllm_memory_share", "vllm_tensor_parallel_size", "vllm_sleep")
    if grouped and job.generation == "transformers":
        for name in on_engine:
            if getattr(job, name) != getattr(usual, name):
                rule, fix = "is not used by generation transformers", "use --generation vllm, or omit it"
                errors.append(ConfigError(where=name, value=getattr(job, name), rule=rule, fix=fix))
    if job.vllm_gpus is not None and job.generation != "vllm-server" and grouped:
        rule, fix = "is used by a vLLM server only", "use --generation vllm-server, or omit it"
        errors.append(ConfigError(where="vllm_gpus", value=job.vllm_gpus, rule=rule, fix=fix))
    return errors


def adapter_errors(stated: Mapping[str, Any], method: str) -> list[ConfigError]:
    """Return an error for each LoRA option that is set for full training."""
    rule, fix = "requires --method lora or qlora", "add --method lora, or omit it"
    return [
        ConfigError(where=name, value=stated[name], rule=rule, fix=fix)
        for name in (*_OF_LORA, "lora_alpha", "lora_dropout", "lora_plus_ratio")
        if name in stated and method == "full"
    ]


class _JobSettings(
    HardwareFields,
    RevisionFields,
    KernelFields,
    ImageFields,
    LayoutFields,
    TaskFields,
    TeacherFields,
    PlanFields,
    TrainingFields,
):
    """Settings from which a plan is made: a job, whose second models are not read yet, and the hardware."""

    group = "Training"

    seq_len: Annotated[
        int | None,
        Count(100_000_000),
        Field(description="Tokens of a sequence (16k = 16,384). Default: 4096, or the model's maximum"),
    ] = None
    num_processes: int | None = Field(None, ge=1, description="Accelerators, if --hardware names only their type")

    def job_fields(self) -> dict[str, Any]:
        """Return the fields of the job that the user set."""
        names = TrainingJob().options().keys()
        return {name: value for name, value in self.stated().items() if name in names}

    def second_models(self) -> dict[SecondModelRole, str]:
        return {role: name for role in MODEL_ROLES if (name := getattr(self, role)) is not None}


if TYPE_CHECKING:
    JobSettings = _JobSettings
else:
    _named = {role: (str | None, Field(None, description=_FIELDS[role].description)) for role in MODEL_ROLES}
    _open = [name for name in PLACEMENT_FIELDS if name not in _JobSettings.model_fields]
    _placed = {name: (_FIELDS[name].annotation, _FIELDS[name]) for name in _open}
    JobSettings = create_model("JobSettings", __base__=_JobSettings, **_named, **_placed)
