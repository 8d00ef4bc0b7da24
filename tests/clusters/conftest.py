"""Hosts with sshd and a two-node SLURM, a small model, its plan, and the losses of the same plan on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_hosts import NAMES, Hosts, environment, logs, two_hosts
from shardwright.plugins.launching.launch import interpreter
from warm_ranks import SERVER_NAME

STEPS = 90
"""Enough that a host can die between two checkpoints."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what hosts printed beside a test that failed."""
    report = yield
    hosts = getattr(item, "funcargs", {}).get("hosts")
    if report.failed and isinstance(hosts, Hosts):
        report.sections.append(("hosts", logs(hosts.directory)))
    return report


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clusters")


@pytest.fixture(scope="session")
def model(work: Path) -> Path:
    code = "import sys, distilling\ndistilling.tiny('llama', hidden=64, vocab_size=300, max_position_embeddings=64)"
    tests = environment(PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    subprocess.run([interpreter(), "-c", f"{code}.save_pretrained(sys.argv[1])", work / "tiny"], check=True, env=tests)
    return work / "tiny"


def planned(model: Path, directory: Path, hardware: str, *, global_batch_size: int = 4) -> Path:
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
    words += ["--precision", "fp32", "--output-dir", str(directory)]
    done = shardwright(["plan", str(model), "--hardware", hardware, *words])
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="session")
def local_losses(model: Path, work: Path) -> list[float]:
    """Losses of the layout on this machine alone."""
    plan = planned(model, work / "local", "2xCPU")
    done = shardwright(["launch", str(plan), "--", *training(work / "local-out")])
    assert done.returncode == 0, done.stdout + done.stderr
    return read_losses(work / "local-out")


@pytest.fixture
def plan(model: Path, tmp_path: Path) -> Path:
    return planned(model, tmp_path / "plan", "2x1xCPU")


def training(output_dir: Path, *, steps: int = STEPS) -> list[str]:
    """Return flags of `train`."""
    data = ["--dataset", "python-help#40", "--evaluation-samples", "2", "--logging-steps", "1"]
    return [*data, "--max-steps", str(steps), "--output-dir", str(output_dir)]


def saving(output_dir: Path) -> list[str]:
    """Return flags of `train` that save every 20 steps."""
    return [*training(output_dir), "--save-steps", "20"]


def saved(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"checkpoint-{step}" / "checkpoint_complete.json"


def has_steps(output_dir: Path) -> bool:
    file = output_dir / "metrics.jsonl"
    return file.exists() and bool(file.read_text())


def read_losses(output_dir: Path) -> list[float]:
    """Return the loss of every step; a run that resumed has those of its first part from the checkpoint."""
    return [json.loads(line)["loss"] for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def command(*words: str) -> list[str]:
    """Return the command, in a warm process but for tests with `cold`; what it starts elsewhere is what users start."""
    return [interpreter(), "-m", "shardwright", *words]


def shardwright(words: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=400, env=environment(**changes))


def started(words: list[str], output: Path) -> subprocess.Popen[str]:
    with output.open("w") as written:
        return subprocess.Popen(command(*words), stdout=written, stderr=subprocess.STDOUT, text=True, env=environment())


def until(true: Callable[[], object], seconds: float, what: str, output: Path | None = None) -> None:
    """Wait until a function returns something true; a failure shows what the output holds by then."""
    deadline = time.monotonic() + seconds
    while not true():
        reported = output.read_text() if output is not None and output.exists() else ""
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s\n{reported}"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def hosts(work: Path) -> Iterator[Hosts]:
    """Two hosts with sshd and slurmd, and SLURM's controller on the first."""
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("client", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(work / name)], check=True)
    # Holds sockets, whose paths have at most 108 characters.
    with two_hosts(work) as made, tempfile.TemporaryDirectory(prefix="slurm-", dir="/run") as spool, munged(spool):
        write_sshd_settings(work, made.addresses)
        write_slurm_settings(work / "slurm", made.addresses, spool)
        for name in NAMES:
            start(made, name)
        yield made
        for name in NAMES:
            made.kill(name)


@contextmanager
def munged(directory: str) -> Iterator[None]:
    """Run the service by which SLURM's daemons and commands know each other; others on this machine have theirs."""
    place = Path(directory)
    place.chmod(0o755)
    (place / "key").touch(mode=0o600)
    (place / "key").write_bytes(os.urandom(128))
    files = [f"--{name}-file={place / name}" for name in ("key", "pid", "log", "seed")]
    with subprocess.Popen(["munged", "--foreground", f"--socket={place / 'munge'}", *files]) as process:
        try:
            until((place / "munge").exists, 20, "munged", place / "log")
            yield
        finally:
            process.terminate()


def start(hosts: Hosts, name: str) -> None:
    """Start a host as it starts when its power comes back."""
    controller = "slurmctld -D & " if name == NAMES[0] else ""
    ssh, slurm = f"/usr/sbin/sshd -D -e -f {hosts.directory}/{name}.sshd", f"{hosts.directory}/slurm/slurm.conf"
    hosts.start(name, f"{ssh} & export SLURM_CONF={slurm}; {controller}exec slurmd -D -N {name}")


def write_sshd_settings(work: Path, addresses: Mapping[str, str]) -> None:
    # One line: of several, sshd takes the first.
    variables = "SetEnv " + " ".join(f'"{each}={os.environ[each]}"' for each in ("PYTHON_EXEC", SERVER_NAME))
    for name, address in addresses.items():
        settings = [f"ListenAddress {address}", f"HostKey {work}/host", f"AuthorizedKeysFile {work}/client.pub"]
        settings += ["StrictModes no", "UsePAM no", "PasswordAuthentication no", "PidFile none", variables]
        (work / f"{name}.sshd").write_text("\n".join(settings) + "\n")
    known = [f"Host {name}\n  HostName {address}\n" for name, address in addresses.items()]
    every = ["IdentityFile {0}/client", "IdentitiesOnly yes", "UserKnownHostsFile {0}/known"]
    every += ["StrictHostKeyChecking accept-new", "LogLevel ERROR"]
    (work / "ssh_config").write_text(
        "".join(known) + "Host *\n" + "".join(f"  {line.format(work)}\n" for line in every)
    )
    (work / "hostfile").write_text("".join(f"{name} slots=1\n" for name in NAMES))


def write_slurm_settings(directory: Path, addresses: Mapping[str, str], spool: str) -> None:
    (directory / "state").mkdir(parents=True)
    first = NAMES[0]
    lines = [
        "ClusterName=two",
        f"SlurmctldHost={first}({addresses[first]})",
        "AuthType=auth/munge",
        # Also what a job that is queued again waits for: 120 s by default (slurm.conf(5), SLURM 22.05).
        f"AuthInfo=socket={spool}/munge,cred_expire=30",
        # Else a job whose wait is over is checked every minute.
        "SchedulerParameters=sched_interval=1",
        "SlurmUser=root",
        "SlurmdUser=root",
        f"StateSaveLocation={directory}/state",
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
        *(f"NodeName={name} NodeAddr={address} CPUs=2 RealMemory=4000" for name, address in addresses.items()),
        f"PartitionName=main Nodes={','.join(NAMES)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE",
    ]
    (directory / "slurm.conf").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def over_ssh(hosts: Hosts, work: Path) -> list[str]:
    return ["--on", "ssh", "--hostfile", str(work / "hostfile"), "--ssh-config", str(work / "ssh_config")]


@pytest.fixture(scope="session")
def slurm(hosts: Hosts, work: Path) -> str:
    config = str(work / "slurm" / "slurm.conf")
    until(lambda: "2 idle" in asked("sinfo", "--noheader", "--format=%D %T", config=config), 60, "two idle nodes")
    return config


def asked(*command: str, config: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True, env=environment(SLURM_CONF=config), timeout=60)
    return found.stdout.strip()
