"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ..ds_configs.specs.settings import Settings
from ..ds_configs.specs.yaml_file import read_small_file, settings_mapping


class ConfigOption(Settings):
    """The option that every command has."""

    group = "Output"

    config: str | None = Field(None, description="YAML file with any of these settings; variables and flags win")

    @classmethod
    def read_config(cls, name: str) -> dict[str, Any]:
        """Return the settings in a file by name, as text.

        Raises:
            UsageError: it cannot be read, or is no YAML mapping.
        """
        return settings_mapping(read_small_file(Path(name), what="config"), name=name)


class FormatOptions(ConfigOption):
    """Options of a command that prints."""

    format: Literal["human", "json"] = Field("human", description="json prints one object on stdout")

    @property
    def as_json(self) -> bool:
        """Whether one JSON object is to be printed."""
        return self.format == "json"


class CheckedFor(Settings):
    """Facts that configurations are checked against."""

    group = "Run"

    num_processes: int | None = Field(None, ge=1, description="Ranks of the job, to check the batch equation")
    transformers: bool = Field(True, description='Whether the files are for the Trainer, which fills in "auto"')


class ReportOptions(FormatOptions):
    """Options of a command that writes when it is told where."""

    output_dir: Path | None = Field(None, description="Where the files go")
    force: bool = Field(False, description="Write into a directory that holds other files")


class WriteOptions(ReportOptions):
    """Options of a command that can also only show what it would write."""

    dry_run: bool = Field(False, description="Check everything and show it; write nothing")


class RunOptions(FormatOptions):
    """Options of a command that writes unless it only shows what it would do."""

    # Fields are checked in their order, and the next asks this one.
    dry_run: bool = Field(False, description="Check everything and show it; run and write nothing")
    output_dir: Path | None = Field(None, validate_default=True, description="Where the result goes")

    @field_validator("output_dir")
    @classmethod
    def _has_a_place(cls, output_dir: Path | None, checked: ValidationInfo) -> Path | None:
        if output_dir is None and not checked.data.get("dry_run", True):
            raise PydanticCustomError("missing", "is missing", {"fix": "give --output-dir, or --dry-run"})
        return output_dir


class TrainingOptions(FormatOptions):
    """Options of a command that launches a training."""

    output_dir: Path = Field(
        description="Where the model goes, with README.md, REPORT.md, metrics.jsonl, a chart and the plan"
    )
    resume: bool = Field(False, description="Go on from the last checkpoint in the output directory")
    force: bool = Field(False, description="Write into an output directory that holds other files")
    dry_run: bool = Field(False, description="Show the data, the plan and the files, launch and write nothing")

    @property
    def how(self) -> dict[str, bool]:
        """Settings that decide how a run begins."""
        return {"dry_run": self.dry_run, "force": self.force, "resume": self.resume}
