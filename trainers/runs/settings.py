"""Settings of a launched training, and the job file that its ranks read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from ...ds_configs.plan.rendering import NodePlace
from ...ds_configs.specs.errors import ConfigError
from ...ds_configs.specs.job import Method, TrainingFields, TrainingJob
from ...ds_configs.specs.second_models import Placement, SecondModelRole
from ...ds_configs.specs.settings import (
    HANG_SECONDS,
    NONFINITE_STEPS,
    HardwareFields,
    Names,
    RevisionFields,
    Settings,
)
from ...plugins.transformers.training_arguments import tracker_errors
from ..data.sources import DataSettings

LEARNING_RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}
"""Default learning rates after warm-up, by method."""

PLAN_DIRECTORY, METRICS_FILE, REPORT_FILE = "plan", "metrics.jsonl", "REPORT.md"
JOB_FILE, RESULT_FILE, TOKENIZER = "job.json", "result.json", "tokenizer"
TRAIN_SAMPLES, EVALUATION_SAMPLES = "train", "evaluation"


class GuardFields(Settings):
    """Options that stop a training run with invalid values or a hanging rank."""

    group = "Guards"

    nonfinite_steps: int = Field(
        NONFINITE_STEPS, ge=1, description="Stop after this many consecutive steps with NaN or Inf"
    )
    allow_nonfinite: bool = Field(False, description="Load and save weights that are NaN or Inf")
    hang_timeout: float = Field(
        HANG_SECONDS, ge=0, description="Seconds without progress of a rank before all ranks stop; 0 disables"
    )

    @property
    def hang_seconds(self) -> float | None:
        """Seconds without progress of a rank before all ranks stop; `None` if disabled."""
        return self.hang_timeout or None

    def guards(self) -> dict[str, Any]:
        """Return these options as arguments of `GuardCallback`."""
        return {
            "nonfinite_steps": self.nonfinite_steps,
            "allow_nonfinite": self.allow_nonfinite,
            "hang_seconds": self.hang_seconds,
        }


class EvaluationSettings(Settings):
    """Samples for the evaluation of a training."""

    group = "Data"

    evaluation_dataset: str | None = Field(
        None, description="Dataset to evaluate on, as for --dataset. Default: held-out rows of --dataset"
    )
    evaluation_split: str | None = Field(None, description="Split of a Hub dataset to evaluate on, such as validation")
    evaluation_samples: int = Field(256, ge=1, description="Maximum number of held-out samples to evaluate on")


class LaunchedSettings(GuardFields, HardwareFields, EvaluationSettings, DataSettings, RevisionFields, TrainingFields):
    """Settings that every launched training has."""

    group = "Training"
    own_options: ClassVar[frozenset[str]] = frozenset()
    """Options with the name of a field of the job, but another meaning."""

    hardware: str | None = Field(
        None, description="Hardware, as for plan. Default: this machine's accelerators, or two CPU ranks"
    )
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps. Default: --epochs of the data")
    epochs: float = Field(
        1.0,
        gt=0,
        description="Epochs (passes over the data)",
        json_schema_extra={"hugging_face": ["num_train_epochs"]},
    )
    learning_rate: float | None = Field(None, gt=0, description="Peak learning rate. Default: 2e-5, with LoRA 2e-4")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="Compute precision; auto: bf16, or fp32 without an accelerator"
    )
    method: Method = Field("full", description="Full training, LoRA, or QLoRA")
    lora_alpha: float | None = Field(
        None, gt=0, description="Scale of LoRA products, times the rank. Default: twice --lora-rank"
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability of the inputs of LoRA matrices")
    lora_plus_ratio: float | None = Field(
        None, gt=0, description="Learning rate of LoRA's B matrices, over that of A (LoRA+). Default: 1"
    )
    logging_steps: int = Field(10, ge=1, description="Optimizer steps between lines of metrics.jsonl")
    save_steps: int | None = Field(None, ge=1, description="Optimizer steps between checkpoints. Default: none")

    report_to: Names = Field(
        (),
        description="Experiment trackers, separated by commas: tensorboard, wandb, trackio, mlflow, ...",
    )

    def with_optimizer(self, job: TrainingJob) -> Self:
        """Return the settings with the optimizer that was planned."""
        return self.model_copy(
            update={name: getattr(job, name) for name in ("optimizer", "optim_args", "weights_dtype")}
        )

    def lora_options(self) -> dict[str, Any]:
        """Return the settings of adapters as keywords of `add_lora`."""
        options = {
            name: getattr(self, f"lora_{name}") for name in ("rank", "alpha", "dropout", "variant", "plus_ratio")
        }
        return options | {"targets": ",".join(self.lora_targets)}

    def base_learning_rate(self) -> float:
        """Return the learning rate, or the default of the method."""
        return LEARNING_RATES[self.method] if self.learning_rate is None else self.learning_rate


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Options of a run that do not depend on the command."""

    output_dir: Path
    """For model, plan and report."""
    resume: bool = False
    """Resume from the last checkpoint; after the last step, write what is missing of model and report."""
    or_anew: bool = False
    """With `resume`, start at step 0 if no checkpoint is complete."""
    force: bool = False
    """Write into a directory that contains other files."""
    dry_run: bool = False
    """Only check and plan."""
    place: NodePlace | None = None
    """This machine's place among several; `None` for a single machine."""
    check_nodes: bool = True
    """Compare several machines first."""
    command: str = ""
    """Command line for the report, which does not have the directories of absolute paths."""
    full_command: str = ""
    """The command line as it was called, for the commands that an out-of-memory error proposes."""


class RankJob(BaseModel):
    """Job of every rank of a launch, stored in the file on its command line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str
    """Its name in `rank_main.TASKS`."""

    @property
    def hang_seconds(self) -> float | None:
        """Seconds without progress after which a rank is ended; `None` for no limit."""
        return None


class RankTask(RankJob, ABC):
    """A job that ranks can run."""

    @abstractmethod
    def run(self, work: Path) -> None:
        """Run on this rank; `work` is the directory of the job's file, for inputs and results."""


class LaunchedJob(RankJob):
    """Job of every rank of `train`, `distill` and `qat`."""

    training_arguments: dict[str, Any] = Field(description="keys of TrainingArguments")
    settings: LaunchedSettings = Field(description="settings of the user")
    output_dir: str = Field(description="directory for the model")
    placements: dict[SecondModelRole, Placement] = Field(description="placement of each second model")
    world_size: int = Field(description="ranks that must start")
    train_samples: int = Field(description="samples of one epoch")
    train_tokens: int = Field(description="tokens of one epoch")
    resume: bool = Field(description="whether to resume from the last checkpoint")
    or_anew: bool = Field(False, description="whether a resuming run starts at step 0 without a complete checkpoint")
    command: str = Field("", description="command line of the run, for the message of an out-of-memory error")
    turn_end: int | None = Field(None, description="token that ends an answer of the chat template, if one was used")
    digests: dict[str, str] = Field({}, description="hashes of the inputs, which must be equal on all machines")

    @property
    def hang_seconds(self) -> float | None:
        """Seconds without progress after which a rank is ended; `None` for no limit."""
        return self.settings.hang_seconds


def launched_errors(settings: LaunchedSettings) -> list[ConfigError]:
    """Return errors for a missing dataset or a tracker."""
    errors = tracker_errors(settings.report_to)
    if not settings.dataset:
        errors.append(ConfigError(where="dataset", rule="is missing", fix="pass --dataset, such as python-help"))
    return errors
