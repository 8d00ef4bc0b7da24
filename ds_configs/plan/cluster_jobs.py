"""Jobs of clusters that run a plan: what each node runs, and the files by which schedulers are told of it.

`sbatch` of SLURM (https://slurm.schedmd.com/sbatch.html), `TrainJob` of Kubeflow Trainer and `JobSet` of Kubernetes
(https://www.kubeflow.org/docs/components/trainer, https://jobset.sigs.k8s.io), and a task of SkyPilot
(https://docs.skypilot.co/en/latest/reference/yaml-spec.html).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..specs.errors import Fault
from ..specs.hardware import HardwareSpec
from .launch import NodePlace
from .plan import Plan

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""A DNS label, short enough for the names of the pods that are made of it."""
_SETTING = re.compile(r"--[a-z][a-z-]*(=[ -~]+)?")
SAVING_SECONDS = 300
"""What a run that a scheduler stops gets to write its checkpoint, unless it is told otherwise."""
RESUME = "--resume-or-anew"
"""Argument of a training that is started again: nobody is there to decide what a broken checkpoint is worth."""
_STOPPED = 143
"""Exit code of a run that was asked to stop, and has saved."""
_MEETING = (
    "set -uo pipefail\n"
    'main_address="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"\n'
    "# Two jobs that share a machine meet at different ports.\n"
    "main_port=$((20000 + SLURM_JOB_ID % 10000))\n"
)
"""Lines of a job in which its nodes learn where they meet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """A plan, with what runs under it, for the nodes of a cluster."""

    plan: Plan
    """With several machines, or one."""
    directory: str
    """The plan's, under the same path on every node."""
    program: tuple[str, ...] = ("shardwright",)
    """Words that are the command on a node."""
    script: str | None = None
    """The user's own script; `None` for the plan's own training."""
    arguments: tuple[str, ...] = ()
    """Of the script or the training."""
    options: tuple[str, ...] = ()
    """Further ones of `shardwright launch` on a node, such as `--no-check-nodes`."""
    name: str = "shardwright"
    """What the scheduler shows."""

    def node_words(self, place: NodePlace, *options: str) -> list[str]:
        """Return the command of one node; `options` are further ones than the job has."""
        meeting = ["--main-address", place.main_address, "--main-port", str(place.main_port)]
        words = [*self.program, "launch", self.directory, "--node-rank", str(place.rank), *meeting]
        words += [] if place.nodes is None else ["--nodes", str(place.nodes)]
        words += [*self.options, *options]
        return [*words, "--", *self.words_behind]

    @property
    def words_behind(self) -> tuple[str, ...]:
        """The script, if there is one, and the arguments."""
        return self.arguments if self.script is None else (self.script, *self.arguments)

    def resumed(self) -> ClusterJob:
        """Return the job that goes on from the newest whole checkpoint, or begins anew where none is whole.

        A script of one's own sees to that itself.
        """
        if self.script is not None or "--resume" in self.arguments:
            return self
        return replace(self, arguments=(*self.arguments, RESUME))


def name_faults(name: str) -> list[Fault]:
    """Return a fault where a scheduler, or the shell and YAML on the way to it, would read a name as something else."""
    if _NAME.fullmatch(name):
        return []
    rule = "must be at most 40 lower-case letters, digits and hyphens, with a letter first"
    return [Fault(where="name", value=name, rule=rule)]


def setting_faults(settings: Sequence[str]) -> list[Fault]:
    """Return the options of `sbatch` that are none; a line break in one would begin a line of the script."""
    return [
        Fault(where="sbatch", value=setting, rule="must read --NAME=VALUE", fix="such as --partition=gpu")
        for setting in settings
        if not _SETTING.fullmatch(setting)
    ]


def placeholder_hosts(plan: Plan) -> list[str]:
    """Return the names that stand for the user's machines in the hostfile that `plan` writes."""
    return [f"node-{index}" for index in range(plan.hardware.nodes)]


def hostfile(plan: Plan) -> str:
    """Return the hostfile of `--on ssh` and of DeepSpeed's own launchers, with names to replace."""
    return "".join(f"{name} slots={plan.hardware.gpus_per_node}\n" for name in placeholder_hosts(plan))


def slurm_script(
    job: ClusterJob, header: str = "", *, settings: tuple[str, ...] = (), saving_seconds: int = SAVING_SECONDS
) -> str:
    """Return a script for `sbatch`: one launcher on each node, stopped in time to save, and queued again to go on.

    SLURM runs a copy of the script, so the plan's directory is written down; `.` means where `sbatch` is called. What
    follows the script on `sbatch`'s line is a script of one's own with its arguments, or arguments of the plan's
    training. `settings` are further options of `sbatch`, such as `--partition=gpu`.
    """
    further = ("--requeue", "--open-mode=append", f"--signal=TERM@{saving_seconds}", *settings)
    directory = '"$SLURM_SUBMIT_DIR"' if job.directory == "." else shlex.quote(job.directory)
    behind, options = shlex.join(job.words_behind), "".join(f"{shlex.quote(word)} " for word in job.options)
    # What the shell of the node puts in comes behind the words that are the same for all.
    same = len(job.program) + 2
    return (
        f"{_asked(job.plan.hardware, job.name, further)}{header}{_MEETING}"
        f'set -- {behind}{" " if behind else ""}"$@"\n'
        "# A script of one's own reads SLURM_RESTART_COUNT itself.\n"
        'case "${1:--}" in -*) set -- "$@" ${SLURM_RESTART_COUNT:+"'
        f'{RESUME}"}} ;; esac\n'
        f"srun --wait={saving_seconds} bash -c "
        f'\'exec "${{@:1:{same}}}" --node-rank "$SLURM_NODEID" "${{@:{same + 1}}}"\' node '
        f"{shlex.join(job.program)} launch {directory} "
        f'--main-address "$main_address" --main-port "$main_port" {options}-- "$@"\n'
        "code=$?\n"
        "# It was stopped before its time limit and has saved: the next turn goes on, if this one got further.\n"
        f'if [ "$code" -eq {_STOPPED} ] && {shlex.join(job.program)} launch {directory} --turn-ended -- "$@"; then\n'
        '  scontrol requeue "$SLURM_JOB_ID"\n'
        "fi\n"
        'exit "$code"\n'
    )


def slurm_command_script(
    words: Sequence[str],
    hardware: HardwareSpec,
    *,
    name: str,
    settings: tuple[str, ...] = (),
    saving_seconds: int = SAVING_SECONDS,
) -> str:
    """Return a script for `sbatch` that runs one command on every node, stopped in time to save.

    Every node puts its place behind the command's words. The job is not queued again: how its command goes on is for
    whoever called it to say.
    """
    asked = _asked(hardware, name, ("--no-requeue", f"--signal=TERM@{saving_seconds}", *settings))
    # When the others have ended, machine 0 reports and uploads for as long as that takes.
    return (
        f"{asked}{_MEETING}srun --wait=0 bash -c "
        f'\'exec "$@" --node-rank "$SLURM_NODEID"\' node {shlex.join(words)} '
        '--main-address "$main_address" --main-port "$main_port"\n'
    )


def _asked(hardware: HardwareSpec, name: str, further: Sequence[str]) -> str:
    """Return the head of a script for `sbatch`: one launcher on each node, which has all of it."""
    asked = [f"--job-name={name}", f"--nodes={hardware.nodes}", "--ntasks-per-node=1"]
    if hardware.gpu != "CPU":
        asked.append(f"--gpus-per-node={hardware.gpus_per_node}")
    return "#!/usr/bin/env bash\n" + "".join(f"#SBATCH {option}\n" for option in [*asked, "--exclusive", *further])
