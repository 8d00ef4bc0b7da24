"""Scripts and hostfiles that run a plan on several machines. Other schedulers: `examples/clusters`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..specs.hardware import HardwareSpec
from .rendering import NodePlace

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
class NodeCommand:
    """A command of Shardwright that each node runs, with its rank and the address of the first one."""

    words: tuple[str, ...]
    """Name and arguments, without options of machines."""
    program: tuple[str, ...] = ("shardwright",)

    def node_words(self, place: NodePlace, *options: str) -> list[str]:
        """Return the command of one node; options of machines precede the arguments, which may be a script's."""
        meeting = ["--main-address", place.main_address, "--main-port", str(place.main_port)]
        return [*self.program, self.words[0], "--node-rank", str(place.rank), *meeting, *options, *self.words[1:]]


def placeholder_hosts(nodes: int) -> list[str]:
    """Return the placeholders for host names in the hostfile that `plan` writes."""
    return [f"node-{index}" for index in range(nodes)]


def hostfile(hardware: HardwareSpec) -> str:
    """Return the hostfile of `--on ssh` and of DeepSpeed's launchers, with placeholder names."""
    return "".join(f"{name} slots={hardware.gpus_per_node}\n" for name in placeholder_hosts(hardware.nodes))


def slurm_script(
    command: NodeCommand,
    hardware: HardwareSpec,
    *,
    behind: Sequence[str],
    header: str = "",
    name: str = "shardwright",
    settings: Sequence[str] = (),
    saving_seconds: int = SAVING_SECONDS,
) -> str:
    """Return an `sbatch` script: one launcher per exclusive node, stopped in time to save.

    Args:
        command: What each node runs; the directory `.` is that of the submission.
        hardware: Nodes of the job.
        behind: Further arguments of `launch`, to which the script adds those that it gets itself. The job is requeued
            to resume as long as it makes progress.
        header: Comments below the options of `sbatch`.
        name: Of the job.
        settings: Further options of `sbatch`.
        saving_seconds: Time between SIGTERM and the time limit.
    """
    options = [f"--job-name={name}", f"--nodes={hardware.nodes}", "--ntasks-per-node=1"]
    if hardware.gpu != "CPU":
        options.append(f"--gpus-per-node={hardware.gpus_per_node}")
    options += ["--exclusive", "--requeue", "--open-mode=append"]
    options += [f"--signal=TERM@{saving_seconds}", *settings]
    head = "#!/usr/bin/env bash\n" + "".join(f"#SBATCH {option}\n" for option in options) + header + _MEETING
    program, same = shlex.join([*command.program, command.words[0]]), len(command.program) + 1
    words = " ".join('"$SLURM_SUBMIT_DIR"' if word == "." else shlex.quote(word) for word in command.words[1:])
    # Node-specific arguments follow the words that are the same on all nodes.
    run = (
        f"srun --wait={saving_seconds} bash -c "
        f'\'exec "${{@:1:{same}}}" --node-rank "$SLURM_NODEID" "${{@:{same + 1}}}"\' node '
        f'{program} --main-address "$main_address" --main-port "$main_port" {words}'
    )
    return (
        f'{head}set -- {"".join(f"{shlex.quote(word)} " for word in behind)}"$@"\n'
        "# Your own script must read SLURM_RESTART_COUNT itself.\n"
        'case "${1:--}" in -*) set -- "$@" ${SLURM_RESTART_COUNT:+"'
        f'{RESUME}"}} ;; esac\n'
        f'{run} -- "$@"\n'
        "code=$?\n"
        "# The run was stopped before its time limit and has saved. Requeue it to resume, if it made progress.\n"
        f'if [ "$code" -eq {_STOPPED} ] && {program} {words} --turn-ended -- "$@"; then\n'
        '  scontrol requeue "$SLURM_JOB_ID"\n'
        "fi\n"
        'exit "$code"\n'
    )
