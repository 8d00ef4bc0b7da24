"""Share of one rank in batches that are divided among ranks, and results that are put together in the batches' order.

Ranks get whole batches, in the same composition as one process reads them, and what each found of a batch goes to the
first rank as it is, so that whatever is computed from it there is the same to the last bit.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from ...ds_configs.specs.errors import Fault, UsageError
from ...plugins.launching.elastic import recorded

JOB_FILE = "job.json"
WORK = "shardwright-work: "
"""Begins a line of the first rank that tells how far it is: what, how much of it, and how much there is, as JSON."""
_LONGEST_WAIT = timedelta(days=30)
"""How long ranks wait for one another, as they do for a first rank that runs tasks; one that dies ends them at once."""

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Place of this rank among those that divide the batches."""

    rank: int = 0
    """Its number."""
    ranks: int = 1
    """How many there are."""

    @property
    def is_first(self) -> bool:
        """Whether results come together here."""
        return self.rank == 0

    @property
    def is_first_here(self) -> bool:
        """Whether this is the first rank of its machine."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def indices(self, count: int) -> range:
        """Return which of so many batches are this rank's.

        >>> list(Share(rank=1, ranks=3).indices(8))
        [1, 4, 7]
        """
        return range(self.rank, count, self.ranks)

    def gathered(self, mine: Sequence[Value]) -> list[Value] | None:
        """Return what all ranks found of their batches, in the batches' order; `None` beside the first rank."""
        if self.ranks == 1:
            return list(mine)
        from torch import distributed

        parts: list[Any] | None = [None] * self.ranks if self.is_first else None
        distributed.gather_object(list(mine), parts)
        return None if parts is None else in_order_of_batches(parts)

    def all_gathered(self, mine: Sequence[Value]) -> list[Value]:
        """Return what all ranks found of their batches, in the batches' order, on every rank."""
        return in_order_of_batches(self.told(list(mine)))

    def told(self, mine: Value) -> list[Value]:
        """Return what each rank says, by rank."""
        if self.ranks == 1:
            return [mine]
        from torch import distributed

        answers: list[Any] = [None] * self.ranks
        distributed.all_gather_object(answers, mine)
        return answers

    def from_first(self, find: Callable[[], Value]) -> Value:
        """Return what the first rank finds."""
        if self.ranks == 1:
            return find()
        from torch import distributed

        answer: list[Any] = [find() if self.is_first else None]
        distributed.broadcast_object_list(answer)
        found: Value = answer[0]
        return found

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.told(None)

    def check_same(self, parts: Mapping[str, Any]) -> None:
        """Check that all ranks do the same work, told by its parts; a rank may leave out what another of its host says.

        Raises:
            UsageError: some do not; names the host and the parts.
        """
        host = socket.gethostname()
        told = self.told((host, dict(parts)))
        first_host, expected = told[0]
        faults = []
        for rank, (name, found) in enumerate(told):
            other = [part for part, value in found.items() if expected.get(part) != value]
            if other:
                rule = f"rank {rank} on {name} has other {', '.join(other)} than rank 0 on {first_host}"
                faults.append(Fault(where="ranks", rule=rule, fix="give all machines the same files and versions"))
        if faults:
            raise UsageError(faults)


ALONE = Share()
"""The share of a process that does everything."""


def in_order_of_batches(parts: Sequence[Sequence[Value]]) -> list[Value]:
    """Return what ranks found of the batches that `Share.indices` gave them, in the batches' order.

    >>> in_order_of_batches([["a", "d"], ["b", "e"], ["c"]])
    ['a', 'b', 'c', 'd', 'e']
    """
    ranks = len(parts)
    return [parts[index % ranks][index // ranks] for index in range(sum(map(len, parts)))]


def tell_work(what: str, done: int, total: int) -> None:
    """Tell the process that launched the ranks how far they are."""
    print(f"\n{WORK}{json.dumps([what, done, total])}", flush=True)


def run_share(work: Callable[[dict[str, Any], Path, Share], None]) -> None:
    """Run one rank, whose command line names the file of its job.

    Args:
        work: Receives the job, the directory of its file and this rank's share.
    """

    def launched() -> None:
        import torch
        from torch import distributed

        file = Path(sys.argv[1])
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Results are objects of the host, whatever computes them.
        distributed.init_process_group("gloo", timeout=_LONGEST_WAIT)
        share = Share(rank=distributed.get_rank(), ranks=distributed.get_world_size())
        work(json.loads(file.read_text(encoding="utf-8")), file.parent, share)
        # A rank that leaves while others communicate makes gloo abort them.
        share.wait()
        distributed.destroy_process_group()

    recorded(launched)()
