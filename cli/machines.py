"""Options of commands that run on several machines, and how one machine starts the others."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    from ..trainers.runs.launch import Replicas

_OF_SSH = ("on", "hostfile", "ssh_config")
_OF_SLURM = ("on", "sbatch", "name")
_OF_PLACES = ("node_rank", "main_address", "main_port", "num_nodes", "num_processes")

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


class SameCommandOptions(MachineOptions):
    """Machines that all run the same command."""

    def errors(self) -> list[ConfigError]:
        errors = super().errors()
        if self.on == "ssh" and self.hostfile is None:
            fix = "list the machines in a file, one line HOST slots=N each"
            errors.append(ConfigError(where="hostfile", rule="is missing", fix=fix))
        return errors


class TrainingMachineOptions(SameCommandOptions, PlannedMachineOptions):
    """Machines of a command that trains."""

    on: Literal["local", "ssh", "slurm"] = Field(
        "local",
        description="Run here, on each machine of --hostfile (ssh), or as a job (slurm)",
    )


class ReplicaOptions(SameCommandOptions):
    """Processes of a command whose result does not depend on how many there are."""

    on: Literal["local", "ssh"] = Field("local", description="Run here, or on each machine of --hostfile (ssh)")
    num_processes: int = Field(1, ge=1, description="Processes in total; each has the model and a share of the batches")
    num_nodes: int = Field(1, ge=1, description="Machines of these processes; set automatically with --on ssh")

    def replicas(self) -> Replicas:
        """Return the processes, with this machine's rank and address.

        Raises:
            UsageError: options that cannot be combined.
        """
        from ..trainers.runs.launch import Replicas

        return Replicas(processes=self.num_processes, nodes=self.num_nodes, place=self.place())


@dataclass(frozen=True, kw_only=True)
class SameCommand:
    """This command, with the rank and address of each machine."""

    words: tuple[str, ...]

    def node_words(self, place: NodePlace, *options: str) -> list[str]:
        from ..plugins.clusters.ssh import own_program

        address = ["--main-address", place.main_address, "--main-port", str(place.main_port)]
        return [*own_program(), *self.words, *_ON_SSH, "--node-rank", str(place.rank), *address, *options]

    def resumed(self) -> SameCommand:
        return self


def run_on_hosts(machines: SameCommandOptions, *, nodes: int | None = None) -> int:
    """Run this command on the machines of a hostfile, and return the exit code.

    `nodes` is the required number of machines; with `None` the hostfile decides, also about the processes.

    Raises:
        UsageError: the hostfile cannot be read or has the wrong number of machines.
        ShardwrightError: a machine does not answer, or the command failed there.
    """
    from ..plugins.clusters.ssh import Hosts, listed_hosts, run_over_ssh

    if errors := machines.errors():
        raise UsageError(errors)
    assert machines.hostfile is not None, "errors() reports a missing file"
    listed = listed_hosts(machines.hostfile)
    slots = {count or 1 for _, count in listed}
    rule = fix = ""
    if nodes is not None and len(listed) != nodes:
        rule, fix = f"must list {nodes} machines, not {len(listed)}", "edit it, or plan for these machines"
    elif nodes is None and len(slots) > 1:
        rule, fix = "has machines with different slots", "use the same number of slots for all"
    if rule:
        raise UsageError(ConfigError(where="hostfile", value=str(machines.hostfile), rule=rule, fix=fix))
    counts = []
    if nodes is None:
        counts = ["--num-nodes", str(len(listed)), "--num-processes", str(len(listed) * slots.pop())]
    run_over_ssh(
        SameCommand(words=(*without_options(arguments(), (*_OF_SSH, *_OF_PLACES)), *counts)),
        Hosts(names=tuple(name for name, _ in listed), ssh_config=machines.ssh_config),
        port=machines.main_port,
        restarts=0,
        on_line=lambda line: print(line, file=sys.stderr if line.startswith(NOTE) else sys.stdout, flush=True),
    )
    return 0


def slurm_script_of_command(machines: TrainingMachineOptions, hardware: HardwareSpec) -> str:
    """Return the `sbatch` script that runs this command on each node of the hardware."""
    from ..ds_configs.plan.clusters import slurm_command_script
    from ..plugins.clusters.ssh import own_program

    stated = [word for word in arguments() if word not in ("--dry-run", "--dry_run")]
    words = [*own_program(), *without_options(stated, (*_OF_SLURM, *_OF_PLACES)), *_IN_SLURM]
    return slurm_command_script(words, hardware, name=machines.name, settings=machines.sbatch)


def submit_to_slurm(
    script: str, hardware: HardwareSpec, machines: PlannedMachineOptions, *, as_json: bool = False
) -> int:
    """Submit a script, print the number of the job, and return the exit code.

    Raises:
        UsageError: SLURM is not installed, or has too few nodes.
        ShardwrightError: SLURM rejects the script; with SLURM's message.
    """
    from ..plugins.clusters.submission import cluster_errors, submit

    if errors := cluster_errors(hardware, machines.sbatch):
        raise UsageError(errors)
    number = submit(script)
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
