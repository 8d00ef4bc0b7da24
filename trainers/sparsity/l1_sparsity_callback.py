"""`L1SparsityCallback`: an L1 penalty on weight matrices as an exact proximal step, not a term of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ...ds_configs.quantization.layers import DEFAULT_IGNORE
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.deepspeed.parameters import WeightEditor, edit_errors
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.transformers.run_settings import run_errors
from .masks import fused_experts_warning, layers_to_train, target_layers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from transformers import TrainerControl, TrainerState, TrainingArguments


class L1SparsityCallback(TrainerCallback):
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

    def __init__(
        self,
        strength: float,
        *,
        targets: Sequence[str] = ("Linear",),
        ignore: Sequence[str] = DEFAULT_IGNORE,
    ) -> None:
        if not (math.isfinite(strength) and strength > 0):
            raise UsageError(ConfigError(where="strength", value=strength, rule="must be a number above 0"))
        self._strength = strength
        self._targets, self._ignore = tuple(targets), tuple(ignore)
        self._names: tuple[str, ...] | None = None
        self._editor: WeightEditor | None = None
        self._learning_rate = 0.0

    @property
    def combined_settings(self) -> tuple[str, ...]:
        """Rows of this callback in the table of combinations."""
        return ("l1",)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: object
    ) -> None:
        """Find the layers early, so that a wrong name fails immediately."""
        if model is not None:
            if errors := run_errors(args, model, callbacks=(self,)):
                raise UsageError(errors)
            self._names = tuple(target_layers(model, self._targets, self._ignore))

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: object,
    ) -> None:
        """Check that the engine keeps changed weights."""
        if errors := run_errors(args, model, callbacks=(self,)):
            raise UsageError(errors)
        layers = layers_to_train(model, self._names, self._targets, self._ignore)
        weights = {name: module.weight for name, module in layers.items()}
        if errors := edit_errors(weights, args, optimizer, tiny_changes=True):
            raise UsageError(errors)
        if warning := fused_experts_warning(model):
            note_on_first_rank(warning)
        self._editor = WeightEditor(weights, optimizer)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: object,
    ) -> None:
        """Read the learning rate of this step: DeepSpeed sets that of the next one during the step."""
        assert self._editor is not None, "training has begun"
        self._learning_rate = _learning_rate(optimizer, self._editor.weights.values())

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: object,
    ) -> None:
        """Apply the threshold, unless fp16 overflowed and the step was skipped."""
        from torch.nn.functional import softshrink

        assert self._editor is not None, "training has begun"
        if self._learning_rate == 0 or getattr(optimizer, "step_was_skipped", False):
            return
        threshold = self._learning_rate * self._strength

        def shrink(name: str, flat: Tensor, start: int) -> None:
            flat.copy_(softshrink(flat, threshold))

        for name in self._editor.weights:
            self._editor.edit(name, shrink, survives_rounding=False)
        self._editor.finish()


def _learning_rate(optimizer: Any, weights: Iterable[Tensor]) -> float:
    """Return the learning rate of the weights; DeepSpeed's groups hold flat copies instead of them."""
    targets = {id(weight) for weight in weights}
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
    return rates[0]
