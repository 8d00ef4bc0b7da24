"""Flags of a plan's own training, which `shardwright launch` starts if it gets no script.

    accelerate launch --config_file accelerate.yaml -m shardwright.trainers.train_causal_lm \\
        --model Qwen/Qwen3-0.6B --text corpus.txt --training-arguments arguments.json --output-dir tuned

Precedence: defaults < `--training-arguments` file < flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.job import Method
from ...ds_configs.specs.settings import GuardSettings, Paths, settings_of
from ...ds_configs.specs.texts import strict_json
from ..data.sources import PYTHON_HELP
from ..runs.settings import RankJob

DEFAULT_SETTINGS: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "logging_steps": 1}


class PlanTrainingJob(GuardSettings, RankJob):
    """Job of every rank; its fields are command-line flags."""

    task: Literal["plan"] = "plan"
    model: str = Field(description="Hub id, local directory, or config.json")
    revision: str | None = Field(None, description="branch, tag or commit of a Hub model")
    random_weights: bool = Field(False, description="initialize from the configuration; load no weights")
    tokenizer: str | None = Field(
        None, description="Hub id or directory; default: the model's, or bytes if a local model has none"
    )
    text: Paths = Field((), description=f"text file to train on, repeatable; or {PYTHON_HELP}, Python's help topics")
    training_arguments: Path | None = Field(None, description="JSON file with keys of TrainingArguments")
    seq_len: int = Field(512, description="tokens per training sample (default 512)")
    max_steps: int | None = Field(None, description="optimizer steps; default: the file's, or one epoch")
    output_dir: Path = Field(description="directory for the trained model")
    method: Method = Field("full", description="full, lora or qlora")
    lora_rank: int | None = Field(None, description="default 16")
    lora_targets: str | None = Field(None, description="module names separated by commas, or all-linear (default)")
    lora_alpha: float | None = Field(None, gt=0, description="default: twice the rank")
    lora_dropout: float | None = Field(None, ge=0, lt=1, description="default 0")
    force: bool = Field(False, description="overwrite the model and checkpoints in --output-dir")
    resume: bool = Field(False, description="resume from the newest valid checkpoint in --output-dir, if any")
    resume_or_anew: bool = Field(False, description="as --resume, but start over if all checkpoints are corrupt")
    plan: Path | None = Field(None, description="directory of the plan; its prediction is compared with the run")
    losses_json: Path | None = Field(None, description="file for the loss of every optimizer step, from rank 0")
    save: bool = Field(True, description="write the trained model; --no-save skips it")

    def errors(self) -> list[ConfigError]:
        errors = []
        if self.seq_len < 2:
            errors.append(ConfigError(where="--seq-len", value=self.seq_len, rule="must be at least 2 tokens"))
        for name, value in (("--max-steps", self.max_steps), ("--lora-rank", self.lora_rank)):
            if value is not None and value < 1:
                errors.append(ConfigError(where=name, value=value, rule="must be at least 1"))
        if self.method == "full":
            rule, fix = "requires --method lora or qlora", "add it, or omit this flag"
            errors += [
                ConfigError(where=f"--{name.replace('_', '-')}", value=value, rule=rule, fix=fix)
                for name in ("lora_rank", "lora_targets", "lora_alpha", "lora_dropout")
                if (value := getattr(self, name)) is not None
            ]
        if self.revision and Path(self.model).exists():
            errors.append(ConfigError(where="--revision", value=self.revision, rule="only a Hub model has revisions"))
        if not self.text:
            fix = f"pass --text FILE, or --text {PYTHON_HELP} for a test run on Python's help topics"
            errors.append(ConfigError(where="--text", rule="is missing", fix=fix))
        text = () if self.is_python_help else self.text
        for path in (*text, *([self.training_arguments] if self.training_arguments else [])):
            if not path.is_file():
                errors.append(ConfigError(where="file", value=str(path), rule="no such file"))
        return errors

    @property
    def is_python_help(self) -> bool:
        """Whether to train on Python's help topics instead of files."""
        return self.text == (Path(PYTHON_HELP),)

    def read_settings(self) -> dict[str, Any]:
        """Merge defaults, the `--training-arguments` file and the flags into keys of ``TrainingArguments``.

        Raises:
            UsageError: the file is not a JSON object.
        """
        settings = dict(DEFAULT_SETTINGS)
        if self.training_arguments is not None:
            where = str(self.training_arguments)
            try:
                from_file = strict_json(self.training_arguments.read_bytes())
            except ValueError as error:
                raise UsageError(ConfigError(where=where, rule=f"must be JSON: {error}")) from error
            if not isinstance(from_file, dict):
                raise UsageError(ConfigError(where=where, rule="must be a JSON object of TrainingArguments keys"))
            settings |= from_file
        settings["output_dir"] = str(self.output_dir)
        if self.max_steps is not None:
            settings["max_steps"] = self.max_steps
        return settings


Job = TypeVar("Job", bound=PlanTrainingJob)


def parse_flags(words: Sequence[str], kind: type[Job]) -> Job:
    """Parse flags into a job; names may have hyphens or underscores.

    Raises:
        UsageError: unknown flags and invalid values, all together.
    """
    fields = kind.model_fields
    if {"-h", "--help"} & set(words):
        print("Fine-tune a causal language model.\n")
        for name, field in fields.items():
            if name != "task":
                print(f"  --{name.replace('_', '-'):20s} {field.description}")
        raise SystemExit(0)
    values: dict[str, Any] = {}
    errors, rest = [], iter(words)
    for word in rest:
        flag, sign, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not word.startswith("--"):
            errors.append(ConfigError(where=word, rule="is not a flag", fix="see --help"))
        elif name in fields and fields[name].annotation is bool and not sign:
            values[name] = True
        elif name == "no_save":
            values["save"] = False
        else:
            text = value if sign else next(rest, None)
            if text is None and name in fields:
                errors.append(ConfigError(where=flag, rule="requires a value"))
            values[name] = [*values.get(name, []), text] if name == "text" else text
    if errors:
        raise UsageError(errors)
    job = settings_of(kind, values)
    if errors := job.errors():
        raise UsageError(errors)
    return job
