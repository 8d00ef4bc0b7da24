"""Launch lines and scripts: one node, several nodes by hand, and SLURM."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from .plan import Plan

TRAINING_MODULE = "shardwright.trainers.train_causal_lm"

LAUNCHING_MODULE = "shardwright.plugins.launching.elastic"
"""Runs a launcher of one node on the loopback interface alone: torch 2.13.0 lets its store listen on all of them."""

_SCRIPT_DIRECTORY = "\0"
"""Stands for the script's own directory while its words are quoted; no path holds a null byte."""


def launch_arguments(plan: Plan, *, directory: str = ".") -> list[str]:
    """Return the exact command that starts training on one node, run from anywhere.

    Accelerate starts a single process for MULTI_CPU, so plain data parallelism over CPU ranks uses torchrun.
    """
    training = [*_training_module_arguments(plan, directory)]
    if plan.hardware.gpu == "CPU" and plan.chosen.strategy.engine == "ddp":
        return ["torchrun", "--standalone", f"--nproc_per_node={plan.hardware.world_size}", "-m", *training]
    return ["accelerate", "launch", "--config_file", f"{directory}/accelerate.yaml", "-m", *training]


def with_own_files(words: Sequence[str], plan: Plan, *, directory: str) -> list[str]:
    """Return the words of a launch that reads the DeepSpeed file of a directory, whatever `accelerate.yaml` holds."""
    if plan.chosen.strategy.engine != "deepspeed":
        return list(words)
    place = words.index("-m")
    return [*words[:place], "--deepspeed_config_file", f"{directory}/ds_config.json", *words[place:]]


def train_arguments(plan: Plan, *, directory: str) -> list[str]:
    """Return the command that trains on the user's data under a plan; `YOUR_DATA` and `OUTPUT` are the user's to name.

    A plan with a teacher is for `distill`, which plans for itself.
    """
    revision = [] if plan.model.revision is None else ["--revision", plan.model.revision]
    model, own = plan.model.name, ["--dataset", "YOUR_DATA", "--output-dir", "OUTPUT"]
    if plan.job.teacher is not None:
        return ["shardwright", "distill", plan.job.teacher.name, model, *revision, *own]
    return ["shardwright", "train", model, "--plan", directory, *revision, *own]


def run_line(plan: Plan, *, directory: str = ".") -> str:
    """Return what to type, quoted for a shell: the launch itself, or on several nodes the script for each."""
    if plan.hardware.nodes == 1:
        return shlex.join(launch_arguments(plan, directory=directory))
    script = shlex.quote(f"{directory}/launch.sh")
    batch = shlex.quote(f"{directory}/launch.sbatch")
    return f"{script} MACHINE_RANK MAIN_PROCESS_IP on each node, or sbatch {batch}"


def _training_module_arguments(plan: Plan, directory: str) -> list[str]:
    arguments = [
        TRAINING_MODULE,
        "--model",
        plan.model.name,
        "--training-arguments",
        f"{directory}/training_arguments.json",
        "--seq-len",
        str(plan.job.seq_len_tokens),
        "--output-dir",
        f"{directory}/model",
        "--plan",
        directory,
    ]
    if plan.model.revision is not None:
        arguments += ["--revision", plan.model.revision]
    if plan.job.method != "full":
        arguments += ["--method", plan.job.method, "--lora-rank", str(plan.job.lora_rank)]
        arguments += ["--lora-targets", ",".join(plan.job.lora_targets)]
    return arguments


def launch_script(plan: Plan, header: str) -> str:
    """Return `launch.sh`: the launch line, with the user's arguments appended; on one node nothing else reaches it.

    Its files are those beside it, wherever they lie.
    """
    words = with_own_files(launch_arguments(plan, directory=_SCRIPT_DIRECTORY), plan, directory=_SCRIPT_DIRECTORY)
    line = " ".join(_quoted(word) for word in words)
    preamble = 'directory="$(cd "$(dirname "$0")" && pwd)"\n'
    if plan.hardware.nodes > 1:
        line = line.replace("accelerate launch", 'accelerate launch --machine_rank "$1" --main_process_ip "$2"', 1)
        preamble = (
            'if [ $# -lt 2 ]; then echo "usage: $0 MACHINE_RANK MAIN_PROCESS_IP [TRAINING ARGUMENTS]" >&2; exit 2; fi\n'
            + preamble
        )
        line += ' "${@:3}"'
    else:
        line = f'"$python" -m {LAUNCHING_MODULE} {line} "$@"'
        preamble += 'python="$(command -v python || command -v python3)"\n'
    return f"#!/usr/bin/env bash\n{header}set -euo pipefail\n{preamble}exec {line}\n"


def _quoted(word: str) -> str:
    if not word.startswith(_SCRIPT_DIRECTORY):
        return shlex.quote(word)
    below = word.removeprefix(_SCRIPT_DIRECTORY)
    return '"$directory"' + (shlex.quote(below) if below else "")


def slurm_script(plan: Plan, header: str, *, directory: str = ".") -> str:
    """Return `launch.sbatch`: one `accelerate launch` per node, its rank taken from SLURM.

    SLURM runs a copy of the script, so the plan's directory is written down; `.` means where `sbatch` is called.
    """
    hardware = plan.hardware
    launcher = '"$SLURM_SUBMIT_DIR/launch.sh"' if directory == "." else shlex.quote(f"{directory}/launch.sh")
    return (
        "#!/usr/bin/env bash\n"
        "#SBATCH --job-name=shardwright\n"
        f"#SBATCH --nodes={hardware.nodes}\n"
        "#SBATCH --ntasks-per-node=1\n"
        f"#SBATCH --gpus-per-node={hardware.gpus_per_node}\n"
        "#SBATCH --exclusive\n"
        f"{header}set -euo pipefail\n"
        'main_process_ip="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"\n'
        "export main_process_ip\n"
        'srun bash -c \'exec bash "$0" "$SLURM_NODEID" "$main_process_ip" "$@"\' '
        f'{launcher} "$@"\n'
    )


def hostfile(plan: Plan) -> str:
    """Return the hostfile of DeepSpeed's own multi-node launchers, with placeholder names."""
    lines = [f"node-{index} slots={plan.hardware.gpus_per_node}" for index in range(plan.hardware.nodes)]
    return "\n".join(lines) + "\n"
