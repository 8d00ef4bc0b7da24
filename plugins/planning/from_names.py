"""Plans from names: resolve the model and the hardware, including this machine, and choose a layout."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from ...ds_configs.memory.activations import activations_are_stored, cached_activations
from ...ds_configs.memory.estimate import Calibration
from ...ds_configs.plan.plan import Plan, make_plan, release_difference
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError, collecting
from ...ds_configs.specs.hardware import (
    HardwareSpec,
    find_gpu,
    hardware_from_mapping,
    parse_hardware,
    parse_overrides,
)
from ...ds_configs.specs.job import ROLES, JobSettings, TrainingJob, adapter_errors, job_errors
from ...ds_configs.specs.texts import read_small_file, yaml_mapping
from ...ds_configs.step_time.learning import MeasuredStep
from ..releases import transformers_release
from .models import LoadedModel, load_model_spec

_LIBRARIES = ("shardwright", "torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes")
_LARGEST_NUMBER = 10**30
"""Largest integer in YAML; Python does not print integers of thousands of digits."""


def plan(
    model: str | Path | LoadedModel,
    hardware: str | Path | HardwareSpec,
    job: TrainingJob | JobSettings | None = None,
    *,
    revision: str | None = None,
    host_memory: str | None = None,
    nvme: str | None = None,
    num_processes: int | None = None,
    calibration: Calibration | Literal["user"] | None = "user",
    notify: Callable[[str], None] | None = None,
    **fields: object,
) -> Plan:
    """Choose a layout for a model and hardware.

    Args:
        model: A Hub id, a directory, a `config.json` or a loaded model.
        hardware: A name such as `8xA100-80GB`, a YAML file, `local`, or a `HardwareSpec`.
        job: The training run, or the settings of a command, which also contain the options about the hardware.
        revision: Branch, tag or commit of a Hub id.
        host_memory: Memory per node, such as `1TB`; for hardware given by name.
        nvme: NVMe per node as `PATH:SIZE`; for hardware given by name.
        num_processes: Number of accelerators; for hardware given by name.
        calibration: Measured runs, by default those that `shardwright calibrate` stored for this user.
        notify: Function that receives warnings.
        **fields: Fields of `TrainingJob`, such as `seq_len=2048, method="lora"`, instead of a `job`; second models may
            be names. Without either, sequences have 4,096 tokens, or the model's maximum if it is smaller.

    Raises:
        UsageError: A name, value or combination is invalid.
        RefusedInputError: The model's files are corrupt, absurd or unsafe.
        PlanDoesNotFitError: No layout fits.

    >>> plan("config.json", "8xA100-80GB").chosen.layout.label  # doctest: +SKIP
    'zero2'
    """
    tell = notify or (lambda _: None)
    sizes: dict[str, Any] = {"host_memory": host_memory, "nvme": nvme, "num_processes": num_processes}
    if isinstance(job, JobSettings):
        if not isinstance(hardware, HardwareSpec):
            sizes = {name: getattr(job, name) for name in sizes}
        fields, revision = job.job_fields(), job.revision
        job = None
    is_new = job is None
    errors = [
        ConfigError(where=name, value=value, rule=rule)
        for name, value, kind, rule in (
            ("model", model, LoadedModel, "must be a Hub id, a path or a loaded model"),
            ("hardware", hardware, HardwareSpec, "must be a name such as 8xA100-80GB, a path or a HardwareSpec"),
        )
        if not isinstance(value, str | Path | kind)
    ]
    if errors:
        raise UsageError(errors)
    with collecting(errors):
        if isinstance(hardware, HardwareSpec):
            cluster, rule, fix = hardware, "cannot be combined with a HardwareSpec", "set it in the HardwareSpec"
            stated = {name: value for name, value in sizes.items() if value is not None}
            errors += [ConfigError(where=name, value=value, rule=rule, fix=fix) for name, value in stated.items()]
        else:
            cluster = read_hardware(str(hardware), **sizes)
    with collecting(errors):
        job = checked_job(job, fields, tell)
    if errors or job is None:
        raise UsageError(errors)
    loaded = model
    if not isinstance(loaded, LoadedModel):
        loaded = load_model_spec(str(loaded), revision=revision, by_structure=True, packaged=True)
    positions = loaded.config.get("max_position_embeddings")
    positions = positions if isinstance(positions, int) else None
    if is_new and not fields.keys() & {"seq_len", "seq_len_tokens"}:
        limits = [limit for limit in (loaded.spec.learned_positions, positions) if limit]
        usual, shortest = job.seq_len_tokens, min([job.seq_len_tokens, *limits])
        job = replace(job, seq_len_tokens=shortest)
        if shortest < usual:
            tell(f"sequence length {shortest}, the maximum of {loaded.spec.architecture}")
    # Callers that load a model and make the job themselves have warned already.
    warns = (not isinstance(model, LoadedModel) or is_new) and loaded.spec.learned_positions is None
    if warns and positions is not None and job.seq_len_tokens > positions:
        tell(f"sequence length {job.seq_len_tokens} exceeds {positions}, the maximum of the model's training")
    for note in loaded.notes:
        tell(note)
    if not activations_are_stored(loaded.spec, job):
        name = loaded.spec.model_type + (" with eager attention" if loaded.spec.attention == "eager" else "")
        reason = "" if loaded.spec.source == "structure" else f"no measured activations for {name}: "
        tell(f"{reason}activation memory is an upper bound from the model's structure")
        # Raises an error before the search if there is no upper bound either.
        cached_activations(loaded.spec, job)(1, "fp32" if job.precision == "fp32" else "bf16")
    measured_steps: tuple[MeasuredStep, ...] = ()
    if calibration == "user":
        calibration, measured_steps = _stored_measurements(cluster.gpu, tell)
    return make_plan(
        loaded.spec,
        cluster,
        job,
        calibration=calibration,
        measured_steps=measured_steps,
        versions=installed_versions(),
    )


def checked_job(job: TrainingJob | None, fields: Mapping[str, object], tell: Callable[[str], None]) -> TrainingJob:
    """Return `job`, or the job with these fields, of which second models may be names.

    Raises:
        UsageError: A field is unknown, invalid, combined with a job, or requires another field.
    """
    errors: list[ConfigError] = []
    if job is not None:
        rule, fix = "cannot be combined with a TrainingJob", "set it in the TrainingJob, or omit the job"
        errors += [ConfigError(where=name, value=value, rule=rule, fix=fix) for name, value in fields.items()]
    values: dict[str, Any] = {name: value for name, value in fields.items() if name not in _UNPLANNED}
    rule, fix = "is not part of a plan: memory and time do not depend on it", "omit it, and pass it to train"
    errors += [ConfigError(where=name, value=fields[name], rule=rule, fix=fix) for name in _UNPLANNED if name in fields]
    errors += adapter_errors(values, values.get("method", "full"))
    for role in ROLES:
        name = f"{role}_placement"
        if values.get(role) is None and values.get(name, "auto") != "auto":
            rule, fix = f"requires a {role}", f"pass --{role} too"
            errors.append(ConfigError(where=name, value=values[name], rule=rule, fix=fix))
    made = job
    with collecting(errors):
        for role in ROLES:
            if isinstance(values.get(role), str):
                second = load_model_spec(values[role], packaged=True)
                for note in second.notes:
                    tell(f"{role}: {note}")
                values[role] = second.spec
        made = job or TrainingJob(**values)
        errors += job_errors(made)
    if errors or made is None:
        raise UsageError(errors)
    return made


_UNPLANNED = ("lora_alpha", "lora_dropout")
"""Options of a training's adapters that no plan has."""


def _stored_measurements(gpu: str, tell: Callable[[str], None]) -> tuple[Calibration | None, tuple[MeasuredStep, ...]]:
    """Return this user's measured runs, and step times on an accelerator whose predictions this release made.

    Names step times of other releases, and a store that cannot be read.
    """
    from .calibration_store import CalibrationStore

    try:
        calibration, steps = CalibrationStore().calibration(), CalibrationStore().steps()
    except ShardwrightError as error:
        tell(f"planning without measured runs: {error}")
        return None, ()
    steps = tuple(step for step in steps if step.gpu == gpu)
    release = own_release()
    comparable = tuple(step for step in steps if step.release == release)
    if others := sorted({step.release or "of an unknown release" for step in steps if step.release != release}):
        tell(
            f"stored step times on {gpu} that Shardwright {', '.join(others)} predicted stay stored "
            f"({len(steps) - len(comparable)}), but do not correct plans of {release}: measure again with "
            "`shardwright tune`, or `train` and `calibrate`"
        )
    return calibration, comparable


def installed_versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of the installed libraries that a plan depends on."""
    versions = []
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions.append((name, metadata.version(name)))
    return tuple(versions)


def own_release() -> str | None:
    """Return the release of Shardwright; `None` if it is not installed."""
    return dict(installed_versions()).get("shardwright")


def installed_release_difference(plan: Plan) -> str | None:
    """Return how the installed release of Transformers changes a plan's memory; `None` if it does not."""
    return release_difference(plan, transformers_release())


def read_hardware(
    text: str,
    *,
    host_memory: str | None = None,
    nvme: str | None = None,
    num_processes: int | None = None,
    on_cpu: bool = True,
) -> HardwareSpec:
    """Return the cluster for a name, a YAML file or `local`.

    Args:
        text: The name.
        host_memory: Memory per node.
        nvme: NVMe per node as `PATH:SIZE`.
        num_processes: Number of accelerators, for a name without one such as `T4`; of ranks for `local` without one.
        on_cpu: Whether `local` means CPU ranks on a machine without accelerators.

    Raises:
        UsageError: The name, the file or one of its values is invalid, or has another number of processes.
    """
    if text == "local":
        ranks = (2 if num_processes is None else num_processes) if on_cpu else None
        cluster = detect_hardware(host_memory=host_memory, nvme=nvme, cpu_ranks=ranks)
    elif text.endswith((".yaml", ".yml")):
        stated = yaml_mapping(read_small_file(Path(text), what="hardware"), name=text, what="hardware")
        errors = [
            ConfigError(where=f"{text}: {key}", rule="must be a single value")
            for key, value in stated.items()
            if isinstance(value, dict | list | set | tuple) or (isinstance(value, int) and abs(value) > _LARGEST_NUMBER)
        ]
        if errors:
            raise UsageError(errors)
        stated = {"source": text} | stated | parse_overrides(host_memory=host_memory, nvme=nvme)
        cluster = hardware_from_mapping(stated, name=text)
    else:
        counted = num_processes is None or re.match(r"\d+ *[xX×]", text)
        cluster = parse_hardware(text if counted else f"{num_processes}x{text}", host_memory=host_memory, nvme=nvme)
    if num_processes not in (None, cluster.world_size):
        rule = f"must equal the {cluster.world_size} accelerators of {cluster.name}"
        raise UsageError(ConfigError(where="num_processes", value=num_processes, rule=rule, fix="omit it"))
    return cluster


def detect_hardware(
    *, host_memory: str | None = None, nvme: str | None = None, cpu_ranks: int | None = None
) -> HardwareSpec:
    """Return this machine as a cluster of one node.

    Of several kinds of accelerators, the one with the least memory is used for all. Link and compute figures come
    from the catalog; an accelerator that is not in it requires a YAML file. Without an accelerator, the machine has
    `cpu_ranks` CPU ranks: half of its memory is for their tensors, half is host memory.

    Raises:
        UsageError: No accelerator is visible and `cpu_ranks` is `None` or more than the machine has cores, or it is
            not in the catalog.
    """
    import torch

    if nvme is not None and ":" not in nvme:
        path = Path(nvme).absolute()
        if not path.is_dir() or not os.access(path, os.W_OK):
            rule, fix = "must be a writable directory", "check the path, or pass PATH:SIZE"
            raise UsageError(ConfigError(where="nvme", value=nvme, rule=rule, fix=fix))
        nvme = f"{path}:{shutil.disk_usage(path).free}B"
    values: dict[str, Any]
    overrides = parse_overrides(host_memory=host_memory, nvme=nvme)
    indices = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    devices = [torch.cuda.get_device_properties(index) for index in indices]
    if not devices and cpu_ranks is not None:
        most = max(2, os.cpu_count() or 1)
        if not 1 <= cpu_ranks <= most:
            rule, fix = (
                f"must be from 1 to {most}, the cores of this machine",
                f"or plan for --hardware {cpu_ranks}xCPU",
            )
            raise UsageError(ConfigError(where="num_processes", value=cpu_ranks, rule=rule, fix=fix))
        total = int(overrides.pop("host_bytes_per_node", 0)) or _host_memory_bytes()
        rank_bytes = total // (2 * cpu_ranks)
        values = {"name": f"{cpu_ranks}xCPU (local)", "gpu": "CPU", "gpus_per_node": cpu_ranks, "gpu_bytes": rank_bytes}
        values |= {"host_bytes_per_node": total - cpu_ranks * rank_bytes}
        return hardware_from_mapping(values | overrides, name="local")
    if not devices:
        rule, fix = (
            "torch does not see an accelerator",
            "name the hardware, such as 8xA100-80GB, or 2xCPU to rehearse here",
        )
        raise UsageError(ConfigError(where="hardware", value="local", rule=rule, fix=fix))
    smallest = min(devices, key=lambda device: device.total_memory)
    memory = smallest.total_memory
    gpu = find_gpu(smallest.name, where="hardware (local)")
    values = {
        "name": f"{len(devices)}x{gpu} (local)",
        "gpu": gpu,
        "gpus_per_node": len(devices),
        "gpu_bytes": memory,
        "host_bytes_per_node": _host_memory_bytes(),
    }
    return hardware_from_mapping(values | overrides, name="local")


def _host_memory_bytes() -> int:
    """Return the memory of this machine, or of the control group that limits this process."""
    import psutil

    total = int(psutil.virtual_memory().total)
    with suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
