"""Pairs of prompts and completions in `KTOTrainer`: the same on several ranks as in one process.

In trl 1.16.0 the KL term is estimated from prompts with the completions of other rows, which are rotated within each
`per_device_train_batch_size` rows. Rows keep their order, so rotating within the rows of all ranks yields the pairs of
one process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import patches

if TYPE_CHECKING:
    from transformers import Trainer


@contextmanager
def pairs_of_a_micro_step(trainer_class: Any, data_ranks: int) -> Iterator[None]:
    """Make a `KTOTrainer` that is created in the block pair the rows of all data-parallel ranks."""
    module = sys.modules.get("trl.trainer.kto_trainer")
    if module is None or data_ranks == 1 or not issubclass(trainer_class, module.KTOTrainer):
        yield
        return

    def pairing(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_merged(trainer: Trainer, dataset: Any, processing_class: Any, args: Any, *rest: object) -> Any:
            whole = copy.copy(args)
            whole.per_device_train_batch_size *= data_ranks
            return prepare(trainer, dataset, processing_class, whole, *rest)

        return prepare_merged

    with patches.applied("pairs-of-a-micro-step", pairing):
        yield
