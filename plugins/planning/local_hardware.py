"""Detects the accelerators, host memory and NVMe of this machine, through torch and psutil."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import Fault, UsageError
from ...ds_configs.specs.hardware import HardwareSpec, find_gpu, gpu_catalog, hardware_from_mapping, parse_overrides


def detect_hardware(*, host_memory: str | None = None, nvme: str | None = None) -> HardwareSpec:
    """Return this machine as a cluster of one node.

    With several kinds of accelerators the one with the least memory stands for all. Link and compute figures come
    from the catalog entry of the same name; an accelerator without one needs a YAML file.

    Raises:
        UsageError: no accelerator is visible, or it is not in the catalog.
    """
    stated = parse_overrides(host_memory=host_memory, nvme=_with_size(nvme))
    devices = _visible_devices()
    if not devices:
        raise UsageError(
            Fault(
                where="hardware",
                value="local",
                rule="no accelerator is visible to torch",
                fix="name the hardware, such as 8xA100-80GB, or 2xCPU to rehearse here",
            )
        )
    name, memory = min(devices, key=lambda device: device[1])
    gpu = _match_catalog(name, memory)
    values: dict[str, Any] = {
        "name": f"{len(devices)}x{gpu} (local)",
        "gpu": gpu,
        "gpus_per_node": len(devices),
        "gpu_bytes": memory,
        "host_bytes_per_node": _host_bytes(),
    }
    return hardware_from_mapping(values | stated, name="local")


def _visible_devices() -> list[tuple[str, int]]:
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(device.name, device.total_memory) for device in properties]


def _match_catalog(name: str, memory: int) -> str:
    """Return the catalog entry of a driver's device name; a name with several sizes is settled by the memory."""
    words = name.replace("-", " ").split()
    gpus = gpu_catalog()
    close = [
        gpu
        for gpu in gpus
        if gpu.split("-")[0].upper() in {w.upper() for w in words} | {"".join(words[-2:]).upper()}
        and abs(gpus[gpu]["usable_gib"] * 2**30 - memory) < 0.1 * memory
    ]
    return close[0] if len(close) == 1 else find_gpu(name, where="hardware (local)")


def _host_bytes() -> int:
    """Memory of the machine, or of the control group that confines this process."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        return min(total, int(limit.read_text()))
    except (OSError, ValueError):
        return total


def _with_size(nvme: str | None) -> str | None:
    """Complete a directory without a size with its free space."""
    if nvme is None or ":" in nvme:
        return nvme
    path = Path(nvme).absolute()
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise UsageError(Fault(where="nvme", value=nvme, rule="must be a directory that can be written"))
    return f"{path}:{shutil.disk_usage(path).free}B"
