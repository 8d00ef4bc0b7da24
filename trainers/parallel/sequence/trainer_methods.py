"""Trainer overrides for shared sequences: reading batches, cutting them, losses, evaluation.

`SequenceParallelMethods` is put before the class of a Trainer, so that its own `compute_loss` is found by `super()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ....ds_configs.legality.sequence import attention_faults, sample_faults
from ....ds_configs.specs.errors import Fault, UsageError
from ....plugins.deepspeed.ulysses import SharedSequence
from ....plugins.deepspeed.whole_sequence import gradients_are_added_over_a_sequence
from .shards import (
    LABELS,
    SHIFT_LABELS,
    Shard,
    cut,
    example_of,
    joined,
    labelled_tokens,
    mask_dimensions,
    padding_and_packing,
)

if TYPE_CHECKING:
    import torch

LossReduction = Literal["mean", "sum"]


@dataclass(kw_only=True)
class SequenceParallelRun:
    """State that one Trainer's methods share."""

    shared: SharedSequence
    """The ranks of a sequence."""
    loss_reduction: LossReduction
    """What the loss of a shard is: the mean over its labelled tokens, or their sum."""
    loss_shifts_labels: bool
    """Whether the Trainer's own loss drops the first label and the last logit itself."""
    has_own_loss: bool
    """Whether a loss other than the model's is computed from its logits."""
    tiled_loss: Any = None
    """Computes the model's loss from the input of its head; `None` for the model's own way."""
    is_connected: bool = False
    """Whether a forward pass has shown that attention exchanges heads in every layer."""
    keeps_logits: bool = False
    """Whether somebody reads the logits of the evaluation that goes on."""
    whole_tokens: int = 0
    """Tokens of the batch that was cut last."""

    @property
    def extends_logits(self) -> bool:
        """Whether logits get one more position, for a loss that drops the last."""
        return self.has_own_loss and self.loss_shifts_labels


class SequenceParallelMethods:
    """Overrides of a Trainer; every rank of a sequence reads the same batches and computes on its own part."""

    sequence_parallel: SequenceParallelRun

    def get_sp_size(self) -> int:
        """Say 1: the Trainer asks in order to count batches that another data loader would hand out."""
        return 1

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of an optimizer step; ranks of one sequence count once."""
        return super().get_total_train_batch_size(args) // self.sequence_parallel.shared.size  # type: ignore[misc,no-any-return]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Check the micro-batches of an optimizer step, and give all ranks of a sequence those of its first."""
        return super().get_batch_samples(_equal(epoch_iterator, self.sequence_parallel.shared), num_batches, device)  # type: ignore[misc]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        import torch.distributed as dist

        shared = self.sequence_parallel.shared
        _check_samples(batch_samples, self.model.config._attn_implementation)  # type: ignore[attr-defined]
        count = labelled_tokens(batch_samples)
        if count is None:
            return None
        count = count.to(device)
        dist.all_reduce(count)
        return count // shared.size

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with self.sequence_parallel.shared.registering(self.model):  # type: ignore[attr-defined]
            return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train with attention that exchanges heads, also where the backward pass recomputes it."""
        with self.sequence_parallel.shared.running():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return this rank's share in the mean over all labelled tokens of the optimizer step, over all ranks."""
        run = self.sequence_parallel
        if not run.shared.active:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        shard = self._shard(inputs)
        if shard.labelled is None or num_items_in_batch is None:
            rule = "batches need labels, whose number weighs the losses of shards"
            raise UsageError(Fault(where="labels", rule=rule, fix="copy input_ids and mask what is not to be learned"))
        if run.tiled_loss is not None and not run.keeps_logits:
            result = run.tiled_loss(model, shard)
        else:
            own = {SHIFT_LABELS: shard.labels(shifts=False), LABELS: shard.labels(shifts=run.extends_logits)}
            result = super().compute_loss(model, shard.inputs | own, return_outputs=return_outputs)  # type: ignore[misc]
        if not run.is_connected:
            run.shared.check_exchanges(self.model)  # type: ignore[attr-defined]
            run.is_connected = True
        loss, outputs = result if isinstance(result, tuple) else (result, None)
        loss = self._share(loss, shard.labelled, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _share(self, loss: torch.Tensor, labelled: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Weigh a shard's loss by its tokens, and undo what the engine does to gradients over ranks.

        The mean over all ranks of what training returns is the mean over tokens, which the Trainer logs. Gradients
        must come out as its gradient, too: engines that add over the ranks of a sequence get `size` times less.
        """
        import torch.distributed as dist

        run = self.sequence_parallel
        weight = labelled if run.loss_reduction == "mean" else (labelled > 0)
        total = loss.float() * weight
        tokens = tokens.to(loss.device).clamp(min=1)
        if not self.model.training:  # type: ignore[attr-defined]
            total = total.detach().clone()
            dist.all_reduce(total, group=run.shared.group)
            return total * run.shared.data_ranks / tokens
        value = total * dist.get_world_size() / tokens
        if not gradients_are_added_over_a_sequence(self._zero_optimization()):
            return value
        graded = value / run.shared.size
        return graded + (value - graded).detach()

    def _zero_optimization(self) -> dict[str, Any]:
        return self.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]  # type: ignore[attr-defined,no-any-return]

    def _shard(self, inputs: dict[str, Any]) -> Shard:
        run = self.sequence_parallel
        pad = getattr(self.processing_class, "pad_token_id", None)  # type: ignore[attr-defined]
        shard = cut(inputs, ranks=run.shared.size, rank=run.shared.rank, pad_token_id=pad or 0)
        run.shared.position_ids = shard.inputs["position_ids"]
        run.whole_tokens = shard.whole_tokens
        return shard

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Evaluate on shards, and join logits where somebody reads them."""
        run = self.sequence_parallel
        run.keeps_logits = not prediction_loss_only
        with run.shared.running():
            if any(inputs.get(name) is None for name in self.label_names):  # type: ignore[attr-defined]
                _check_samples([inputs], self.model.config._attn_implementation)  # type: ignore[attr-defined]
                inputs = self._shard(self._prepare_inputs(inputs)).inputs  # type: ignore[attr-defined]
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        run.keeps_logits = False
        if logits is not None:
            logits = joined(logits, run.shared, whole_tokens=run.whole_tokens)
        return loss, logits, labels

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Gather from one rank of each sequence."""
        shared = self.sequence_parallel.shared
        unprepared = not self.accelerator._models  # type: ignore[attr-defined]
        with (
            shared.registering(self.model) if unprepared else nullcontext(),  # type: ignore[attr-defined]
            _gathering_once(self.accelerator, shared),  # type: ignore[attr-defined]
        ):
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen  # type: ignore[attr-defined]
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        seen = self.state.num_input_tokens_seen - before  # type: ignore[attr-defined]
        self.state.num_input_tokens_seen = before + seen // self.sequence_parallel.shared.size  # type: ignore[attr-defined]

    def floating_point_ops(self, inputs: Any) -> int:
        """Return this rank's operations on a batch that it shares."""
        return super().floating_point_ops(inputs) // self.sequence_parallel.shared.size  # type: ignore[misc,no-any-return]


def _check_samples(batches: list[Any], attention: str) -> None:
    faults = attention_faults(attention=attention, mask_dimensions=mask_dimensions(batches))
    if not faults:
        left_padded, packed = padding_and_packing(batches)
        samples = max((len(example_of(batch)) for batch in batches), default=1)
        faults = sample_faults(left_padded=left_padded, packed=packed, attention=attention, samples=samples)
    if faults:
        raise UsageError(faults)


def _equal(batches: Iterator[Any], shared: SharedSequence) -> Iterator[Any]:
    """Yield the batches of the first rank of a sequence on all of its ranks.

    They are the same already, unless a collator draws random numbers in a worker process of the data loader, which the
    Trainer seeds by rank.
    """
    import torch
    import torch.distributed as dist

    source = dist.get_global_rank(shared.group, 0)
    for batch in batches:
        for name in sorted(batch):
            value = batch[name]
            if torch.is_tensor(value):
                shape = torch.tensor(value.shape, device=value.device)
                dist.broadcast(shape, source, group=shared.group)
                if tuple(shape.tolist()) != tuple(value.shape):
                    value = value.new_empty(shape.tolist())
                batch[name] = value = value.contiguous()
                dist.broadcast(value, source, group=shared.group)
        yield batch


@contextmanager
def _gathering_once(accelerator: Any, shared: SharedSequence) -> Iterator[None]:
    """Let `accelerator.gather` collect from the ranks that hold the same shard, inside the block."""
    import torch
    import torch.distributed as dist
    from accelerate.utils import recursively_apply

    def gather(data: Any) -> Any:
        def one(tensor: torch.Tensor) -> torch.Tensor:
            own = tensor[None].contiguous() if tensor.dim() == 0 else tensor.contiguous()
            parts = [torch.empty_like(own) for _ in range(shared.data_ranks)]
            dist.all_gather(parts, own, group=shared.data_group)
            return torch.cat(parts)

        return recursively_apply(one, data, error_on_other_type=True)

    accelerator.gather = gather
    try:
        yield
    finally:
        del accelerator.gather
