"""`L1SparsityCallback`: an L1 penalty on weight matrices as an exact proximal step, not a term of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...ds_configs.quantization.layers import DEFAULT_IGNORE
from ...ds_configs.specs.errors import ConfigError, UsageError
from .callback import SparsityCallback

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import TrainerControl, TrainerState, TrainingArguments


class L1SparsityCallback(SparsityCallback):
    """Applies a soft threshold to weights after every optimizer step, in any Trainer.

    ``w ← sign(w) · max(|w| - lr · strength, 0)`` with the learning rate of the step. For plain SGD this is the proximal
    gradient step (ISTA; Beck & Teboulle, SIAM J. Imaging Sciences 2009, eq. 1.4-1.5) of ``loss + strength · Σ|w|``,
    whose solutions have exact zeros. The gradient of the penalty itself would oscillate around zero. For Adam it is
    decoupled from the moments, like AdamW's weight decay (Loshchilov & Hutter, arXiv 1711.05101).

    Works on one process, DDP, ZeRO-1, 2 and 3, FSDP2, and with tensor, expert and pipeline parallelism. It has no state
    to save.

    >>> callback = L1SparsityCallback(1e-3)  # doctest: +SKIP
    >>> Trainer(model, arguments, train_dataset=samples, callbacks=[callback]).train()  # doctest: +SKIP

    Args:
        strength: Factor of Σ|w|, above 0.
        targets: Names of linear layers, `re:` patterns of names, or `Linear` for all.
        ignore: Names or patterns of layers without the penalty.

    Raises:
        UsageError: the strength is not a number above 0.
    """

    combined_settings = ("l1",)
    tiny_changes = True

    def __init__(
        self, strength: float, *, targets: Sequence[str] = ("Linear",), ignore: Sequence[str] = DEFAULT_IGNORE
    ) -> None:
        super().__init__(targets, ignore)
        if not (math.isfinite(strength) and strength > 0):
            raise UsageError(ConfigError(where="strength", value=strength, rule="must be a number above 0"))
        self._strength = strength
        self._learning_rate = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: object
    ) -> None:
        """Read the learning rate of this step: DeepSpeed sets that of the next one during the step."""
        # DeepSpeed's groups hold flat copies instead of the weights.
        targets = {id(weight) for weight in self.editor.weights.values()}
        own = [group for group in optimizer.param_groups if any(id(each) in targets for each in group["params"])]
        values = [group["lr"] for group in own or optimizer.param_groups]
        if any(rate is None for rate in values):
            fix = "set a learning rate, for Adafactor with relative_step=False"
            raise UsageError(ConfigError(where="optimizer", rule="computes its learning rate itself", fix=fix))
        rates = sorted({float(rate) for rate in values})
        if len(rates) > 1:
            rule = "has several learning rates for the targets, but the threshold needs one"
            fix = "use one learning rate, or one callback per group"
            raise UsageError(ConfigError(where="learning_rate", value=rates, rule=rule, fix=fix))
        self._learning_rate = rates[0]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: object
    ) -> None:
        """Apply the threshold, unless fp16 overflowed and the step was skipped."""
        from torch.nn.functional import softshrink

        if self._learning_rate == 0 or getattr(optimizer, "step_was_skipped", False):
            return
        threshold = self._learning_rate * self._strength

        def shrink(name: str, flat: Tensor, start: int) -> None:
            flat.copy_(softshrink(flat, threshold))

        for name in self.editor.weights:
            self.editor.edit(name, shrink, survives_rounding=False)
        self.editor.finish()
