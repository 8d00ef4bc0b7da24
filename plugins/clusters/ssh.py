"""Launches over ssh: one launcher on each host of a hostfile, all ended with the command that started them.

The hostfile is DeepSpeed's (`deepspeed/launcher/runner.py`, 0.19.8): a line `HOST slots=N` for each machine. Hosts see
the plan's directory and this environment's Python under the same paths, as on a shared file system.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ...ds_configs.plan.cluster_jobs import placeholder_hosts
from ...ds_configs.plan.launch import NodePlace
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ..launching.launch import Launch, LaunchFailedError, run_together
from ..launching.notes import Notify
from .submission import program_faults

_LINE = re.compile(r"(?P<host>[^\s=]+)(?:\s+slots=(?P<slots>\d{1,6}))?")
_EXPORTED = re.compile(r"(PYTHON|NCCL_|GLOO_|UCX_|OMP_|SHARDWRIGHT_|TRANSFORMERS_|HF_HUB_OFFLINE$|HF_HOME$|TORCH_EXT)")
"""Variables that the hosts get too. Tokens are none of them: a command line is seen by every user of a host."""
_NOT_EXPORTED = frozenset({"SHARDWRIGHT_LAUNCH_TOKEN", "PYTHON_EXEC"})
_LONGEST_RUN_SECONDS = 90 * 86400.0
_SECONDS_BETWEEN_PROBES = 5.0
_CONNECT_SECONDS = 10


class NodeJob(Protocol):
    """A command of every machine."""

    def node_words(self, place: NodePlace, *options: str) -> list[str]:
        """Return the command of one machine."""

    def resumed(self) -> NodeJob:
        """Return the job that goes on from its newest checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Machines that ssh reaches."""

    names: tuple[str, ...]
    """As ssh knows them; ranks meet on the first."""
    ssh_config: Path | None = None
    """File of ssh's own settings; `None` for the user's."""

    def ssh(self, host: str) -> tuple[str, ...]:
        """Return the words that run a command on a host, without a question to anybody."""
        own = () if self.ssh_config is None else ("-F", str(self.ssh_config))
        return ("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", *own, "--", host)


def read_hostfile(file: Path, plan: Plan) -> tuple[str, ...]:
    """Return the hosts of a file, as many as the plan has machines.

    Raises:
        UsageError: it cannot be read, holds other counts than the plan, or the names that `plan` wrote in their stead.
    """
    where, hardware, faults, hosts = str(file), plan.hardware, [], []
    for host, slots in listed_hosts(file):
        hosts.append(host)
        if slots not in (None, hardware.gpus_per_node):
            rule = f"{host} has {slots} slots where the plan has {hardware.gpus_per_node} ranks on each machine"
            faults.append(Fault(where=where, rule=rule, fix="plan again for this machine"))
    if hosts == placeholder_hosts(plan):
        rule = "holds the names that stand for your machines"
        faults.append(Fault(where="hostfile", value=where, rule=rule, fix="write their own names there"))
    elif len(hosts) != hardware.nodes:
        rule = f"names {len(hosts)} machines where the plan has {hardware.nodes}"
        faults.append(Fault(where="hostfile", value=where, rule=rule, fix="name as many, or plan again"))
    if faults:
        raise UsageError(faults)
    return tuple(hosts)


def listed_hosts(file: Path) -> list[tuple[str, int | None]]:
    """Return the machines of a file and their slots; `None` where a line states none.

    Raises:
        UsageError: it cannot be read, has other lines, or names a machine twice or none at all.
    """
    where = str(file)
    try:
        lines = [line.split("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read ({getattr(error, 'strerror', None) or 'no text'})"
        raise UsageError(Fault(where="hostfile", value=where, rule=rule, fix="name it with --hostfile")) from None
    faults, listed = [], []
    for line in filter(None, lines):
        found = _LINE.fullmatch(line)
        if found is None or found["host"].startswith("-"):
            faults.append(Fault(where=where, value=line, rule="must read HOST slots=N"))
            continue
        slots = found["slots"]
        listed.append((found["host"], None if slots is None else int(slots)))
        if slots is not None and not int(slots):
            faults.append(Fault(where=where, value=line, rule="has no slots"))
    names = [name for name, _ in listed]
    if len(set(names)) < len(names):
        faults.append(Fault(where="hostfile", value=where, rule="names a machine twice"))
    if not names and not faults:
        faults.append(Fault(where="hostfile", value=where, rule="names no machine"))
    if faults:
        raise UsageError(faults)
    return listed


def exported_variables() -> dict[str, str]:
    """Return the variables of this process that other machines get too."""
    names = sorted(name for name in os.environ if _EXPORTED.match(name) and name not in _NOT_EXPORTED)
    return {name: os.environ[name] for name in names}


def node_launches(job: NodeJob, hosts: Hosts, *, port: int, directory: Path, nodes: int | None = None) -> list[Launch]:
    """Return one launch for each host; its ranks meet at a port of the first.

    `nodes` is their number where some of the plan's are missing.
    """
    exported = [f"{name}={value}" for name, value in exported_variables().items()]
    launches = []
    for rank, host in enumerate(hosts.names):
        place = NodePlace(rank=rank, main_address=hosts.names[0], main_port=port, nodes=nodes)
        # ssh hands one text to the host's shell.
        words = ["env", *exported, *job.node_words(place, "--until-stdin-closes")]
        text = f"cd {shlex.quote(str(directory))} && exec {shlex.join(words)}"
        launches.append(Launch(program=hosts.ssh(host), arguments=(text,), name=host))
    return launches


def run_over_ssh(
    job: NodeJob,
    hosts: Hosts,
    *,
    port: int,
    restarts: int,
    wait_seconds: float,
    on_line: Callable[[str], None],
    notify: Notify,
    most: Callable[[int], int | None] = lambda _: None,
) -> None:
    """Run a plan on hosts and wait for its end; a run that fails goes on from its newest whole checkpoint.

    Args:
        job: What every host runs.
        hosts: As many as the plan has machines.
        port: Where ranks meet on the first host.
        restarts: How often a run that failed is started again.
        wait_seconds: How long a host that does not answer is waited for.
        on_line: Receives every line that ranks print.
        notify: Receives remarks.
        most: Says with how many of the hosts that answer a restart goes on where others do not; `None` for none.

    Raises:
        UsageError: there is no ssh.
        ShardwrightError: a host does not answer, or the run failed once more than it is restarted.
    """
    if faults := program_faults("ssh", "ssh"):
        raise UsageError(faults)
    every = hosts
    for attempt in range(restarts + 1):
        nodes = None
        try:
            wait_for_hosts(every, wait_seconds=wait_seconds if attempt else 0.0, notify=notify)
            hosts = every
        except SilentHostsError as error:
            left = [name for name in every.names if name not in error.hosts]
            nodes = most(len(left)) if attempt else None
            if nodes is None:
                raise
            hosts = replace(every, names=tuple(left[:nodes]))
            notify(f"no answer from {', '.join(error.hosts)}: going on with {nodes} of {len(every.names)} machines")
        launches = node_launches(job.resumed() if attempt else job, hosts, port=port, directory=Path.cwd(), nodes=nodes)
        try:
            run_together(launches, timeout_seconds=_LONGEST_RUN_SECONDS, on_line=on_line)
        except LaunchFailedError as error:
            if attempt == restarts or error.launcher_exit_code in (2, 4):
                raise
            notify(f"the run failed ({_first_line(error)}); it goes on from its newest whole checkpoint")
        else:
            return


class SilentHostsError(ShardwrightError):
    """Hosts that do not answer."""

    def __init__(self, message: str, hosts: Sequence[str]) -> None:
        super().__init__(message)
        self.hosts = tuple(hosts)
        """Their names."""


def wait_for_hosts(hosts: Hosts, *, wait_seconds: float, notify: Notify) -> None:
    """Return once every host answers.

    Raises:
        SilentHostsError: one does not, after that time.
    """
    deadline = time.monotonic() + wait_seconds
    told = False
    while True:
        asked = [
            subprocess.Popen([*hosts.ssh(host), "true"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for host in hosts.names
        ]
        answers = [(process.communicate()[1], process.returncode) for process in asked]
        silent = [(host, text) for host, (text, code) in zip(hosts.names, answers, strict=True) if code != 0]
        if not silent:
            return
        names = ", ".join(host for host, _ in silent)
        if time.monotonic() >= deadline:
            last = silent[0][1].decode(errors="replace").strip().splitlines()[-1:] or ["no answer"]
            raise SilentHostsError(
                f"{names}: ssh gets no answer ({last[0]}); name hosts that `ssh HOST true` reaches without a password, "
                "with --ssh-config for settings of their own",
                [host for host, _ in silent],
            )
        if not told:
            notify(f"waiting {wait_seconds:.0f} s for {names}, which the plan needs")
            told = True
        time.sleep(min(_SECONDS_BETWEEN_PROBES, max(0.0, deadline - time.monotonic())))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def own_program() -> tuple[str, ...]:
    """Return the words that are this command on another machine that sees the same file system."""
    return (sys.executable, "-m", "shardwright")
