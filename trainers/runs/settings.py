"""Settings of a launched training, and the file through which its ranks learn them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...ds_configs.plan.output import output_faults
from ...ds_configs.specs.errors import Fault
from ...ds_configs.specs.job import Method
from ...ds_configs.specs.settings import (
    GuardSettings,
    HardwareSettings,
    HubSettings,
    Names,
    Settings,
    TeacherPlacementSettings,
    TrainingSettings,
)
from ...ds_configs.specs.teacher_placement import TeacherPlacement
from ...plugins.huggingface_hub.push import push_faults
from ...plugins.transformers.trackers import tracker_faults
from ..data.settings import DataSettings
from ..losses.objective import Divergence
from .checkpoints import last_checkpoint

LEARNING_RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}
"""Of the first step after warm-up, where the user names none."""

PLAN_DIRECTORY, METRICS_FILE = "plan", "metrics.jsonl"
JOB_FILE, RESULT_FILE, TOKENIZER = "job.json", "result.json", "tokenizer"
TRAIN_SAMPLES, EVALUATION_SAMPLES = "train", "evaluation"


class ObjectiveSettings(TeacherPlacementSettings):
    """Objective of a student: the distance to its teacher and the weight of the labels."""

    group = "Objective"

    loss: Divergence = Field("forward_kl", description="Distance between teacher and trained model")
    mixture: float = Field(0.5, description="Teacher's weight in JSD, lambda of the skewed divergences")
    alpha: float = Field(0.5, description="Weight of the distance, 0 to 1; the labels have the rest")
    temperature: float = Field(1.0, description="Softens both distributions")
    teacher_revision: str | None = Field(None, description="Branch, tag or commit of a Hub teacher")


class EvaluationSettings(Settings):
    """Samples that a training is judged on."""

    group = "Data"

    evaluation_dataset: str | None = Field(
        None, description="Evaluate on this dataset, named as --dataset is. Default: rows held out of that"
    )
    evaluation_split: str | None = Field(
        None, description="Evaluate on this split of a Hub dataset, such as validation, and train on all of the other"
    )
    evaluation_samples: int = Field(256, ge=1, description="Held-out samples to evaluate on, at most")


class LaunchedSettings(
    TrainingSettings, GuardSettings, HardwareSettings, EvaluationSettings, DataSettings, HubSettings
):
    """Settings that every launched training has."""

    group = "Training"

    hardware: str | None = Field(
        None, description="As for plan. Default: this machine's accelerators, or two CPU ranks"
    )
    global_batch_size: int | None = Field(None, ge=1, description="Samples of one optimizer step. Default: about 32")
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps. Default: as many as the epochs need")
    epochs: float = Field(1.0, gt=0, description="Passes over the data")
    learning_rate: float | None = Field(None, gt=0, description="Default: 2e-5, with LoRA 2e-4")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="Compute precision; auto: bf16, and fp32 without an accelerator"
    )
    method: Method = Field("full", description="Full training, LoRA, or QLoRA")
    logging_steps: int = Field(10, ge=1, description="Optimizer steps between two lines of metrics.jsonl")
    save_steps: int | None = Field(None, ge=1, description="Optimizer steps between checkpoints. Default: none")

    report_to: Names = Field(
        (),
        description="Trackers that hear of every step, separated by commas: tensorboard, wandb, trackio, mlflow, ...",
    )

    def base_learning_rate(self) -> float:
        """Return the learning rate, by method where none is named."""
        return LEARNING_RATES[self.method] if self.learning_rate is None else self.learning_rate


class RankJob(BaseModel):
    """Job of every rank of any launch, as it stands in a file that its command line names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    training_arguments: dict[str, Any] = Field(description="keys of TrainingArguments")

    @property
    def hang_seconds(self) -> float | None:
        """Seconds that a rank may stand still; `None` for as long as it wants."""
        return None


class LaunchedJob(RankJob):
    """Job of every rank of a training."""

    settings: LaunchedSettings = Field(description="what the user asked for")
    output_dir: str = Field(description="where the model goes")
    placement: TeacherPlacement = Field(description="where the teacher lives; unused without one")
    world_size: int = Field(description="ranks that must come up")
    train_samples: int = Field(description="samples of one epoch")
    train_tokens: int = Field(description="tokens of one epoch")
    resume: bool = Field(description="whether to go on from the last checkpoint")
    digests: dict[str, str] = Field({}, description="of what every machine made for itself, where there are several")

    @property
    def hang_seconds(self) -> float | None:
        """Seconds that a rank may stand still; `None` for as long as it wants."""
        return self.settings.hang_seconds


def launched_faults(settings: LaunchedSettings) -> list[Fault]:
    """Return a fault where no dataset is named, or a tracker or the Hub is not ready for the run."""
    faults = tracker_faults(settings.report_to) + push_faults(settings.push_to_hub)
    if not settings.dataset:
        faults.append(Fault(where="dataset", rule="is missing", fix="give --dataset, such as python-help"))
    return faults


def run_output_faults(directory: Path, how: Mapping[str, Any], sources: Mapping[str, str | None]) -> list[Fault]:
    """Return what stands in the way of writing to a directory, on the machine that does.

    Args:
        directory: Where results go.
        how: `dry_run`, `force` and `resume`, and this machine's `place` among several.
        sources: What is read, by part.
    """
    force, resume, place = (how.get(name) for name in ("force", "resume", "place"))
    if how.get("dry_run") or not (place is None or place.is_first):
        return []
    fix = "use --force to write into it, or --resume to go on from its last checkpoint"
    faults = output_faults(directory, force=bool(force or resume), sources=sources, fix=fix)
    if resume and not directory.is_file() and last_checkpoint(directory) is None:
        rule, fix = "holds no checkpoint to resume from", "run with --save-steps first, or drop --resume"
        faults.append(Fault(where="output_dir", value=str(directory), rule=rule, fix=fix))
    return faults


def is_without(directory: Path, names: Sequence[str]) -> bool:
    """Tell whether a local model lacks all files of these names or patterns."""
    if directory.is_file():
        return True
    return directory.is_dir() and not any(any(directory.glob(name)) for name in names)
