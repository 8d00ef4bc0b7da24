"""Plans from names of models and hardware, and the store of measured runs.

A model's `ModelSpec` comes from stored shapes if there are any, else from the meta device. Measured runs and step times
are in one file in the user's data directory, which processes share.

Each line is a JSON object that one write appends under a lock, so that processes lose nothing and none reads half a
line. To forget is a line too. The file is read from top to bottom:

    {"kind": "run", "stored_at": ..., fields of MeasuredRun}
    {"kind": "step", "stored_at": ..., fields of MeasuredStep}
    {"kind": "forget", "stored_at": ..., "identifier": of a run and its step, or "all"}
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import TypeAdapter

from ..ds_configs.memory.activations import activations_are_stored, activations_of
from ..ds_configs.memory.estimate import Calibration, MeasuredRun
from ..ds_configs.models.images import image_tokens
from ..ds_configs.models.stored_shapes import model_spec_from_config, model_type_of
from ..ds_configs.plan.gallery import packaged_config, packaged_models
from ..ds_configs.plan.output import NO_LOCKS
from ..ds_configs.plan.plan import Plan, make_plan, release_difference
from ..ds_configs.specs.errors import (
    ConfigError,
    InputError,
    RefusedInputError,
    ShardwrightError,
    UsageError,
    collecting,
)
from ..ds_configs.specs.hardware import (
    HardwareSpec,
    find_gpu,
    hardware_from_mapping,
    parse_hardware,
    parse_overrides,
)
from ..ds_configs.specs.job import MODEL_ROLES, JobSettings, TrainingJob, adapter_errors, job_errors
from ..ds_configs.specs.layout import Layout
from ..ds_configs.specs.model import ModelSpec
from ..ds_configs.specs.synonyms import removals
from ..ds_configs.specs.texts import read_small_file, strict_json, yaml_mapping
from ..ds_configs.step_time.learning import MeasuredStep
from .huggingface_hub import ModelSource, read_model_source
from .releases import INSTALL_TRAIN, installed_version, transformers_release

logger = logging.getLogger(__name__)

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
    **fields: object,
) -> Plan:
    """Choose a layout for a model and hardware; what is assumed is logged.

    Args:
        model: A Hub id, a directory, a `config.json` or a loaded model.
        hardware: A name such as `8xA100-80GB`, a YAML file, `local`, or a `HardwareSpec`.
        job: The training run, or the settings of a command, which also contain the options about the hardware.
        revision: Branch, tag or commit of a Hub id.
        host_memory: Memory per node, such as `1TB`; for hardware given by name.
        nvme: NVMe per node as `PATH:SIZE`; for hardware given by name.
        num_processes: Number of accelerators; for hardware given by name.
        calibration: Measured runs, by default those that `shardwright calibrate` stored for this user.
        **fields: Fields of `TrainingJob`, such as `seq_len=2048, method="lora"`, instead of a `job`; second models may
            be names. Without either, sequences have 4,096 tokens, or the model's maximum if it is smaller.

    Raises:
        UsageError: A name, value or combination is invalid.
        RefusedInputError: The model's files are corrupt, absurd or unsafe.
        PlanDoesNotFitError: No layout fits.

    >>> plan("config.json", "8xA100-80GB").chosen.layout.label  # doctest: +SKIP
    'zero2'
    """
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
        job = checked_job(job, fields)
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
            logger.warning(f"sequence length {shortest}, the maximum of {loaded.spec.architecture}")
    # Callers that load a model and make the job themselves have warned already.
    warns = (not isinstance(model, LoadedModel) or is_new) and loaded.spec.learned_positions is None
    if warns and positions is not None and job.seq_len_tokens > positions:
        logger.warning(f"sequence length {job.seq_len_tokens} exceeds {positions}, the maximum of the model's training")
    for note in loaded.notes:
        logger.warning(note)
    image_tokens(loaded.spec, job)
    cast, other = (activations_are_stored(loaded.spec, job, Layout(engine=engine)) for engine in ("ddp", "fsdp2"))
    if not (cast and other):
        name = loaded.spec.model_type + (" with eager attention" if loaded.spec.attention == "eager" else "")
        name += " under autocast (one process, DDP)" if other else ""
        reason = "" if loaded.spec.source == "structure" else f"no measured activations for {name}: "
        logger.warning(f"{reason}activation memory is an upper bound from the model's structure")
        # Raises an error before the search if there is no upper bound either.
        activations_of(loaded.spec, job, 1, "fp32" if job.precision == "fp32" else "bf16")
    measured_steps: tuple[MeasuredStep, ...] = ()
    if calibration == "user":
        calibration = None
        try:
            calibration, steps = CalibrationStore().calibration(), CalibrationStore().steps()
        except ShardwrightError as error:
            logger.warning(f"planning without measured runs: {error}")
            steps = ()
        gpu, release = cluster.gpu, own_release()
        steps = tuple(step for step in steps if step.gpu == gpu)
        # Steps correct only the plans of the release that predicted them.
        measured_steps = tuple(step for step in steps if step.release == release)
        if others := sorted({step.release or "of an unknown release" for step in steps if step.release != release}):
            logger.warning(
                f"stored step times on {gpu} that Shardwright {', '.join(others)} predicted stay stored "
                f"({len(steps) - len(measured_steps)}), but do not correct plans of {release}: measure again with "
                "`shardwright tune`, or `train` and `calibrate`"
            )
    return make_plan(
        loaded.spec,
        cluster,
        job,
        calibration=calibration,
        measured_steps=measured_steps,
        versions=installed_versions(),
    )


def checked_job(job: TrainingJob | None, fields: Mapping[str, object]) -> TrainingJob:
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
    made = job
    with collecting(errors):
        for role in MODEL_ROLES:
            if isinstance(values.get(role), str):
                second = load_model_spec(values[role], packaged=True)
                for note in second.notes:
                    logger.warning(f"{role}: {note}")
                values[role] = second.spec
        made = job or TrainingJob(**values)
        for role in MODEL_ROLES:
            name = f"{role}_placement"
            if values.get(name, "auto") != "auto" and not made.needs(role):
                rule, fix = f"requires a {role}", f"pass --{role} too"
                errors.append(ConfigError(where=name, value=values[name], rule=rule, fix=fix))
        errors += job_errors(made)
    if errors or made is None:
        raise UsageError(errors)
    return made


_UNPLANNED = ("lora_alpha", "lora_dropout", "lora_plus_ratio")
"""Options of a training's adapters that no plan has."""


def installed_versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of the installed libraries that a plan depends on."""
    versions = ((name, installed_version(name)) for name in _LIBRARIES)
    return tuple((name, version) for name, version in versions if version is not None)


def own_release() -> str | None:
    """Return the release of Shardwright; `None` if it is not installed."""
    return installed_version("shardwright")


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

    `num_processes` is for a name without a number, such as `T4`, and for ranks of `local` without an accelerator, which
    `on_cpu` permits. A file or value that is invalid, or has another number of processes, is a `UsageError`.
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
    `cpu_ranks` CPU ranks, at most one per core: half of its memory is for their tensors, half is host memory.

    Raises:
        UsageError: No accelerator is visible and `cpu_ranks` is `None` or more than the machine has cores, or it is
            not in the catalog.
    """
    if installed_version("torch") is None:
        rule, fix = "needs torch, which sees the accelerators", f"{INSTALL_TRAIN}, or name the hardware: 8xA100-80GB"
        raise UsageError(ConfigError(where="hardware", value="local", rule=rule, fix=fix))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model specification with notes about its source."""

    spec: ModelSpec
    config: dict[str, Any]
    """The validated `config.json`."""
    notes: tuple[str, ...]
    """Warnings about the source, such as a quantized checkpoint."""


def load_model_spec(
    model: str, *, revision: str | None = None, by_structure: bool = False, packaged: bool = False
) -> LoadedModel:
    """Return the specification of a Hub id, local directory or `config.json`; torch loads only for rarer families.

    With `by_structure`, a model type of remote code whose class Transformers has is planned as the type of that class.
    With `packaged`, a public model of the package is described by the package if the Hub cannot be reached or denies
    access. Errors are those of `read_model_source`.
    """
    try:
        source = read_model_source(model, revision=revision)
    except InputError:
        raise
    except ShardwrightError as error:
        if not packaged or revision is not None or model not in packaged_models():
            raise
        reason = str(error).removeprefix(f"model = {model!r}: ").partition("; ")[0]
        note = f"{model} is planned from its configuration in this package, without a commit of the Hub: {reason}"
        source = ModelSource(name=model, revision=None, config=packaged_config(model), checkpoint_parameters=None)
        loaded = model_from_source(source)
        return replace(loaded, notes=(note, *loaded.notes))
    return model_from_source(source, by_structure=by_structure)


def _family_of_class(config: dict[str, Any], release: str) -> str | None:
    """Return the model type of the class in `architectures` if it differs from `model_type`, which names remote code.

    Without remote code, `model_type` decides, as in the Auto classes of Transformers, which reject an unknown one.
    """
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture is None or "model_type" not in config or "auto_map" not in config:
        return None
    stored = model_type_of(architecture, release=release)
    if stored is not None or installed_version("transformers") is None:
        return stored if stored != config["model_type"] else None
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config["model_type"] in CONFIG_MAPPING_NAMES:
        return None

    # The lazy module knows the package of each class without importing it.
    module = getattr(transformers, "_class_to_module", {}).get(architecture, "")
    name = module.split(".")[1] if module.startswith("models.") else ""
    return next((kind for kind in (name, name.replace("_", "-")) if kind in CONFIG_MAPPING_NAMES), None)


def model_from_source(source: ModelSource, *, by_structure: bool = False) -> LoadedModel:
    """Return the specification of a configuration; raises the errors of `load_model_spec`."""
    release, config = transformers_release(), source.config
    identity: dict[str, Any] = {"name": source.name, "revision": source.revision}
    spec = model_spec_from_config(config, **identity, release=release)
    notes: list[str] = []
    family = _family_of_class(config, release) if spec is None and by_structure else None
    if family is not None:
        own, architecture = config["model_type"], config["architectures"][0]
        notes.append(
            f"model_type = {own!r} is not that of {architecture}: planned as {family!r}, the type of this class"
        )
        config = config | {"model_type": family}
        spec = model_spec_from_config(config, **identity, release=release)
    if installed_version("transformers") is None:
        notes.append(f"transformers is not installed; the plan is for {release}, the newest tested release")
    if spec is None:
        if lacking := [package for package in ("torch", "transformers") if installed_version(package) is None]:
            architecture = (config.get("architectures") or [config["model_type"]])[0]
            rule = f"this class or its settings are counted by Transformers itself, which needs {' and '.join(lacking)}"
            raise UsageError(
                ConfigError(where=f"{source.name}: architectures", value=architecture, rule=rule, fix=INSTALL_TRAIN)
            )
        from .transformers.meta_model import model_spec_from_meta

        spec = model_spec_from_meta(config, **identity)
    if family is not None:
        # Its own code decides about layers and the layouts that they support.
        spec = replace(spec, layer_classes=(), weight_conversion=False, source="structure")
    # Reject SDPA for a class without it, as Transformers does when it builds the model.
    if _attention(config) == "sdpa" and spec.attention == "eager":
        rule = f"is not supported: {spec.architecture} of transformers {spec.release} has no SDPA"
        where, fix = f"{spec.name}: attn_implementation", "remove it, or write eager"
        raise RefusedInputError(ConfigError(where=where, value="sdpa", rule=rule, fix=fix))
    layer_types = config.get("layer_types")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope_type = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    spec = replace(
        spec,
        layer_types=tuple(sorted({str(kind) for kind in layer_types})) if isinstance(layer_types, list) else (),
        attention=_attention(config) or spec.attention,
        rope_type=rope_type if isinstance(rope_type, str) and rope_type != "default" else "",
    )
    architecture = (config.get("architectures") or [spec.architecture])[0]
    usual = model_type_of(architecture, release=release)
    if usual is not None and usual.partition("_")[0] != str(config["model_type"]).partition("_")[0]:
        notes.append(
            f"architectures = {architecture!r} is a class of {usual!r}, but model_type is {config['model_type']!r}: "
            f"planned as {spec.architecture}; Auto classes of transformers load the class of the model_type"
        )
    if architecture != spec.architecture:
        notes.append(
            f"architectures = {architecture!r} is not a class of the installed transformers; the plan is for "
            f"{spec.architecture}"
        )
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method is not None:
        notes.append(f"the checkpoint is quantized ({method}); the plan counts its weights in training precision")
    stored = source.checkpoint_parameters
    # Checkpoints may have a tied head twice and old rotary tables, so 0.25 % is tolerated.
    tied_head = spec.embedding_parameters if spec.tied_embeddings else 0
    counts = (spec.parameter_count, spec.parameter_count + tied_head)
    if method is None and stored is not None and all(abs(stored - count) > count / 400 for count in counts):
        notes.append(f"the checkpoint has {stored:,} parameters, but {spec.architecture} has {spec.parameter_count:,}")
    return LoadedModel(spec=spec, config=config, notes=tuple(notes))


def _attention(config: dict[str, Any]) -> str | None:
    attention = config.get("attn_implementation", config.get("_attn_implementation"))
    return attention if isinstance(attention, str) else None


DATA_DIRECTORY_VARIABLE = "SHARDWRIGHT_DATA_DIR"
FILE_NAME = "calibration.jsonl"
Measured = MeasuredRun | MeasuredStep
_KINDS: dict[str, type[Measured]] = {"run": MeasuredRun, "step": MeasuredStep}
_POSITIVE = {
    "run": ("ranks", "predicted_allocated_bytes", "reserved_peak_bytes"),
    "step": ("ranks", "predicted_seconds", "measured_seconds"),
}
"""Fields that plans divide by, of each kind."""


def _lock(stream: IO[bytes], *, exclusive: bool) -> None:
    """Lock a file until it is closed, where the system and the file system have locks."""
    try:
        import fcntl
    except ImportError:  # Windows.
        return
    try:
        fcntl.flock(stream, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def data_directory() -> Path:
    """Return the directory of this user's measurements: `SHARDWRIGHT_DATA_DIR`, else the platform's data directory."""
    directory = os.environ.get(DATA_DIRECTORY_VARIABLE)
    if directory:
        return Path(directory).absolute()
    from platformdirs import user_data_path

    return user_data_path("shardwright", appauthor=False)


class CalibrationStore:
    """Measurements on disk.

    Raises, from every method:
        RefusedInputError: The file is not such a file.
        ShardwrightError: The file cannot be accessed.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or data_directory() / FILE_NAME

    def add(self, measured: Measured) -> bool:
        """Store a measurement, which later plans use, and return whether it was new."""
        if measured in self._measurements():
            return False
        kind = next(kind for kind, each in _KINDS.items() if isinstance(measured, each))
        self._append(kind, asdict(measured))
        return True

    def calibration(self) -> Calibration:
        """Return the runs with memory peaks, oldest first."""
        return Calibration(runs=tuple(each for each in self._measurements() if isinstance(each, MeasuredRun)))

    def steps(self) -> tuple[MeasuredStep, ...]:
        """Return the measured step times, oldest first."""
        return tuple(each for each in self._measurements() if isinstance(each, MeasuredStep))

    def forget(self, identifier: str) -> int:
        """Remove one run by a prefix of its identifier, or `all`; return the number of removed runs.

        A run may have memory peaks, a step time, or both.

        Raises:
            UsageError: No run, or several runs, have this prefix.
        """
        stored = self._measurements()
        runs = sorted({each.identifier for each in stored})
        if identifier == "all":
            if stored:
                self._append("forget", {"identifier": identifier})
            return len(runs)
        matches = [name for name in runs if identifier and name.startswith(identifier)]
        if len(matches) != 1:
            rule = "is not a stored run"
            fix = removals().get(f"forget={identifier}", "`shardwright calibrate --list` lists the runs")
            if matches:
                rule = f"matches {len(matches)} runs"
                fix = f"write a longer prefix: {', '.join(name[:16] for name in matches[:4])}"
            raise UsageError(ConfigError(where="--forget", value=identifier, rule=rule, fix=fix))
        self._append("forget", {"identifier": matches[0]})
        return 1

    def _append(self, kind: str, values: dict[str, object]) -> None:
        stored_at = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"kind": kind, "stored_at": stored_at, **values}) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer, the line is one write to the end of the file.
            with self.path.open("ab", buffering=0) as stream:
                _lock(stream, exclusive=True)
                stream.write(line.encode())
                os.fsync(stream.fileno())
        except OSError as error:
            raise self._unusable(error) from None

    def _measurements(self) -> list[Measured]:
        """Return everything that was stored and not removed, each once, oldest first."""
        try:
            with self.path.open("rb") as stream:
                _lock(stream, exclusive=False)
                lines = stream.read().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable(error) from None
        # Keys keep their order.
        stored: dict[Measured, None] = {}
        for number, line in enumerate(lines, start=1):
            try:
                values = strict_json(line)
                kind, _ = values.pop("kind"), values.pop("stored_at")
                if kind == "forget":
                    forgotten = values["identifier"]
                    stored = {each: None for each in stored if forgotten not in ("all", each.identifier)}
                    continue
                if kind == "cpu":
                    # Rates of CPU ranks, which earlier versions stored.
                    continue
                stored[TypeAdapter(_KINDS[kind]).validate_json(json.dumps(values), strict=True)] = None
                if zero := [name for name in _POSITIVE[kind] if not values[name] > 0]:
                    raise ValueError(f"{zero[0]} = {values[zero[0]]}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                where, detail = f"calibration file {self.path}", " ".join(str(error).split())[:200]
                rule, fix = f"line {number} is not a measurement ({detail})", "remove the line, or move the file"
                raise RefusedInputError(ConfigError(where=where, rule=rule, fix=fix)) from None
        return list(stored)

    def _unusable(self, error: OSError) -> ShardwrightError:
        detail = f"cannot be used ({error.strerror}); set {DATA_DIRECTORY_VARIABLE}"
        return ShardwrightError(f"calibration file {self.path}: {detail}")
