"""Options of commands that several machines run together, and the way from one of them to all."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ..ds_configs.plan.launch import MAIN_PORT, NodePlace
from ..ds_configs.specs.errors import Fault, UsageError
from ..ds_configs.specs.settings import Names, Settings
from ..plugins.launching.notes import NOTE
from .command_line import arguments
from .progress import note

if TYPE_CHECKING:
    from ..ds_configs.specs.hardware import HardwareSpec
    from ..trainers.replicas.launch import Replicas

_OF_SSH = ("on", "hostfile", "ssh_config")
_OF_SLURM = ("on", "sbatch", "name")
_OF_PLACES = ("node_rank", "main_address", "main_port", "num_nodes", "num_processes")

# A file of settings, which all machines read, may state what is not for one of them.
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
    """Options that some values of `on` know and others would pass over."""

    on: str = Field("local", description="What starts the machines")
    hostfile: Path | None = Field(None, description="Machines for ssh, a line HOST slots=N for each")
    ssh_config: Path | None = Field(None, description="Settings of ssh in place of your own")
    node_rank: int | None = Field(None, ge=0, description="Place of this machine, where you start each yourself")
    main_address: str | None = Field(None, description="Name or address of machine 0, where ranks meet")
    main_port: int = Field(
        MAIN_PORT,
        ge=1,
        le=65534,
        description="TCP port of machine 0; trainings also use the next one, to compare machines",
    )
    until_stdin_closes: bool = Field(
        False, description="Stop once standard input ends, as --on ssh does; a training saves first"
    )

    def faults(self) -> list[Fault]:
        """Return the options that would be passed over, and those that lack their other half."""
        faults = []
        for name, engines in self.engines.items():
            value = getattr(self, name)
            if self.on not in engines and value != type(self).model_fields[name].default:
                known = " or ".join(engines)
                shown, rule = str(value) if isinstance(value, Path) else value, f"is for --on {known}, not {self.on}"
                fix = f"state --on {known}, or leave it out" if self.on == "local" else "leave it out"
                faults.append(Fault(where=name, value=shown, rule=rule, fix=fix))
        stated = {"node_rank": self.node_rank, "main_address": self.main_address}
        missing = [name for name, value in stated.items() if value is None]
        if self.on == "local" and len(missing) == 1:
            given = next(name for name in stated if name not in missing)
            rule = f"needs --{missing[0].replace('_', '-')} beside it"
            faults.append(Fault(where=given, value=stated[given], rule=rule))
        elif missing and self.on == "local" and self.main_port != MAIN_PORT:
            rule, fix = "is for one of several machines", "state --node-rank and --main-address beside it"
            faults.append(Fault(where="main_port", value=self.main_port, rule=rule, fix=fix))
        return faults

    def place(self) -> NodePlace | None:
        """Return this machine's place, and stop with standard input where that was asked for; `None` for the only one.

        Raises:
            UsageError: options that do not go together.
        """
        if faults := self.faults():
            raise UsageError(faults)
        if self.until_stdin_closes:
            from ..plugins.launching.remote import stop_with_stdin

            stop_with_stdin()
        if self.node_rank is None or self.main_address is None:
            return None
        return NodePlace(rank=self.node_rank, main_address=self.main_address, main_port=self.main_port)


class PlannedMachineOptions(MachineOptions):
    """Machines of a run, as many as its hardware or plan names."""

    engines: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **MachineOptions.engines,
        "sbatch": ("slurm",),
        "name": ("slurm",),
    }

    check_nodes: bool = Field(True, description="Compare versions, accelerators, links, clocks, memory and disk first")
    sbatch: Names = Field((), description="Further options of sbatch, such as --sbatch=--partition=gpu,--time=12:00:00")
    name: str = Field("shardwright", description="What the scheduler calls it")

    def faults(self) -> list[Fault]:
        """Return what would be passed over or lacks its other half, and names that a scheduler reads otherwise."""
        from ..ds_configs.plan.cluster_jobs import name_faults, setting_faults

        return name_faults(self.name) + setting_faults(self.sbatch) + super().faults()


class SameCommandOptions(MachineOptions):
    """Machines that all run the command that was called."""

    def faults(self) -> list[Fault]:
        """Return what would be passed over, and what is missing."""
        faults = super().faults()
        if self.on == "ssh" and self.hostfile is None:
            rule, fix = "is missing", "name the machines in a file, a line HOST slots=N for each"
            faults.append(Fault(where="hostfile", rule=rule, fix=fix))
        return faults


class TrainingMachineOptions(SameCommandOptions, PlannedMachineOptions):
    """Machines of a command that trains."""

    on: Literal["local", "ssh", "slurm"] = Field(
        "local",
        description="Run this command from this directory on each machine of --hostfile (ssh), or as a job (slurm)",
    )


class ReplicaOptions(SameCommandOptions):
    """Processes of a command whose result does not depend on their number."""

    on: Literal["local", "ssh"] = Field(
        "local", description="ssh: run this command on each machine of --hostfile, from this directory"
    )
    num_processes: int = Field(
        1, ge=1, description="Processes in all, each with the model and a share of the batches; same result as of one"
    )
    num_nodes: int = Field(1, ge=1, description="Machines that they are on; --on ssh counts them itself")

    def replicas(self) -> Replicas:
        """Return the processes, with this machine's place.

        Raises:
            UsageError: options that do not go together.
        """
        from ..trainers.replicas.launch import Replicas

        return Replicas(processes=self.num_processes, nodes=self.num_nodes, place=self.place())


@dataclass(frozen=True, kw_only=True)
class SameCommand:
    """This command on every machine, with its place."""

    words: tuple[str, ...]

    def node_words(self, place: NodePlace, *options: str) -> list[str]:
        from ..plugins.clusters.ssh import own_program

        meeting = ["--main-address", place.main_address, "--main-port", str(place.main_port)]
        return [*own_program(), *self.words, *_ON_SSH, "--node-rank", str(place.rank), *meeting, *options]

    def resumed(self) -> SameCommand:
        return self


def run_on_hosts(machines: SameCommandOptions, *, nodes: int | None = None) -> int:
    """Run this command on the machines of a hostfile, and return the exit code.

    Args:
        machines: What was stated.
        nodes: How many there must be; `None` where their file decides that, and how many processes each has.

    Raises:
        UsageError: the file cannot be read or holds other machines than are needed.
        ShardwrightError: a machine does not answer, or the command failed there.
    """
    from ..plugins.clusters.ssh import Hosts, listed_hosts, run_over_ssh

    if faults := machines.faults():
        raise UsageError(faults)
    assert machines.hostfile is not None, "it was checked a moment ago"
    listed = listed_hosts(machines.hostfile)
    slots = {count or 1 for _, count in listed}
    faults, where = [], "hostfile"
    if nodes is not None and len(listed) != nodes:
        rule = f"names {len(listed)} machines where {nodes} are needed"
        faults.append(
            Fault(where=where, value=str(machines.hostfile), rule=rule, fix="name as many, or plan for these")
        )
    if nodes is None and len(slots) > 1:
        rule, fix = "has machines with different slots", "give all of them equally many processes"
        faults.append(Fault(where=where, value=str(machines.hostfile), rule=rule, fix=fix))
    if faults:
        raise UsageError(faults)
    counts = [] if nodes is not None else ["--num-nodes", str(len(listed))]
    counts += [] if nodes is not None else ["--num-processes", str(len(listed) * slots.pop())]
    run_over_ssh(
        SameCommand(words=(*without_options(arguments(), (*_OF_SSH, *_OF_PLACES)), *counts)),
        Hosts(names=tuple(name for name, _ in listed), ssh_config=machines.ssh_config),
        port=machines.main_port,
        restarts=0,
        wait_seconds=0.0,
        on_line=_print_line,
        notify=note,
    )
    return 0


def slurm_script_of_command(machines: TrainingMachineOptions, hardware: HardwareSpec) -> str:
    """Return the script for `sbatch` that runs the command that was called, as often as the hardware has nodes."""
    from ..ds_configs.plan.cluster_jobs import slurm_command_script
    from ..plugins.clusters.ssh import own_program

    stated = [word for word in arguments() if word not in ("--dry-run", "--dry_run")]
    words = [*own_program(), *without_options(stated, (*_OF_SLURM, *_OF_PLACES)), *_IN_SLURM]
    return slurm_command_script(words, hardware, name=machines.name, settings=machines.sbatch)


def submit_to_slurm(
    script: str, hardware: HardwareSpec, machines: PlannedMachineOptions, *, as_json: bool = False
) -> int:
    """Submit a script, say which job it is, and return the exit code.

    Raises:
        UsageError: there is no SLURM here, or it has too few nodes.
        ShardwrightError: SLURM refuses the script; says what it said.
    """
    from ..plugins.clusters.slurm import cluster_faults, submit

    if faults := cluster_faults(hardware, machines.sbatch):
        raise UsageError(faults)
    number = submit(script)
    line = f"Submitted job {number}: squeue --job {number} shows it, slurm-{number}.out gets its output"
    print(json.dumps({"schema_version": 1, "job": number}) if as_json else line)
    return 0


def without_options(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return a command's words without some options that each have a value.

    >>> without_options(["evaluate", "model", "--on", "ssh", "--ssh_config=own", "--force"], ["on", "ssh_config"])
    ['evaluate', 'model', '--force']
    """
    kept, skip = [], False
    for word in words:
        option, sign, _ = word.partition("=")
        if skip:
            skip = False
        elif option.startswith("--") and option[2:].replace("-", "_") in names:
            skip = not sign
        else:
            kept.append(word)
    return kept


def tell_place(place: NodePlace | None) -> None:
    """Say where the results are, on a machine that has none."""
    assert place is not None, "a machine without results is one of several"
    note(f"machine {place.rank} has done its share; the results are on {place.main_address}")


def _print_line(line: str) -> None:
    print(line, file=sys.stderr if line.startswith(NOTE) else sys.stdout, flush=True)
