"""Record of a checkpoint: every file with size and checksum, and the facts of the run that saved it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from ...ds_configs.plan.output import flush, write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import ShardwrightError
from ...plugins.accelerate.cpu_ranks import engine_from_environment
from ...plugins.releases import installed_version
from ...plugins.transformers.sound_model import gathered
from ...plugins.transformers.training_arguments import deepspeed_configuration

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

RECORD = "checkpoint_complete.json"
SCHEMA_VERSION = 1
_CHUNK_BYTES = 2**20
_FILES_AT_ONCE = 4
Reader = Callable[[Path], "CheckpointRecord"]
"""`read_whole`, or `read_complete` if the bytes are read later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One file of a checkpoint."""

    size_bytes: int
    xxh3_128: str
    """Checksum in hexadecimal digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """Files of a complete checkpoint, and the run that saved it."""

    step: int
    """Completed optimizer steps."""
    files: Mapping[str, FileRecord]
    """Every file by its path inside the checkpoint."""
    facts: Mapping[str, object]
    """Facts of the run that saved it (`run_facts`)."""


class NotWholeError(Exception):
    """A checkpoint is incomplete or damaged; the message names the file."""


def file_records(directory: Path, names: Iterable[str] | None = None) -> dict[str, FileRecord]:
    """Return size and checksum of the named files in a directory; without names, of all files except the record.

    Raises:
        OSError: a file cannot be read.
    """
    if names is None:
        paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != RECORD)
        names = [path.relative_to(directory).as_posix() for path in paths]
    names = list(names)
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return dict(zip(names, pool.map(lambda name: _file_record(directory / name), names), strict=True))


def write_record(directory: Path, *, step: int, files: Mapping[str, FileRecord], facts: Mapping[str, object]) -> None:
    """Mark a checkpoint complete; call it after `flush_tree` has run on every node that wrote to it.

    Raises:
        ShardwrightError: the record cannot be written.
    """
    record = CheckpointRecord(step=step, files=files, facts=dict(facts))
    text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(record)}, indent=1) + "\n"
    write_files({RECORD: text}, directory, force=True)
    flush(directory.parent)


def read_whole(directory: Path) -> CheckpointRecord:
    """Return the record of a checkpoint after comparing every byte.

    Raises:
        NotWholeError: a file is missing, shorter, longer or different, or there is no valid record.
    """
    record = read_complete(directory)
    try:
        current = file_records(directory, record.files)
    except OSError as error:
        raise NotWholeError(f"cannot be read ({error})") from None
    for name, expected in record.files.items():
        if current[name] != expected:
            raise NotWholeError(f"{name} differs from the bytes that were saved")
    return record


def read_complete(directory: Path) -> CheckpointRecord:
    """Return the record of a checkpoint after comparing the sizes of its files, without reading them.

    Raises:
        NotWholeError: a file is missing, shorter or longer, or there is no valid record.
    """
    record = read_record(directory)
    for name, expected in record.files.items():
        path = directory / name
        if not path.is_file():
            raise NotWholeError(f"{name} is missing")
        size = path.stat().st_size
        if size != expected.size_bytes:
            raise NotWholeError(f"{name} has {size} of {expected.size_bytes} bytes")
    return record


def read_record(directory: Path) -> CheckpointRecord:
    """Return the record of a checkpoint without checking its files.

    Raises:
        NotWholeError: there is no record, or it is damaged.
    """
    try:
        content = json.loads((directory / RECORD).read_bytes())
        if content["schema_version"] != SCHEMA_VERSION:
            raise NotWholeError(f"{RECORD} has the version {content['schema_version']!r}, not {SCHEMA_VERSION}")
        files = {name: FileRecord(**entry) for name, entry in content["files"].items()}
        for name in map(Path, files):
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"{str(name)!r} is not a path inside the checkpoint")
        return CheckpointRecord(step=int(content["step"]), files=files, facts=dict(content["facts"]))
    except FileNotFoundError:
        raise NotWholeError(f"has no {RECORD}, which is written at the end of a save") from None
    except OSError as error:
        raise NotWholeError(f"{RECORD} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise NotWholeError(f"{RECORD} is damaged ({error!r})") from None


def flush_tree(directory: Path) -> None:
    """Flush every file in a directory, and their names, to disk; one process per node calls it."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        list(pool.map(flush, [path for path in directory.rglob("*") if not path.is_symlink()]))
    flush(directory)


def flushed_records(directory: Path) -> dict[str, FileRecord]:
    """Flush a directory as `flush_tree` does while computing the result of `file_records`.

    Raises:
        OSError: a file cannot be read or written to disk.
    """
    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(flush_tree, directory)
        records = file_records(directory)
        flushing.result()
    return records


def _file_record(path: Path) -> FileRecord:
    import xxhash

    checksum, size = xxhash.xxh3_128(), 0
    # Mapped memory, because the allocator would keep a chunk per thread that has read a file.
    with path.open("rb", buffering=0) as stream, mmap(-1, _CHUNK_BYTES) as chunk, memoryview(chunk) as view:
        while count := stream.readinto(view):
            checksum.update(view[:count])
            size += count
    return FileRecord(size_bytes=size, xxh3_128=checksum.hexdigest())


_SAMPLES_READ = 16
"""Number of evenly spread samples by which datasets are compared."""
_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Keys of a model's configuration that may change without changing its parameters."""


def layout_facts(trainer: Trainer) -> dict[str, Any]:
    """Return the facts of a run's layout that `resume.RULES` compares, without those that are unknown."""
    args = trainer.args
    deepspeed = deepspeed_configuration(args)
    facts: dict[str, object] = {
        "engine": "deepspeed" if deepspeed else "fsdp2" if args.fsdp else engine_from_environment(),
        "zero_stage": deepspeed["zero_optimization"].get("stage", 0) if deepspeed else None,
        "axes": _axes(trainer, deepspeed or {}),
        "world_size": args.world_size,
    }
    return _as_recorded(facts)


def run_facts(trainer: Trainer) -> dict[str, object]:
    """Return the facts that `resume.RULES` compares, without those that are unknown.

    Every rank must call it; only the result of the first rank is used.
    """
    args = trainer.args
    config = getattr(trainer.model, "config", None)
    if config is not None and not isinstance(config, dict):
        config = config.to_dict()
    model_type = (config or {}).get("model_type", type(trainer.model).__name__)
    # When it trains, the Trainer copies special tokens from the tokenizer.
    stable = {
        name: value for name, value in (config or {}).items() if name not in _VOLATILE and not name.endswith("token_id")
    }
    facts: dict[str, object] = {
        **layout_facts(trainer),
        "global_batch_size": trainer.get_total_train_batch_size(args),
        "precision": args.mixed_precision,
        **_argument_facts(args),
        "model": None if config is None else f"{model_type} {_digest(stable)}",
        "trained": trained_tensors(trainer.model),
        "data": _data(trainer.train_dataset),
        "versions": {package: release for package in _PACKAGES if (release := installed_version(package))},
    }
    return _as_recorded(facts)


def planned_facts(plan: Plan, arguments: Mapping[str, object], samples: Any) -> dict[str, object]:
    """Return the facts that are known before a rank starts."""
    from transformers import TrainingArguments

    layout = plan.chosen.layout
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    facts = {
        "engine": "ddp" if layout.engine == "single" else layout.engine,
        "zero_stage": layout.zero_stage,
        # With further axes, only the ranks know the names of the axes and the number of data-parallel ranks.
        "axes": None if layout.axes or (layout.engine == "fsdp2" and layout.dp_replicate > 1) else {},
        "world_size": plan.hardware.world_size,
        "global_batch_size": None if layout.axes else layout.global_batch_size,
        "precision": {"fp32": "no"}.get(plan.job.precision, plan.job.precision),
        **_argument_facts(SimpleNamespace(**defaults | dict(arguments))),
        "data": _data(samples),
    }
    return _as_recorded(facts)


def _argument_facts(args: Any) -> dict[str, object]:
    return {
        "micro_batch_size": args.per_device_train_batch_size,
        "seed": args.seed if args.data_seed is None else [args.seed, args.data_seed],
        "optimizer": [
            str(getattr(args.optim, "value", args.optim)),
            args.adam_beta1,
            args.adam_beta2,
            args.adam_epsilon,
        ],
        "learning_rate": args.learning_rate,
        "schedule": [str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)), args.warmup_steps],
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm,
        "max_steps": args.max_steps if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs",
    }


def _as_recorded(facts: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in json.loads(json.dumps(facts)).items() if value is not None}


def _axes(trainer: Any, deepspeed: Mapping[str, Any]) -> dict[str, int]:
    """Return the axes beyond data parallelism that shard states."""
    axes: dict[str, int] = {}
    for name, attribute in (("pipeline_stages", "_stages"), ("tensor_parallel_size", "_tensor_ranks")):
        if isinstance(size := getattr(trainer, attribute, None), int) and size > 1:
            axes[name] = size
    config = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("tp_size", "sp_size", "cp_size", "dp_replicate_size"):
        if (getattr(config, name, 1) or 1) > 1:
            axes[name] = getattr(config, name)
    for section, key in (("tensor_parallel", "autotp_size"), ("expert_parallel", "autoep_size")):
        size = (deepspeed.get(section) or {}).get(key)
        if isinstance(size, int) and size > 1:
            axes[key] = size
    return axes


def trained_tensors(model: PreTrainedModel) -> str:
    """Return the number of trained tensors and a digest of their names, without the prefixes of wrappers."""
    names = sorted(
        name.replace("_orig_mod.", "").removeprefix("module.")
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )
    return f"{len(names)} tensors {_digest(names)}"


def _data(dataset: Any) -> str | None:
    """Return the number of samples and a digest of some; `None` for a stream, which can be read only once."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    count = len(dataset)
    if not count:
        return "0 samples"
    chosen = sorted({index * (count - 1) // max(1, _SAMPLES_READ - 1) for index in range(_SAMPLES_READ)})
    return f"{count} samples {_digest([_content(dataset[index]) for index in chosen])}"


def _content(sample: Any) -> Any:
    """Return what identifies a sample: its tokens if it has some, which collation does not change."""
    value = sample.get("input_ids", sample) if isinstance(sample, dict) else sample
    if isinstance(value, dict):
        return {str(name): _content(item) for name, item in sorted(value.items())}
    return value.tolist() if hasattr(value, "tolist") else str(value) if not isinstance(value, list) else value


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


Result = TypeVar("Result")


def on_first_rank(work: Callable[[], Result]) -> Result:
    """Run `work` on the first rank, and return its result or raise its error on every rank; every rank must call it."""
    import torch.distributed as distributed

    several = distributed.is_available() and distributed.is_initialized()
    answer: list[Any] = [None, None]
    if not several or distributed.get_rank() == 0:
        try:
            answer = [work(), None]
        except ShardwrightError as error:
            answer = [None, error]
    if several:
        distributed.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    result: Result = answer[0]
    return result


def together(work: Callable[[], Result] | None, what: str) -> Result | None:
    """Run this rank's part of the work, if it has one; fail on every rank if one of them fails.

    Raises:
        ShardwrightError: a rank failed; names the rank and the reason.
    """
    failure: Exception | None = None
    result: Result | None = None
    try:
        if work is not None:
            result = work()
    except (OSError, ShardwrightError) as error:
        failure = error
    failures = gathered(None if failure is None else f"{what}: {failure}")
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
    if failed:
        raise ShardwrightError("; ".join(failed)) from failure
    return result
