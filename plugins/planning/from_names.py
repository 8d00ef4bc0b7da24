"""Plans from names: resolves model and hardware, and traces activations of families without stored coefficients."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from ...ds_configs.memory.activation_source import ActivationSource, activations_are_stored, cached_activations
from ...ds_configs.memory.activations import ActivationEstimate, Mode
from ...ds_configs.memory.calibration import Calibration
from ...ds_configs.plan.plan import Plan, make_plan
from ...ds_configs.search.questions import slowest_node
from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ...ds_configs.specs.hardware import HardwareSpec, hardware_from_mapping, parse_hardware, parse_overrides
from ...ds_configs.specs.job import AXIS_FIELDS, TrainingJob
from ...ds_configs.specs.settings import adapter_faults, unknown_fault
from ...ds_configs.specs.yaml_file import read_small_file, yaml_mapping
from ...ds_configs.step_time.measured_network import with_measured_network
from .models import LoadedModel, load_model_spec

_LIBRARIES = ("shardwright", "torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes")
_LARGEST_NUMBER = 10**30
"""Python refuses to print integers of some thousand digits, and anchors can nest lists beyond any memory."""


def plan(
    model: str | LoadedModel,
    hardware: str | HardwareSpec,
    job: TrainingJob | None = None,
    *,
    revision: str | None = None,
    host_memory: str | None = None,
    nvme: str | None = None,
    num_processes: int | None = None,
    calibration: Calibration | Literal["user"] | None = "user",
    trace_activations: bool = False,
    notify: Callable[[str], None] | None = None,
    offers: bool = True,
    **words: Any,
) -> Plan:
    """Choose a strategy for a model on some hardware.

    `model` is a Hub id, a directory, a `config.json` or an already loaded model; `hardware` a name such as
    `8xA100-80GB`, a YAML file, `local`, or a `HardwareSpec`; `host_memory`, `nvme` and `num_processes` complete a name.
    `calibration` holds measured runs to learn from, by default those that `shardwright calibrate` stored for this user.
    `trace_activations` traces a model without stored activation coefficients, in minutes, where else an upper
    bound from its structure counts; a trace that fails falls back to it. `notify` receives remarks while planning.
    Without `offers` the plan does not say what changes of the training's numbers would make it faster.
    In place of a `job`, `words` are options of `shardwright plan`, such as `seq_len=2048, method="lora"`; without
    either, sequences have 4,096 tokens, or as many as the model has positions for.

    Raises:
        UsageError: a name, value or combination cannot be used.
        RefusedInputError: the model's files are corrupt, absurd or unsafe.
        PlanDoesNotFitError: no layout fits.

    >>> plan("config.json", "8xA100-80GB").chosen.strategy.label  # doctest: +SKIP
    'zero2'
    """
    tell = notify or (lambda _: None)
    completing = {"host_memory": host_memory, "nvme": nvme, "num_processes": num_processes}
    cluster = _cluster(hardware, {name: value for name, value in completing.items() if value is not None}, tell)
    loaded = load_model_spec(model, revision=revision, by_structure=True) if isinstance(model, str) else model
    if job is None and "seq_len" not in words:
        words["seq_len"] = _longest_training(loaded, tell)
    wanted = job_from_words(words, job)
    positions = loaded.config.get("max_position_embeddings")
    if isinstance(positions, int) and loaded.spec.learned_positions is None and wanted.seq_len_tokens > positions:
        tell(f"sequences of {wanted.seq_len_tokens} tokens are beyond the {positions} that the model was trained for")
    return plan_job(
        loaded,
        cluster,
        wanted,
        calibration=calibration,
        trace_activations=trace_activations,
        notify=notify,
        offers=offers,
    )


def plan_job(
    loaded: LoadedModel,
    cluster: HardwareSpec,
    wanted: TrainingJob,
    *,
    calibration: Calibration | Literal["user"] | None = "user",
    trace_activations: bool = False,
    notify: Callable[[str], None] | None = None,
    offers: bool = True,
) -> Plan:
    """Choose a strategy as `plan` does, where nothing is a name any more and the sequences' length was remarked on.

    Raises:
        UsageError: a value or combination cannot be used.
        PlanDoesNotFitError: no layout fits.
    """
    tell = notify or (lambda _: None)
    for note in loaded.notes:
        tell(note)
    source: ActivationSource | None = None
    if not activations_are_stored(loaded.spec, wanted):
        source = _activations_without_coefficients(loaded, wanted, traced=trace_activations, tell=tell)
    if calibration == "user":
        cluster = _with_stored_network(cluster, tell)
    return make_plan(
        loaded.spec,
        cluster,
        wanted,
        activations=source,
        calibration=stored_calibration(tell) if calibration == "user" else calibration,
        versions=installed_versions(),
        offers=offers,
    )


def _longest_training(loaded: LoadedModel, tell: Callable[[str], None]) -> int:
    """Return the tokens of a training sequence where none are asked for: 4,096, or fewer where the model ends."""
    usual = TrainingJob().seq_len_tokens
    stated = loaded.config.get("max_position_embeddings")
    limits = [loaded.spec.learned_positions, stated if isinstance(stated, int) else None]
    most = min([usual, *(limit for limit in limits if limit)])
    if most < usual:
        tell(f"sequences of {most} tokens, the most that {loaded.spec.architecture} has positions for")
    return most


def _activations_without_coefficients(
    loaded: LoadedModel, job: TrainingJob, *, traced: bool, tell: Callable[[str], None]
) -> ActivationSource | None:
    """Return a trace where it is asked for and succeeds; `None` leaves it to the upper bound.

    Raises:
        UsageError: neither exists.
    """
    modes: tuple[Mode, ...] = ("fp32",) if job.precision == "fp32" else ("bf16", "bf16_autocast")
    kind = f"{loaded.spec.model_type} with eager attention" if loaded.spec.attention == "eager" else None
    name = kind or loaded.spec.model_type
    if loaded.spec.source == "structure":
        tell("memory of activations is an upper bound from its structure")
    elif traced:
        tell(f"no stored activations for {name}: tracing the model, which takes minutes")
        source = TracedActivations(loaded, job)
        try:
            for mode in modes:
                source(1, mode)
            return source
        except ShardwrightError as error:
            tell(f"planning with an upper bound instead: {error}")
    else:
        tell(
            f"no stored activations for {name}: memory is an upper bound from the model's structure; "
            "--trace-activations measures it, in minutes"
        )
    cached_activations(loaded.spec, job)(1, modes[0])
    return None


def job_from_words(words: Mapping[str, Any], job: TrainingJob | None = None) -> TrainingJob:
    """Return the training that options of `shardwright plan` describe, or the given one where there are none.

    Raises:
        UsageError: names that are no options, both a job and options, or options that belong to others not given.
    """
    if not words:
        return job or TrainingJob()
    known = {field.name for field in fields(TrainingJob)} - {"seq_len_tokens"} | {"seq_len"}
    faults = [unknown_fault(name, sorted(known)) for name in words if name not in known]
    if job is not None:
        rule, fix = "stands beside a TrainingJob", "state it there, or leave the job out"
        faults += [Fault(where=name, value=value, rule=rule, fix=fix) for name, value in words.items()]
    faults += adapter_faults(words, words.get("method", "full"))
    if words.get("teacher") is None and words.get("teacher_placement", "auto") != "auto":
        rule, fix = "places a teacher, and none is named", "give --teacher too"
        faults.append(Fault(where="teacher_placement", value=words["teacher_placement"], rule=rule, fix=fix))
    if faults:
        raise UsageError(faults)
    stated = {"seq_len_tokens" if name == "seq_len" else name: value for name, value in words.items()}
    for name in {"micro_batch_size", *AXIS_FIELDS} & stated.keys():
        stated[name] = None if stated[name] == "auto" else stated[name]
    if isinstance(targets := stated.get("lora_targets"), str):
        stated["lora_targets"] = tuple(target.strip() for target in targets.split(",") if target.strip())
    if isinstance(teacher := stated.get("teacher"), str):
        stated["teacher"] = load_model_spec(teacher).spec
    return TrainingJob(**stated)


def stored_calibration(tell: Callable[[str], None]) -> Calibration | None:
    """Return the measured runs of this user; a store that cannot be read is remarked on and left out."""
    from .calibration_store import CalibrationStore

    try:
        return CalibrationStore().calibration()
    except ShardwrightError as error:
        tell(f"planning without measured runs: {error}")
        return None


def _with_stored_network(cluster: HardwareSpec, tell: Callable[[str], None]) -> HardwareSpec:
    """Return hardware whose assumed network is the one that this user's machines measured, where they did."""
    from .calibration_store import CalibrationStore

    if cluster.nodes == 1:
        return cluster
    try:
        found, remark = with_measured_network(cluster, CalibrationStore().networks())
    except ShardwrightError:
        # Remarked on where its runs are read.
        return cluster
    if remark is not None:
        tell(remark)
    return found


def installed_versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of the libraries that a plan depends on, of those that are installed."""
    found = []
    for name in _LIBRARIES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def _cluster(hardware: str | HardwareSpec, completing: Mapping[str, Any], tell: Callable[[str], None]) -> HardwareSpec:
    if isinstance(hardware, str):
        return read_hardware(hardware, tell=tell, **completing)
    if completing:
        rule, fix = "stands beside a HardwareSpec", "state it there"
        raise UsageError([Fault(where=name, value=value, rule=rule, fix=fix) for name, value in completing.items()])
    return hardware


def read_hardware(
    text: str,
    *,
    host_memory: str | None = None,
    nvme: str | None = None,
    num_processes: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> HardwareSpec:
    """Return the cluster that a name, a YAML file or `local` describes; `num_processes` counts a kind such as `T4`.

    Names joined by `+` are unequal nodes, of which the slowest rules; `tell` gets what it holds back.

    Raises:
        UsageError: the name, the file or one of its values cannot be used, or describes another number of processes.
    """
    if text == "local":
        from .local_hardware import detect_hardware

        cluster = detect_hardware(host_memory=host_memory, nvme=nvme)
    elif "+" in text and not text.endswith((".yaml", ".yml")):
        parts = [parse_hardware(part, host_memory=host_memory, nvme=nvme) for part in text.split("+")]
        cluster, held_back = slowest_node(parts)
        for note in held_back:
            tell(note)
    elif text.endswith((".yaml", ".yml")):
        stated = read_yaml_mapping(Path(text), what="hardware")
        stated |= parse_overrides(host_memory=host_memory, nvme=nvme)
        cluster = hardware_from_mapping(stated, name=text)
    else:
        counted = num_processes is None or re.match(r"\d+x", text)
        cluster = parse_hardware(text if counted else f"{num_processes}x{text}", host_memory=host_memory, nvme=nvme)
    if num_processes not in (None, cluster.world_size):
        rule = f"must equal the {cluster.world_size} accelerators of {cluster.name}"
        raise UsageError(Fault(where="num_processes", value=num_processes, rule=rule, fix="leave it out"))
    return cluster


def read_yaml_mapping(path: Path, *, what: str) -> dict[str, Any]:
    """Return the mapping in a small YAML file.

    Raises:
        UsageError: it cannot be read, is too large, is not YAML, or holds no mapping.
    """
    data = yaml_mapping(read_small_file(path, what=what), name=str(path), what=what)
    faults = [
        Fault(where=f"{path}: {key}", rule="must be one plain value")
        for key, value in data.items()
        if isinstance(value, dict | list | set | tuple) or (isinstance(value, int) and abs(value) > _LARGEST_NUMBER)
    ]
    if faults:
        raise UsageError(faults)
    return data


class TracedActivations:
    """Activation bytes of a model that is traced on demand, linear in the micro-batch.

    Each precision mode is traced once at micro-batches 1 and 2. Adapters are counted as full training, which keeps
    at least as much.
    """

    def __init__(self, loaded: LoadedModel, job: TrainingJob) -> None:
        self._loaded = loaded
        self._job = job
        self._traces: dict[Mode, tuple[ActivationEstimate, ActivationEstimate]] = {}

    def __call__(self, micro_batch_size: int, mode: Mode) -> ActivationEstimate:
        if mode not in self._traces:
            with ThreadPoolExecutor(max_workers=2) as pool:
                first, second = pool.map(lambda size: self._trace(size, mode), (1, 2))
            self._traces[mode] = (first, second)
        first, second = self._traces[mode]
        return _extrapolate(first, second, micro_batch_size)

    def _trace(self, micro_batch_size: int, mode: Mode) -> ActivationEstimate:
        from ..activations.request import trace_model

        return trace_model(
            self._loaded.config,
            micro_batch_size=micro_batch_size,
            seq_len_tokens=self._job.seq_len_tokens,
            mode=mode,
            num_layers=self._loaded.spec.dimensions.num_layers,
        )


def _extrapolate(first: ActivationEstimate, second: ActivationEstimate, size: int) -> ActivationEstimate:
    values: Mapping[str, Any] = {
        field.name: getattr(first, field.name) + (size - 1) * (getattr(second, field.name) - getattr(first, field.name))
        for field in fields(ActivationEstimate)
        if field.name != "source"
    }
    return ActivationEstimate(source=first.source, **values)
