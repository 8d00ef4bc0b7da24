"""`L1SparsityCallback`: an L1 penalty on weight matrices, taken exactly and without a term of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ...ds_configs.quantization.layers import DEFAULT_IGNORE
from ...ds_configs.specs.errors import Fault, UsageError
from ...plugins.deepspeed.parameter_edit import WeightEditor, edit_faults
from ...plugins.launching.notes import note_on_first_rank
from ...plugins.transformers.run_settings import run_faults
from .targets import fused_experts_remark, layers_to_train, target_layers

if TYPE_CHECKING:
    from torch import Tensor


class L1SparsityCallback(TrainerCallback):
    """Draws weights to zero by a soft threshold after every optimizer step, in any Trainer.

    ``w ← sign(w) · max(|w| - lr · strength, 0)`` with the learning rate of the step. For plain SGD that is the proximal
    gradient step (ISTA; Beck & Teboulle, SIAM J. Imaging Sciences 2009, eq. 1.4-1.5) of ``loss + strength · Σ|w|``,
    whose solutions have exact zeros; a gradient of the penalty itself would only dance around zero. For Adam and its
    like it is decoupled from the moments, as AdamW's weight decay is (Loshchilov & Hutter, arXiv 1711.05101).

    Works on one process, DDP, ZeRO-1, 2 and 3, FSDP2, and with tensor, expert and pipeline parallelism. Nothing has to
    be saved: the weights are all its state.

    >>> callback = L1SparsityCallback(1e-3)  # doctest: +SKIP
    >>> Trainer(model, arguments, train_dataset=samples, callbacks=[callback]).train()  # doctest: +SKIP

    Args:
        strength: Factor of Σ|w|, above 0.
        targets: Names of linear layers, `re:` patterns of names, or `Linear` for all.
        ignore: Likewise, what stays as it is.
        notify: Receives remarks; default: standard error, of the first rank alone.

    Raises:
        UsageError: the strength is no number above 0.
    """

    def __init__(
        self,
        strength: float,
        *,
        targets: Sequence[str] = ("Linear",),
        ignore: Sequence[str] = DEFAULT_IGNORE,
        notify: Callable[[str], None] = note_on_first_rank,
    ) -> None:
        if not (math.isfinite(strength) and strength > 0):
            raise UsageError(Fault(where="strength", value=strength, rule="must be a number above 0"))
        self._strength = strength
        self._targets, self._ignore = tuple(targets), tuple(ignore)
        self._notify = notify
        self._names: tuple[str, ...] | None = None
        self._editor: WeightEditor | None = None
        self._learning_rate = 0.0

    @property
    def combined_settings(self) -> tuple[str, ...]:
        """Its rows in the table of combinations."""
        return ("l1",)

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Find the layers, so that a wrong name costs no time."""
        if model is not None:
            if faults := run_faults(args, model, callbacks=(self,)):
                raise UsageError(faults)
            self._names = tuple(target_layers(model, self._targets, self._ignore))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Check that changes will last."""
        if combined := run_faults(args, model, callbacks=(self,)):
            raise UsageError(combined)
        layers = layers_to_train(model, self._names, self._targets, self._ignore)
        weights = {name: module.weight for name, module in layers.items()}
        faults = edit_faults(weights, args, optimizer, tiny_changes=True)
        if faults:
            raise UsageError(faults)
        remark = fused_experts_remark(model)
        if remark:
            self._notify(remark)
        self._editor = WeightEditor(weights, optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Keep the learning rate of this step: DeepSpeed moves on to the next one inside of the step."""
        assert self._editor is not None, "training has begun"
        self._learning_rate = _learning_rate(optimizer, self._editor.weights.values())

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Take the proximal step, unless fp16 overflowed and no step was taken."""
        assert self._editor is not None, "training has begun"
        if self._learning_rate == 0 or getattr(optimizer, "step_was_skipped", False):
            return
        for name in self._editor.weights:
            self._editor.edit(name, self._shrink, survives_rounding=False)
        self._editor.finish()

    def _shrink(self, name: str, flat: Tensor, start: int) -> None:
        from torch.nn.functional import softshrink

        flat.copy_(softshrink(flat, self._learning_rate * self._strength))


def _learning_rate(optimizer: Any, weights: Any) -> float:
    """Return the learning rate of the weights; DeepSpeed's groups hold flat copies in place of them."""
    wanted = {id(weight) for weight in weights}
    own = [group for group in optimizer.param_groups if any(id(each) in wanted for each in group["params"])]
    found = [group["lr"] for group in own or optimizer.param_groups]
    if any(rate is None for rate in found):
        fix = "give it a learning rate: for Adafactor relative_step=False"
        raise UsageError(Fault(where="optimizer", rule="finds its learning rate by itself", fix=fix))
    rates = sorted({float(rate) for rate in found})
    if len(rates) > 1:
        rule = "has several learning rates for the targets, and the threshold follows one"
        fix = "give them one learning rate, or use one callback for one group"
        raise UsageError(Fault(where="learning_rate", value=rates, rule=rule, fix=fix))
    return rates[0]
