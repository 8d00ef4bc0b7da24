"""`shardwright launch`: run `train` or your script with a plan, on this machine or on a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import BoundArguments
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter
from pydantic import Field

from ...ds_configs.plan.rendering import NodePlace
from ...ds_configs.specs.errors import ConfigError, UsageError, collecting
from ..machines import PlannedMachineOptions, submit_to_slurm
from ..options import ConfigOption
from ..settings import FILLED, Options, grouped, resolve, running

if TYPE_CHECKING:
    from ...ds_configs.plan.clusters import ClusterJob


@grouped
class LaunchOptions(PlannedMachineOptions, ConfigOption):
    engines: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **PlannedMachineOptions.engines,
        "dry_run": ("ssh", "slurm", "ray", "kubernetes", "jobset", "skypilot"),
        "wait_for_nodes": ("ssh", "ray"),
        "address": ("ray",),
        "restarts": ("ssh", "ray", "jobset"),
        "name": ("slurm", "ray", "kubernetes", "jobset", "skypilot"),
        "image": ("kubernetes", "jobset"),
        "volume": ("kubernetes", "jobset"),
        "min_nodes": ("ssh", "ray"),
        "nodes": ("local",),
        "turn_ended": ("local",),
    }

    on: Literal["local", "ssh", "slurm", "ray", "kubernetes", "jobset", "skypilot"] = Field(
        "local", description="Launcher; kubernetes submits a Kubeflow TrainJob, jobset a JobSet"
    )
    hostfile: Path | None = Field(None, description="Machines for ssh, one line HOST slots=N each. Default: the plan's")
    dry_run: bool = Field(False, description="Check everything and print the commands or manifests; launch nothing")
    restarts: int = Field(0, ge=0, description="Restarts of a failed run, from its newest checkpoint")
    wait_for_nodes: float = Field(600.0, ge=0, description="Seconds that a restart waits for a machine")
    address: str | None = Field(None, description="HOST:PORT of a Ray cluster. Default: RAY_ADDRESS, or this machine's")
    min_nodes: int | None = Field(
        None, ge=1, description="Fewest machines for a restart, with the same global batch. Default: all"
    )
    image: str | None = Field(None, description="Container image with shardwright, for kubernetes and jobset")
    volume: str | None = Field(None, description="Volume claim that all pods write to, as CLAIM:/PATH")
    nodes: int | None = Field(None, ge=1, description="Available machines, if fewer than in the plan")
    turn_ended: bool = Field(False, description="Exit code tells SLURM whether to requeue the job")

    def errors(self) -> list[ConfigError]:
        errors = super().errors()
        if self.on == "local" and self.node_rank is None and self.main_address is None and self.nodes is not None:
            errors.append(ConfigError(where="nodes", value=self.nodes, rule="needs --node-rank and --main-address"))
        return errors

    def place(self) -> NodePlace | None:
        place = super().place()
        return None if place is None else replace(place, nodes=self.nodes)


def launch_command(
    plan: Path,
    script: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    options: Annotated[LaunchOptions, Options] = FILLED,
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
    if script is None:
        return _train(plan, arguments, place, check_nodes=options.check_nodes)
    launch_script(plan, Path(script), arguments, place=place, check_nodes=options.check_nodes, on_line=_print_line)
    return 0


def _train(plan: Path, arguments: Sequence[str], place: NodePlace | None, *, check_nodes: bool) -> int:
    """Run `train` with a plan on this machine, and return the exit code."""
    from ...plugins.releases import check_torch
    from ...trainers.training.script import train_words

    check_torch()
    options = [] if check_nodes else ["--no-check-nodes"]
    if place is not None:
        options += ["--node-rank", str(place.rank), "--main-address", place.main_address]
        options += ["--main-port", str(place.main_port)]
        options += [] if place.nodes is None else ["--nodes", str(place.nodes)]
    words = [*train_words(plan, arguments), *options]
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


def _launch_on_cluster(
    plan_directory: Path, script: str | None, arguments: tuple[str, ...], options: LaunchOptions
) -> int:
    from ...ds_configs.plan.clusters import ClusterJob, has_output_directory
    from ...ds_configs.plan.plan import Plan
    from ...plugins.clusters.ssh import own_program
    from ...trainers.training.script import script_errors, train_words
    from ...trainers.training.settings import train_settings_errors

    plan = Plan.load(plan_directory)
    if script is None:
        # Reject before machines start what each of them would reject. Containers write to their volume.
        output = ["--output-dir", options.name] if options.volume and not has_output_directory(arguments) else []
        _, bound = _resolved([*train_words(plan_directory, arguments), *output])
        errors = train_settings_errors(bound.arguments["settings"])
    else:
        errors = script_errors(Path(script))
    if errors:
        raise UsageError(errors)
    job = ClusterJob(
        plan=plan,
        directory=str(plan_directory.absolute()),
        program=own_program(),
        script=None if script is None else str(Path(script).absolute()),
        arguments=arguments,
        name=options.name,
        options=() if options.check_nodes else ("--no-check-nodes",),
    )
    if options.on == "ssh":
        from ...ds_configs.plan.plan import most_nodes
        from ...plugins.clusters.ssh import Hosts, node_launches, read_hostfile, run_over_ssh

        names = read_hostfile(options.hostfile or plan_directory / "hostfile", job.plan)
        hosts = Hosts(names=names, ssh_config=options.ssh_config)
        least = _least_nodes(job, options)
        if options.dry_run:
            for launch in node_launches(job, hosts, port=options.main_port, directory=Path.cwd()):
                print(" ".join([*(launch.program or ()), *launch.arguments]))
            return 0
        run_over_ssh(
            job,
            hosts,
            port=options.main_port,
            restarts=options.restarts,
            wait_seconds=options.wait_for_nodes,
            on_line=_print_line,
            most=lambda available: most_nodes(plan, available, least=least),
        )
        return 0
    if options.on == "ray":
        from ...plugins.clusters.ray_train import ray_run, run_on_ray

        settings: dict[str, Any] = {"restarts": options.restarts, "wait_seconds": options.wait_for_nodes}
        settings["least"] = _least_nodes(job, options)
        if options.dry_run:
            import yaml

            sys.stdout.write(yaml.safe_dump(ray_run(job, **settings), sort_keys=False))
            return 0
        run_on_ray(job, address=options.address, **settings)
        return 0
    if options.on == "slurm":
        from ...ds_configs.plan.clusters import slurm_script

        batch_script = slurm_script(job, settings=options.sbatch)
        if options.dry_run:
            sys.stdout.write(batch_script)
            return 0
        return submit_to_slurm(batch_script, job.plan.hardware, options)
    return _by_manifest(job, options)


def _least_nodes(job: ClusterJob, options: LaunchOptions) -> int:
    """Return the fewest nodes for a restart.

    Raises:
        UsageError: the plan cannot run on fewer nodes, or the script does not read the plan's global batch.
    """
    from ...ds_configs.plan.plan import most_nodes, on_fewer_nodes
    from ...trainers.training.script import PLAN_FLAGS

    plan, nodes = job.plan, job.plan.hardware.nodes
    least = options.min_nodes or nodes
    if least != nodes and most_nodes(plan, nodes - 1, least=least) is None:
        on_fewer_nodes(plan, least)
    if least < nodes and job.script is not None and PLAN_FLAGS not in job.arguments:
        rule, fix = "needs the plan's global batch in your script", f"add {PLAN_FLAGS} to its arguments"
        raise UsageError(ConfigError(where="min_nodes", value=least, rule=rule, fix=fix))
    return least


def _by_manifest(job: ClusterJob, options: LaunchOptions) -> int:
    import yaml

    from ...ds_configs.plan.clusters import config_map, job_set, manifest_errors, sky_task, train_job
    from ...plugins.clusters.submission import apply, launch_task, plan_files, program_errors

    program, submit = ("sky", launch_task) if options.on == "skypilot" else ("kubectl", apply)
    errors = [] if options.dry_run else program_errors(options.on, program)
    manifests = [sky_task(job)]
    if options.on != "skypilot":
        with collecting(errors):
            files, image, volume = plan_files(job), options.image or "", options.volume or ""
            errors += manifest_errors(job, files, image=image, volume=volume)
            manifests = [config_map(job, files)]
            if options.on == "jobset":
                manifests.append(job_set(job, image=image, volume=volume, restarts=options.restarts))
            else:
                manifests.append(train_job(job, image=image, volume=volume))
    if errors:
        raise UsageError(errors)
    text = yaml.safe_dump_all(manifests, sort_keys=False)
    sys.stdout.write(text if options.dry_run else submit(text))
    return 0
