"""What a launched training is asked for, and the file through which its ranks learn it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...ds_configs.plan.write import output_faults
from ...ds_configs.specs.errors import Fault, UsageError
from ...ds_configs.specs.job import OffloadName, StrategyName, Switch
from ...ds_configs.specs.teacher_placement import TeacherPlacement, TeacherPlacementChoice
from ..losses.objective import Divergence
from .checkpoints import last_checkpoint

LEARNING_RATES = {"full": 2e-5, "lora": 2e-4}
"""Of the first step after warm-up, where the user names none."""

PLAN_DIRECTORY, METRICS_FILE = "plan", "metrics.jsonl"
JOB_FILE, RESULT_FILE, TOKENIZER = "job.json", "result.json", "tokenizer"
TRAIN_SAMPLES, EVALUATION_SAMPLES = "train", "evaluation"

Settings = TypeVar("Settings", bound=BaseModel)


class LaunchedSettings(BaseModel):
    """Settings that every launched training has, as its YAML file may state them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    dataset: str = Field("", description="ID[:config][#N] of the Hub, a file, a directory, or python-help")
    dataset_split: str = Field("train", description="split of a Hub dataset")
    dataset_revision: str | None = Field(None, description="branch, tag or commit of a Hub dataset")
    seq_len: int = Field(512, ge=2, description="tokens of one sample")
    packing: bool = Field(True, description="join plain text to samples of equal length")
    evaluation_fraction: float = Field(0.05, gt=0, lt=1, description="share of the rows that is held out")
    evaluation_samples: int = Field(256, ge=1, description="held-out samples to evaluate on, at most")
    hardware: str | None = Field(None, description="as for plan; default: this machine's accelerators, or 2xCPU")
    host_memory: str | None = Field(None, description="memory of one node, such as 1TB")
    nvme: str | None = Field(None, description="NVMe of one node as PATH:SIZE")
    loss: Divergence = Field("forward_kl", description="distance between the distributions")
    mixture: float = Field(0.5, description="teacher's weight in JSD, lambda of skewed divergences")
    alpha: float = Field(0.5, description="weight of the distance; labels have the rest")
    temperature: float = Field(1.0, description="softens both distributions")
    max_steps: int | None = Field(None, ge=1, description="optimizer steps; default: by epochs")
    epochs: float = Field(1.0, gt=0, description="passes over the data")
    learning_rate: float | None = Field(None, gt=0, description="default 2e-5, with LoRA 2e-4")
    micro_batch_size: int | Literal["auto"] = Field("auto", description="samples of one forward pass on one rank")
    global_batch_size: int | None = Field(None, ge=1, description="samples of one optimizer step; default about 32")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field("auto", description="bf16, without accelerator fp32")
    optimizer: str = Field("adamw_torch_fused", description="a name of the Trainer's optim")
    method: Literal["full", "lora"] = Field("full", description="full training or LoRA")
    lora_rank: int = Field(16, ge=1, description="rank of the LoRA matrices")
    lora_targets: str = Field("all-linear", description="module names separated by commas, or all-linear")
    gradient_checkpointing: Switch = Field("auto", description="recompute each layer in the backward pass")
    strategy: StrategyName = Field("auto", description="engine and stage to use")
    offload: OffloadName = Field("auto", description="where optimizer states and parameters may live")
    teacher_placement: TeacherPlacementChoice = Field("auto", description="where the teacher lives")
    revision: str | None = Field(None, description="branch, tag or commit of a Hub model that is trained")
    teacher_revision: str | None = Field(None, description="branch, tag or commit of a Hub teacher")
    logging_steps: int = Field(10, ge=1, description="optimizer steps between two lines of metrics.jsonl")
    save_steps: int | None = Field(None, ge=1, description="optimizer steps between checkpoints; default: none")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="of data order, held-out rows and sampling")

    def base_learning_rate(self) -> float:
        """Return the learning rate, by method where none is named."""
        return LEARNING_RATES[self.method] if self.learning_rate is None else self.learning_rate


def validated(kind: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Return settings from values by name.

    Raises:
        UsageError: unknown names and values that are not allowed, all together.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        # A field that takes a number or a word fails once for each kind.
        faults = {detail["loc"][0]: _fault(kind, detail) for detail in reversed(error.errors())}
        raise UsageError(list(reversed(faults.values()))) from None


def _fault(kind: type[BaseModel], detail: Mapping[str, Any]) -> Fault:
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        near = get_close_matches(name, list(kind.model_fields), n=1, cutoff=0.5)
        return Fault(where=name, rule="is not a setting", fix=f"did you mean {near[0]}?" if near else "")
    return Fault(where=name, value=detail["input"], rule=str(detail["msg"]).lower())


class RankJob(BaseModel):
    """What every rank of any launch needs to know, as it stands in a file that its command line names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    training_arguments: dict[str, Any] = Field(description="keys of TrainingArguments")


class LaunchedJob(RankJob):
    """What every rank of a training needs to know."""

    settings: LaunchedSettings = Field(description="what the user asked for")
    output_dir: str = Field(description="where the model goes")
    placement: TeacherPlacement = Field(description="where the teacher lives")
    world_size: int = Field(description="ranks that must come up")
    train_samples: int = Field(description="samples of one epoch")
    train_tokens: int = Field(description="tokens of one epoch")
    resume: bool = Field(description="whether to go on from the last checkpoint")

    @property
    def teacher_revision(self) -> str | None:
        """Branch, tag or commit that a Hub teacher is loaded from."""
        return self.settings.teacher_revision


def dataset_faults(settings: LaunchedSettings) -> list[Fault]:
    """Return a fault where no dataset is named."""
    if settings.dataset:
        return []
    return [Fault(where="dataset", rule="is missing", fix="give --dataset, such as python-help")]


def adapter_faults(settings: LaunchedSettings) -> list[Fault]:
    """Return the settings of LoRA that are stated for a training without it."""
    rule, fix = "needs adapters", "add --method lora, or drop it"
    return [
        Fault(where=name, value=getattr(settings, name), rule=rule, fix=fix)
        for name in ("lora_rank", "lora_targets")
        if name in settings.model_fields_set and settings.method != "lora"
    ]


def run_output_faults(directory: Path, *, force: bool, resume: bool, sources: Mapping[str, str | None]) -> list[Fault]:
    """Return what stands in the way of writing to a directory; `sources` are the models that are read, by part."""
    fix = "use --force to write into it, or --resume to go on from its last checkpoint"
    faults = output_faults(directory, force=force or resume, sources=sources, fix=fix)
    if resume and not directory.is_file() and last_checkpoint(directory) is None:
        rule, fix = "holds no checkpoint to resume from", "run with --save-steps first, or drop --resume"
        faults.append(Fault(where="output_dir", value=str(directory), rule=rule, fix=fix))
    return faults


def is_without(directory: Path, names: Sequence[str]) -> bool:
    """Tell whether a local model lacks all files of these names or patterns."""
    if directory.is_file():
        return True
    return directory.is_dir() and not any(any(directory.glob(name)) for name in names)
