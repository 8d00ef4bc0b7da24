"""Scripts and hostfiles that run a plan on several machines. Other schedulers: `examples/clusters`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..specs.errors import ConfigError
from ..specs.hardware import HardwareSpec
from .rendering import LaunchSpec, NodePlace

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_SETTING = re.compile(r"--[a-z][a-z-]*(=[ -~]+)?")
SAVING_SECONDS = 300
"""Default time in seconds to write a checkpoint after a scheduler stops the run."""
RESUME = "--resume-or-anew"
"""Argument of a restarted run: resumes, or starts again if no checkpoint is valid, because no user can decide."""
_STOPPED = 143
"""Exit code of a run that saved after SIGTERM."""
_MEETING = (
    "set -uo pipefail\n"
    'main_address="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"\n'
    "# Two jobs that share a machine meet at different ports.\n"
    "main_port=$((20000 + SLURM_JOB_ID % 10000))\n"
)
"""Script lines that set the rendezvous address and port."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """A plan with a script or `train`, for the nodes of a cluster."""

    plan: LaunchSpec
    directory: str
    """Directory of the plan, the same path on every node."""
    program: tuple[str, ...] = ("shardwright",)
    """Command on a node."""
    script: str | None = None
    """The user's script; `None` for `train`."""
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Further options of `shardwright launch`, such as `--no-check-nodes`."""
    name: str = "shardwright"

    def node_words(self, place: NodePlace, *options: str) -> list[str]:
        """Return the command of one node, with further options of `shardwright launch`."""
        meeting = ["--main-address", place.main_address, "--main-port", str(place.main_port)]
        words = [*self.program, "launch", self.directory, "--node-rank", str(place.rank), *meeting]
        words += [*self.options, *options]
        return [*words, "--", *self.words_behind]

    @property
    def words_behind(self) -> tuple[str, ...]:
        return self.arguments if self.script is None else (self.script, *self.arguments)

    def resumed(self) -> ClusterJob:
        """Return the job that resumes from the newest valid checkpoint, or starts again without one.

        A user's script must do that itself, so its job is returned unchanged.
        """
        if self.script is not None or "--resume" in self.arguments:
            return self
        return replace(self, arguments=(*self.arguments, RESUME))


def name_errors(name: str) -> list[ConfigError]:
    """Return an error for a name that a scheduler, a shell or YAML would not read as a plain name."""
    if _NAME.fullmatch(name):
        return []
    rule = "must be at most 40 lower-case letters, digits and hyphens, with a letter first"
    return [ConfigError(where="name", value=name, rule=rule)]


def setting_errors(settings: Sequence[str]) -> list[ConfigError]:
    """Return an error for each invalid option of `sbatch`; a line break would add a line to the script."""
    return [
        ConfigError(
            where="sbatch", value=setting, rule="must have the form --NAME=VALUE", fix="such as --partition=gpu"
        )
        for setting in settings
        if not _SETTING.fullmatch(setting)
    ]


def placeholder_hosts(plan: LaunchSpec) -> list[str]:
    """Return the placeholders for host names in the hostfile that `plan` writes."""
    return [f"node-{index}" for index in range(plan.hardware.nodes)]


def hostfile(plan: LaunchSpec) -> str:
    """Return the hostfile of `--on ssh` and of DeepSpeed's launchers, with placeholder names."""
    return "".join(f"{name} slots={plan.hardware.gpus_per_node}\n" for name in placeholder_hosts(plan))


def slurm_script(
    job: ClusterJob, header: str = "", *, settings: tuple[str, ...] = (), saving_seconds: int = SAVING_SECONDS
) -> str:
    """Return an `sbatch` script: one launcher per node, stopped in time to save, then requeued to resume."""
    further = ("--requeue", "--open-mode=append", f"--signal=TERM@{saving_seconds}", *settings)
    directory = '"$SLURM_SUBMIT_DIR"' if job.directory == "." else shlex.quote(job.directory)
    behind, options = shlex.join(job.words_behind), "".join(f"{shlex.quote(word)} " for word in job.options)
    # Node-specific arguments follow the words that are the same on all nodes.
    same = len(job.program) + 2
    return (
        f"{_sbatch_head(job.plan.hardware, job.name, further)}{header}{_MEETING}"
        f'set -- {behind}{" " if behind else ""}"$@"\n'
        "# Your own script must read SLURM_RESTART_COUNT itself.\n"
        'case "${1:--}" in -*) set -- "$@" ${SLURM_RESTART_COUNT:+"'
        f'{RESUME}"}} ;; esac\n'
        f"srun --wait={saving_seconds} bash -c "
        f'\'exec "${{@:1:{same}}}" --node-rank "$SLURM_NODEID" "${{@:{same + 1}}}"\' node '
        f"{shlex.join(job.program)} launch {directory} "
        f'--main-address "$main_address" --main-port "$main_port" {options}-- "$@"\n'
        "code=$?\n"
        "# The run was stopped before its time limit and has saved. Requeue it to resume, if it made progress.\n"
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
    """Return an `sbatch` script that runs one command on every node, stopped in time to save.

    Node rank and rendezvous address are appended to the command. The job is not requeued; the caller decides how its
    command resumes.
    """
    head = _sbatch_head(hardware, name, ("--no-requeue", f"--signal=TERM@{saving_seconds}", *settings))
    # After the other nodes have ended, node 0 may still report and upload, without a time limit.
    return (
        f"{head}{_MEETING}srun --wait=0 bash -c "
        f'\'exec "$@" --node-rank "$SLURM_NODEID"\' node {shlex.join(words)} '
        '--main-address "$main_address" --main-port "$main_port"\n'
    )


def _sbatch_head(hardware: HardwareSpec, name: str, further: Sequence[str]) -> str:
    """Return the head of an `sbatch` script with one launcher per exclusive node."""
    options = [f"--job-name={name}", f"--nodes={hardware.nodes}", "--ntasks-per-node=1"]
    if hardware.gpu != "CPU":
        options.append(f"--gpus-per-node={hardware.gpus_per_node}")
    return "#!/usr/bin/env bash\n" + "".join(f"#SBATCH {option}\n" for option in [*options, "--exclusive", *further])
