"""Hosts with sshd and a two-node SLURM, a small model, its plan, and the losses of the same plan on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_hosts import NAMES, Hosts, environment, two_hosts

STEPS = 60
"""Enough that a host can die between two checkpoints."""


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory that all hosts see."""
    return tmp_path_factory.mktemp("clusters")


@pytest.fixture(scope="session")
def model(work: Path) -> Path:
    from distilling import tiny

    tiny("llama", hidden=64, vocab_size=300, max_position_embeddings=64).save_pretrained(work / "tiny")
    return work / "tiny"


def planned(model: Path, directory: Path, hardware: str, *, global_batch_size: int = 4) -> Path:
    """Write the plan of the small model under ZeRO-2 in fp32."""
    words = [
        "--strategy",
        "zero2",
        "--seq-len",
        "32",
        "--global-batch-size",
        str(global_batch_size),
        "--micro-batch-size",
        "2",
    ]
    command = [sys.executable, "-m", "shardwright", "plan", str(model), "--hardware", hardware, *words]
    command += ["--precision", "fp32", "--output-dir", str(directory)]
    subprocess.run(command, check=True, capture_output=True, env=environment())
    return directory


@pytest.fixture(scope="session")
def local_losses(model: Path, work: Path) -> list[float]:
    """Losses of the layout on this machine alone."""
    plan = planned(model, work / "local", "2xCPU")
    return trained(["launch", str(plan), "--", *training(work / "local.json")], work / "local.json")


@pytest.fixture
def plan(model: Path, tmp_path: Path) -> Path:
    """Plan for two machines with one CPU rank each."""
    return planned(model, tmp_path / "plan", "2x1xCPU")


def training(losses: Path, *, steps: int = STEPS) -> list[str]:
    """Return arguments of the plan's own training."""
    return ["--max-steps", str(steps), "--losses-json", str(losses)]


def trained(words: list[str], losses: Path) -> list[float]:
    """Run the command to its end, and return the losses that it wrote."""
    done = shardwright(words)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_losses(losses)


def read_losses(file: Path) -> list[float]:
    found: list[float] = json.loads(file.read_text())["losses"]
    return found


def shardwright(words: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    command = [sys.executable, "-m", "shardwright", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment(**changes))


def until(true: Callable[[], object], seconds: float, what: str, output: Path | None = None) -> None:
    """Wait until a function returns something true; a failure shows what the output holds by then."""
    deadline = time.monotonic() + seconds
    while not true():
        told = output.read_text() if output is not None and output.exists() else ""
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s\n{told}"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def hosts(work: Path) -> Iterator[Hosts]:
    """Two hosts, none of them started."""
    with two_hosts(work) as made:
        yield made


@pytest.fixture(scope="module")
def over_ssh(hosts: Hosts, work: Path) -> Iterator[list[str]]:
    """Both hosts with sshd, and the options by which ssh finds them."""
    for name in ("client", "host"):
        key = work / name
        if not key.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    for name, address in hosts.addresses.items():
        settings = [f"ListenAddress {address}", f"HostKey {work}/host", f"AuthorizedKeysFile {work}/client.pub"]
        settings += ["StrictModes no", "UsePAM no", "PasswordAuthentication no", "PidFile none"]
        (work / f"{name}.sshd").write_text("\n".join(settings) + "\n")
        start_sshd(hosts, name)
    known = [f"Host {name}\n  HostName {address}\n" for name, address in hosts.addresses.items()]
    every = ["IdentityFile {0}/client", "IdentitiesOnly yes", "UserKnownHostsFile {0}/known"]
    every += ["StrictHostKeyChecking accept-new", "LogLevel ERROR"]
    config = work / "ssh_config"
    config.write_text("".join(known) + "Host *\n" + "".join(f"  {line.format(work)}\n" for line in every))
    hostfile = work / "hostfile"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in NAMES))
    yield ["--on", "ssh", "--hostfile", str(hostfile), "--ssh-config", str(config)]
    for name in NAMES:
        hosts.kill(name)


def start_sshd(hosts: Hosts, name: str) -> None:
    hosts.start(name, f"exec /usr/sbin/sshd -D -e -f {hosts.directory}/{name}.sshd")


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, work: Path) -> Iterator[str]:
    """A SLURM of both hosts, with the controller on the first; returns the file of its settings."""
    directory = work / "slurm"
    directory.mkdir()
    (directory / "state").mkdir()
    if subprocess.run(["munge", "-n"], capture_output=True).returncode != 0:
        Path("/run/munge").mkdir(exist_ok=True)
        subprocess.run(["/etc/init.d/munge", "start"], check=True, capture_output=True)
    first, spool = NAMES[0], tempfile.mkdtemp(prefix="slurm-", dir="/run")
    lines = [
        "ClusterName=two",
        f"SlurmctldHost={first}({hosts.addresses[first]})",
        "AuthType=auth/munge",
        "SlurmUser=root",
        "SlurmdUser=root",
        f"StateSaveLocation={directory}/state",
        # Holds sockets, whose paths have at most 108 characters.
        f"SlurmdSpoolDir={spool}/%n",
        f"SlurmctldPidFile={directory}/slurmctld.pid",
        f"SlurmdPidFile={directory}/slurmd-%n.pid",
        f"SlurmctldLogFile={directory}/slurmctld.log",
        f"SlurmdLogFile={directory}/slurmd-%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "ReturnToService=2",
        "SlurmdTimeout=10",
        "MpiDefault=none",
        *(f"NodeName={name} NodeAddr={address} CPUs=2 RealMemory=4000" for name, address in hosts.addresses.items()),
        f"PartitionName=main Nodes={','.join(NAMES)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE",
    ]
    config = directory / "slurm.conf"
    config.write_text("\n".join(lines) + "\n")
    for name in NAMES:
        controller = f"export SLURM_CONF={config}; " + ("slurmctld -D & " if name == first else "")
        hosts.start(name, f"{controller}exec slurmd -D -N {name}")
    until(lambda: "2 idle" in asked("sinfo", "--noheader", "--format=%D %T", config=str(config)), 60, "two idle nodes")
    yield str(config)
    for name in NAMES:
        hosts.kill(name)
    shutil.rmtree(spool)


def asked(*command: str, config: str) -> str:
    """Return what a command of SLURM prints."""
    found = subprocess.run(command, capture_output=True, text=True, env=environment(SLURM_CONF=config), timeout=60)
    return found.stdout.strip()
