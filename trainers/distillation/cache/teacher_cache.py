"""`TeacherCache`: a teacher's stored answers, with random access by row, for any layout of the student."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from ....ds_configs.plan.output import write_files
from ....ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ....ds_configs.specs.texts import strict_json
from ....plugins.safetensors.reading import check_names, read_header
from ...losses.objective import TopKTargets
from .cache_format import Array, CachedAnswers, RecordFormat, decode, log_probabilities

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
OWN_FILES = (MANIFEST, "answers-*.safetensors")
"""Names of a cache's files; `*` is the number of a shard."""
# 128 bits: the chance that two of 10^12 samples share a hash is about 10^-15.
HASH_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Identity of a cache's answers; another key means other answers."""

    teacher: str
    """Hub id or directory as passed by the user; not compared."""
    weights: str
    """Commit of the Hub model, or a hash of the local weights."""
    tokenizer: str
    """Hash of the tokenizer."""
    template: str
    """Hash of the chat template; the hash of an empty one if none was used."""
    layout: RecordFormat


def sample_hash(token_ids: Sequence[int]) -> bytes:
    """Return the hash of a sample's token ids, by which it is looked up."""
    return hashlib.sha256(np.asarray(token_ids, dtype=np.int64).tobytes()).digest()[:HASH_BYTES]


def key_errors(stored: CacheKey, expected: CacheKey, directory: Path) -> list[ConfigError]:
    """Return the differences between a cache and the expected one."""
    errors, where = [], f"teacher cache {directory}"
    for name, meaning in {"weights": "teacher", "tokenizer": "tokenizer", "template": "chat template"}.items():
        actual, wanted = getattr(stored, name), getattr(expected, name)
        if actual != wanted:
            rule = f"was made with another {meaning} ({actual[:12]}, expected {wanted[:12]})"
            errors.append(ConfigError(where=where, rule=rule, fix="write a new cache"))
    if stored.layout.vocab_size != expected.layout.vocab_size:
        rule = f"has distributions over {stored.layout.vocab_size} tokens, expected {expected.layout.vocab_size}"
        errors.append(ConfigError(where=where, rule=rule))
    return errors


@dataclass(frozen=True, kw_only=True)
class CacheShard:
    """One file of records."""

    file: str
    rows: int
    samples: int
    file_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    schema_version: int
    key: CacheKey
    shards: tuple[CacheShard, ...]


def write_manifest(directory: Path, key: CacheKey, shards: Sequence[CacheShard]) -> None:
    """Write the list of a cache's files atomically.

    Raises:
        ShardwrightError: the file cannot be written.
    """
    content = {"schema_version": SCHEMA_VERSION, "key": asdict(key), "shards": [asdict(shard) for shard in shards]}
    write_files({MANIFEST: json.dumps(content, indent=1) + "\n"}, directory, force=True)


def read_manifest(directory: Path) -> tuple[CacheKey, list[CacheShard]]:
    """Return the key and the files of a cache.

    Raises:
        RefusedInputError: no manifest, another version of it, or files of other sizes.
    """
    where = f"teacher cache {directory}"
    try:
        content = (directory / MANIFEST).read_bytes()
        version = strict_json(content)["schema_version"]
        if version != SCHEMA_VERSION:
            rule = f"schema version {version}, this version reads {SCHEMA_VERSION}"
            raise RefusedInputError(ConfigError(where=where, rule=rule, fix="write the cache again"))
        manifest: _Manifest = TypeAdapter(_Manifest).validate_json(content, strict=True)
    except FileNotFoundError as error:
        rule = f"has no {MANIFEST}"
        fix = "write a cache with shardwright cache-teacher"
        raise RefusedInputError(ConfigError(where=where, rule=rule, fix=fix)) from error
    except RefusedInputError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        where, rule = f"{where}/{MANIFEST}", f"cannot be read: {' '.join(str(error).split())[:300]}"
        raise RefusedInputError(ConfigError(where=where, rule=rule, fix="write the cache again")) from error
    shards = list(manifest.shards)
    check_names(str(directory / MANIFEST), [shard.file for shard in shards])
    errors = []
    for shard in shards:
        path = directory / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size != shard.file_bytes:
            rule = f"must have {shard.file_bytes} bytes"
            errors.append(ConfigError(where=str(path), value=size, rule=rule, fix="write the cache again"))
    if errors:
        raise RefusedInputError(errors)
    return manifest.key, shards


class TeacherCache:
    """Stored answers of a teacher.

    Every position of every stored sample is a row, numbered over all files. Files are memory-mapped.
    """

    def __init__(self, directory: Path, key: CacheKey, shards: Sequence[CacheShard]) -> None:
        self.directory, self.key = directory, key
        self._records: list[Array] = []
        self._first_rows = [0]
        self._samples: dict[bytes, tuple[int, int]] = {}
        for shard in shards:
            arrays = _mapped(directory / shard.file, shard, key.layout)
            self._records.append(arrays["records"])
            for digest, start, length in zip(arrays["hashes"], arrays["starts"], arrays["lengths"], strict=True):
                self._samples[digest.tobytes()] = (self._first_rows[-1] + int(start), int(length))
            self._first_rows.append(self._first_rows[-1] + shard.rows)

    @classmethod
    def open(cls, directory: str | Path, expected: CacheKey | None = None) -> TeacherCache:
        """Open a cache; with a key, reject a cache of other answers.

        Raises:
            RefusedInputError: it is damaged, or of another teacher; names all differences.
        """
        path = Path(directory)
        key, shards = read_manifest(path)
        if expected is not None and (errors := key_errors(key, expected, path)):
            raise RefusedInputError(errors)
        return cls(path, key, shards)

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __reduce__(self) -> tuple[object, ...]:
        """Let other processes map the files themselves; pickled arrays would be sent in full."""
        return TeacherCache.open, (self.directory,)

    def __contains__(self, token_ids: Sequence[int]) -> bool:
        return sample_hash(token_ids) in self._samples

    def rows_of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the row of each position of a sample.

        Raises:
            UsageError: the sample was not stored.
        """
        rows = self._samples.get(sample_hash(token_ids))
        if rows is None:
            rule = f"has no sample of {len(token_ids)} tokens that starts with {list(token_ids[:8])}"
            fix = "cache the same data with the same --seq-len"
            raise UsageError(ConfigError(where=f"teacher cache {self.directory}", rule=rule, fix=fix))
        first, length = rows
        return list(range(first, first + length))

    def answers(self, rows: Sequence[int] | Array) -> CachedAnswers:
        """Return the answers of rows, in their order.

        Raises:
            UsageError: a row that does not exist.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self)):
            bad = int(rows.min()) if rows.min() < 0 else int(rows.max())
            rule = f"a labelled position has row {bad}, but the cache has 0 to {len(self) - 1}"
            fix = "wrap the dataset in CachedTeacherDataset"
            raise UsageError(ConfigError(where="teacher_rows", rule=rule, fix=fix))
        records = np.empty((len(rows), self.key.layout.record_bytes), dtype=np.uint8)
        owners = np.searchsorted(self._first_rows, rows, side="right") - 1
        for shard in np.unique(owners):
            in_shard = owners == shard
            records[in_shard] = self._records[shard][rows[in_shard] - self._first_rows[shard]]
        return decode(records, self.key.layout)

    def read(self, rows_N: torch.Tensor, temperature: float) -> TopKTargets:
        """Return the teacher's answers at rows, on the device of `rows_N`.

        Raises:
            UsageError: a row that does not exist, or a temperature that was not stored.
        """
        import torch

        answers = self.answers(rows_N.cpu().numpy())
        log_p_NK, log_tail_N = log_probabilities(answers, self.key.layout, temperature)
        return TopKTargets(
            ids_NK=torch.from_numpy(answers.ids_NK).to(rows_N.device),
            log_probabilities_NK=torch.from_numpy(log_p_NK).to(rows_N.device),
            tail_log_probability_N=torch.from_numpy(log_tail_N).to(rows_N.device),
            temperature=temperature,
        )

    def damaged_files(self) -> list[str]:
        """Return the files that were changed after they were written; reads all of them."""
        _, shards = read_manifest(self.directory)
        return [shard.file for shard in shards if file_sha256(self.directory / shard.file) != shard.sha256]


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


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mapped(path: Path, shard: CacheShard, layout: RecordFormat) -> dict[str, Array]:
    """Return the arrays of a file, memory-mapped and checked; safetensors' own reader would load full arrays."""
    where, fix = str(path), "write the cache again"
    kinds = {"U8": np.uint8, "I64": np.int64}
    arrays = {
        # An empty array cannot be mapped.
        name: np.memmap(path, dtype=kinds[tensor.dtype], mode="r", offset=tensor.first_byte, shape=tensor.shape)
        if tensor.elements
        else np.empty(tensor.shape, dtype=kinds[tensor.dtype])
        for name, tensor in read_header(path).tensors.items()
        if tensor.dtype in kinds
    }
    if missing := sorted({"records", "hashes", "starts", "lengths"} - arrays.keys()):
        raise RefusedInputError(ConfigError(where=where, value=missing, rule="arrays are missing", fix=fix))
    samples = (shard.samples,)
    expected = {
        "records": (np.uint8, (shard.rows, layout.record_bytes)),
        "hashes": (np.uint8, (*samples, *arrays["hashes"].shape[1:])),
        "starts": (np.int64, samples),
        "lengths": (np.int64, samples),
    }
    errors = []
    for name, (kind, shape) in expected.items():
        array = arrays[name]
        if array.dtype != kind or array.shape != shape:
            rule = f"is {array.dtype} of shape {list(array.shape)}, expected {np.dtype(kind)} of shape {list(shape)}"
            errors.append(ConfigError(where=where, value=name, rule=rule, fix=fix))
    if not errors:
        starts, lengths = arrays["starts"], arrays["lengths"]
        outside = (starts < 0) | (lengths < 0) | (lengths > shard.rows) | (starts > shard.rows - lengths)
        if outside.any():
            rule = f"{int(outside.sum())} samples have rows that do not exist"
            errors.append(ConfigError(where=where, rule=rule, fix=fix))
    if errors:
        raise RefusedInputError(errors)
    return arrays
