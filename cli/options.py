"""Options that several commands share."""

# Without `from __future__ import annotations`: pydantic and cyclopts would evaluate every annotation as text.
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from ..ds_configs.plan.rendering import MAIN_PORT, NodePlace
from ..ds_configs.specs.errors import ConfigError, UsageError
from ..ds_configs.specs.job import JobSettings
from ..ds_configs.specs.settings import Settings
from ..ds_configs.specs.tasks import TrlTask


class ConfigFile(Settings):
    """Option of every command."""

    group = "Output"

    config: str | None = Field(None, description="YAML file with settings; environment and flags override it")


class Output(ConfigFile):
    format: Literal["human", "json"] = Field("human", description="Output format; json prints one object on stdout")

    @property
    def as_json(self) -> bool:
        """Whether to print one JSON object."""
        return self.format == "json"


class OutputDirectory(Output):
    output_dir: Path | None = Field(None, description="Directory for the files")
    force: bool = Field(False, description="Write into a directory that is not empty")


class ResultDirectory(Output):
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


class Machine(Settings):
    """This machine's place among those that run a command together; the hardware or the plan sets their number."""

    group = "Machines"

    node_rank: int | None = Field(None, ge=0, description="Rank of this machine, if you start each one yourself")
    main_address: str | None = Field(None, description="Host name or address of machine 0")
    main_port: int = Field(
        MAIN_PORT, ge=1, le=65534, description="TCP port of machine 0; training also uses the next port"
    )
    until_stdin_closes: bool = Field(False, description="Stop when standard input ends; a training run saves first")
    check_nodes: bool = Field(True, description="Compare versions, accelerators and files of all machines first")

    def errors(self) -> list[ConfigError]:
        """Return an error for each option that needs another one."""
        if self.node_rank is not None and self.main_address is None:
            return [ConfigError(where="node_rank", value=self.node_rank, rule="needs --main-address")]
        if self.main_address is not None and self.node_rank is None:
            return [ConfigError(where="main_address", value=self.main_address, rule="needs --node-rank")]
        if self.node_rank is None and self.main_port != MAIN_PORT:
            rule, fix = "is used by several machines only", "pass --node-rank and --main-address too"
            return [ConfigError(where="main_port", value=self.main_port, rule=rule, fix=fix)]
        return []

    def place(self) -> NodePlace | None:
        """Return this machine's rank and address, or `None` for a single machine; start `until_stdin_closes`."""
        if errors := self.errors():
            raise UsageError(errors)
        if self.until_stdin_closes:
            from ..plugins.launching.elastic import stop_with_stdin

            stop_with_stdin()
        if self.node_rank is None or self.main_address is None:
            return None
        return NodePlace(rank=self.node_rank, main_address=self.main_address, main_port=self.main_port)


class CheckedFor(Settings):
    """How the checked files will be used."""

    group = "Run"

    num_processes: int | None = Field(None, ge=1, description="Ranks of the job; checks the batch equation")
    transformers: bool = Field(True, description='Files are for the Trainer, which replaces "auto"')
    task: TrlTask | None = Field(None, description="Task of a TRL file whose keys fit several")
    hardware: str | None = Field(None, description="GPUs (e.g. 8xH100-80GB); checks vLLM's share of their memory")


class PlanSettings(JobSettings):
    """Every setting of a plan and of the estimate of its run, for `plan` and the page."""

    group = "Run"

    tokens: float | None = Field(
        None, gt=0, description="Tokens to train on (e.g. 1e11); adds total time and GPU hours"
    )
