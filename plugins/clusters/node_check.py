"""Compare the machines of a launch before training: versions, accelerators, links, clocks, memory, disk and files.

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
from ...ds_configs.plan.output import write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ...ds_configs.specs.units import gigabytes
from ...ds_configs.step_time.rates import FILE_NAME, MeasuredNetwork, network_text
from ..launching.elastic import recorded
from ..launching.messages import note_on_first_rank
from ..planning.from_names import installed_versions

_PLAN_FILES = ("plan.json", "accelerate.yaml", "ds_config.json", "training_arguments.json")
_LARGEST_CLOCK_DIFFERENCE_SECONDS = 2.0
"""Larger differences make times of logs and files misleading; synchronized clocks differ by milliseconds."""
_LINK_BYTES = 64 * 2**20
"""Bytes of the all-reduce that measures links: bound by bandwidth, but fast on a slow network."""
_LINK_ROUNDS = 4
_SLOW_LINK = 0.5
"""Fraction of the planned rate below which the predicted step time is not valid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Properties of one machine."""

    host: str
    versions: Mapping[str, str]
    """Of Python and the libraries."""
    gpus: tuple[str, ...]
    """Name and size of each accelerator."""
    files: Mapping[str, str]
    """Digests of the plan's files, by name."""
    shares_directory: bool | None
    """Whether it sees files of machine 0 in the output directory; `None` if machine 0 cannot write there."""
    clock_seconds: float
    """Difference to machine 0's clock."""
    free_memory_bytes: int
    """Of the host."""
    free_disk_bytes: int
    """Of the output file system."""


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
        if hardware.gpu != "CPU" and len(node.gpus) < needed:
            rule = f"{node.host} has {len(node.gpus)}, but the plan needs {needed} x {hardware.gpu}"
            errors.append(ConfigError(where="accelerators", rule=rule, fix="plan for fewer, or use other machines"))
        if hardware.gpu != "CPU" and node.gpus[:needed] != first.gpus[:needed]:
            rule = f"{node.host} has {_counted(node.gpus)}, but {first.host} has {_counted(first.gpus)}"
            errors.append(ConfigError(where="accelerators", rule=rule, fix="use machines of one kind"))
    return errors


def node_warnings(plan: Plan, nodes: Sequence[NodeFacts], link_bytes_per_s: float) -> list[str]:
    """Return warnings about differences from the plan that do not prevent the run."""
    hardware, first = plan.hardware, nodes[0]
    warnings = []
    apart = [node.host for node in nodes if node.shares_directory is False]
    if apart:
        warnings.append(
            f"{', '.join(apart)} cannot see files of {first.host} in the output directory: checkpoints are complete "
            "only in a shared directory"
        )
    for node in nodes:
        if abs(node.clock_seconds) > _LARGEST_CLOCK_DIFFERENCE_SECONDS:
            warnings.append(f"the clock of {node.host} is {node.clock_seconds:+.1f} s off {first.host}'s")
        needed = plan.chosen.memory.host.peak_bytes_per_node
        if node.free_memory_bytes < needed:
            free = gigabytes(node.free_memory_bytes)
            warnings.append(f"{node.host} has {free} GB of free memory, but the plan needs {gigabytes(needed)} GB")
        checkpoint = _checkpoint_bytes(plan)
        if node.free_disk_bytes < 2 * checkpoint:
            free = gigabytes(node.free_disk_bytes)
            warnings.append(f"{node.host} has {free} GB of free disk; a checkpoint takes {gigabytes(checkpoint)} GB")
    if link_bytes_per_s < _SLOW_LINK * hardware.network_bytes_per_s:
        warnings.append(
            f"the network reached {link_bytes_per_s / 1e9:.2f} GB/s per accelerator, but the plan assumes "
            f"{hardware.network_bytes_per_s / 1e9:.2f}: run `shardwright calibrate` on the directory with {FILE_NAME}, "
            "then plan again"
        )
    return warnings


def _counted(gpus: Sequence[str]) -> str:
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none"


def _checkpoint_bytes(plan: Plan) -> int:
    """Return the size of a checkpoint: 16-bit weights, and fp32 weights and two moments of trained parameters."""
    trained = rank_parameters(plan.model, plan.job).trainable
    return 12 * trained + 2 * (plan.model.parameter_count if plan.job.method == "full" else trained)


def _gpus() -> tuple[str, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(f"{device.name} {device.total_memory / 2**30:.0f} GiB" for device in properties)


def _digests(directory: Path) -> dict[str, str]:
    # Comments contain the directory, which may differ between machines.
    own = str(directory).encode()
    return {
        name: hashlib.sha256((directory / name).read_bytes().replace(own, b".")).hexdigest()
        for name in _PLAN_FILES
        if (directory / name).is_file()
    }


def _sees_first_nodes_file(directory: Path, rank: int) -> bool | None:
    """Return whether this machine sees a file that machine 0 writes; `None` if that cannot write."""
    from torch import distributed

    names = [""]
    if rank == 0:
        file = directory / f".shardwright-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            file.touch(exist_ok=False)
            names = [file.name]
    distributed.broadcast_object_list(names)
    # A network file system caches missing names; listing the directory queries the server.
    is_seen = directory.is_dir() and names[0] in {path.name for path in directory.iterdir()}
    distributed.barrier()
    if rank == 0 and names[0]:
        (directory / names[0]).unlink(missing_ok=True)
    return is_seen if names[0] else None


def _clock_ahead(rank: int, ranks: int) -> float:
    """Return how far this clock is ahead of machine 0's, in seconds, corrected by half a round trip."""
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
    """Return bytes per second that an all-reduce sends from one machine: 2 (n - 1) / n of its size on a ring."""
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


def compare(directory: Path, output_directory: Path) -> None:
    """Compare the machines of this process and its peers; all of them must call it.

    Raises:
        UsageError: they cannot run the plan together; names each difference.
    """
    from torch import distributed

    distributed.init_process_group("gloo")
    try:
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        plan = Plan.load(directory)
        existing = next(path for path in (output_directory, *output_directory.parents) if path.is_dir())
        own = NodeFacts(
            host=socket.gethostname(),
            versions={"python": platform.python_version(), **dict(installed_versions())},
            gpus=_gpus(),
            files=_digests(directory),
            shares_directory=_sees_first_nodes_file(output_directory, rank),
            clock_seconds=_clock_ahead(rank, ranks),
            free_memory_bytes=psutil.virtual_memory().available,
            free_disk_bytes=shutil.disk_usage(existing).free,
        )
        nodes: list[Any] = [None] * ranks
        distributed.all_gather_object(nodes, own)
        errors = node_errors(plan, nodes)
        if errors:
            raise UsageError(errors)
        link = _link_bytes_per_s()
        note_on_first_rank(
            f"{', '.join(node.host for node in nodes)}: same versions and files, {link / 1e9:.2f} GB/s between them"
        )
        for warning in node_warnings(plan, nodes, link):
            note_on_first_rank(warning)
        if rank == 0:
            hardware = plan.hardware
            measured = MeasuredNetwork(
                gpu=hardware.gpu, gpus_per_node=hardware.gpus_per_node, nodes=hardware.nodes, bytes_per_s=link
            )
            # For `shardwright calibrate`; a directory that is not writable must not stop the training.
            with contextlib.suppress(ShardwrightError):
                write_files({FILE_NAME: network_text(measured)}, output_directory, force=True)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    recorded(lambda: compare(Path(sys.argv[1]), Path(sys.argv[2])))()
