"""`TeacherCache`: a teacher's stored answers, read at random by row, whatever layout trains the student."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from ....ds_configs.plan.write import write_files
from ....ds_configs.specs.errors import Fault, RefusedInputError, UsageError
from ....ds_configs.specs.json_text import strict_json
from ....plugins.safetensors.reading import check_names, read_header
from ...losses.objective import TopKTargets
from .cache_format import CachedAnswers, RecordFormat, decode, log_probabilities

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
OWN_FILES = (MANIFEST, "answers-*.safetensors")
"""Of a cache; `*` stands for the number of a shard."""
# 128 bits: the chance that two of 10^12 samples share a hash is about 10^-15.
HASH_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Teacher and samples of a cache's answers; another key means other answers."""

    teacher: str
    """Hub id or directory, as it was given; for people, it is not compared."""
    weights: str
    """Commit of the Hub model, or a hash of the local weights."""
    tokenizer: str
    """Hash of the tokenizer."""
    template: str
    """Hash of the chat template; that of an empty one where text was not rendered by one."""
    layout: RecordFormat
    """What each record holds."""


def sample_hash(token_ids: Sequence[int]) -> bytes:
    """Return what a sample is found by: a hash of its token ids."""
    return hashlib.sha256(np.asarray(token_ids, dtype=np.int64).tobytes()).digest()[:HASH_BYTES]


def key_faults(found: CacheKey, expected: CacheKey, directory: Path) -> list[Fault]:
    """Return each way in which a cache is not the expected one."""
    faults = []
    meanings = {"weights": "teacher", "tokenizer": "tokenizer", "template": "chat template"}
    for name, meaning in meanings.items():
        own, wanted = getattr(found, name), getattr(expected, name)
        if own != wanted:
            rule = f"was made with another {meaning} ({own[:12]}, expected {wanted[:12]})"
            faults.append(Fault(where=f"teacher cache {directory}", rule=rule, fix="write a cache for this one"))
    if found.layout.vocab_size != expected.layout.vocab_size:
        rule = f"is about {found.layout.vocab_size} tokens, expected {expected.layout.vocab_size}"
        faults.append(Fault(where=f"teacher cache {directory}", rule=rule))
    return faults


@dataclass(frozen=True, kw_only=True)
class CacheShard:
    """One file of records."""

    file: str
    """Name inside the cache's directory."""
    rows: int
    """Records in it."""
    samples: int
    """Samples in it."""
    file_bytes: int
    """Size of the whole file."""
    sha256: str
    """Of the whole file."""


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """Contents of `manifest.json`."""

    schema_version: int
    key: CacheKey
    shards: tuple[CacheShard, ...]


def write_manifest(directory: Path, key: CacheKey, shards: Sequence[CacheShard]) -> None:
    """Write what the cache holds, under a temporary name first.

    Raises:
        ShardwrightError: the system refuses to write.
    """
    content = {"schema_version": SCHEMA_VERSION, "key": asdict(key), "shards": [asdict(shard) for shard in shards]}
    write_files({MANIFEST: json.dumps(content, indent=1) + "\n"}, directory, force=True)


def read_manifest(directory: Path) -> tuple[CacheKey, list[CacheShard]]:
    """Return whose answers a directory holds, and its files.

    Raises:
        RefusedInputError: no manifest, another version of it, or files that are not as it says.
    """
    where = f"teacher cache {directory}"
    try:
        content = (directory / MANIFEST).read_bytes()
        version = strict_json(content)["schema_version"]
        if version != SCHEMA_VERSION:
            rule = f"schema version {version}, this version reads {SCHEMA_VERSION}"
            raise RefusedInputError(Fault(where=where, rule=rule, fix="write it again"))
        manifest: _Manifest = TypeAdapter(_Manifest).validate_json(content, strict=True)
        key, shards = manifest.key, list(manifest.shards)
    except FileNotFoundError as error:
        rule = f"has no {MANIFEST}"
        raise RefusedInputError(
            Fault(where=where, rule=rule, fix="write one with shardwright cache-teacher")
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, RefusedInputError):
            raise
        rule = f"cannot be read: {' '.join(str(error).split())[:300]}"
        raise RefusedInputError(Fault(where=f"{where}/{MANIFEST}", rule=rule, fix="write the cache again")) from error
    check_names(str(directory / MANIFEST), [shard.file for shard in shards])
    faults = []
    for shard in shards:
        path = directory / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size != shard.file_bytes:
            rule = f"must have {shard.file_bytes} bytes"
            faults.append(Fault(where=str(path), value=size, rule=rule, fix="write the cache again"))
    if faults:
        raise RefusedInputError(faults)
    return key, shards


class TeacherCache:
    """The stored answers of one teacher.

    Every position of every stored sample is a row; rows are numbered through all files. Files are mapped, not read.
    """

    def __init__(self, directory: Path, key: CacheKey, shards: Sequence[CacheShard]) -> None:
        self.directory, self.key = directory, key
        self._records: list[Any] = []
        self._first_rows = [0]
        self._samples: dict[bytes, tuple[int, int]] = {}
        for shard in shards:
            arrays = _mapped(directory / shard.file)
            if faults := _array_faults(arrays, shard, key.layout, str(directory / shard.file)):
                raise RefusedInputError(faults)
            self._records.append(arrays["records"])
            for digest, start, length in zip(arrays["hashes"], arrays["starts"], arrays["lengths"], strict=True):
                self._samples[digest.tobytes()] = (self._first_rows[-1] + int(start), int(length))
            self._first_rows.append(self._first_rows[-1] + shard.rows)

    @classmethod
    def open(cls, directory: str | Path, expected: CacheKey | None = None) -> TeacherCache:
        """Open a cache; with a key, refuse one that holds other answers.

        Raises:
            RefusedInputError: it is damaged, or another teacher's; every mismatch is named.
        """
        path = Path(directory)
        key, shards = read_manifest(path)
        faults = key_faults(key, expected, path) if expected is not None else []
        if faults:
            raise RefusedInputError(faults)
        return cls(path, key, shards)

    def __len__(self) -> int:
        return self._first_rows[-1]

    def __reduce__(self) -> tuple[Any, ...]:
        """Processes that get a copy map the files themselves; mapped arrays would be sent whole."""
        return TeacherCache.open, (self.directory,)

    def __contains__(self, token_ids: Sequence[int]) -> bool:
        return sample_hash(token_ids) in self._samples

    def rows_of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the row of each position of a sample.

        Raises:
            UsageError: the sample was not stored.
        """
        found = self._samples.get(sample_hash(token_ids))
        if found is None:
            rule = f"holds no sample that begins with {list(token_ids[:8])} and has {len(token_ids)} tokens"
            fix = "cache the same data with the same --seq-len"
            raise UsageError(Fault(where=f"teacher cache {self.directory}", rule=rule, fix=fix))
        first, length = found
        return list(range(first, first + length))

    def answers(self, rows: Any) -> CachedAnswers:
        """Return what rows hold, in their order.

        Raises:
            UsageError: a row that is not there.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self)):
            bad = int(rows.min()) if rows.min() < 0 else int(rows.max())
            rule = f"a labelled position has row {bad}, the cache has 0 to {len(self) - 1}"
            raise UsageError(Fault(where="teacher_rows", rule=rule, fix="wrap the dataset in CachedTeacherDataset"))
        records = np.empty((len(rows), self.key.layout.record_bytes), dtype=np.uint8)
        owners = np.searchsorted(self._first_rows, rows, side="right") - 1
        for shard in np.unique(owners):
            mine = owners == shard
            records[mine] = self._records[shard][rows[mine] - self._first_rows[shard]]
        return decode(records, self.key.layout)

    def read(self, rows_N: torch.Tensor, temperature: float) -> TopKTargets:
        """Return the teacher's answers at rows, on the device of `rows_N`.

        Raises:
            UsageError: a row that is not there, or a temperature that was not stored.
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
        """Return the files whose content is not what was written; reads all of them."""
        _, shards = read_manifest(self.directory)
        return [shard.file for shard in shards if file_sha256(self.directory / shard.file) != shard.sha256]


class CachedTeacherDataset:
    """A dataset whose samples carry the rows of their teacher's answers, as `teacher_rows`."""

    def __init__(self, dataset: Any, cache: TeacherCache) -> None:
        self._dataset, self._cache = dataset, cache

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self._dataset[index]
        ids = sample["input_ids"]
        return {**sample, "teacher_rows": self._cache.rows_of(ids.tolist() if hasattr(ids, "tolist") else ids)}


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _array_faults(arrays: Mapping[str, Any], shard: CacheShard, layout: RecordFormat, where: str) -> list[Fault]:
    """Return which arrays of a file are not as the manifest says, or name rows that it does not have."""
    samples = (shard.samples,)
    expected = {
        "records": (np.uint8, (shard.rows, layout.record_bytes)),
        "hashes": (np.uint8, (*samples, *arrays["hashes"].shape[1:])),
        "starts": (np.int64, samples),
        "lengths": (np.int64, samples),
    }
    faults = [
        Fault(where=where, value=name, rule=f"is {array.dtype} of shape {list(array.shape)}", fix=f"expected {wanted}")
        for name, (kind, shape) in expected.items()
        if (array := arrays[name]).dtype != kind or array.shape != shape
        for wanted in [f"{np.dtype(kind)} of shape {list(shape)}; write the cache again"]
    ]
    if not faults:
        starts, lengths = arrays["starts"], arrays["lengths"]
        outside = (starts < 0) | (lengths < 0) | (lengths > shard.rows) | (starts > shard.rows - lengths)
        if outside.any():
            rule = f"{int(outside.sum())} samples have rows that are not there"
            faults = [Fault(where=where, rule=rule, fix="write the cache again")]
    return faults


def _mapped(path: Path) -> dict[str, Any]:
    """Return the arrays of a file, mapped into memory; safetensors' own reader loads a whole array at once."""
    kinds = {"U8": np.uint8, "I64": np.int64}
    arrays = {
        # An array without elements cannot be mapped.
        name: np.memmap(path, dtype=kinds[tensor.dtype], mode="r", offset=tensor.first_byte, shape=tensor.shape)
        if tensor.elements
        else np.empty(tensor.shape, dtype=kinds[tensor.dtype])
        for name, tensor in read_header(path).tensors.items()
        if tensor.dtype in kinds
    }
    if missing := sorted({"records", "hashes", "starts", "lengths"} - arrays.keys()):
        raise RefusedInputError(Fault(where=str(path), value=missing, rule="holds none", fix="write the cache again"))
    return arrays
