"""Complete checkpoints: the record of every file and of the run that saved it, and the run that resumes.

All ranks have saved a complete checkpoint. `checkpoint_callback.py` marks it complete with a record of every file.
`RULES` lists what may differ between the run that saved it and the run that resumes.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..ds_configs.plan.output import flush, write_files
from ..ds_configs.plan.plan import Plan
from ..ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError, UsageError
from ..ds_configs.specs.units import gigabytes
from ..plugins.accelerate import engine_from_environment
from ..plugins.deepspeed.engine import load_from_other_ranks
from ..plugins.launching.background import FirstRank
from ..plugins.launching.messages import note_on_first_rank
from ..plugins.releases import installed_version
from ..plugins.transformers.loading import gathered
from ..plugins.transformers.training_arguments import deepspeed_configuration

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
    import xxhash

    if names is None:
        paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != RECORD)
        names = [path.relative_to(directory).as_posix() for path in paths]
    names = list(names)

    def file_record(name: str) -> FileRecord:
        checksum, size = xxhash.xxh3_128(), 0
        # Mapped memory, because the allocator would keep a chunk per thread that has read a file.
        path = directory / name
        with path.open("rb", buffering=0) as stream, mmap(-1, _CHUNK_BYTES) as chunk, memoryview(chunk) as view:
            while count := stream.readinto(view):
                checksum.update(view[:count])
                size += count
        return FileRecord(size_bytes=size, xxh3_128=checksum.hexdigest())

    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return dict(zip(names, pool.map(file_record, names), strict=True))


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


_SAMPLES_READ = 16
"""Number of evenly spread samples by which datasets are compared."""
_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Keys of a model's configuration that may change without changing its parameters."""


def layout_facts(trainer: Trainer) -> dict[str, Any]:
    """Return the facts of a run's layout that `RULES` compares, without those that are unknown."""
    args = trainer.args
    deepspeed = deepspeed_configuration(args) or {}
    pipeline = {"pipeline_stages": "_stages", "tensor_parallel_size": "_tensor_ranks"}
    axes = {name: getattr(trainer, attribute, None) for name, attribute in pipeline.items()}
    config = getattr(trainer.accelerator, "parallelism_config", None)
    axes |= {name: getattr(config, name, 1) for name in ("tp_size", "sp_size", "cp_size", "dp_replicate_size")}
    for section, key in (("tensor_parallel", "autotp_size"), ("expert_parallel", "autoep_size")):
        axes[key] = (deepspeed.get(section) or {}).get(key)
    facts: dict[str, object] = {
        "engine": "deepspeed" if deepspeed else "fsdp2" if args.fsdp else engine_from_environment(),
        "zero_stage": deepspeed["zero_optimization"].get("stage", 0) if deepspeed else None,
        # Those beyond data parallelism that shard states.
        "axes": {name: size for name, size in axes.items() if isinstance(size, int) and size > 1},
        "world_size": args.world_size,
    }
    return _as_recorded(facts)


def run_facts(trainer: Trainer) -> dict[str, object]:
    """Return the facts that `RULES` compares, without those that are unknown.

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
        # TRL's trainers of pairs tokenize the rows, so that only the ranks know the samples.
        "data": _data(samples) if plan.job.task == "sft" else None,
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


_ERRORS = {errno.ENOSPC: "is full", errno.EDQUOT: "has no quota left", errno.EFBIG: "does not take files of this size"}
_TEXTS = {"os error 28": "is full", "os error 122": "has no quota left", "os error 27": _ERRORS[errno.EFBIG]}
"""Of safetensors, which is written in Rust."""
_TORCH_WRITER = ("inline_container.cc", "PytorchStreamWriter failed")
"""`torch.save` reports a failed write without its cause (torch 2.13, caffe2/serialize/inline_container.cc)."""


@contextmanager
def full_disk_errors(directory: Path) -> Iterator[None]:
    """Raise one error for a write that failed inside the block because the disk of a directory takes no more.

    Raises:
        ShardwrightError: the disk is full, the quota is used up, or a file is too large.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        rule = _ERRORS.get(getattr(error, "errno", None) or 0) if isinstance(error, OSError) else None
        rule = rule or next((rule for part, rule in _TEXTS.items() if part in text), None)
        if rule is None and not any(part in text for part in _TORCH_WRITER):
            raise
        where = next(path for path in (directory, *directory.parents) if path.is_dir())
        free = gigabytes(shutil.disk_usage(where).free)
        raise ShardwrightError(
            f"{directory}: the disk {rule or 'did not take a file of the checkpoint'} ({free} GB free). Earlier "
            "complete checkpoints are unchanged: free space, or lower save_total_limit, then resume"
        ) from error


_NAME = re.compile(r"checkpoint-(\d+)")
FEWEST_KEPT = 2
"""Complete checkpoints that are always kept, whatever `save_total_limit` says: the newest could be damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The checkpoint to resume from."""

    path: Path
    """Its directory."""
    record: CheckpointRecord
    """Its files, and the run that saved it."""
    skipped: tuple[str, ...]
    """Newer incomplete checkpoints, each with the reason."""


def checkpoints(output_dir: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by step, in order, complete or not."""
    by_step = {}
    for path in output_dir.glob("checkpoint-*"):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            by_step[int(match[1])] = path
    return dict(sorted(by_step.items()))


def newest_whole(output_dir: Path, read: Reader = read_whole) -> Selection | None:
    """Return the newest checkpoint of a run that `read` accepts as complete; `None` if there are no checkpoints.

    Raises:
        RefusedInputError: none is complete; lists every checkpoint with its error.
    """
    skipped: list[tuple[Path, str]] = []
    for path in reversed(checkpoints(output_dir).values()):
        try:
            record = read(path)
        except NotWholeError as error:
            skipped.append((path, str(error)))
            continue
        return Selection(path=path, record=record, skipped=tuple(f"{path.name} {why}" for path, why in skipped))
    if skipped:
        raise RefusedInputError([_not_whole(path, why) for path, why in skipped])
    return None


def named_checkpoint(path: Path) -> Selection:
    """Return the checkpoint at a path.

    Raises:
        UsageError: it is not a directory.
        RefusedInputError: it is incomplete.
    """
    if not path.is_dir():
        raise UsageError(ConfigError(where="resume_from_checkpoint", value=str(path), rule="is not a directory"))
    try:
        return Selection(path=path, record=read_whole(path), skipped=())
    except NotWholeError as error:
        raise RefusedInputError(_not_whole(path, str(error))) from None


def _not_whole(path: Path, why: str) -> ConfigError:
    fix = "resume from another checkpoint, or start a new run with its path as the model"
    return ConfigError(where=str(path), rule=f"is not a complete checkpoint: {why}", fix=fix)


def set_aside(output_dir: Path, *, after_step: int) -> None:
    """Rename incomplete checkpoints, and those after the step where the run begins, so that it writes into neither."""
    for step, path in checkpoints(output_dir).items():
        try:
            read_record(path)
            word, reason = "superseded", f"{path.name} is from an earlier run, after step {after_step}"
            if step <= after_step:
                continue
        except NotWholeError as error:
            word, reason = "incomplete", f"{path.name} {error}"
        target = path.with_name(f"{word}-{path.name}")
        number = 1
        while target.exists():
            number += 1
            target = path.with_name(f"{word}-{path.name}-{number}")
        path.rename(target)
        note_on_first_rank(f"{reason}: renamed to {target.name}")


def rotate(output_dir: Path, *, limit: int | None, best: str | None) -> None:
    """Delete the oldest complete checkpoints until `limit` are left, but never the best one or the newest two."""
    if limit is None or limit <= 0:
        return
    complete = [path for path in checkpoints(output_dir).values() if (path / RECORD).is_file()]
    protected = {path.name for path in complete[-FEWEST_KEPT:]} | ({Path(best).name} if best else set())
    excess = len(complete) - max(limit, FEWEST_KEPT)
    for path in complete:
        if excess <= 0:
            return
        if path.name in protected:
            continue
        # Without a record it is incomplete, also if the deletion is interrupted.
        (path / RECORD).unlink()
        try:
            shutil.rmtree(path)
        except OSError as error:
            note_on_first_rank(f"{path.name} could not be deleted ({error.strerror})")
        excess -= 1


Action = Literal["rejected", "converted", "warning"]
_NEW_RUN = "start a new run with its path as the model"
_MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Consequence of a fact that differs between the checkpoint and the run that resumes."""

    fact: str
    """Key of `run_facts`."""
    action: Action
    """Whether the run is rejected, continues with converted states, or continues with a warning."""
    why: str
    """What would go wrong, or what changes."""


RULES = (
    Rule(fact="states", action="rejected", why="it has only weights, without the states of the optimizer"),
    Rule(fact="engine", action="rejected", why="each engine saves its optimizer in a different format"),
    Rule(
        fact="zero_stage", action="rejected", why="each stage shards its states differently, except ZeRO-1 and ZeRO-2"
    ),
    Rule(fact="axes", action="rejected", why="tensors and optimizer states are sharded by these axes"),
    Rule(fact="sharded", action="rejected", why="each part of the model has its own states"),
    Rule(fact="world_size", action="converted", why="the random states of the ranks, which dropout uses, start again"),
    Rule(fact="global_batch_size", action="rejected", why="the completed steps would correspond to other samples"),
    Rule(fact="seed", action="rejected", why="the samples would come in another order, and some twice"),
    Rule(fact="data", action="rejected", why="the completed steps would correspond to other samples"),
    Rule(fact="model", action="rejected", why="the optimizer states belong to other parameters"),
    Rule(fact="weights", action="rejected", why="the optimizer states belong to other parameters"),
    Rule(fact="trained", action="rejected", why="the optimizer states belong to other parameters"),
    Rule(fact="precision", action="rejected", why="the states are saved in other formats"),
    Rule(fact="optimizer", action="rejected", why="the states of one optimizer do not fit another"),
    Rule(fact="learning_rate", action="rejected", why="the schedule of the checkpoint would keep the old rate"),
    Rule(fact="schedule", action="rejected", why="the learning rate would jump"),
    Rule(fact="weight_decay", action="rejected", why="the value of the checkpoint would override the new one"),
    Rule(fact="max_grad_norm", action="warning", why="later steps use the new value"),
    Rule(fact="max_steps", action="warning", why="the rest of the schedule follows the new length"),
    Rule(fact="micro_batch_size", action="warning", why="the global batch is the same"),
    Rule(fact="versions", action="warning", why="other versions may compute other losses"),
)
_LAYOUT = ("engine", "zero_stage", "sharded")
"""Facts that an error shows together, as `layout_name`."""
_SAME_STATES = {1, 2, "1 or 2"}
"""ZeRO stages with the same checkpoints."""


def compared(
    saved: Mapping[str, object], now: Mapping[str, object], *, new_run: str = _NEW_RUN
) -> tuple[list[ConfigError], list[str]]:
    """Return the errors that prevent resuming, and the warnings.

    Facts that only one of the two runs has are not compared.
    """
    errors: list[ConfigError] = []
    warnings: list[str] = []
    for rule in RULES:
        before, after = saved.get(rule.fact, _MISSING), now.get(rule.fact, _MISSING)
        if before is _MISSING or after is _MISSING or before == after:
            continue
        if rule.fact == "zero_stage" and {before, after} <= _SAME_STATES:
            continue
        action, why, fix = rule.action, rule.why, f"resume with the settings of the checkpoint, or {new_run}"
        if rule.fact == "world_size" and (saved.get("axes") or saved.get("sharded")):
            action, why = "rejected", "stages and axes must keep their ranks"
            fix = f"launch {saved[rule.fact]} ranks, or {new_run}"
        if rule.fact in _LAYOUT:
            if any(error.where.removeprefix("resume: ") in _LAYOUT for error in errors):
                continue
            before, after = layout_name(saved), layout_name(now)
            alike = before if saved.get("sharded") else layout_name({**saved, "world_size": None})
            fix = f"resume under {alike}, or {new_run}"
        if rule.fact == "states":
            after, fix = layout_name(now), f"save without save_only_model, or {new_run}"
        if action == "rejected":
            shown = f"the checkpoint was saved with {before}: {why}"
            errors.append(ConfigError(where=f"resume: {rule.fact}", value=after, rule=shown, fix=fix))
        else:
            warnings.append(f"resume: {rule.fact} was {before} and is now {after}: {why}")
    return errors, warnings


def layout_name(facts: Mapping[str, object]) -> str:
    """Return how a run is called that has these facts.

    >>> layout_name({"engine": "deepspeed", "zero_stage": 3, "world_size": 2})
    'ZeRO-3 on 2 ranks'
    """
    engine, stage = facts.get("engine"), facts.get("zero_stage")
    names = {"ddp": "DDP or one process", "fsdp2": "FSDP2", "deepspeed": f"ZeRO-{stage}"}
    name = names.get(str(engine), str(engine))
    if facts.get("sharded"):
        name += f" with {facts['sharded']}"
    count = facts.get("world_size")
    return name if not count else f"{name} on 1 rank" if count == 1 else f"{name} on {count} ranks"


_TAG = re.compile(r"global_step\d+/")
_WEIGHTS = re.compile(r"(pytorch_)?model([.-].*)?\.(safetensors|bin)")
_FSDP2_STATES = {"optimizer.bin", "optimizer_0", "pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"}


def saved_layout(names: Collection[str]) -> dict[str, object]:
    """Return the facts of the run that saved a checkpoint, as far as the names of its files and directories show them.

    Any Trainer saves these files, also one without `CheckpointCallback`.

    >>> saved_layout(["optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"])
    {'engine': 'ddp', 'sharded': '', 'world_size': 2}
    """
    parts = [name for name in names if _TAG.match(name)]
    is_fsdp2 = not _FSDP2_STATES.isdisjoint(names)
    ranks = sum(re.fullmatch(r"rng_state_\d+\.pth", name) is not None for name in names) or int(
        "rng_state.pth" in names
    )
    # With save_only_model, ZeRO-3 saves its states, but neither the schedule nor random states.
    if not (is_fsdp2 or "optimizer.pt" in names or (parts and (ranks or "scheduler.pt" in names))):
        return {"states": "save_only_model"}
    facts: dict[str, object] = {"engine": "deepspeed" if parts else "fsdp2" if is_fsdp2 else "ddp", "sharded": ""}
    if parts:
        has_shards = any(name.endswith("_optim_states.pt") for name in parts)
        shards_weights = any(re.search(r"/zero_pp_rank_.*_model_states\.pt", name) for name in parts)
        facts["zero_stage"] = 3 if shards_weights else "1 or 2" if has_shards else 0
        facts["sharded"] = sharded(
            is_pipeline=any(re.search(r"/layer_\d+-", name) for name in parts),
            has_experts=any("_expert_" in name or "/expp_rank_" in name for name in parts),
            tensor_ranks=len({match[1] for name in parts if (match := re.search(r"mp_rank_(\d+)_", name))}),
        )
    if ranks:
        facts["world_size"] = ranks
    if not facts["sharded"] and any(name.endswith("adapter_config.json") for name in names):
        facts["weights"] = "adapters"
    elif not facts["sharded"] and any(map(_WEIGHTS.fullmatch, names)):
        facts["weights"] = "all weights"
    return facts


def sharded(*, is_pipeline: bool, has_experts: bool, tensor_ranks: int) -> str:
    """Return the axis that divides the files of a DeepSpeed checkpoint; empty for data parallelism alone."""
    if is_pipeline:
        return "pipeline stages"
    if has_experts:
        return "expert parallelism"
    return f"tensors over {tensor_ranks} ranks" if tensor_ranks > 1 else ""


def new_run(path: Path, names: Collection[str]) -> str:
    """Return how to use the weights of a checkpoint with these files under a layout that cannot resume from it."""
    if any(map(_WEIGHTS.fullmatch, names)):
        return _NEW_RUN
    if any(name.endswith("adapter_config.json") for name in names):
        return "start a new run with its path as the adapter"
    # Without `--safe_serialization`, DeepSpeed writes a pickle, which no command here loads.
    extracts = "accelerate merge-weights pytorch_model_fsdp_0 ."
    extracts = "python zero_to_fp32.py . . --safe_serialization" if "zero_to_fp32.py" in names else extracts
    return f"run `{extracts}` in {path} and start a new run from these weights"


def checked_checkpoint(trainer: Any, resume: Any) -> str:
    """Return the checkpoint to resume from, after comparing the layout that saved it; every rank must call it.

    Raises:
        UsageError: it is not a checkpoint of a Trainer, or this run cannot load its states.
    """
    now = layout_facts(trainer)
    axes = now.get("axes", {})
    now["states"] = "complete"
    now["weights"] = "adapters" if hasattr(trainer.model, "peft_config") else "all weights"
    now["sharded"] = sharded(
        is_pipeline="pipeline_stages" in axes,
        has_experts="autoep_size" in axes,
        tensor_ranks=axes.get("autotp_size", axes.get("tensor_parallel_size", 1)),
    )

    def check() -> tuple[str, bool]:
        output_dir = Path(trainer.args.output_dir)
        path = next(reversed(checkpoints(output_dir).values()), output_dir) if resume is True else Path(resume)
        if not (path / "trainer_state.json").is_file():
            rule = "is not a complete checkpoint of a Trainer: it has no trainer_state.json"
            others = [f"{path.name}/{name.name}" for name in checkpoints(path).values()] or [
                name.name for name in checkpoints(path.parent).values() if name != path
            ]
            fix = f"pass one of {', '.join(others)}" if others else "start a new run with its path as the model"
            raise UsageError(ConfigError(where="resume_from_checkpoint", value=str(path), rule=rule, fix=fix))
        names = {file.relative_to(path).as_posix() for file in path.rglob("*")}
        saved = saved_layout(names)
        if trainer.args.save_on_each_node:
            saved.pop("world_size", None)
        if saved.get("zero_stage") == 3 and now["sharded"] == "expert parallelism" and not saved["sharded"]:
            # ZeRO-3 names its files alike with and without experts.
            del saved["sharded"]
        errors, warnings = compared(saved, now, new_run=new_run(path, names))
        if errors:
            raise UsageError(errors)
        if RECORD not in names:
            for line in warnings:
                note_on_first_rank(line)
        return str(path), saved.get("world_size", now["world_size"]) != now["world_size"]

    with FirstRank() as ranks:
        selected: tuple[str, bool] = ranks.does(check)
    path, has_other_ranks = selected
    if has_other_ranks and now["engine"] == "deepspeed":
        load_from_other_ranks()
    return path


def finished(selection: Selection, facts: Mapping[str, object], max_steps: int) -> tuple[bool, list[ConfigError]]:
    """Return whether the run that resumes has no further step, and the errors of one with fewer steps.

    The checkpoint of a longer run used its schedule.

    Args:
        max_steps: Its optimizer steps; 0 or less if only its epochs are known.
    """
    state = json.loads((selection.path / "trainer_state.json").read_text(encoding="utf-8"))
    saved, step = state["max_steps"], selection.record.step
    steps = saved if selection.record.facts.get("max_steps") == facts.get("max_steps") else max_steps
    if saved == steps == step or not 0 < steps <= step:
        return saved == steps == step, []
    fix = "raise the steps or epochs, or start a new run from the weights of the checkpoint"
    rule = f"all {steps} steps are done, in a run of {saved} steps"
    return False, [ConfigError(where="resume", value=selection.path.name, rule=rule, fix=fix)]
