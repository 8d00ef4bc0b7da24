"""Compare the machines of a launch before training, because ranks that differ would hang: versions, GPUs and files.

torchrun ... -m shardwright.plugins.clusters.node_check PLAN_DIR OUTPUT_DIR, one process on each machine
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ConfigError, UsageError
from ..launching.elastic import recorded
from ..launching.messages import note_on_first_rank
from ..planning.from_names import installed_versions

_PLAN_FILES = ("plan.json", "accelerate.yaml", "ds_config.json", "training_arguments.json")


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


def _counted(gpus: Sequence[str]) -> str:
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none"


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
        own = NodeFacts(
            host=socket.gethostname(),
            versions={"python": platform.python_version(), **dict(installed_versions())},
            gpus=_gpus(),
            files=_digests(directory),
            shares_directory=_sees_first_nodes_file(output_directory, rank),
        )
        nodes: list[Any] = [None] * ranks
        distributed.all_gather_object(nodes, own)
        errors = node_errors(plan, nodes)
        if errors:
            raise UsageError(errors)
        note_on_first_rank(f"{', '.join(node.host for node in nodes)}: same versions and files")
        if apart := [node.host for node in nodes if node.shares_directory is False]:
            note_on_first_rank(
                f"{', '.join(apart)} cannot see files of {nodes[0].host} in the output directory: checkpoints are "
                "complete only in a shared directory"
            )
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    recorded(lambda: compare(Path(sys.argv[1]), Path(sys.argv[2])))()
