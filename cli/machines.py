"""Options of commands that run on several machines, and how one machine starts the others."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ..ds_configs.plan.rendering import MAIN_PORT, NodePlace
from ..ds_configs.specs.errors import ConfigError, UsageError
from ..ds_configs.specs.settings import Names, Settings
from ..plugins.launching.messages import NOTE
from .progress import note
from .settings import arguments

if TYPE_CHECKING:
    from ..ds_configs.specs.hardware import HardwareSpec

_OF_SSH = ("on", "hostfile", "ssh_config")
_OF_SLURM = ("on", "sbatch", "name")
_OF_PLACES = ("node_rank", "main_address", "main_port")

# All machines read the same settings file, which may set what only the first one uses.
_ON_SSH = ("--on", "local", "--hostfile", "null", "--ssh-config", "null")
_IN_SLURM = ("--on", "local", "--sbatch=[]", "--name", "shardwright")


class MachineOptions(Settings):
    """Machines that run a command together."""

    group = "Machines"
    engines: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "hostfile": ("ssh",),
        "ssh_config": ("ssh",),
        "node_rank": ("local",),
        "main_address": ("local",),
        "main_port": ("local", "ssh"),
        "until_stdin_closes": ("local",),
    }
    """Values of `on` that each option has an effect with."""

    on: str = Field("local", description="What starts the machines")
    hostfile: Path | None = Field(None, description="Machines for ssh, one line HOST slots=N each")
    ssh_config: Path | None = Field(None, description="ssh configuration file; replaces your own")
    node_rank: int | None = Field(None, ge=0, description="Rank of this machine, if you start each one yourself")
    main_address: str | None = Field(None, description="Host name or address of machine 0")
    main_port: int = Field(
        MAIN_PORT,
        ge=1,
        le=65534,
        description="TCP port of machine 0; training also uses the next port",
    )
    until_stdin_closes: bool = Field(False, description="Stop when standard input ends; a training run saves first")

    def errors(self) -> list[ConfigError]:
        """Return an error for each option without effect, and for each one that needs another option."""
        errors = []
        for name, engines in self.engines.items():
            value = getattr(self, name)
            if self.on not in engines and value != type(self).model_fields[name].default:
                known = " or ".join(engines)
                shown, rule = str(value) if isinstance(value, Path) else value, f"is for --on {known}, not {self.on}"
                fix = f"pass --on {known}, or omit it" if self.on == "local" else "omit it"
                errors.append(ConfigError(where=name, value=shown, rule=rule, fix=fix))
        if self.on != "local":
            return errors
        if self.node_rank is not None and self.main_address is None:
            errors.append(ConfigError(where="node_rank", value=self.node_rank, rule="needs --main-address"))
        elif self.main_address is not None and self.node_rank is None:
            errors.append(ConfigError(where="main_address", value=self.main_address, rule="needs --node-rank"))
        elif self.node_rank is None and self.main_port != MAIN_PORT:
            rule, fix = "is for one of several machines", "pass --node-rank and --main-address too"
            errors.append(ConfigError(where="main_port", value=self.main_port, rule=rule, fix=fix))
        return errors

    def place(self) -> NodePlace | None:
        """Return this machine's rank and address, or `None` for a single machine; start `until_stdin_closes`.

        Raises:
            UsageError: options that cannot be combined.
        """
        if errors := self.errors():
            raise UsageError(errors)
        if self.until_stdin_closes:
            from ..plugins.launching.lifetime import stop_with_stdin

            stop_with_stdin()
        if self.node_rank is None or self.main_address is None:
            return None
        return NodePlace(rank=self.node_rank, main_address=self.main_address, main_port=self.main_port)


class PlannedMachineOptions(MachineOptions):
    """Options for the machines of a run; the hardware or the plan sets their number."""

    engines: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **MachineOptions.engines,
        "sbatch": ("slurm",),
        "name": ("slurm",),
    }

    check_nodes: bool = Field(True, description="Compare versions, accelerators and files of all machines first")
    sbatch: Names = Field((), description="More options of sbatch, such as --sbatch=--partition=gpu,--time=12:00:00")
    name: str = Field("shardwright", description="Name of the job")

    def errors(self) -> list[ConfigError]:
        from ..ds_configs.plan.clusters import name_errors, setting_errors

        return name_errors(self.name) + setting_errors(self.sbatch) + super().errors()


class TrainingMachineOptions(PlannedMachineOptions):
    """Machines of a command that trains."""

    on: Literal["local", "ssh", "slurm"] = Field(
        "local",
        description="Run here, on each machine of --hostfile (ssh), or as a job (slurm)",
    )

    def errors(self) -> list[ConfigError]:
        errors = super().errors()
        if self.on == "ssh" and self.hostfile is None:
            fix = "list the machines in a file, one line HOST slots=N each"
            errors.append(ConfigError(where="hostfile", rule="is missing", fix=fix))
        return errors


def run_on_hosts(machines: TrainingMachineOptions, hardware: HardwareSpec) -> int:
    """Run this command on the machines of a hostfile, and return the exit code.

    Raises:
        UsageError: the hostfile cannot be read or does not fit the hardware.
        ShardwrightError: a machine does not answer, or the command failed there.
    """
    from ..ds_configs.plan.clusters import NodeCommand
    from ..plugins.clusters.ssh import Hosts, own_program, read_hostfile, run_over_ssh

    if errors := machines.errors():
        raise UsageError(errors)
    assert machines.hostfile is not None, "errors() reports a missing file"
    names = read_hostfile(machines.hostfile, hardware)
    words = [*without_options(arguments(), (*_OF_SSH, *_OF_PLACES)), *_ON_SSH]
    run_over_ssh(
        NodeCommand(program=own_program(), words=tuple(words)),
        Hosts(names=names, ssh_config=machines.ssh_config),
        port=machines.main_port,
        on_line=lambda line: print(line, file=sys.stderr if line.startswith(NOTE) else sys.stdout, flush=True),
    )
    return 0


def slurm_script_of_command(machines: TrainingMachineOptions, hardware: HardwareSpec) -> str:
    """Return the `sbatch` script that runs this command on each node of the hardware."""
    from ..ds_configs.plan.clusters import NodeCommand, slurm_script
    from ..plugins.clusters.ssh import own_program

    stated = [word for word in arguments() if word not in ("--dry-run", "--dry_run")]
    words = (*without_options(stated, (*_OF_SLURM, *_OF_PLACES)), *_IN_SLURM)
    command = NodeCommand(program=own_program(), words=words)
    return slurm_script(command, hardware, name=machines.name, settings=machines.sbatch)


def submit_to_slurm(
    script: str, hardware: HardwareSpec, machines: PlannedMachineOptions, *, as_json: bool = False
) -> int:
    """Submit a script, print the number of the job, and return the exit code; raises as `submit`."""
    from ..plugins.clusters.submission import submit

    number = submit(script, hardware, machines.sbatch)
    line = f"Submitted job {number}. State: squeue --job {number}. Output: slurm-{number}.out"
    print(json.dumps({"schema_version": 1, "job": number}) if as_json else line)
    return 0


def without_options(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the words of a command without some options and their values.

    >>> without_options(["evaluate", "model", "--on", "ssh", "--ssh_config=own", "--force"], ["on", "ssh_config"])
    ['evaluate', 'model', '--force']
    """
    others, is_value = [], False
    for word in words:
        option, sign, _ = word.partition("=")
        if is_value:
            is_value = False
        elif option.startswith("--") and option[2:].replace("-", "_") in names:
            is_value = not sign
        else:
            others.append(word)
    return others


def note_result_machine(place: NodePlace | None) -> None:
    """Print which machine has the results."""
    assert place is not None, "with one machine the results are here"
    note(f"machine {place.rank} is done; the results are on {place.main_address}")
