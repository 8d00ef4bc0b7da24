"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ..ds_configs.specs.settings import Settings
from ..ds_configs.specs.texts import FileSettings, read_small_file, settings_mapping


class ConfigOption(Settings):
    """Option of every command."""

    group = "Output"

    config: str | None = Field(None, description="YAML file with settings; environment and flags override it")

    @classmethod
    def read_config(cls, name: str) -> FileSettings:
        """Return the settings in a file by name, as text.

        Raises:
            UsageError: it cannot be read, or is not a YAML mapping.
        """
        return settings_mapping(read_small_file(Path(name), what="config"), name=name)


class FormatOptions(ConfigOption):
    format: Literal["human", "json"] = Field("human", description="Output format; json prints one object on stdout")

    @property
    def as_json(self) -> bool:
        """Whether to print one JSON object."""
        return self.format == "json"


class CheckedFor(Settings):
    """How the checked files will be used."""

    group = "Run"

    num_processes: int | None = Field(None, ge=1, description="Ranks of the job; checks the batch equation")
    transformers: bool = Field(True, description='Files are for the Trainer, which replaces "auto"')


class ReportOptions(FormatOptions):
    output_dir: Path | None = Field(None, description="Directory for the files")
    force: bool = Field(False, description="Write into a directory that is not empty")


class WriteOptions(ReportOptions):
    dry_run: bool = Field(False, description="Check and print everything; write nothing")


class RunOptions(FormatOptions):
    """Options of a command that needs --output-dir, except for a dry run."""

    # Before output_dir, whose validator reads it.
    dry_run: bool = Field(False, description="Check and print everything; run and write nothing")
    output_dir: Path | None = Field(None, validate_default=True, description="Directory for the result")

    @field_validator("output_dir")
    @classmethod
    def _is_set(cls, output_dir: Path | None, checked: ValidationInfo) -> Path | None:
        if output_dir is None and not checked.data.get("dry_run", True):
            raise PydanticCustomError("missing", "is missing", {"fix": "pass --output-dir, or --dry-run"})
        return output_dir


class TrainingOptions(FormatOptions):
    """Options of a command that launches a training run."""

    output_dir: Path = Field(description="Directory for the model, its report, model card and plan")
    resume: bool = Field(False, description="Resume from the last checkpoint in the output directory")
    force: bool = Field(False, description="Write into a directory that is not empty")
    dry_run: bool = Field(False, description="Print data, plan and files; launch and write nothing")
