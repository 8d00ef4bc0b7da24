"""Launch lines and scripts of one node, and of one node among several."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Plan

TRAINING_MODULE = "shardwright.trainers.train_causal_lm"

LAUNCHING_MODULE = "shardwright.plugins.launching.elastic"
"""Runs a launcher on the interface by which its node reaches the others, on loopback where it is the only one."""

MAIN_PORT = 29500
"""Where the ranks of several nodes meet, unless another port is stated: the default of torchrun and Accelerate."""

_SCRIPT_DIRECTORY = "\0"
"""Stands for the script's own directory while its words are quoted; no path holds a null byte."""
_SCRIPT_WORDS = {"\0rank": '"$1"', "\0address": '"$2"', "\0port": f'"${{MAIN_PROCESS_PORT:-{MAIN_PORT}}}"'}
"""Words of a script that stand for its arguments and variables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """Place of a machine among those of a launch."""

    rank: int | str
    """Its number from 0, the machine where ranks meet; a text where a script's argument says it."""
    main_address: str
    """Name or address of machine 0."""
    main_port: int | str = MAIN_PORT
    """TCP port there."""
    nodes: int | None = None
    """How many machines there are, where those are fewer than `accelerate.yaml` says."""

    @property
    def is_first(self) -> bool:
        """Whether this is the machine that reports what all did."""
        return str(self.rank) == "0"


def launch_arguments(plan: Plan, *, directory: str = ".", place: NodePlace | None = None) -> list[str]:
    """Return the exact command that starts training on one node, run from anywhere.

    Accelerate starts a single process for MULTI_CPU, so plain data parallelism over CPU ranks uses torchrun.
    """
    hardware = plan.hardware
    training = [*_training_module_arguments(plan, directory)]
    if hardware.gpu == "CPU" and plan.chosen.strategy.engine == "ddp":
        meeting = ["--standalone"]
        if place is not None:
            meeting = [f"--nnodes={hardware.nodes}", "--node-rank", str(place.rank)]
            meeting += ["--master-addr", place.main_address, "--master-port", str(place.main_port)]
        return ["torchrun", *meeting, f"--nproc_per_node={hardware.gpus_per_node}", "-m", *training]
    meeting = []
    if place is not None:
        meeting = ["--machine_rank", str(place.rank), "--main_process_ip", place.main_address]
        meeting += ["--main_process_port", str(place.main_port)]
        if place.nodes is not None:
            meeting += ["--num_machines", str(place.nodes), "--num_processes", str(hardware.world_size)]
    return ["accelerate", "launch", "--config_file", f"{directory}/accelerate.yaml", *meeting, "-m", *training]


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
    several = plan.hardware.nodes > 1
    place = NodePlace(rank="\0rank", main_address="\0address", main_port="\0port") if several else None
    words = launch_arguments(plan, directory=_SCRIPT_DIRECTORY, place=place)
    words = with_own_files(words, plan, directory=_SCRIPT_DIRECTORY)
    line = " ".join(_quoted(word) for word in words)
    preamble = 'directory="$(cd "$(dirname "$0")" && pwd)"\npython="$(command -v python || command -v python3)"\n'
    arguments = '"$@"'
    if several:
        usage = "usage: $0 MACHINE_RANK MAIN_PROCESS_IP [TRAINING ARGUMENTS]"
        preamble = f'if [ $# -lt 2 ]; then echo "{usage}" >&2; exit 2; fi\n{preamble}'
        arguments = '"${@:3}"'
    line = f'"$python" -m {LAUNCHING_MODULE} {line} {arguments}'
    return f"#!/usr/bin/env bash\n{header}set -euo pipefail\n{preamble}exec {line}\n"


def _quoted(word: str) -> str:
    if word in _SCRIPT_WORDS:
        return _SCRIPT_WORDS[word]
    if not word.startswith(_SCRIPT_DIRECTORY):
        return shlex.quote(word)
    below = word.removeprefix(_SCRIPT_DIRECTORY)
    return '"$directory"' + (shlex.quote(below) if below else "")
