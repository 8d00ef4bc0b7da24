"""Record format: a teacher's answer to one token, its K likeliest tokens and the mass of all others, in fixed bytes.

A record has, for K ids out of V and each temperature:

    ids         a sorted set, Elias-Fano coded (Elias 1974; Fano 1971): the low bits of each, and the high parts as a
                bit vector with one bit for each id
    depths      the largest log-probability minus each, `value_bits` each: range · (code / codes)²
    range       fp16
    per τ       fp16 log of the mass r of all other tokens

The log-sum-exp of (z - max z) / τ follows: it is ``log Σ_K exp(-depth / τ) - log(1 - r)``, so it is not stored.
50 of 151,936 ids take 675 bits, depths 300, one temperature 4 bytes with the range: 126 bytes. The square gives the
large probabilities the most precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....ds_configs.specs.errors import ConfigError, UsageError

Array = np.ndarray[Any, Any]
Records = np.ndarray[Any, np.dtype[np.uint8]]

LARGEST_RANGE = 60.0
"""Upper limit of depths: 1 + exp(-60) is 1 in fp32."""


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """Layout of records; equal formats read each other's records.

    Raises:
        UsageError: invalid sizes; all errors together.
    """

    top_k: int
    vocab_size: int
    temperatures: tuple[float, ...]
    """Temperatures at which the answers can be read."""
    value_bits: int = 6

    def __post_init__(self) -> None:
        positive = bool(self.temperatures) and all(0 < temperature < float("inf") for temperature in self.temperatures)
        distinct = len(set(self.temperatures)) == len(self.temperatures)
        rules = {
            "vocab_size": (2 <= self.vocab_size < 2**31, "must be from 2 to 2^31 - 1"),
            "top_k": (1 <= self.top_k <= self.vocab_size, "must be from 1 to the size of the vocabulary"),
            "value_bits": (2 <= self.value_bits <= 16, "must be from 2 to 16"),
            "temperatures": (positive and distinct, "must be one or more values above 0, each once"),
        }
        errors = [
            ConfigError(where=name, value=getattr(self, name), rule=rule)
            for name, (holds, rule) in rules.items()
            if not holds
        ]
        if errors:
            raise UsageError(errors)

    @property
    def low_bits(self) -> int:
        """Low bits of each id: ⌊log2(V / K)⌋."""
        return max(0, (self.vocab_size // self.top_k).bit_length() - 1)

    @property
    def high_bits(self) -> int:
        """Length of the bit vector of high parts: one bit for each id and for each step of the high part."""
        return self.top_k + (self.vocab_size >> self.low_bits) + 1

    @property
    def packed_bytes(self) -> int:
        return -(-(self.top_k * (self.low_bits + self.value_bits) + self.high_bits) // 8)

    @property
    def record_bytes(self) -> int:
        return self.packed_bytes + 2 + 2 * len(self.temperatures)


@dataclass(frozen=True, kw_only=True)
class CachedAnswers:
    """Answers of a teacher to N tokens, before or after coding."""

    ids_NK: Array
    """int64, ascending in each row."""
    depths_NK: Array
    """fp32, the largest log-probability minus each."""
    log_tail_NT: Array
    """fp32 log of the mass outside the K ids, for each temperature; -inf without other tokens."""


def encode(answers: CachedAnswers, layout: RecordFormat) -> Records:
    """Return records, uint8 [N, record_bytes]."""
    ids, depths = np.asarray(answers.ids_NK, dtype=np.int64), np.asarray(answers.depths_NK, dtype=np.float32)
    rows = len(ids)
    depths = np.minimum(depths, LARGEST_RANGE)
    spread = depths.max(axis=1).astype(np.float16)
    # fp16 may round down, and then the largest depth would have no code.
    spread = np.where(spread.astype(np.float32) < depths.max(axis=1), np.nextafter(spread, np.float16(np.inf)), spread)
    high = np.zeros((rows, layout.high_bits), dtype=np.uint8)
    positions = (ids >> layout.low_bits) + np.arange(layout.top_k)
    high[np.arange(rows)[:, None], positions] = 1
    largest_code = 2**layout.value_bits - 1
    share = depths / np.maximum(spread.astype(np.float32), np.float32(1e-8))[:, None]
    codes = np.rint(largest_code * np.sqrt(np.minimum(share, 1.0))).astype(np.int64)
    bits = [_bits(ids & ((1 << layout.low_bits) - 1), layout.low_bits), high, _bits(codes, layout.value_bits)]
    packed = np.packbits(np.concatenate(bits, axis=1), axis=1)
    tail = np.asarray(answers.log_tail_NT, dtype=np.float32).astype(np.float16)
    numbers = np.concatenate([spread.astype(np.float16)[:, None], tail], axis=1)
    return np.concatenate([packed, np.ascontiguousarray(numbers).view(np.uint8)], axis=1)


def decode(records: Records, layout: RecordFormat) -> CachedAnswers:
    """Return the contents of records.

    Raises:
        UsageError: damaged records.
    """
    k, low_end = layout.top_k, layout.top_k * layout.low_bits
    # Positions of the K ones of the bit vector in every record, int64 [N, K].
    first_byte, skipped = divmod(low_end, 8)
    covering = np.ascontiguousarray(records[:, first_byte : -(-(low_end + layout.high_bits) // 8)])
    bits = np.ascontiguousarray(np.unpackbits(covering, axis=1)[:, skipped : skipped + layout.high_bits])
    ones = np.flatnonzero(bits)
    if len(ones) != len(records) * k:
        raise _damaged()
    positions = ones.reshape(len(records), k) - layout.high_bits * np.arange(len(records))[:, None]
    if (positions[:, 0] < 0).any() or (positions[:, -1] >= layout.high_bits).any():
        raise _damaged()
    ids = ((positions - np.arange(k)) << layout.low_bits) | _numbers(records, 0, k, layout.low_bits)
    if (ids[:, -1] >= layout.vocab_size).any():
        raise _damaged()
    codes = _numbers(records, low_end + layout.high_bits, k, layout.value_bits)
    numbers = np.ascontiguousarray(records[:, layout.packed_bytes :]).view(np.float16).astype(np.float32)
    share = codes.astype(np.float32) / np.float32(2**layout.value_bits - 1)
    return CachedAnswers(ids_NK=ids, depths_NK=numbers[:, :1] * share**2, log_tail_NT=numbers[:, 1:])


def log_probabilities(answers: CachedAnswers, layout: RecordFormat, temperature: float) -> tuple[Array, Array]:
    """Return log-probabilities [N, K] of the ids and of all others [N] at a stored temperature.

    The K are normalised, so that they and the others add up to one in spite of rounding.

    Raises:
        UsageError: the temperature was not stored.
    """
    if temperature not in layout.temperatures:
        rule = f"the cache has {', '.join(map(str, layout.temperatures))}"
        fix = "use one of them, or write the cache again"
        raise UsageError(ConfigError(where="temperature", value=temperature, rule=rule, fix=fix))
    index = layout.temperatures.index(temperature)
    log_p = -answers.depths_NK / np.float32(temperature)
    log_tail = answers.log_tail_NT[:, index]
    if layout.top_k == layout.vocab_size:
        log_tail = np.full_like(log_tail, -np.inf)
    log_kept = np.log(np.maximum(-np.expm1(np.minimum(log_tail, 0.0)), np.float32(1e-7)))
    largest = log_p.max(axis=1, keepdims=True)
    log_sum = largest[:, 0] + np.log(np.exp(log_p - largest).sum(axis=1))
    log_p = log_p + (log_kept - log_sum)[:, None]
    return log_p.astype(np.float32), log_tail.astype(np.float32)


def _bits(numbers: Array, width: int) -> Array:
    shifts = np.arange(width - 1, -1, -1)
    return ((numbers[:, :, None] >> shifts) & 1).astype(np.uint8).reshape(len(numbers), -1)


def _numbers(records: Array, first_bit: int, count: int, width: int) -> Array:
    """Return `count` numbers of `width` bits that start at a bit of every record, int64 [N, count]."""
    starts = first_bit + width * np.arange(count)
    read_bytes = -(-(7 + width) // 8)
    # The bytes of the last number may reach beyond the record; the extra bits are shifted out.
    last_byte = records.shape[1] - 1
    numbers = np.zeros((len(records), count), dtype=np.int64)
    for offset in range(read_bytes):
        numbers <<= 8
        numbers |= records[:, np.minimum((starts >> 3) + offset, last_byte)]
    numbers >>= 8 * read_bytes - width - (starts & 7)
    numbers &= (1 << width) - 1
    return numbers


def _damaged() -> UsageError:
    return UsageError(ConfigError(where="teacher cache", rule="has damaged records", fix="write the cache again"))
