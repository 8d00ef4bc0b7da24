"""Teachers made of the student: a frozen copy, a moving average, the model without its adapter, a deeper exit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ...ds_configs.plan.write import replacing
from ...ds_configs.specs.errors import Fault, UsageError
from ...plugins.safetensors.reading import read_header

if TYPE_CHECKING:
    import torch

AVERAGE_FILE = "ema_teacher.safetensors"


def frozen_copy(model: Any) -> Any:
    """Return a copy of a model that is not yet wrapped, in evaluation mode and without gradients.

    Weights that ZeRO-3 has partitioned while it loaded are gathered one at a time; every rank must call.

    Raises:
        UsageError: weights are partitioned, and the model is no longer what its class makes.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        teacher = _gathered_copy(model)
    else:
        teacher = copy.deepcopy(model)
    teacher.requires_grad_(False)
    return teacher.eval()


def _gathered_copy(model: Any) -> Any:
    import torch

    from ...plugins.transformers.teacher_placement import without_partitioning

    with without_partitioning():
        teacher = type(model)(copy.deepcopy(model.config)).to(model.dtype)
    sources = [dict(each.named_parameters()) | dict(each.named_buffers()) for each in (model, teacher)]
    own, made = sources
    if own.keys() != made.keys():
        names = sorted(own.keys() ^ made.keys())
        rule = f"ZeRO-3 has partitioned the student's weights already, and it has other ones than its class: {names[0]}"
        fix = "load the teacher from the same checkpoint, or use a lower stage"
        raise UsageError(Fault(where="self_teacher", rule=rule, fix=fix))
    with torch.no_grad():
        for name, tensor in made.items():
            with _whole(own[name]) as whole:
                tensor.copy_(whole)
    return teacher


class MovingAverage(TrainerCallback):
    """Keeps a teacher at the exponential moving average of the student: ``θ' ← d θ' + (1 - d) θ`` (arXiv 1703.01780).

    Buffers are copied. Under ZeRO-3 and FSDP2 the average is of whole weights, gathered one at a time.
    """

    def __init__(self, teacher: Any, student: Callable[[], Any], decay: float) -> None:
        self._teacher, self._student, self._decay = teacher, student, decay

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the average after the optimizer stepped."""
        import torch

        with torch.no_grad():
            own = dict(self._teacher.named_parameters())
            student = self._student()
            for name, parameter in student.named_parameters():
                if name in own:
                    with _whole(parameter) as whole:
                        own[name].lerp_(whole.to(device=own[name].device, dtype=own[name].dtype), 1.0 - self._decay)
            own_buffers = dict(self._teacher.named_buffers())
            for name, buffer in student.named_buffers():
                if name in own_buffers:
                    own_buffers[name].copy_(buffer)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the average into the checkpoint."""
        from safetensors.torch import save_model

        if args.process_index == 0:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            with replacing(checkpoint / AVERAGE_FILE) as unfinished:
                save_model(self._teacher, str(unfinished))

    def load(self, checkpoint: str) -> None:
        """Go on from the average of a checkpoint.

        Raises:
            UsageError: the checkpoint has none.
        """
        from safetensors.torch import load_model

        path = Path(checkpoint) / AVERAGE_FILE
        if not path.is_file():
            rule = f"has no {AVERAGE_FILE}, and its average cannot be told from its weights"
            raise UsageError(
                Fault(where=str(checkpoint), rule=rule, fix="resume from a run with the same self_teacher")
            )
        read_header(path)
        load_model(self._teacher, str(path), device=str(next(self._teacher.parameters()).device))


@contextmanager
def _whole(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter
        return
    full_tensor = getattr(parameter, "full_tensor", None)
    yield parameter if full_tensor is None else full_tensor()


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Run the base model of a PEFT model inside the block, in evaluation mode."""
    training = model.training
    model.eval()
    try:
        with model.disable_adapter():
            yield
    finally:
        model.train(training)


class EarlyExit:
    """The hidden states of an earlier layer, normalised as the last layer's are, so that the same head reads them.

    Raises:
        UsageError: the model has no list of layers or no final norm.
    """

    def __init__(self, model: Any, exit_layer: int | None) -> None:
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        layers = next((getattr(decoder, name) for name in ("layers", "h") if hasattr(decoder, name)), None)
        norm = next(
            (getattr(decoder, name) for name in ("norm", "ln_f", "final_layernorm") if hasattr(decoder, name)), None
        )
        if layers is None or norm is None:
            rule = "has no list of layers with a final norm, which an earlier exit needs"
            raise UsageError(Fault(where=type(model).__name__, rule=rule))
        number = len(layers) // 2 if exit_layer is None else exit_layer
        if not 0 < number < len(layers):
            rule = f"from 1 to {len(layers) - 1}, the model has {len(layers)} layers"
            raise UsageError(Fault(where="self_teacher.exit_layer", value=number, rule=rule))
        self._layer, self._norm = layers[number - 1], norm
        self._kept: Any = None

    @contextmanager
    def __call__(self) -> Iterator[EarlyExit]:
        """Keep the layer's output inside the block."""
        self._kept = None

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            if self._kept is None:
                self._kept = output[0] if isinstance(output, tuple) else output

        handle = self._layer.register_forward_hook(keep)
        try:
            yield self
        finally:
            handle.remove()

    @property
    def hidden(self) -> torch.Tensor:
        """The normalised hidden states at the exit, [B, S, H]."""
        hidden: torch.Tensor = self._norm(self._kept)
        return hidden
