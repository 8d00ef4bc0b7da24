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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from ....ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ....plugins.safetensors import load_tensors, read_header

if TYPE_CHECKING:
    import torch

    from ...losses.objective import TopKTargets

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

        from ...losses.objective import TopKTargets

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
    """Return the key of a file whose tensors have the shapes that it requires.

    Raises:
        RefusedInputError: the file is damaged.
    """
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
