"""Starts on several machines: over ssh, one launcher on each host of a hostfile, or as a job of SLURM.

All launchers end with the command that started them. The hostfile has the format of DeepSpeed 0.19.8
(`deepspeed/launcher/runner.py`): one line `HOST slots=N` per machine. Hosts need the plan's directory and this Python
environment under the same paths, as on a shared file system.

Run as a program, the module compares the machines of a launch before training, because ranks that differ in versions,
GPUs or files would hang: `torchrun ... -m shardwright.plugins.clusters PLAN_DIR`, one process on each machine.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ds_configs.plan.plan import Plan
from ..ds_configs.plan.rendering import NodeCommand, NodePlace, placeholder_hosts
from ..ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ..ds_configs.specs.hardware import HardwareSpec
from .launching.elastic import recorded
from .launching.launch import Launch, launch_ranks
from .launching.messages import NOTE, note_on_first_rank
from .planning import installed_versions

_LINE = re.compile(r"(?P<host>[^\s=]+)(?:\s+slots=(?P<slots>\d{1,6}))?")
_EXPORTED = re.compile(r"(PYTHON|NCCL_|GLOO_|UCX_|OMP_|SHARDWRIGHT_|TRANSFORMERS_|HF_HUB_OFFLINE$|HF_HOME$|TORCH_EXT)")
"""Variables that hosts receive. Tokens are excluded, because every user of a host sees command lines."""
_NOT_EXPORTED = frozenset({"SHARDWRIGHT_LAUNCH_TOKEN", "PYTHON_EXEC"})
_CONNECT_SECONDS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Machines that are reachable by ssh."""

    names: tuple[str, ...]
    """Names for ssh; ranks connect to the first."""
    ssh_config: Path | None = None
    """Configuration file of ssh; `None` for the user's."""

    def ssh(self, host: str) -> tuple[str, ...]:
        """Return the arguments that run a command on a host, without prompts."""
        config = () if self.ssh_config is None else ("-F", str(self.ssh_config))
        return ("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", *config, "--", host)


def read_hostfile(file: Path, hardware: HardwareSpec) -> tuple[str, ...]:
    """Return the machines of a file, whose slots must be those of the hardware if a line has some.

    Raises:
        UsageError: it cannot be read, has invalid lines, lists a machine twice or none, still has the placeholders that
            `plan` wrote, or has other counts than the hardware.
    """
    where = str(file)
    try:
        lines = [line.split("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read ({getattr(error, 'strerror', None) or 'no text'})"
        raise UsageError(ConfigError(where="hostfile", value=where, rule=rule, fix="pass --hostfile")) from None
    errors, names = [], []
    for line in filter(None, lines):
        match = _LINE.fullmatch(line)
        if match is None or match["host"].startswith("-") or match["slots"] == "0":
            errors.append(ConfigError(where=where, value=line, rule="must have the form HOST slots=N"))
            continue
        slots = None if match["slots"] is None else int(match["slots"])
        names.append(match["host"])
        if slots not in (None, hardware.gpus_per_node):
            rule = f"{match['host']} has {slots} slots, but the plan has {hardware.gpus_per_node} ranks on each machine"
            errors.append(ConfigError(where=where, rule=rule, fix="plan again for this machine"))
    rules = []
    if len(set(names)) < len(names):
        rules.append(("lists a machine twice", "remove one of its lines"))
    if not names and not errors:
        rules.append(("lists no machine", "write a line HOST slots=N for each"))
    elif names == placeholder_hosts(len(names)):
        rules.append(("contains placeholders for host names", "replace them with your machines"))
    elif len(names) != hardware.nodes:
        rule = f"lists {len(names)} machines, but the plan has {hardware.nodes}"
        rules.append((rule, "list as many, or plan again"))
    errors += [ConfigError(where="hostfile", value=where, rule=rule, fix=fix) for rule, fix in rules]
    if errors:
        raise UsageError(errors)
    return tuple(names)


def node_launches(command: NodeCommand, hosts: Hosts, *, port: int, directory: Path) -> list[Launch]:
    """Return one launch per host, whose ranks connect to a port of the first."""
    names = sorted(name for name in os.environ if _EXPORTED.match(name) and name not in _NOT_EXPORTED)
    exported = [f"{name}={os.environ[name]}" for name in names]
    launches = []
    for rank, host in enumerate(hosts.names):
        place = NodePlace(rank=rank, main_address=hosts.names[0], main_port=port)
        # ssh passes one string to the host's shell.
        words = ["env", *exported, *command.node_words(place, "--until-stdin-closes")]
        text = f"cd {shlex.quote(str(directory))} && exec {shlex.join(words)}"
        launches.append(Launch(program=hosts.ssh(host), arguments=(text,), name=host))
    return launches


def run_over_ssh(command: NodeCommand, hosts: Hosts, *, port: int, on_line: Callable[[str], None]) -> None:
    """Run the command of a plan on hosts, whose ranks connect to a port of the first one, and wait for it.

    Raises:
        UsageError: ssh is not installed.
        ShardwrightError: a host does not answer, or the run failed.
    """
    if errors := program_errors("ssh", "ssh"):
        raise UsageError(errors)
    probes = [
        subprocess.Popen([*hosts.ssh(host), "true"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for host in hosts.names
    ]
    answers = [(process.communicate()[1], process.returncode) for process in probes]
    silent = [(host, text) for host, (text, code) in zip(hosts.names, answers, strict=True) if code != 0]
    if silent:
        last = silent[0][1].decode(errors="replace").strip().splitlines()[-1:] or ["no answer"]
        raise ShardwrightError(
            f"{', '.join(host for host, _ in silent)}: no answer over ssh ({last[0]}); use hosts where `ssh HOST true` "
            "works without a password, or pass --ssh-config"
        )
    launches = node_launches(command, hosts, port=port, directory=Path.cwd())
    launch_ranks(*launches, on_message=lambda message: on_line(f"{NOTE}{message}"), on_line=on_line)


def own_program() -> tuple[str, ...]:
    """Return the arguments that run this command on another machine with the same file system."""
    return (sys.executable, "-m", "shardwright")


_ANSWER_SECONDS = 120.0


def program_errors(on: str, program: str) -> list[ConfigError]:
    """Return an error if a program is not on PATH."""
    if shutil.which(program) is not None:
        return []
    fix = f"install and configure it, or copy the output of --dry-run to a machine with {program}"
    return [ConfigError(where="on", value=on, rule=f"{program} is not on PATH", fix=fix)]


def _output(command: Sequence[str], *, text: str | None = None) -> str:
    """Run a command of SLURM, and return its output."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise ShardwrightError(
            f"{command[0]} did not answer within {_ANSWER_SECONDS:.0f} s; check that its server is running"
        ) from None
    if done.returncode != 0:
        raise ShardwrightError(f"{command[0]}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout


def submit(script: str, hardware: HardwareSpec, settings: Sequence[str]) -> str:
    """Submit a script to SLURM and return the job id; `settings` are options of `sbatch` that it has.

    Raises:
        UsageError: SLURM is not installed, or the cluster has too few nodes.
        ShardwrightError: SLURM rejects the script; contains its message.
    """
    if errors := program_errors("slurm", "sbatch"):
        raise UsageError(errors)
    partitions = [setting for setting in settings if setting.startswith("--partition=")]
    there = sum(int(line) for line in _output(["sinfo", "--noheader", "--format=%D", *partitions]).split())
    if there < hardware.nodes:
        rule = f"the plan has {hardware.nodes} nodes, but the cluster has {there}" + (
            f" in {partitions[0].removeprefix('--partition=')}" if partitions else ""
        )
        raise UsageError(ConfigError(where="nodes", value=hardware.name, rule=rule, fix="plan for fewer nodes"))
    return _output(["sbatch", "--parsable"], text=script).strip().split(";")[0]


_PLAN_FILES = ("plan.json", "accelerate.yaml", "ds_config.json", "training_arguments.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Properties of one machine."""

    host: str
    versions: Mapping[str, str]
    """Of Python and the libraries."""
    gpus: int
    """Number of accelerators."""
    files: Mapping[str, str]
    """Digests of the plan's files, by name."""


def node_errors(plan: Plan, nodes: Sequence[NodeFacts]) -> list[ConfigError]:
    """Return why the machines cannot run the plan together."""
    hardware, first, errors = plan.hardware, nodes[0], []
    for node in nodes[1:]:
        for name in sorted(first.versions.keys() | node.versions):
            here, there = node.versions.get(name, "none"), first.versions.get(name, "none")
            if here != there:
                rule = f"{node.host} has {name} {here}, but {first.host} has {there}"
                errors.append(ConfigError(where="versions", rule=rule, fix="install the same version on both"))
        other = sorted(
            name for name in first.files.keys() | node.files if first.files.get(name) != node.files.get(name)
        )
        if other:
            rule = f"{', '.join(other)} on {node.host} differs from {first.host}'s"
            errors.append(ConfigError(where="plan", rule=rule, fix="copy the plan's directory to both"))
    needed = hardware.gpus_per_node
    for node in nodes:
        if hardware.gpu != "CPU" and node.gpus < needed:
            rule = f"{node.host} has {node.gpus}, but the plan needs {needed} x {hardware.gpu}"
            errors.append(ConfigError(where="accelerators", rule=rule, fix="plan for fewer, or use other machines"))
    return errors


def compare(directory: Path) -> None:
    """Compare the machines of this process and its peers; all of them must call it.

    Raises:
        UsageError: they cannot run the plan together; names each difference.
    """
    from torch import cuda, distributed

    distributed.init_process_group("gloo")
    try:
        plan = Plan.load(directory)
        # Comments contain the directory, which may differ between machines.
        path = str(directory).encode()
        own = NodeFacts(
            host=socket.gethostname(),
            versions={"python": platform.python_version(), **dict(installed_versions())},
            gpus=cuda.device_count(),
            files={
                name: hashlib.sha256((directory / name).read_bytes().replace(path, b".")).hexdigest()
                for name in _PLAN_FILES
                if (directory / name).is_file()
            },
        )
        nodes: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(nodes, own)
        errors = node_errors(plan, nodes)
        if errors:
            raise UsageError(errors)
        note_on_first_rank(f"{', '.join(node.host for node in nodes)}: same versions and files")
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    recorded(lambda: compare(Path(sys.argv[1])))()
