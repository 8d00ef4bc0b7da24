"""Launches as a user types them, on CPU ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwright.plugins.launching.launch import Launch, free_port, launch_ranks, python_arguments


def torchrun(
    arguments: Sequence[str],
    *,
    ranks: int = 2,
    timeout_seconds: float = 240.0,
    environment: Mapping[str, str] | None = None,
) -> str:
    port = free_port()
    command = ["torchrun", "--nproc-per-node", str(ranks), "--master-port", str(port), *arguments]
    return launch_ranks(
        Launch(arguments=python_arguments(command), environment=environment), timeout_seconds=timeout_seconds
    )


def accelerate_launch(
    config_file: Path, module: str, arguments: Sequence[str], *, timeout_seconds: float = 240.0
) -> str:
    port = free_port()
    launcher = ["accelerate", "launch", "--config_file", str(config_file), "--main_process_port", str(port)]
    return launch_ranks(
        Launch(arguments=python_arguments([*launcher, "-m", module, *arguments])),
        timeout_seconds=timeout_seconds,
    )
