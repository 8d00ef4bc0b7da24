"""Launches as a user types them, on CPU ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwright.plugins.launching.launch import free_port, python_arguments, run_launch


def torchrun(
    arguments: Sequence[str],
    *,
    ranks: int = 2,
    timeout_seconds: float = 240.0,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a script or ``-m module`` and return what it printed."""
    port = free_port()
    command = ["torchrun", "--nproc-per-node", str(ranks), "--master-port", str(port), *arguments]
    return run_launch(python_arguments(command), timeout_seconds=timeout_seconds, environment=environment, port=port)


def accelerate_launch(
    config_file: Path, module: str, arguments: Sequence[str], *, timeout_seconds: float = 240.0
) -> str:
    """Run ``accelerate launch --config_file config_file -m module`` and return what it printed."""
    port = free_port()
    launcher = ["accelerate", "launch", "--config_file", str(config_file), "--main_process_port", str(port)]
    return run_launch(
        python_arguments([*launcher, "-m", module, *arguments]), timeout_seconds=timeout_seconds, port=port
    )
