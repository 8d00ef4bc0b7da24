"""Errors that users meet: each names a value, the rule it breaks and the way out, and carries an exit code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class ShardwrightError(ValueError):
    """A failure that is not a bug of Shardwright; the command line prints it as one line per fault."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One violated rule."""

    where: str
    """The field, key path or `file:line` that holds the value."""
    value: object = None
    """The offending value; `None` when something is missing."""
    rule: str
    """What must hold, as a statement or an equation."""
    fix: str = ""
    """What to write instead; empty when the rule already says it."""

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {_abbreviate(self.value)}"
        return f"{self.where}{shown}: {self.rule}" + (f"; {self.fix}" if self.fix else "")


def _abbreviate(value: object, longest: int = 80) -> str:
    """Keep both ends: what tells two long paths apart mostly stands at the end."""
    try:
        text = repr(value)
    except ValueError:
        # Python 3.11 writes no integer of more than 4,300 digits.
        text = "a number of thousands of digits"
    kept = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:kept]}...{text[-kept:]}"


class FaultsError(ShardwrightError):
    """One or more faults in what the user gave, reported together."""

    exit_code = 2

    def __init__(self, faults: Sequence[Fault] | Fault) -> None:
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else tuple(faults)
        assert self.faults, "FaultsError needs at least one fault"
        super().__init__("\n".join(str(fault) for fault in self.faults))

    def __reduce__(self) -> tuple[type[FaultsError], tuple[tuple[Fault, ...]]]:
        """Carry the faults to another rank, not the text that was made of them."""
        return type(self), (self.faults,)


class UsageError(FaultsError):
    """Bad flags, files or combinations (exit code 2)."""


class DoesNotFitError(ShardwrightError):
    """No legal strategy fits the hardware (exit code 3)."""

    exit_code = 3


class RefusedInputError(FaultsError):
    """Input that is corrupt, absurd or unsafe to use (exit code 4)."""

    exit_code = 4


@contextmanager
def collecting(faults: list[Fault]) -> Iterator[None]:
    """Keep the faults of a step, so that later steps report theirs too; other errors come after known faults.

    Input that is refused as unsafe or corrupt is told at once, with its own exit code.
    """
    try:
        yield
    except UsageError as error:
        faults += error.faults
    except RefusedInputError:
        raise
    except ShardwrightError:
        if faults:
            raise UsageError(faults) from None
        raise
