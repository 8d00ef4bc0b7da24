"""`shardwright launch`: a plan's own training, or the user's script under it, on this machine or on a cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter
from pydantic import Field

from ...ds_configs.plan.launch import NodePlace
from ...ds_configs.specs.errors import Fault, UsageError, collecting
from ..machines import PlannedMachineOptions, submit_to_slurm
from ..options import ConfigOption
from ..progress import note
from ..settings import FILLED, Options, grouped

if TYPE_CHECKING:
    from ...ds_configs.plan.cluster_jobs import ClusterJob


@grouped
class LaunchOptions(PlannedMachineOptions, ConfigOption):
    """Machines of a launch."""

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
        "local", description="What starts the machines: kubernetes as a TrainJob of Kubeflow, jobset without it"
    )
    hostfile: Path | None = Field(
        None, description="Machines for ssh, a line HOST slots=N for each. Default: hostfile in the plan's directory"
    )
    dry_run: bool = Field(False, description="Check everything and print what each machine or the scheduler gets")
    restarts: int = Field(
        0, ge=0, description="How often ssh, ray or jobset starts a failed run again, from its newest checkpoint"
    )
    wait_for_nodes: float = Field(600.0, ge=0, description="Seconds for which a restart waits for a machine")
    address: str | None = Field(
        None, description="HOST:PORT of a Ray cluster. Default: RAY_ADDRESS, else the cluster of this machine"
    )
    min_nodes: int | None = Field(
        None, ge=1, description="Fewest machines that a restart goes on with, at the same global batch. Default: all"
    )
    image: str | None = Field(None, description="Container image with shardwright, for kubernetes and jobset")
    volume: str | None = Field(None, description="Claim that all pods write to, as CLAIM:/PATH")
    nodes: int | None = Field(None, ge=1, description="Machines that there are, where fewer than the plan has go on")
    turn_ended: bool = Field(False, description="Say by the exit code whether SLURM is to queue this job again")

    def faults(self) -> list[Fault]:
        """Return what would be passed over or lacks its other half, and names that a scheduler reads otherwise."""
        faults = super().faults()
        if self.on == "local" and self.node_rank is None and self.main_address is None and self.nodes is not None:
            faults.append(Fault(where="nodes", value=self.nodes, rule="needs --node-rank and --main-address beside it"))
        return faults

    def place(self) -> NodePlace | None:
        """Return this machine's place, among fewer machines than the plan has where `nodes` says so."""
        place = super().place()
        return None if place is None else replace(place, nodes=self.nodes)


def launch_command(
    plan: Path,
    script: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    options: Annotated[LaunchOptions, Options] = FILLED,
) -> int:
    """Run a plan or your script under it, on this machine or a cluster.

    The plan's directory may have moved since it was written. CPU ranks are made ready for the script.

    Examples: shardwright launch plan finetune.py --epochs 3 ;
    shardwright launch plan run_clm.py --output_dir out @plan ;
    shardwright launch plan --on slurm --sbatch=--partition=gpu finetune.py -- --config own.yaml

    Parameters
    ----------
    plan
        Directory that `plan` wrote.
    script
        Python file with a Trainer, an Accelerator or `deepspeed.initialize`. Without it the plan's own training runs.
    arguments
        Of the script or the training; `@plan` stands for the plan's TrainingArguments as flags. Behind `--` where this
        command has one of the same name.
    """
    if script is not None and script.startswith("-"):
        arguments, script = (script, *arguments), None
    if faults := options.faults():
        raise UsageError(faults)
    if options.on != "local":
        return _launch_on_cluster(plan, script, arguments, options)
    if options.turn_ended:
        from ...trainers.training.turns import count_turn

        own = None if script is None else Path(script)
        count_turn(plan, own, arguments, job=os.environ.get("SLURM_JOB_ID", ""))
        return 0
    from ...trainers.training.script import launch_plan

    launch_plan(
        plan,
        None if script is None else Path(script),
        arguments,
        place=options.place(),
        check_nodes=options.check_nodes,
        on_line=_print_line,
        notify=note,
    )
    return 0


def _print_line(line: str) -> None:
    print(line, flush=True)


def _launch_on_cluster(
    plan_directory: Path, script: str | None, arguments: tuple[str, ...], options: LaunchOptions
) -> int:
    from ...ds_configs.plan.cluster_jobs import ClusterJob
    from ...ds_configs.plan.plan import Plan
    from ...plugins.clusters.ssh import own_program
    from ...trainers.training.script import script_faults

    plan = Plan.load(plan_directory)
    if script is not None and (faults := script_faults(Path(script))):
        raise UsageError(faults)
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
        return _over_ssh(job, plan_directory, options)
    if options.on == "ray":
        return _on_ray(job, options)
    return _in_slurm(job, options) if options.on == "slurm" else _by_manifest(job, options)


def _least_nodes(job: ClusterJob, options: LaunchOptions) -> int:
    """Return with how many nodes a restart may go on.

    Raises:
        UsageError: the plan can go on with no part of its nodes, or a script would not know of it.
    """
    from ...ds_configs.plan.fewer_nodes import most_nodes, on_fewer_nodes
    from ...trainers.training.script import PLAN_FLAGS

    plan, nodes = job.plan, job.plan.hardware.nodes
    least = options.min_nodes or nodes
    if least != nodes and most_nodes(plan, nodes - 1, least=least) is None:
        on_fewer_nodes(plan, least)
    if least < nodes and job.script is not None and PLAN_FLAGS not in job.arguments:
        rule, fix = "needs the plan's global batch in your script", f"take it with {PLAN_FLAGS} among its arguments"
        raise UsageError(Fault(where="min_nodes", value=least, rule=rule, fix=fix))
    return least


def _over_ssh(job: ClusterJob, plan_directory: Path, options: LaunchOptions) -> int:
    from ...ds_configs.plan.fewer_nodes import most_nodes
    from ...plugins.clusters.ssh import Hosts, node_launches, read_hostfile, run_over_ssh

    names = read_hostfile(options.hostfile or plan_directory / "hostfile", job.plan)
    hosts = Hosts(names=names, ssh_config=options.ssh_config)
    least, plan = _least_nodes(job, options), job.plan
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
        notify=note,
        most=lambda there: most_nodes(plan, there, least=least),
    )
    return 0


def _on_ray(job: ClusterJob, options: LaunchOptions) -> int:
    from ...plugins.clusters.ray_train import ray_run, run_on_ray

    settings: dict[str, Any] = {"restarts": options.restarts, "wait_seconds": options.wait_for_nodes}
    settings["least"] = _least_nodes(job, options)
    if options.dry_run:
        import yaml

        sys.stdout.write(yaml.safe_dump(ray_run(job, **settings), sort_keys=False))
        return 0
    run_on_ray(job, address=options.address, **settings)
    return 0


def _in_slurm(job: ClusterJob, options: LaunchOptions) -> int:
    from ...ds_configs.plan.cluster_jobs import slurm_script

    script = slurm_script(job, settings=options.sbatch)
    if options.dry_run:
        sys.stdout.write(script)
        return 0
    return submit_to_slurm(script, job.plan.hardware, options)


def _by_manifest(job: ClusterJob, options: LaunchOptions) -> int:
    import yaml

    from ...plugins.clusters.submission import apply, launch_task, program_faults

    program, submit = ("sky", launch_task) if options.on == "skypilot" else ("kubectl", apply)
    faults = [] if options.dry_run else program_faults(options.on, program)
    manifests: list[dict[str, Any]] = []
    with collecting(faults):
        manifests = _manifests(job, options)
    if faults:
        raise UsageError(faults)
    text = yaml.safe_dump_all(manifests, sort_keys=False)
    sys.stdout.write(text if options.dry_run else submit(text))
    return 0


def _manifests(job: ClusterJob, options: LaunchOptions) -> list[dict[str, Any]]:
    """Return what the scheduler gets.

    Raises:
        UsageError: a name, image or volume is none, or the files are too large.
    """
    from ...ds_configs.plan.cluster_manifests import config_map, job_set, manifest_faults, sky_task, train_job
    from ...plugins.clusters.submission import plan_files

    if options.on == "skypilot":
        return [sky_task(job)]
    files, image, volume = plan_files(job), options.image or "", options.volume or ""
    faults = manifest_faults(job, files, image=image, volume=volume)
    if faults:
        raise UsageError(faults)
    if options.on == "jobset":
        return [config_map(job, files), job_set(job, image=image, volume=volume, restarts=options.restarts)]
    return [config_map(job, files), train_job(job, image=image, volume=volume)]
