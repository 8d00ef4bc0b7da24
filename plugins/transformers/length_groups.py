"""`train_sampling_strategy="group_by_length"`: one order of samples for all ranks, and the same in a resumed epoch.

In transformers 5.17.0 to 5.23.0 `LengthGroupedSampler` draws its order from the random numbers of the process, and
Accelerate seeds only `RandomSampler`. After dropout on batches of different lengths, ranks have different random
numbers and draw different orders: in the second epoch some samples occur twice and others never. A resumed run draws
the order of its first epoch again, with other random numbers than the run that saved.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..launching.messages import note_on_first_rank

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

_UNKNOWN = "the checkpoint lacks the sample order of its epoch (group_by_length): samples may repeat or be missing"


def one_order(sampler: Any, trainer: Trainer) -> Any:
    """Return a sampler of length groups that draws one order on all ranks, for a Trainer with `LengthGroupOrder`."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    if _callback_of(trainer) is None or not isinstance(sampler, LengthGroupedSampler):
        return sampler
    if not trainer.args.accelerator_config.split_batches:
        # Groups of the samples of a step, whatever the number of ranks; Transformers counts those of one rank.
        sampler.batch_size = trainer.get_total_train_batch_size(trainer.args)
    # With `dispatch_batches` the first rank reads for all.
    return _OneOrder(sampler, trainer, draws_on_every_rank=not trainer.args.accelerator_config.dispatch_batches)


def _callback_of(trainer: Trainer) -> LengthGroupOrder | None:
    # Looked up when needed, because the Trainer may have recreated its callbacks from a checkpoint.
    callbacks = trainer.callback_handler.callbacks
    return next((callback for callback in callbacks if isinstance(callback, LengthGroupOrder)), None)


class LengthGroupOrder(TrainerCallback, ExportableState):
    """Stores the random state from which the current epoch's order was drawn in every checkpoint."""

    def __init__(self) -> None:
        self.drawn: dict[str, Any] = {}
        self._epoch = 0
        self._resumed: str | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Read the random state of the epoch in which the checkpoint of a resumed run was saved."""
        name = type(self).__name__
        saved = state.stateful_callbacks.setdefault(name, {})
        drawn = saved.get("attributes", {}).get("drawn", {})
        is_inside_epoch = bool(state.epoch) and state.epoch != int(state.epoch)
        self._resumed = drawn.get("generator") if drawn.get("epoch") == int(state.epoch or 0) else None
        if is_inside_epoch and self._resumed is None:
            note_on_first_rank(_UNKNOWN)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Store the epoch of the next order."""
        self._epoch = int(state.epoch or 0)

    def before_drawing(self) -> None:
        """Restore the random state of a resumed epoch, once, and store the state that the order is drawn from."""
        import torch

        if self._resumed is not None:
            data = bytearray(base64.b64decode(self._resumed))
            torch.set_rng_state(torch.frombuffer(data, dtype=torch.uint8))
            self._resumed = None
        state = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
        self.drawn = {"epoch": self._epoch, "generator": state}

    def state(self) -> dict[str, Any]:
        """Return the state that the Trainer writes to `trainer_state.json`."""
        return {"args": {}, "attributes": {"drawn": self.drawn}}


class _OneOrder(Sampler):
    """The order of a sampler, drawn from the random numbers of the first rank."""

    def __init__(self, sampler: Any, trainer: Trainer, *, draws_on_every_rank: bool) -> None:
        self._sampler, self._trainer, self._draws_on_every_rank = sampler, trainer, draws_on_every_rank

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        import torch
        import torch.distributed as distributed

        if (order := _callback_of(self._trainer)) is not None:
            order.before_drawing()
        if self._draws_on_every_rank and distributed.is_available() and distributed.is_initialized():
            state = [torch.get_rng_state()]
            distributed.broadcast_object_list(state, src=0)
            torch.set_rng_state(state[0])
        return iter(self._sampler)
