"""`TeacherCache`: a teacher's stored answers, with random access by row, for any layout of the student.

A cache is a directory of safetensors files, each of which is complete. A file has, for N positions of S samples:

    ids         int32 [N, K], the K likeliest tokens
    logits      fp16 [N, K], their logits minus the largest one
    log_tails   fp16 [N, T], log of the mass of all other tokens at each of T temperatures
    hashes      uint8 [S, 16], of the samples' token ids
    lengths     int64 [S], their numbers of positions, which are rows in the same order

and in its metadata the `CacheKey`. The log-sum-exp of (z - max z) / τ is not stored, because it follows from a tail of
mass r: ``log Σ_K exp(z / τ) - log(1 - r)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from ...ds_configs.memory.second_models import CACHED_TOP_K
from ...ds_configs.plan.output import disk_errors, output_errors, reserved, write_files
from ...ds_configs.specs.errors import ConfigError, DoesNotFitError, RefusedInputError, ShardwrightError, UsageError
from ...ds_configs.specs.settings import Decimals
from ...plugins.launching.messages import log_progress
from ...plugins.safetensors import load_tensors, read_header
from ..data.chat import set_chat_template
from ..data.models import StartingModel, load_config, load_tokenizer, with_positions
from ..data.samples import collate, stated_samples
from ..data.sources import DataSettings, Packing, local_place
from ..evaluation.measures import ModelReader

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..losses.objective import TopKTargets

OWN_FILES = ("answers-*.safetensors",)
"""Names of a cache's files; `*` is the number of a file."""
KEY = "cache_key"
# 128 bits: the chance that two of 10^12 samples share a hash is about 10^-15.
_HASH_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Identity of a cache's answers; another key means other answers."""

    teacher: str
    """Hub id or directory as passed by the user; not compared."""
    weights: str
    """Commit of the Hub model, or a hash of the local weights."""
    vocab_size: int
    top_k: int
    """K, the stored tokens of each distribution."""
    temperatures: tuple[float, ...]
    """Temperatures at which the answers can be read."""

    @property
    def bytes_per_token(self) -> int:
        return (4 + 2) * self.top_k + 2 * len(self.temperatures)


CACHE_KEY = TypeAdapter(CacheKey)


def sample_hash(token_ids: Sequence[int]) -> bytes:
    """Return the hash of a sample's token ids, by which it is looked up."""
    return hashlib.sha256(np.asarray(token_ids, dtype=np.int64).tobytes()).digest()[:_HASH_BYTES]


def key_errors(stored: CacheKey, expected: CacheKey, where: str) -> list[ConfigError]:
    """Return the differences between a cache and the expected one."""
    names = {"weights": "teacher", "vocab_size": "vocabulary"}
    errors = []
    for name, wanted in asdict(expected).items():
        actual = getattr(stored, name)
        if name != "teacher" and actual != wanted:
            shown = (f"{value[:12] if isinstance(value, str) else value}" for value in (actual, wanted))
            rule = f"was made with another {names.get(name, name)} ({', expected '.join(shown)})"
            errors.append(ConfigError(where=where, rule=rule, fix="write a new cache to another directory"))
    return errors


class TeacherCache:
    """Stored answers of a teacher.

    Every position of every stored sample is a row, numbered over all files. Files are memory-mapped.
    """

    def __init__(self, directory: Path, key: CacheKey, files: Sequence[Path]) -> None:
        self.directory, self.key = directory, key
        self._files = [load_tensors(file) for file in files]
        self._first_rows = [0]
        self._samples: dict[bytes, range] = {}
        for tensors in self._files:
            ends = list(accumulate(tensors["lengths"].tolist(), initial=self._first_rows[-1]))
            hashes = map(bytes, tensors["hashes"].numpy())
            self._samples |= {digest: range(*rows) for digest, rows in zip(hashes, pairwise(ends), strict=True)}
            self._first_rows.append(ends[-1])

    @classmethod
    def open(cls, directory: str | Path, expected: CacheKey | None = None) -> TeacherCache:
        """Open a cache; with a key, reject a cache of other answers.

        Raises:
            RefusedInputError: it is damaged, of an earlier format, or of another teacher; names all differences.
        """
        path = Path(directory)
        where, files = f"teacher cache {path}", sorted(path.glob(OWN_FILES[0]))
        if not files:
            fix = "write a cache with shardwright cache-teacher"
            raise RefusedInputError(ConfigError(where=where, rule=f"has no {OWN_FILES[0]}", fix=fix))
        keys = {file: _checked_key(file) for file in files}
        key = keys[files[0]]
        errors = [error for file, own in keys.items() for error in key_errors(own, key, str(file))]
        errors += [] if expected is None else key_errors(key, expected, where)
        if errors:
            raise RefusedInputError(errors)
        return cls(path, key, files)

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __reduce__(self) -> tuple[object, ...]:
        """Let other processes map the files themselves; pickled tensors would be sent in full."""
        return TeacherCache.open, (self.directory,)

    def __contains__(self, token_ids: Sequence[int]) -> bool:
        return sample_hash(token_ids) in self._samples

    def rows_of(self, token_ids: Sequence[int]) -> range:
        """Return the row of each position of a sample.

        Raises:
            UsageError: the sample was not stored.
        """
        rows = self._samples.get(sample_hash(token_ids))
        if rows is None:
            rule = f"has no sample of {len(token_ids)} tokens that starts with {list(token_ids[:8])}"
            fix = "cache the same data with the same --seq-len"
            raise UsageError(ConfigError(where=f"teacher cache {self.directory}", rule=rule, fix=fix))
        return rows

    def read(self, rows_N: torch.Tensor, temperature: float) -> TopKTargets:
        """Return the teacher's answers at rows, on the device of `rows_N`.

        The K tokens are normalised, so that they and the others add up to one in spite of rounding.

        Raises:
            UsageError: a row that does not exist, or a temperature that was not stored.
        """
        import torch

        from ..losses.objective import TopKTargets

        key, rows = self.key, rows_N.cpu()
        errors = []
        if temperature not in key.temperatures:
            rule = f"the cache has {', '.join(map(str, key.temperatures))}"
            fix = "use one of them, or write the cache again"
            errors.append(ConfigError(where="temperature", value=temperature, rule=rule, fix=fix))
        if outside := [row for row in rows.tolist() if not 0 <= row < len(self)]:
            rule = f"a labelled position has row {outside[0]}, but the cache has 0 to {len(self) - 1}"
            errors.append(ConfigError(where="teacher_rows", rule=rule, fix="wrap the dataset in CachedTeacherDataset"))
        if errors:
            raise UsageError(errors)
        ids_NK = torch.empty(len(rows), key.top_k, dtype=torch.int64)
        log_p_NK = torch.empty(len(rows), key.top_k)
        log_tail_N = torch.empty(len(rows))
        owners = torch.bucketize(rows, torch.tensor(self._first_rows), right=True) - 1
        for owner in owners.unique().tolist():
            inside, tensors = owners == owner, self._files[owner]
            own = rows[inside] - self._first_rows[owner]
            ids_NK[inside] = tensors["ids"][own].long()
            log_p_NK[inside] = tensors["logits"][own].float() / temperature
            log_tail_N[inside] = tensors["log_tails"][own, key.temperatures.index(temperature)].float()
        log_kept_N = torch.log((-torch.expm1(log_tail_N.clamp(max=0.0))).clamp(min=1e-7))
        log_p_NK += (log_kept_N - log_p_NK.logsumexp(dim=-1))[:, None]
        return TopKTargets(
            ids_NK=ids_NK.to(rows_N.device),
            log_probabilities_NK=log_p_NK.to(rows_N.device),
            tail_log_probability_N=log_tail_N.to(rows_N.device),
            temperature=temperature,
        )


class CachedTeacherDataset:
    """Dataset that adds the rows of the teacher's answers to each sample, as `teacher_rows`.

    A cache has single documents: those of a packed row, whose `position_ids` restart with each one, are looked up one
    by one.
    """

    def __init__(self, dataset: Any, cache: TeacherCache) -> None:
        self._dataset, self._cache = dataset, cache

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self._dataset[index]
        ids, positions = (np.asarray(sample.get(name, ())).tolist() for name in ("input_ids", "position_ids"))
        starts = [start for start, position in enumerate(positions) if position == 0] or [0]
        documents = (ids[start:end] for start, end in pairwise([*starts, len(ids)]))
        return {**sample, "teacher_rows": [row for document in documents for row in self._cache.rows_of(document)]}


def _checked_key(file: Path) -> CacheKey:
    """Return the key of a file whose tensors have the shapes that it requires."""
    header, fix = read_header(file), "write the cache again"
    try:
        key = CACHE_KEY.validate_json(header.metadata.get(KEY, ""))
    except ValidationError as error:
        rule = f"has no {KEY} that can be read ({error.errors()[0]['msg']})"
        raise RefusedInputError(ConfigError(where=str(file), rule=rule, fix=fix)) from None
    stored = {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()}
    rows, samples = (stored.get(name, ("", (0,)))[1][:1] for name in ("ids", "lengths"))
    expected = {
        "ids": ("I32", (*rows, key.top_k)),
        "logits": ("F16", (*rows, key.top_k)),
        "log_tails": ("F16", (*rows, len(key.temperatures))),
        "hashes": ("U8", (*samples, _HASH_BYTES)),
        "lengths": ("I64", samples),
    }
    if stored != expected:
        raise RefusedInputError(ConfigError(where=str(file), rule=f"has {stored}, expected {expected}", fix=fix))
    lengths = load_tensors(file)["lengths"]
    if int(lengths.sum()) != rows[0] or bool((lengths < 1).any()):
        rule = f"has {rows[0]} rows for samples of {int(lengths.sum())} positions"
        raise RefusedInputError(ConfigError(where=str(file), rule=rule, fix=fix))
    return key


# About 79 MB at k = 50: an interrupted run loses little, and a large cache still has few files.
FILE_ROWS = 2**18
# fp32 logits of 512 rows over a vocabulary of 128 k take 263 MB.
CHUNK_ROWS = 512
_SMALLEST_LOGIT = -60.0
"""Of logits minus the largest one: 1 + exp(-60) is 1 in fp32, and 0 · log 0 would not be a number."""


def weights_identity(name: str, revision: str | None, config: PreTrainedConfig) -> str:
    """Return the commit of a Hub model, or a hash of the files of a local one."""
    directory = Path(name)
    if not directory.is_dir():
        return str(getattr(config, "_commit_hash", None) or revision or "main")
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.safetensors"), directory / "config.json"]):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def write_cache(
    directory: Path, key: CacheKey, teacher: PreTrainedModel, samples: Sequence[Sequence[int]], *, batch_size: int
) -> None:
    """Store the answers to samples that the directory does not have yet, each sample once.

    After an interruption finished files stay, and later answers are computed again.

    Raises:
        RefusedInputError: the directory has another cache, or damaged files; names all differences.
        ShardwrightError: the teacher's logits are NaN or infinite, or a file cannot be written.
    """
    import torch

    reader = ModelReader(teacher, name=f"teacher {type(teacher).__name__}")
    cache = stored_cache(directory, key)
    missing = {sample_hash(ids): ids for ids in samples if len(ids) and (cache is None or ids not in cache)}
    last = max(directory.glob(OWN_FILES[0]), default=None)
    next_file = 0 if last is None else int(last.stem.removeprefix("answers-")) + 1
    done = len(samples) - len(missing)
    # Each file has samples of similar length, and about `FILE_ROWS` rows.
    groups: list[list[Sequence[int]]] = []
    rows = FILE_ROWS
    for ids in sorted(missing.values(), key=len):
        if rows >= FILE_ROWS:
            groups.append([])
            rows = 0
        groups[-1].append(ids)
        rows += len(ids)
    for file, group in enumerate(groups, start=next_file):
        answers = []
        for first in range(0, len(group), batch_size):
            batch = collate([{"input_ids": ids} for ids in group[first : first + batch_size]])
            rows_ND, head = reader.answers(batch, batch["attention_mask"].bool())
            with torch.no_grad():
                answers += [answers_of(head(rows_nD), key) for rows_nD in rows_ND.split(CHUNK_ROWS)]
            done += len(batch["input_ids"])
            log_progress("sample", done, len(samples))
        write_answers(directory / f"answers-{file:05d}.safetensors", key, group, answers)


def stored_cache(directory: Path, key: CacheKey) -> TeacherCache | None:
    """Return the cache in a directory; `None` if it has none.

    Raises:
        RefusedInputError: the directory has another cache; names all differences.
    """
    return TeacherCache.open(directory, key) if any(directory.glob(OWN_FILES[0])) else None


def write_answers(
    path: Path, key: CacheKey, samples: list[Sequence[int]], answers: list[dict[str, torch.Tensor]]
) -> None:
    import torch
    from safetensors.torch import save

    tensors = {name: torch.cat([answer[name] for answer in answers]) for name in answers[0]}
    tensors["hashes"] = torch.tensor([list(sample_hash(ids)) for ids in samples], dtype=torch.uint8)
    tensors["lengths"] = torch.tensor([len(ids) for ids in samples])
    # safetensors (0.8.0) writes several entries of metadata in random order, and equal caches have equal bytes.
    content = save(tensors, metadata={KEY: CACHE_KEY.dump_json(key).decode()})
    write_files({path.name: content}, path.parent, force=True)


def answers_of(logits_NV: torch.Tensor, key: CacheKey) -> dict[str, torch.Tensor]:
    """Return what a file stores of distributions over the first V tokens, computed in fp32, on the CPU.

    Raises:
        ShardwrightError: the logits are NaN or infinite, or fewer than V.
    """
    import torch

    logits_NV = logits_NV[:, : key.vocab_size].float()
    if logits_NV.shape[1] < key.vocab_size:
        raise ShardwrightError(f"teacher: has {logits_NV.shape[1]} logits for {key.vocab_size} tokens")
    largest_N1 = logits_NV.amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(largest_N1).all()) or bool(torch.isnan(logits_NV).any()):
        raise ShardwrightError("teacher: NaN or infinite logits; load it in bf16 or fp32, and check its weights")
    below_NV = logits_NV - largest_N1
    kept_NK, ids_NK = below_NV.topk(key.top_k, dim=-1)
    rest_NV = below_NV.scatter(1, ids_NK, float("-inf"))
    tails = [(rest_NV / tau).logsumexp(dim=-1) - (below_NV / tau).logsumexp(dim=-1) for tau in key.temperatures]
    return {
        "ids": ids_NK.int().cpu(),
        "logits": kept_NK.clamp(min=_SMALLEST_LOGIT).half().cpu(),
        "log_tails": torch.stack(tails, dim=1).half().cpu(),
    }


class CacheSettings(DataSettings):
    """Settings of `shardwright cache-teacher`; those of the data must equal those of `distill`."""

    group = "Answers"

    dataset: str = Field("python-help", description="As for distill")
    packing: Packing = Field("auto", description="As for distill; conversations are stored one by one with any value")
    top_k: int = Field(CACHED_TOP_K, ge=1, description="Likeliest tokens to store")
    temperature: Decimals = Field((1.0,), description="Temperatures to distill at")
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


def prepare_cache(teacher: str, settings: CacheSettings, output_dir: Path | None = None) -> CacheJob:
    """Read configuration, tokenizer and data; nothing is run or written.

    Raises:
        UsageError: invalid settings, a dataset without text, a sequence beyond the model's positions.
        RefusedInputError: the teacher has no safetensors weights.
    """
    sources = {"the teacher": teacher, "the dataset": local_place(settings.dataset)}
    errors: list[ConfigError] = []
    temperatures = settings.temperature
    if not temperatures or len({*temperatures}) < len(temperatures) or not all(0 < each < inf for each in temperatures):
        rule = "must be one or more values above 0, each once"
        errors.append(ConfigError(where="temperature", value=temperatures, rule=rule))
    if output_dir is not None:
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
    key = CacheKey(
        teacher=teacher,
        weights=weights_identity(teacher, settings.revision, config),
        vocab_size=vocab_size,
        top_k=min(settings.top_k, vocab_size),
        temperatures=temperatures,
    )
    ids = [list(sample["input_ids"]) for sample in (*samples.train, *samples.evaluation)]
    return CacheJob(teacher=teacher, settings=settings, key=key, samples=ids)


def run_cache_job(job: CacheJob, directory: Path) -> None:
    """Load the teacher and store its outputs.

    Raises:
        UsageError: the directory has other files, or another run writes to it.
        DoesNotFitError: the answers do not fit on its disk.
        RefusedInputError: the directory has another cache.
        ShardwrightError: the teacher's logits are NaN or infinite, or a file cannot be written.
    """
    import torch

    from ...plugins.transformers.second_model import load_second_model

    rows = sum(len(ids) for ids in {tuple(ids) for ids in job.samples})
    rows -= len(stored_cache(directory, job.key) or ())
    if errors := disk_errors(directory, needed_bytes=max(0, rows) * job.key.bytes_per_token):
        raise DoesNotFitError("\n".join(map(str, errors)))
    with reserved(directory, force=False, own=OWN_FILES):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator or torch.device("cpu")
        dtype = getattr(torch, job.settings.dtype or ("bfloat16" if accelerator else "float32"))
        teacher = load_second_model(job.teacher, revision=job.settings.revision, dtype=dtype).to(device)
        write_cache(directory, job.key, teacher, job.samples, batch_size=job.settings.batch_size)
