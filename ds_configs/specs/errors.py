"""Errors for users: each names a value, the rule that it violates and the fix, and has an exit code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class ShardwrightError(ValueError):
    """A known error. The command line prints one line per error instead of a traceback."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigError:
    """One violated rule."""

    where: str
    """The field, key path or `file:line` that holds the value."""
    value: object = None
    """The offending value; `None` if something is missing."""
    rule: str
    """What is allowed, as a statement or an equation."""
    fix: str = ""
    """What to write instead; empty if the rule says it."""

    def __str__(self) -> str:
        shown = ""
        if self.value is not None:
            try:
                shown = repr(self.value)
            except ValueError:
                # Python 3.11 does not print integers of more than 4,300 digits.
                shown = "a number of thousands of digits"
            # Long paths usually differ at the end, so both ends are shown.
            shown = f" = {shown if len(shown) <= 80 else f'{shown[:38]}...{shown[-38:]}'}"
        return f"{self.where}{shown}: {self.rule}" + (f"; {self.fix}" if self.fix else "")


class InputError(ShardwrightError):
    """One or more errors in the user's input, reported together."""

    exit_code = 2

    def __init__(self, errors: Sequence[ConfigError] | ConfigError) -> None:
        self.errors: tuple[ConfigError, ...] = (errors,) if isinstance(errors, ConfigError) else tuple(errors)
        assert self.errors, "InputError needs at least one error"
        super().__init__("\n".join(str(error) for error in self.errors))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[ConfigError, ...]]]:
        """Pickle the errors, not their text, so that another rank gets them."""
        return type(self), (self.errors,)


class UsageError(InputError):
    """Bad flags, files or combinations (exit code 2)."""


class DoesNotFitError(ShardwrightError):
    """No legal layout fits the hardware (exit code 3)."""

    exit_code = 3


class RefusedInputError(InputError):
    """Input that is corrupt, absurd or unsafe to use (exit code 4)."""

    exit_code = 4


@contextmanager
def collecting(errors: list[ConfigError]) -> Iterator[None]:
    """Add the errors of a step to `errors`, so that later steps can report theirs too.

    Unsafe or corrupt input is raised immediately, with its own exit code. Any other error is replaced by the errors
    that are already known.
    """
    try:
        yield
    except UsageError as error:
        errors += error.errors
    except RefusedInputError:
        raise
    except ShardwrightError:
        if errors:
            raise UsageError(errors) from None
        raise


_COUNT = re.compile(r"([0-9]{1,9})[kK]")


def count_fix(name: str, value: object) -> str:
    """Return the fix of a count such as `2k`, of tokens in a sequence in powers of two; empty for other values.

    >>> count_fix("seq_len", "2k"), count_fix("max_steps", "2k"), count_fix("seq_len", "x")
    ('write 2048', 'write 2000', '')
    """
    match = _COUNT.fullmatch(value) if isinstance(value, str) else None
    return f"write {int(match[1]) * (1024 if name == 'seq_len' else 1000)}" if match else ""


def not_a_count(name: str, value: object) -> ConfigError | None:
    """Return the error of a value that is no integer, for arguments that pydantic does not check."""
    if isinstance(value, int) and not isinstance(value, bool):
        return None
    return ConfigError(where=name, value=value, rule="must be an integer", fix=count_fix(name, value))


def nearest_divisors(number: int, value: int) -> str:
    """Return the divisors of `number` on both sides of `value`, as text."""
    divisors = [candidate for candidate in range(1, min(number, 100_000) + 1) if number % candidate == 0]
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d > value][:1]
    return ", ".join(map(str, below + above))


def nearest(legal: Iterable[int], value: int) -> str:
    """Return the fix that lists the legal values on both sides of `value`.

    >>> nearest((1, 2, 4, 8), 3), nearest((1, 2, 4), 8)
    ('nearest legal values: 2, 4', 'nearest legal value: 4')
    """
    ordered = sorted(legal)
    neighbors = [n for n in ordered if n <= value][-1:] + [n for n in ordered if n > value][:1]
    plural = "s" if len(neighbors) > 1 else ""
    return f"nearest legal value{plural}: {', '.join(map(str, neighbors))}" if neighbors else ""


def divides(where: str, value: int, number: int, what: str) -> ConfigError | None:
    """Return the error of a `value` that does not divide `number`, with the nearest divisors."""
    if value >= 1 and number % value == 0:
        return None
    return ConfigError(
        where=where,
        value=value,
        rule=f"must divide {what} ({number} % {value} = {number % value if value else number})",
        fix=f"nearest legal values: {nearest_divisors(number, value)}",
    )
