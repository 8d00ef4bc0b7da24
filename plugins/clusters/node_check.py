"""Compare the machines of a launch before training, because ranks that differ would hang: versions, GPUs and files.

torchrun ... -m shardwright.plugins.clusters.node_check PLAN_DIR, one process on each machine
"""

from __future__ import annotations

import hashlib
import platform
import socket
import sys
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


def _digests(directory: Path) -> dict[str, str]:
    # Comments contain the directory, which may differ between machines.
    own = str(directory).encode()
    return {
        name: hashlib.sha256((directory / name).read_bytes().replace(own, b".")).hexdigest()
        for name in _PLAN_FILES
        if (directory / name).is_file()
    }


def compare(directory: Path) -> None:
    """Compare the machines of this process and its peers; all of them must call it.

    Raises:
        UsageError: they cannot run the plan together; names each difference.
    """
    from torch import cuda, distributed

    distributed.init_process_group("gloo")
    try:
        plan = Plan.load(directory)
        own = NodeFacts(
            host=socket.gethostname(),
            versions={"python": platform.python_version(), **dict(installed_versions())},
            gpus=cuda.device_count(),
            files=_digests(directory),
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
