"""Parse and format byte sizes and parameter counts."""

from __future__ import annotations

import re
from fractions import Fraction

from .errors import ConfigError, UsageError

_FACTORS: dict[str, int] = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 10**3), ("ib", 2**10))
}
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_LARGEST_BYTES = 10**18


def parse_bytes(text: str, *, where: str = "size") -> int:
    """Return a size in bytes; `80GB` is 80·10⁹ and `80GiB` is 80·2³⁰.

    >>> parse_bytes("1.5GiB")
    1610612736

    Raises:
        UsageError: The text is not a number with a unit B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB or PiB.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(
            ConfigError(where=where, value=text, rule="must be a size with a unit", fix="for example 80GB or 80GiB")
        )
    value = round(Fraction(match[1]) * factor)
    if value > _LARGEST_BYTES:
        raise UsageError(ConfigError(where=where, value=text, rule="must be at most 1 EB", fix="reduce it"))
    return value


def exact_bytes(count: int) -> str:
    """Return a size that `parse_bytes` reads as exactly this count.

    >>> exact_bytes(2 * 10**12), exact_bytes(3 * 2**30), exact_bytes(7)
    ('2TB', '3GiB', '7B')
    """
    units = [(10**12, "TB"), (2**40, "TiB"), (10**9, "GB"), (2**30, "GiB"), (10**6, "MB"), (2**20, "MiB")]
    return next((f"{count // size}{unit}" for size, unit in units if count and count % size == 0), f"{count}B")


_TOKENS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([kKmM])", re.ASCII)


def token_count(text: str) -> str:
    """Return the tokens of a text such as `16k` in digits, other texts unchanged; lengths are counted in powers of two.

    >>> [token_count(text) for text in ("16k", "1M", "1.5K", "0.3k", "512")]
    ['16384', '1048576', '1536', '0.3k', '512']
    """
    if match := _TOKENS.fullmatch(text.strip()):
        count = Fraction(match[1]) * (2**10 if match[2] in "kK" else 2**20)
        return str(count) if count.denominator == 1 else text
    return text


def gigabytes(count: float) -> str:
    """Return `count` bytes in GB (10⁹) with one decimal, or three below 1 GB.

    >>> gigabytes(96_234_000_000)
    '96.2'
    """
    value = count / 10**9
    return f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def human_count(count: int) -> str:
    """Return a parameter count with a unit.

    >>> human_count(8_030_261_248)
    '8.03 B'
    """
    for factor, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return str(count)


ROUNDED_PINNED_MB = 64
"""Largest pinned block that torch rounds up, and keeps when it is freed, as launches set; larger ones are exact."""


def pinned_block_bytes(count: int, *, rounded_mb: float = ROUNDED_PINNED_MB) -> int:
    """Return the bytes of a pinned block: the next power of two up to a size (`CachingHostAllocator` of torch 2.13).

    >>> pinned_block_bytes(3 * 2**20) == 4 * 2**20
    True
    >>> pinned_block_bytes(3 * 2**30) == 3 * 2**30
    True
    """
    if count > rounded_mb * 2**20:
        return count
    return 1 << (count - 1).bit_length() if count > 0 else 0
