"""Distribution of batches over ranks, with results combined in the order of the batches.

Each batch has the same samples as in one process, and its result goes unchanged to the first rank, so that everything
computed there is bit-identical.
"""

from __future__ import annotations

import os
import socket
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from ...ds_configs.specs.errors import ConfigError, UsageError
from .settings import RankTask

_LONGEST_WAIT = timedelta(days=30)
"""How long ranks wait for a first rank that runs tasks; they end immediately if a rank dies."""

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Position of this rank among those that share the batches."""

    rank: int = 0
    ranks: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank receives the results."""
        return self.rank == 0

    @property
    def is_first_here(self) -> bool:
        """Whether this is the first rank of its machine."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def indices(self, count: int) -> range:
        """Return the indices of this rank's batches.

        >>> list(Share(rank=1, ranks=3).indices(8))
        [1, 4, 7]
        """
        return range(self.rank, count, self.ranks)

    def gathered(self, mine: Sequence[Value]) -> list[Value] | None:
        """Return the results of all ranks in the order of the batches; `None` on other ranks than the first."""
        if self.ranks == 1:
            return list(mine)
        from torch import distributed

        parts: list[Any] | None = [None] * self.ranks if self.is_first else None
        distributed.gather_object(list(mine), parts)
        return None if parts is None else in_order_of_batches(parts)

    def by_rank(self, mine: Value) -> list[Value]:
        """Return the values of all ranks."""
        if self.ranks == 1:
            return [mine]
        from torch import distributed

        values: list[Any] = [None] * self.ranks
        distributed.all_gather_object(values, mine)
        return values

    def from_first(self, compute: Callable[[], Value]) -> Value:
        """Compute a value on the first rank and return it on every rank."""
        if self.ranks == 1:
            return compute()
        from torch import distributed

        values: list[Any] = [compute() if self.is_first else None]
        distributed.broadcast_object_list(values)
        value: Value = values[0]
        return value

    def wait(self) -> None:
        """Wait for all ranks."""
        self.by_rank(None)

    def check_same(self, parts: Mapping[str, Any]) -> None:
        """Check that all ranks have equal parts; a rank may omit parts that another rank of its host has.

        Raises:
            UsageError: parts differ; names the host and the parts.
        """
        host = socket.gethostname()
        parts_by_rank = self.by_rank((host, dict(parts)))
        first_host, expected = parts_by_rank[0]
        errors = []
        for rank, (name, own_parts) in enumerate(parts_by_rank):
            other = [part for part, value in own_parts.items() if expected.get(part) != value]
            if other:
                rule = f"rank {rank} on {name} and rank 0 on {first_host} differ in: {', '.join(other)}"
                errors.append(ConfigError(where="ranks", rule=rule, fix="use the same files and versions everywhere"))
        if errors:
            raise UsageError(errors)


ALONE = Share()
"""The share of a single process."""


def in_order_of_batches(parts: Sequence[Sequence[Value]]) -> list[Value]:
    """Return the ranks' results, distributed as in `Share.indices`, in the order of the batches.

    >>> in_order_of_batches([["a", "d"], ["b", "e"], ["c"]])
    ['a', 'b', 'c', 'd', 'e']
    """
    ranks = len(parts)
    return [parts[index % ranks][index // ranks] for index in range(sum(map(len, parts)))]


class ShareTask(RankTask):
    """Task of ranks that share batches."""

    content: dict[str, Any]
    """The job as JSON values."""

    def run(self, work: Path) -> None:
        """Connect the ranks, do this rank's share, and wait for the others."""
        import torch
        from torch import distributed

        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Results are host objects on any device.
        distributed.init_process_group("gloo", timeout=_LONGEST_WAIT)
        share = Share(rank=distributed.get_rank(), ranks=distributed.get_world_size())
        self.do_share(share, work)
        # A rank that leaves while others communicate makes gloo abort them.
        share.wait()
        distributed.destroy_process_group()

    @abstractmethod
    def do_share(self, share: Share, work: Path) -> None:
        """Do this rank's share of `content`."""
