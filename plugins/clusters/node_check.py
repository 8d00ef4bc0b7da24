"""Machines of a launch compared before training starts: versions, accelerators, links, clocks, memory, disk and files.

torchrun ... -m shardwright.plugins.clusters.node_check PLAN_DIR OUTPUT_DIR, one process on each machine
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ...ds_configs.memory.rank_parameters import rank_parameters
from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.write import write_files
from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ...ds_configs.specs.units import gigabytes
from ...ds_configs.step_time.measured_network import FILE_NAME, MeasuredNetwork, network_text
from ..launching.elastic import recorded
from ..launching.notes import note_on_first_rank
from ..planning.from_names import installed_versions

_PLAN_FILES = ("plan.json", "accelerate.yaml", "ds_config.json", "training_arguments.json")
_LARGEST_CLOCK_DIFFERENCE_SECONDS = 2.0
"""Above which times of logs and files mislead; clocks that are kept by a server differ by milliseconds."""
_LINK_BYTES = 64 * 2**20
"""Bytes of the all-reduce that measures the links: enough to be bound by them, and a moment on a slow network."""
_LINK_ROUNDS = 4
_SLOW_LINK = 0.5
"""Share of the plan's rate below which its step time does not hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Facts of one machine, as it tells them itself."""

    host: str
    """Its own name."""
    versions: Mapping[str, str]
    """Of Python and of the libraries that train."""
    gpus: tuple[str, ...]
    """Name and size of each accelerator that the launch may use."""
    files: Mapping[str, str]
    """Digests of the plan's files, by name."""
    shares_directory: bool | None
    """Whether it sees what machine 0 writes where the results go; `None` where that cannot write there."""
    clock_seconds: float
    """Its clock, ahead of machine 0's."""
    free_memory_bytes: int
    """Host memory that is not in use."""
    free_disk_bytes: int
    """Of the file system that holds the plan."""


def node_faults(plan: Plan, nodes: Sequence[NodeFacts]) -> list[Fault]:
    """Return why the machines cannot run the plan together, each by name."""
    hardware, first, faults = plan.hardware, nodes[0], []
    for node in nodes[1:]:
        for name in sorted(first.versions.keys() | node.versions):
            here, there = node.versions.get(name, "none"), first.versions.get(name, "none")
            if here != there:
                rule = f"{node.host} has {name} {here}, {first.host} has {there}"
                faults.append(Fault(where="versions", rule=rule, fix="install the same on both"))
        other = sorted(
            name for name in first.files.keys() | node.files if first.files.get(name) != node.files.get(name)
        )
        if other:
            rule = f"{', '.join(other)} on {node.host} differs from {first.host}'s"
            faults.append(Fault(where="plan", rule=rule, fix="copy the plan's directory to both"))
    needed = hardware.gpus_per_node
    for node in nodes:
        if hardware.gpu != "CPU" and len(node.gpus) < needed:
            rule = f"{node.host} has {len(node.gpus)} where the plan needs {needed} x {hardware.gpu}"
            faults.append(Fault(where="accelerators", rule=rule, fix="plan for what there is, or name other machines"))
        if hardware.gpu != "CPU" and node.gpus[:needed] != first.gpus[:needed]:
            rule = f"{node.host} has {_counted(node.gpus)}, {first.host} has {_counted(first.gpus)}"
            faults.append(Fault(where="accelerators", rule=rule, fix="use machines of one kind"))
    return faults


def node_remarks(plan: Plan, nodes: Sequence[NodeFacts], link_bytes_per_s: float) -> list[str]:
    """Return what differs from the plan without keeping it from running."""
    hardware, first = plan.hardware, nodes[0]
    remarks = []
    apart = [node.host for node in nodes if node.shares_directory is False]
    if apart:
        remarks.append(
            f"{', '.join(apart)} does not see what {first.host} writes to the output directory: checkpoints are whole "
            "only where every node writes to one"
        )
    for node in nodes:
        if abs(node.clock_seconds) > _LARGEST_CLOCK_DIFFERENCE_SECONDS:
            remarks.append(f"the clock of {node.host} is {node.clock_seconds:+.1f} s off {first.host}'s")
        needed = plan.chosen.memory.host.peak_bytes_per_node
        if node.free_memory_bytes < needed:
            free = gigabytes(node.free_memory_bytes)
            remarks.append(f"{node.host} has {free} GB of free memory where the plan needs {gigabytes(needed)} GB")
        checkpoint = _checkpoint_bytes(plan)
        if node.free_disk_bytes < 2 * checkpoint:
            free = gigabytes(node.free_disk_bytes)
            remarks.append(f"{node.host} has {free} GB of free disk; a checkpoint takes {gigabytes(checkpoint)} GB")
    if link_bytes_per_s < _SLOW_LINK * hardware.network_bytes_per_s:
        remarks.append(
            f"the network gave one accelerator of each node {link_bytes_per_s / 1e9:.2f} GB/s where the plan counts on "
            f"{hardware.network_bytes_per_s / 1e9:.2f}: plan again after `shardwright calibrate` of the directory with "
            f"{FILE_NAME}"
        )
    return remarks


def _counted(gpus: Sequence[str]) -> str:
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none"


def _checkpoint_bytes(plan: Plan) -> int:
    """Return the size of a checkpoint: weights in 16 bit, and fp32 weights and two moments of what is trained."""
    trained = rank_parameters(plan.model, plan.job).trainable
    return 12 * trained + 2 * (plan.model.parameter_count if plan.job.method == "full" else trained)


def _gpus() -> tuple[str, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(f"{each.name} {each.total_memory / 2**30:.0f} GiB" for each in properties)


def _digests(directory: Path) -> dict[str, str]:
    # Comments name the directory, which may lie elsewhere on each machine.
    own = str(directory).encode()
    return {
        name: hashlib.sha256((directory / name).read_bytes().replace(own, b".")).hexdigest()
        for name in _PLAN_FILES
        if (directory / name).is_file()
    }


def _sees_first_nodes_file(directory: Path, rank: int) -> bool | None:
    """Return whether a file that machine 0 writes is seen here; `None` where it can write none."""
    from torch import distributed

    names = [""]
    if rank == 0:
        file = directory / f".shardwright-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            file.touch(exist_ok=False)
            names = [file.name]
    distributed.broadcast_object_list(names)
    # A network file system answers for a name that was not there from memory; listing asks its server.
    found = directory.is_dir() and names[0] in {path.name for path in directory.iterdir()}
    distributed.barrier()
    if rank == 0 and names[0]:
        (directory / names[0]).unlink(missing_ok=True)
    return found if names[0] else None


def _free_disk_bytes(directory: Path) -> int:
    there = next(each for each in (directory, *directory.parents) if each.is_dir())
    return shutil.disk_usage(there).free


def _clock_ahead(rank: int, ranks: int) -> float:
    """Return how far this clock is ahead of machine 0's, in seconds: half a round trip is taken off."""
    import torch
    from torch import distributed

    ahead = 0.0
    for other in range(1, ranks):
        stamp = torch.zeros(1, dtype=torch.float64)
        if rank == other:
            sent = time.time()
            distributed.send(stamp, 0)
            distributed.recv(stamp, 0)
            ahead = (sent + time.time()) / 2 - stamp.item()
        elif rank == 0:
            distributed.recv(stamp, other)
            distributed.send(torch.tensor([time.time()], dtype=torch.float64), other)
    return ahead


def _link_bytes_per_s() -> float:
    """Return the rate at which an all-reduce moves bytes out of one machine: 2 (n - 1) / n of its size on a ring."""
    import torch
    from torch import distributed

    cuda = torch.cuda.is_available()
    group = distributed.new_group(backend="nccl") if cuda else None
    ranks = distributed.get_world_size()
    data = torch.ones(_LINK_BYTES // 4, device="cuda:0" if cuda else "cpu")
    seconds = []
    for _ in range(_LINK_ROUNDS):
        distributed.barrier()
        started = time.perf_counter()
        distributed.all_reduce(data, group=group)
        data.sum().item()
        seconds.append(time.perf_counter() - started)
        data.fill_(1.0)
    return float(2 * (ranks - 1) / ranks * _LINK_BYTES / min(seconds[1:]))


def _leave_network(plan: Plan, link_bytes_per_s: float, directory: Path) -> None:
    """Write what was measured where results go, for `shardwright calibrate`; a place that refuses costs no training."""
    hardware = plan.hardware
    measured = MeasuredNetwork(
        gpu=hardware.gpu, gpus_per_node=hardware.gpus_per_node, nodes=hardware.nodes, bytes_per_s=link_bytes_per_s
    )
    with contextlib.suppress(ShardwrightError):
        write_files({FILE_NAME: network_text(measured)}, directory, force=True)


def compare(directory: Path, output_directory: Path) -> None:
    """Compare the machines that this process and its peers run on a plan; all of them must call it.

    Raises:
        UsageError: they cannot run the plan together; names each difference.
    """
    from torch import distributed

    distributed.init_process_group("gloo")
    try:
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        plan = Plan.load(directory)
        own = NodeFacts(
            host=socket.gethostname(),
            versions={"python": platform.python_version(), **dict(installed_versions())},
            gpus=_gpus(),
            files=_digests(directory),
            shares_directory=_sees_first_nodes_file(output_directory, rank),
            clock_seconds=_clock_ahead(rank, ranks),
            free_memory_bytes=psutil.virtual_memory().available,
            free_disk_bytes=_free_disk_bytes(output_directory),
        )
        nodes: list[Any] = [None] * ranks
        distributed.all_gather_object(nodes, own)
        faults = node_faults(plan, nodes)
        if faults:
            raise UsageError(faults)
        link = _link_bytes_per_s()
        note_on_first_rank(
            f"{', '.join(node.host for node in nodes)}: same versions and files, {link / 1e9:.2f} GB/s between them"
        )
        for remark in node_remarks(plan, nodes, link):
            note_on_first_rank(remark)
        if rank == 0:
            _leave_network(plan, link, output_directory)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    recorded(lambda: compare(Path(sys.argv[1]), Path(sys.argv[2])))()
