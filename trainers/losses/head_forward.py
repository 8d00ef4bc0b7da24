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
from ...plugins.transformers.output_heads import further_bias, head_module, logit_shape

if TYPE_CHECKING:
    import torch

HeadWork = Callable[["torch.Tensor"], "torch.Tensor"]
"""Takes the head's input [B, S, H], returns a loss."""
_PROBES = (1.0, -3.0, 40.0)
"""Outputs of a head that tell scales, soft-caps and biases behind it apart."""


class UnknownLogitsError(UsageError):
    """A model makes other logits of its head's outputs than a loss beside the head would."""


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

        def keep(_module: Any, _inputs: Any, output: Any) -> Any:
            self._finished = output
            # Some models work on their logits in place.
            return output.clone()

        def work(_original: Any, hidden: torch.Tensor) -> torch.Tensor:
            return self._with_probes(self._work(hidden))

        handle = self._head.register_forward_hook(keep)
        try:
            with replaced_forward(self._head, work):
                yield self
        finally:
            handle.remove()

    @property
    def result(self) -> torch.Tensor:
        """Result of the work, as a scalar with its graph.

        Raises:
            UnknownLogitsError: the model's forward never called its head module.
        """
        if self._finished is None:
            raise _never_called(type(self._model).__name__)
        return self._finished[0, 0, 0]

    def check_logits(self, logits: torch.Tensor) -> None:
        """Compare what the model makes of the head's output with the scale, soft-cap and bias that the loss assumes.

        Raises:
            UnknownLogitsError: the model shapes its logits otherwise.
        """
        _check_probes(type(self._model).__name__, self._model, logits, first=1)

    def _with_probes(self, loss: torch.Tensor) -> torch.Tensor:
        """Put known numbers behind the loss, as wide as logits: biases and masks of a vocabulary meet them too."""
        import torch

        probes_V = _probes(_vocabulary(self._head), loss)
        return torch.cat([loss.reshape(1), probes_V[1:]]).reshape(1, 1, -1)


class CapturedHead:
    """The inputs of a model's head, and a check of what the model makes of the head's outputs."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.inputs: list[torch.Tensor] = []
        """Of each call of the head, [B, S, H]."""

    def check(self, name: str, logits: torch.Tensor) -> None:
        """Compare the model's logits with those that an `OutputHead` would give; call it after the model ran.

        Args:
            name: What messages call the model.
            logits: [1, 2, V] that the model returned: for its first token, and for known outputs of the head.

        Raises:
            UnknownLogitsError: the head was not called as a module, or its outputs are shaped otherwise.
        """
        if not self.inputs:
            raise _never_called(name)
        _check_probes(name, self._model, logits[:, 1:], first=0)


def _never_called(name: str) -> UnknownLogitsError:
    rule = "its forward does not call its output embeddings as a module"
    return UnknownLogitsError(Fault(where=name, rule=rule, fix="use implementation='plain'"))


def _vocabulary(head: Any) -> int:
    """Return the columns of a head inside its forward pass, where its weight is whole."""
    return int(getattr(head, "out_features", None) or head.weight.shape[0])


def _probes(count: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_tensor(_PROBES).repeat(-(-count // len(_PROBES)))[:count]


def _check_probes(name: str, model: Any, logits: torch.Tensor, *, first: int) -> None:
    """Compare [1, 1, V] that a model made of `_probes`, from column `first` on."""
    import torch

    found = logits.detach().reshape(-1).float().cpu()
    given = _probes(len(found), found)
    scale, soft_cap = logit_shape(model)
    bias_V = further_bias(model)
    expected = (given if bias_V is None else given + bias_V.float().cpu()[: len(given)]) * scale
    if soft_cap is not None:
        expected = torch.tanh(expected / soft_cap) * soft_cap
    off = ~torch.isclose(found, expected, rtol=1e-2, atol=1e-3)
    off[:first] = False
    if bool(off.any()):
        column = int(off.nonzero()[0])
        rule = (
            f"makes the logit {found[column].item():g} of the head's output {given[column].item():g}, "
            f"where {expected[column].item():g} was expected"
        )
        raise UnknownLogitsError(Fault(where=name, rule=rule, fix="use implementation='plain'"))


@contextmanager
def captured_head_input(model: Any) -> Iterator[CapturedHead]:
    """Keep the input of the model's head, which then computes the logits of one token only, and known ones behind it.

    Raises:
        UsageError: the model has no output embeddings.
    """
    import torch

    head, captured = head_module(model), CapturedHead(model)

    def work(original: Any, hidden: torch.Tensor) -> Any:
        captured.inputs.append(hidden)
        own_1V = original(hidden.reshape(-1, hidden.shape[-1])[:1])
        return torch.stack([own_1V, _probes(own_1V.shape[-1], own_1V)[None]], dim=1)

    with replaced_forward(head, work):
        yield captured


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
