"""Write a teacher's outputs to a cache, shard by shard, on one or several ranks; an interrupted run resumes."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from ....ds_configs.memory.distillation_memory import CACHED_TOP_K
from ....ds_configs.plan.output import disk_errors, output_errors, reserved, write_files
from ....ds_configs.specs.errors import ConfigError, DoesNotFitError, RefusedInputError, ShardwrightError, UsageError
from ....ds_configs.specs.settings import Decimals
from ....plugins.huggingface_hub.hub import model_directory
from ....plugins.launching.messages import log_progress
from ....plugins.planning.from_names import installed_versions
from ...data.models import StartingModel, load_config, load_tokenizer, with_positions
from ...data.samples import collate, stated_samples
from ...data.sources import DataSettings, Packing, local_place
from ...data.templates import set_chat_template
from ...losses.fused_loss import UnknownLogitsError, accepted_inputs, captured_head_input
from ...runs.launch import ONE_PROCESS, Replicas, run_replicas
from ...runs.share import ALONE, Share, ShareTask
from .cache_format import CachedAnswers, RecordFormat, encode
from .teacher_cache import (
    MANIFEST,
    OWN_FILES,
    CacheKey,
    CacheShard,
    TeacherCache,
    file_sha256,
    key_errors,
    read_manifest,
    sample_hash,
    write_manifest,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from ....plugins.transformers.teacher_placement import PlacedTeacher

# About 34 MB at k = 50: an interrupted run loses little, and a large cache still has few files.
SHARD_ROWS = 2**18
# fp32 logits of 512 rows over a vocabulary of 128 k take 263 MB.
CHUNK_ROWS = 512
# Ranks wait for the slowest one before files are written. With 8 batches of similar length per rank the wait is short.
_BATCHES_PER_RANK = 8
_TOKENS, _ENDS = "tokens.npy", "ends.npy"


def cache_key(
    teacher: str, weights: str, tokenizer: PreTrainedTokenizerBase, layout: RecordFormat, *, rendered_by_template: bool
) -> CacheKey:
    return CacheKey(
        teacher=teacher,
        weights=weights,
        tokenizer=tokenizer_hash(tokenizer),
        template=template_hash(tokenizer, used=rendered_by_template),
        layout=layout,
    )


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of everything that determines how a tokenizer splits text.

    Fast tokenizers store the padding and truncation of the last call (transformers 5.17.0,
    tokenization_utils_tokenizers.py `set_truncation_and_padding`); both are omitted.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content = repr(sorted(tokenizer.get_vocab().items()))
    else:
        content = json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None})
    return hashlib.sha256(content.encode()).hexdigest()


def template_hash(tokenizer: PreTrainedTokenizerBase, *, used: bool) -> str:
    """Return a hash of the chat template; the hash of an empty one if it is not used."""
    template = str(getattr(tokenizer, "chat_template", None) or "") if used else ""
    return hashlib.sha256(template.encode()).hexdigest()


def weights_identity(name: str, revision: str | None, config: PreTrainedConfig) -> str:
    """Return the commit of a Hub model, or a hash of the files of a local one."""
    directory = Path(name)
    if not directory.is_dir():
        return str(getattr(config, "_commit_hash", None) or revision or "main")
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.safetensors"), directory / "config.json"]):
        digest.update(path.name.encode() + bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()


def write_cache(
    directory: Path,
    key: CacheKey,
    teacher: PlacedTeacher,
    samples: Sequence[Sequence[int]],
    *,
    batch_size: int,
    device: str | torch.device,
    share: Share = ALONE,
) -> None:
    """Store the answers to samples that the directory does not have yet, each sample once.

    Ranks of a share each run whole batches, and the first writes all answers: the files equal those of one process. If
    a rank fails, finished files stay, and later answers are computed again.

    Raises:
        RefusedInputError: the directory has another cache, or damaged files; names all differences and files.
        ShardwrightError: the teacher's logits are NaN or infinite, or a file cannot be written.
        UsageError: the teacher has no output embeddings.
    """
    # Only the first rank's machine may have the directory.
    shards, positions = share.from_first(lambda: _missing(directory, key, samples))
    done = len(samples) - len(positions)
    for groups in _rounds([samples[position] for position in positions], batch_size, share.ranks):
        batches = [group[i : i + batch_size] for group in groups for i in range(0, len(group), batch_size)]
        own = []
        for index in share.indices(len(batches)):
            answers = teacher_answers(teacher, batches[index], key.layout, device)
            own.append(np.concatenate([encode(answer, key.layout) for answer in answers]))
            log_progress("sample", done + sum(map(len, batches[: index + share.ranks])), len(samples))
        done += sum(map(len, groups))
        gathered = share.gathered(own)
        if gathered is None:
            continue
        records = iter(gathered)
        for group in groups:
            group_records = np.concatenate(list(islice(records, -(-len(group) // batch_size))))
            shards.append(_write_shard(directory, len(shards), group, group_records))
            write_manifest(directory, key, shards)
    if not shards and share.is_first:
        write_manifest(directory, key, shards)


def _rounds(samples: list[Sequence[int]], batch_size: int, ranks: int) -> Iterator[list[list[Sequence[int]]]]:
    """Yield rounds of groups, each for one file of about `SHARD_ROWS` rows, with samples of similar length.

    The groups of a round are computed before any of them is written: one group on one rank, else enough to keep all
    ranks busy.
    """
    needed_batches = 1 if ranks == 1 else _BATCHES_PER_RANK * ranks
    groups: list[list[Sequence[int]]] = [[]]
    rows = 0
    for ids in sorted(samples, key=len):
        if rows >= SHARD_ROWS:
            if sum(-(-len(group) // batch_size) for group in groups) >= needed_batches:
                yield groups
                groups = []
            groups.append([])
            rows = 0
        groups[-1].append(ids)
        rows += len(ids)
    if groups[-1]:
        yield groups


def finished_shards(directory: Path, key: CacheKey) -> list[CacheShard]:
    """Return the finished files of a cache; none if the directory has no cache.

    Raises:
        RefusedInputError: the directory has another cache; names all differences.
    """
    if not (directory / MANIFEST).exists():
        return []
    stored_key, shards = read_manifest(directory)
    errors = key_errors(stored_key, key, directory)
    if stored_key.layout != key.layout and not errors:
        rule = f"has records of another format ({stored_key.layout}, expected {key.layout})"
        errors = [ConfigError(where=f"teacher cache {directory}", rule=rule, fix="write to another directory")]
    if errors:
        raise RefusedInputError(errors)
    return shards


def _missing(directory: Path, key: CacheKey, samples: Sequence[Sequence[int]]) -> tuple[list[CacheShard], list[int]]:
    """Return the finished shards, verified, and the indices of the samples that none of them has."""
    shards = finished_shards(directory, key)
    seen: set[bytes] = set()
    if shards:
        cache = TeacherCache(directory, key, shards)
        rule, fix = "was changed after it was written", "write the cache again, to an empty directory"
        errors = [ConfigError(where=str(directory / file), rule=rule, fix=fix) for file in cache.damaged_files()]
        if errors:
            raise RefusedInputError(errors)
        seen = {sample_hash(ids) for ids in samples if ids in cache}
    missing = []
    for index, ids in enumerate(samples):
        digest = sample_hash(ids)
        if digest not in seen and len(ids):
            seen.add(digest)
            missing.append(index)
    return shards, missing


def _write_shard(
    directory: Path, number: int, samples: list[Sequence[int]], records: np.ndarray[Any, Any]
) -> CacheShard:
    from safetensors.numpy import save

    lengths = np.array([len(ids) for ids in samples], dtype=np.int64)
    content = save(
        {
            "records": records,
            "hashes": np.stack([np.frombuffer(sample_hash(ids), dtype=np.uint8) for ids in samples]),
            "starts": np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64),
            "lengths": lengths,
        }
    )
    name = f"answers-{number:05d}.safetensors"
    write_files({name: content}, directory, force=True)
    return CacheShard(
        file=name,
        rows=int(lengths.sum()),
        samples=len(samples),
        file_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def teacher_answers(
    teacher: PlacedTeacher, samples: Sequence[Sequence[int]], layout: RecordFormat, device: str | torch.device
) -> Iterator[CachedAnswers]:
    """Run a placed teacher on a batch of samples and yield its answers to every token, some rows at a time.

    Raises:
        ShardwrightError: its logits are NaN or infinite.
        UsageError: it has no output embeddings.
    """
    import torch

    batch = {name: tensor.to(device) for name, tensor in collate([{"input_ids": ids} for ids in samples]).items()}
    mask_BS, inputs = batch["attention_mask"].bool(), accepted_inputs(teacher.model, batch)
    with torch.no_grad(), captured_head_input(teacher.model) as head_input:
        outputs = teacher(**inputs)
    try:
        head_input.check(f"teacher {type(teacher.model).__name__}", outputs.logits)
    except UnknownLogitsError:
        # The logits are not just the output of a head, so they are computed for all positions.
        with torch.no_grad():
            logits_NV = teacher(**inputs).logits[mask_BS]
        for chunk_nV in logits_NV.split(CHUNK_ROWS):
            yield answers_of(chunk_nV, layout)
        return
    hidden_NH = head_input.inputs[0][mask_BS]
    with torch.no_grad(), teacher.gathered_head() as head:
        for chunk_nH in hidden_NH.split(CHUNK_ROWS):
            yield answers_of(head.logits(chunk_nH.to(head.weight_VH.dtype)), layout)


def answers_of(logits_NV: torch.Tensor, layout: RecordFormat) -> CachedAnswers:
    """Return the contents of records for the first V tokens, computed in fp32.

    Raises:
        ShardwrightError: the logits are NaN or infinite, or fewer than V.
    """
    import torch

    logits_NV = logits_NV[:, : layout.vocab_size].float()
    if logits_NV.shape[1] < layout.vocab_size:
        raise ShardwrightError(f"teacher: has {logits_NV.shape[1]} logits for {layout.vocab_size} tokens")
    largest_N1 = logits_NV.amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(largest_N1).all()) or bool(torch.isnan(logits_NV).any()):
        raise ShardwrightError("teacher: NaN or infinite logits; load it in bf16 or fp32, and check its weights")
    below_NV = logits_NV - largest_N1
    ids_NK = below_NV.topk(layout.top_k, dim=-1).indices.sort(dim=-1).values
    rest_NV = below_NV.scatter(1, ids_NK, float("-inf"))
    tails = [
        (rest_NV / temperature).logsumexp(dim=-1) - (below_NV / temperature).logsumexp(dim=-1)
        for temperature in layout.temperatures
    ]
    return CachedAnswers(
        ids_NK=ids_NK.cpu().numpy(),
        depths_NK=-below_NV.gather(1, ids_NK).cpu().numpy(),
        log_tail_NT=torch.stack(tails, dim=1).cpu().numpy(),
    )


class CacheSettings(DataSettings):
    """Settings of `shardwright cache-teacher`; those of the data must equal those of `distill`."""

    group = "Answers"

    dataset: str = Field("python-help", description="As for distill")
    packing: Packing = Field("auto", description="As for distill; conversations are stored one by one with any value")
    top_k: int = Field(CACHED_TOP_K, description="Likeliest tokens to store")
    temperature: Decimals = Field((1.0,), description="Temperatures to distill at")
    value_bits: int = Field(6, description="Bits of each probability, 2 to 16")
    batch_size: int = Field(8, ge=1, description="Samples per forward pass")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Dtype of the teacher. Default: bfloat16 on an accelerator, float32 on the CPU"
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a Hub teacher")


@dataclass(frozen=True, kw_only=True)
class CacheJob:
    """A cache to be written."""

    teacher: str
    settings: CacheSettings
    key: CacheKey
    samples: list[list[int]]
    """Token ids of training and held-out samples."""


def prepare_cache(
    teacher: str, settings: CacheSettings, output_dir: Path | None = None, *, replicas: Replicas = ONE_PROCESS
) -> CacheJob:
    """Read configuration, tokenizer and data; nothing is run or written. `replicas` share the batches.

    Raises:
        UsageError: invalid settings, a dataset without text, a sequence beyond the model's positions.
        RefusedInputError: the teacher has no safetensors weights.
    """
    sources = {"the teacher": teacher, "the dataset": local_place(settings.dataset)}
    errors = replicas.errors()
    if output_dir is not None and replicas.result_is_here:
        fix = "use another directory"
        errors += output_errors(output_dir, force=False, sources=sources, own=OWN_FILES, fix=fix)
    if errors:
        raise UsageError(errors)
    path = Path(teacher)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        rule = "has no safetensors weights"
        raise RefusedInputError(ConfigError(where=f"teacher {teacher}", rule=rule))
    if path.is_dir() and settings.revision is not None:
        rule = "only a Hub model has revisions"
        raise UsageError(ConfigError(where="--revision", value=settings.revision, rule=rule))
    source = StartingModel(model=teacher, revision=settings.revision)
    config = load_config(source)
    settings = with_positions(settings, config)
    tokenizer = load_tokenizer(source, config.get_text_config().vocab_size)
    set_chat_template(tokenizer, settings.chat_template)
    samples = stated_samples(settings, tokenizer)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    layout = RecordFormat(
        top_k=min(settings.top_k, vocab_size),
        vocab_size=vocab_size,
        temperatures=settings.temperature,
        value_bits=settings.value_bits,
    )
    key = cache_key(
        teacher,
        weights_identity(teacher, settings.revision, config),
        tokenizer,
        layout,
        rendered_by_template=samples.statistics.kind == "messages",
    )
    ids = [list(sample["input_ids"]) for sample in (*samples.train, *samples.evaluation)]
    return CacheJob(teacher=teacher, settings=settings, key=key, samples=ids)


def run_cache_job(job: CacheJob, directory: Path, *, replicas: Replicas = ONE_PROCESS) -> None:
    """Load the teacher and store its outputs; the files of several replicas equal those of one process.

    Raises:
        UsageError: the directory has other files, or another run writes to it.
        DoesNotFitError: the answers do not fit on its disk.
        RefusedInputError: the directory has another cache.
        ShardwrightError: the teacher's logits are NaN or infinite, or a rank failed.
    """
    if not replicas.result_is_here:
        _launch_ranks(job, directory, replicas)
        return
    rows = sum(len(ids) for ids in {tuple(ids) for ids in job.samples})
    rows -= sum(shard.rows for shard in finished_shards(directory, job.key))
    if errors := disk_errors(directory, needed_bytes=max(0, rows) * job.key.layout.record_bytes):
        raise DoesNotFitError("\n".join(map(str, errors)))
    with reserved(directory, force=False, own=OWN_FILES):
        if replicas.are_launched:
            _launch_ranks(job, directory, replicas)
        else:
            options = job.settings.model_dump(include={"dtype", "batch_size", "revision"})
            _store_answers(job.teacher, job.key, job.samples, directory, **options)


def _store_answers(
    teacher: str,
    key: CacheKey,
    samples: Sequence[Sequence[int]],
    directory: Path,
    *,
    dtype: str | None,
    batch_size: int,
    revision: str | None = None,
    share: Share = ALONE,
) -> None:
    """Load the teacher and store its answers, or this rank's share of them; every rank of a share must call it."""
    import torch

    from ....plugins.transformers.teacher_placement import PlacedTeacher, load_teacher

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    torch_dtype = getattr(torch, dtype or ("bfloat16" if accelerator else "float32"))
    model = load_teacher(teacher, revision=revision, dtype=torch_dtype).to(device)
    placed = PlacedTeacher(model, model, "replica")
    write_cache(directory, key, placed, samples, batch_size=batch_size, device=device, share=share)


def _launch_ranks(job: CacheJob, directory: Path, replicas: Replicas) -> None:
    """Run the teacher on shares of the batches; the first rank writes."""
    import torch

    path = Path(job.teacher)
    # A Hub model is downloaded here, once for all ranks of this machine.
    teacher = path.absolute() if path.exists() else model_directory(job.teacher, revision=job.settings.revision)
    content = {
        "teacher": str(teacher),
        "dtype": job.settings.dtype,
        "batch_size": job.settings.batch_size,
        "key": asdict(job.key),
        "directory": str(directory.absolute()),
    }
    with tempfile.TemporaryDirectory(prefix="shardwright-cache-", ignore_cleanup_errors=True) as temporary:
        work = Path(temporary)
        # Ranks map the files, so that the samples are in memory once per machine.
        np.save(work / _ENDS, np.cumsum([len(ids) for ids in job.samples], dtype=np.int64))
        np.save(work / _TOKENS, np.concatenate([np.asarray(ids, dtype=np.int64) for ids in job.samples]))
        run_replicas(replicas, AnswerTask(content=content), work, on_cpu=not torch.accelerator.is_available())


class AnswerTask(ShareTask):
    """Task of every rank."""

    task: Literal["cache-teacher"] = "cache-teacher"

    def do_share(self, share: Share, work: Path) -> None:
        """Answer this rank's share of the samples."""
        content = self.content
        options = {name: content[name] for name in ("dtype", "batch_size")}
        parts = {**options, "key": {**content["key"], "teacher": ""}, "versions": dict(installed_versions())}
        if share.is_first_here:
            parts["samples"] = [file_sha256(work / name) for name in (_TOKENS, _ENDS)]
        share.check_same(parts)
        key, directory = TypeAdapter(CacheKey).validate_python(content["key"]), Path(content["directory"])
        _store_answers(content["teacher"], key, _MappedSamples(work), directory, share=share, **options)


class _MappedSamples(Sequence[Any]):
    """Token ids of samples, concatenated in a file."""

    def __init__(self, work: Path) -> None:
        self._ends = np.load(work / _ENDS, mmap_mode="r", allow_pickle=False)
        self._tokens = np.load(work / _TOKENS, mmap_mode="r", allow_pickle=False)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        first = int(self._ends[index - 1]) if index else 0
        return self._tokens[first : int(self._ends[index])]
