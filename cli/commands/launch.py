"""`shardwright launch`: run `train` or your script with a plan, on this machine or on a cluster."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import BoundArguments
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from cyclopts import Parameter
from pydantic import Field

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.settings import Names
from ..options import ConfigFile, Machine
from ..settings import FILLED, Options, resolve, running

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""A name that each scheduler, shell and YAML reads as a plain name."""
_SETTING = re.compile(r"--[a-z][a-z-]*(=[ -~]+)?")
"""An option of `sbatch` without a line break, which would add a line to the script."""


class Flags(Machine, ConfigFile):
    engines: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "hostfile": ("ssh",),
        "ssh_config": ("ssh",),
        "node_rank": ("local",),
        "main_address": ("local",),
        "main_port": ("local", "ssh"),
        "until_stdin_closes": ("local",),
        "sbatch": ("slurm",),
        "name": ("slurm",),
        "dry_run": ("ssh", "slurm"),
        "turn_ended": ("local",),
    }
    """Values of `on` that each option has an effect with."""

    on: Literal["local", "ssh", "slurm"] = Field(
        "local", description="Launcher. Ray, Kubernetes, SkyPilot: examples/clusters"
    )
    hostfile: Path | None = Field(None, description="Machines for ssh, one line HOST slots=N each. Default: the plan's")
    ssh_config: Path | None = Field(None, description="ssh configuration file; replaces your own")
    sbatch: Names = Field((), description="More options of sbatch, such as --sbatch=--partition=gpu,--time=12:00:00")
    name: str = Field("shardwright", description="Name of the job")
    dry_run: bool = Field(False, description="Check everything and print the commands or the script; launch nothing")
    turn_ended: bool = Field(False, description="Exit code tells SLURM whether to requeue the job")

    def errors(self) -> list[ConfigError]:
        """Return an error for each option without effect, and for each one that needs another option."""
        rule, fix = "must have the form --NAME=VALUE", "such as --partition=gpu"
        errors = [
            ConfigError(where="sbatch", value=setting, rule=rule, fix=fix)
            for setting in self.sbatch
            if not _SETTING.fullmatch(setting)
        ]
        if not _NAME.fullmatch(self.name):
            rule = "must be at most 40 lower-case letters, digits and hyphens, with a letter first"
            errors.append(ConfigError(where="name", value=self.name, rule=rule))
        for name, engines in self.engines.items():
            value = getattr(self, name)
            if self.on not in engines and value != type(self).model_fields[name].default:
                known = " or ".join(engines)
                shown, rule = str(value) if isinstance(value, Path) else value, f"is for --on {known}, not {self.on}"
                fix = f"pass --on {known}, or omit it" if self.on == "local" else "omit it"
                errors.append(ConfigError(where=name, value=shown, rule=rule, fix=fix))
        return errors + (super().errors() if self.on == "local" else [])


def launch_command(
    plan: Path,
    script: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    options: Options[Flags] = FILLED,
) -> int:
    """Run a plan, or your script with it, on this machine or a cluster.

    You can move the plan's directory. On CPU ranks, the environment of the script is prepared.

    Parameters
    ----------
    plan
        Directory that `plan` wrote.
    script
        Python file with a Trainer, an Accelerator or `deepspeed.initialize`. Default: run `train --plan PLAN`.
    arguments
        Arguments of the script, where `@plan` becomes the plan's TrainingArguments, or of `train`. Put `--` before
        flags that this command has too.
    """
    if script is not None and script.startswith("-"):
        arguments, script = (script, *arguments), None
    if errors := options.errors():
        raise UsageError(errors)
    if options.on != "local":
        return _launch_on_cluster(plan, script, arguments, options)
    from ...trainers.training.script import count_turn, launch_script

    if options.turn_ended:
        count_turn(plan, arguments, is_script=script is not None, job=os.environ.get("SLURM_JOB_ID", ""))
        return 0
    place = options.place()
    if script is not None:
        launch_script(plan, Path(script), arguments, place=place, check_nodes=options.check_nodes, on_line=_print_line)
        return 0
    from ...plugins.releases import check_torch
    from ...trainers.training.script import train_words

    check_torch()
    more = [] if options.check_nodes else ["--no-check-nodes"]
    if place is not None:
        more += ["--node-rank", str(place.rank), "--main-address", place.main_address]
        more += ["--main-port", str(place.main_port)]
    words = [*train_words(plan, arguments), *more]
    command, bound = _resolved(words)
    with running(words):
        code: int = command(*bound.args, **bound.kwargs)
    return code


def _resolved(words: Sequence[str]) -> tuple[Callable[..., Any], BoundArguments]:
    """Return the command of some arguments of `shardwright`, and its settings."""
    from ..main import build_app

    return resolve(build_app(), words)


def _print_line(line: str) -> None:
    print(line, flush=True)


def _launch_on_cluster(plan_directory: Path, script: str | None, arguments: tuple[str, ...], options: Flags) -> int:
    from ...ds_configs.plan.plan import Plan
    from ...ds_configs.plan.rendering import NodeCommand, slurm_script
    from ...plugins.clusters import Hosts, node_launches, own_program, read_hostfile, run_over_ssh, submit
    from ...trainers.training.script import script_errors, train_words
    from ...trainers.training.settings import train_settings_errors

    plan = Plan.load(plan_directory)
    if script is None:
        # Reject before machines start what each of them would reject.
        _, bound = _resolved(train_words(plan_directory, arguments))
        errors = train_settings_errors(bound.arguments["settings"], plan.job.task)
    else:
        errors = script_errors(Path(script))
    if errors:
        raise UsageError(errors)
    checked = () if options.check_nodes else ("--no-check-nodes",)
    words = ("launch", str(plan_directory.absolute()), *checked)
    behind = arguments if script is None else (str(Path(script).absolute()), *arguments)
    if options.on == "slurm":
        command = NodeCommand(program=own_program(), words=words)
        batch_script = slurm_script(command, plan.hardware, behind=behind, name=options.name, settings=options.sbatch)
        if options.dry_run:
            sys.stdout.write(batch_script)
        else:
            number = submit(batch_script, plan.hardware, options.sbatch)
            print(f"Submitted job {number}. State: squeue --job {number}. Output: slurm-{number}.out")
        return 0
    command = NodeCommand(program=own_program(), words=(*words, "--", *behind))
    names = read_hostfile(options.hostfile or plan_directory / "hostfile", plan.hardware)
    hosts = Hosts(names=names, ssh_config=options.ssh_config)
    if options.dry_run:
        for launch in node_launches(command, hosts, port=options.main_port, directory=Path.cwd()):
            print(" ".join([*(launch.program or ()), *launch.arguments]))
    else:
        run_over_ssh(command, hosts, port=options.main_port, on_line=_print_line)
    return 0
