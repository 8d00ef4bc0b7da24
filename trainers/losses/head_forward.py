"""Runs a model so that work on the input of its output head replaces the head, inside every wrapper's own hooks.

DDP, ZeRO-3 and FSDP2 gather, release and reduce in hooks around modules. A loss that is computed in the place of the
head finds the head's weight gathered once, and a loss that leaves the model as its output sets off the same hooks as
logits would. Nothing is patched beyond the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, UsageError
from ...plugins.transformers.output_heads import head_module, logit_shape

if TYPE_CHECKING:
    import torch

HeadWork = Callable[["torch.Tensor"], "torch.Tensor"]
"""Takes the head's input [B, S, H], returns a tensor whose shape the model's own forward accepts as logits."""
_PROBES = (1.0, -3.0, 40.0)


@contextmanager
def replaced_forward(model: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Let ``model.forward(**inputs)`` be ``forward(original, **inputs)`` inside the block."""
    had_own = "forward" in model.__dict__
    original = model.forward

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return forward(original, *args, **kwargs)

    model.forward = replacement
    try:
        yield
    finally:
        if had_own:
            model.forward = original
        else:
            del model.forward


class HeadReplacement:
    """The head of one model, replaced for the duration of a call.

    ``result`` is what the work returned, after the hooks of wrappers on the head: the tensor to differentiate.
    """

    def __init__(self, model: Any, work: HeadWork) -> None:
        self._model = model
        self._head = head_module(model)
        self._work = work
        self._finished: Any = None

    @contextmanager
    def __call__(self) -> Iterator[HeadReplacement]:
        """Replace the head inside the block."""

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            self._finished = output

        def work(_original: Any, hidden: torch.Tensor) -> torch.Tensor:
            return _with_probes(self._work(hidden), hidden)

        handle = self._head.register_forward_hook(keep)
        try:
            with replaced_forward(self._head, work):
                yield self
        finally:
            handle.remove()

    @property
    def result(self) -> torch.Tensor:
        """What the work returned, as a scalar with its graph.

        Raises:
            UsageError: the model's forward never called its head module.
        """
        if self._finished is None:
            rule = "its forward does not call its output embeddings as a module"
            raise UsageError(Fault(where=type(self._model).__name__, rule=rule, fix="use implementation='plain'"))
        return self._finished[0, 0, 0]

    def check_logits(self, logits: torch.Tensor) -> None:
        """Compare what the model makes of the head's output with the scale and the soft-cap that the loss assumes.

        Raises:
            UsageError: the model shapes its logits otherwise.
        """
        import torch

        scale, soft_cap = logit_shape(self._model)
        expected = torch.tensor(_PROBES, dtype=torch.float32) * scale
        if soft_cap is not None:
            expected = torch.tanh(expected / soft_cap) * soft_cap
        found = logits.detach()[0, 0, 1:].float().cpu()
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-3):
            rule = (
                f"makes {found.tolist()} of the head's outputs {list(_PROBES)}, where {expected.tolist()} was expected"
            )
            raise UsageError(Fault(where=type(self._model).__name__, rule=rule, fix="use implementation='plain'"))


def _with_probes(loss: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Put known numbers behind the loss, so that what the model does to its logits can be seen."""
    import torch

    return torch.cat([loss.reshape(1), loss.new_tensor(_PROBES)]).reshape(1, 1, -1)


@contextmanager
def captured_head_input(model: Any) -> Iterator[list[torch.Tensor]]:
    """Keep the input of the model's head, which then computes the logits of one token only.

    Raises:
        UsageError: the model has no output embeddings.
    """
    head, kept = head_module(model), []

    def work(original: Any, hidden: torch.Tensor) -> Any:
        kept.append(hidden)
        return original(hidden.reshape(-1, hidden.shape[-1])[:1])[None]

    with replaced_forward(head, work):
        yield kept


def accepted_inputs(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs that a model's forward takes, without a cache of keys and values.

    With one, Transformers (5.17.0, masking_utils.py) does not look for packed documents in `position_ids`.
    """
    parameters = inspect.signature(type(model).forward).parameters
    if "use_cache" in parameters:
        inputs = {**inputs, "use_cache": False}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return inputs
    return {name: value for name, value in inputs.items() if name in parameters}
