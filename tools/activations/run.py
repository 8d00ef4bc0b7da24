"""Runs one metered training step of a model and cuts it into named phases (seen with transformers 5.17)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from .meter import Recording, StorageMeter
from .narrow_values import fused_attention_of_narrow_values, values_are_narrow

Mode = Literal["bf16", "fp32", "bf16_autocast"]

# CUDA autocast runs these in float32, CPU autocast does not (torch 2.13, torch/amp documentation, op reference).
CUDA_FLOAT32_FUNCTIONS = frozenset(
    """
    __pow__ __rpow__ pow rsqrt reciprocal exp expm1 log log2 log10 log1p softplus softmax log_softmax layer_norm
    group_norm norm renorm dist cumsum cumprod prod sum cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss kl_div
    cosine_similarity binary_cross_entropy_with_logits sinh cosh tan acos asin erfinv
    """.split()  # noqa: SIM905
)


class CudaSemantics(TorchFunctionMode):
    """Makes CPU tensors keep what CUDA tensors would keep (torch 2.13).

    Under autocast, functions of CUDA's float32 list get float32 inputs. Dropout saves a mask of one byte per element,
    as the fused CUDA kernel does; the CPU default saves scaled noise in the input's type. Fused attention takes values
    narrower than the queries.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Casts or replaces what differs, and passes everything else on."""
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.dropout:
            return _fused_dropout(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention and values_are_narrow(*args[:3]):
            return fused_attention_of_narrow_values(*args[:3])
        listed = getattr(func, "__name__", "") in CUDA_FLOAT32_FUNCTIONS
        if listed and kwargs.get("dtype") is None and torch.is_autocast_enabled("cpu"):
            args = tuple(_widen(value) for value in args)
            kwargs = {name: _widen(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _fused_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return torch.native_dropout(input, p, train=True)[0] if training and p > 0 else input


def enable_checkpointing(model: Any) -> None:
    """Turns on non-reentrant checkpointing, the default of `gradient_checkpointing_enable` in transformers 5.17.

    The recomputation runs inside `loss.backward()`, where torch 2.13 has function modes switched off; the context
    puts the CUDA semantics back.
    """

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), CudaSemantics()

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts})


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


@dataclass(frozen=True, kw_only=True)
class LayerPhases:
    """Live activation bytes around one layer."""

    end: int
    """Live when its forward pass has ended."""
    forward: list[int]
    """After each operator of its forward pass, beyond what lived when it started."""
    backward: list[int]
    """After each operator from the gradient of its output to that of the layer before."""


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Live activation bytes of one training step, without parameters, their gradients and their copies."""

    head_start: int
    """Live when the output head starts: every saved tensor of the layers and of what surrounds them."""
    layer_forward: list[int]
    """After each operator of the last layer's forward, beyond what lived when that layer started."""
    loss_forward: list[int]
    """After each operator from the output head to the end of the loss."""
    loss_backward: list[int]
    """After each operator from the start of the backward to the last layer's output gradient."""
    layer_backward: list[int]
    """After each operator of the last layer's backward."""
    backward: list[int]
    """After each operator of the whole backward."""
    weight_copy_bytes: int
    """Copies of parameters in another element type that live when the output head starts."""
    by_layer: list[LayerPhases]
    """Each layer's own, in the order of execution."""


def _forward(model: torch.nn.Module, inputs: Mapping[str, Any], mode: Mode) -> torch.Tensor:
    """Does what `Trainer.compute_loss` does: outputs die when it returns, only the loss survives."""
    with CudaSemantics(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "bf16_autocast"):
        outputs = model(**inputs)
    if mode == "bf16_autocast":
        from accelerate.utils.operations import convert_to_fp32

        # Accelerate 1.15 wraps the forward in ConvertOutputsToFp32, which copies every half-precision output.
        outputs = convert_to_fp32(outputs)
    return _loss_of(outputs)


def _loss_of(outputs: Any) -> torch.Tensor:
    """The model's loss, or the mean of its first output for a model without one."""
    loss = outputs.get("loss")
    if loss is None:
        first = next(value for value in outputs.values() if isinstance(value, torch.Tensor))
        loss = first.float().mean()
    assert isinstance(loss, torch.Tensor)
    return loss


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """One metered training step, before it is known which storages are activations."""

    recording: Recording
    weight_shaped: frozenset[int]
    """Storages shaped like a parameter: its gradients and copies, and what happens to have such a shape."""
    gradients: frozenset[int]
    """Storages of what ended as a parameter's gradient."""

    def phases(self, weight_shaped: Set[int] | None = None, sizes: Sequence[Any] | None = None) -> Phases:
        """Return the live activation bytes by phase.

        Args:
            weight_shaped: Storages that are shaped like a parameter whatever the sizes, where several traces of the
                same operators have told; by default those of this trace.
            sizes: Size of each storage, which may be an array; by default its bytes.
        """
        ignored = self.weight_shaped if weight_shaped is None else weight_shaped
        return _cut(self.recording, ignored, self.gradients, sizes)


def run_training_step(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    *,
    mode: Mode,
    layers: list[torch.nn.Module],
    head: torch.nn.Module | None,
) -> Phases:
    """Return the live activation bytes of one training step, as `trace_training_step` meters it."""
    return trace_training_step(model, inputs, mode=mode, layers=layers, head=head).phases()


def trace_training_step(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    *,
    mode: Mode,
    layers: list[torch.nn.Module],
    head: torch.nn.Module | None,
    unmetered: Iterable[tuple[torch.nn.Module, str]] = (),
) -> TracedStep:
    """Meters forward, loss and backward of `model` in training mode.

    `layers` are the transformer layers in the order of execution; `head` is the output projection, or `None` when
    everything after the last layer counts as loss. Of `unmetered` methods, only results are metered.
    """
    parameters = list(model.parameters())
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    meter = StorageMeter([*parameters, *model.buffers(), *tensors])
    in_forward = [True]
    for module, name in unmetered:
        setattr(module, name, meter.pausing(getattr(module, name)))
    hooks = _place_marks(meter, layers, head, in_forward)
    # Gradients of earlier steps would be added in place instead of being moved into `.grad`.
    model.zero_grad(set_to_none=True)
    try:
        with meter:
            loss = _forward(model, inputs, mode)
            meter.mark("kept")
            in_forward[0] = False
            loss.backward()
            meter.mark("end")
    finally:
        for hook in hooks:
            hook.remove()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    recording = meter.recording
    # Copies of weights in their own type are PEFT's sums of an expert's weight and adapters, which plans count as such.
    adapted = {p.dtype for p in parameters} if any(not p.requires_grad for p in parameters) else set()
    computed = {number for number in recording.matrices_before("kept") if recording.dtypes[number] not in adapted}
    if mode == "bf16_autocast":
        computed = set()
    return TracedStep(
        recording=recording,
        # Weights in another type that the model computes itself, such as a router's in fp32, are kept like activations.
        weight_shaped=frozenset(recording.weight_shaped(parameters) - computed),
        gradients=frozenset(meter.numbers_of(gradients)),
    )


def _place_marks(
    meter: StorageMeter, layers: list[torch.nn.Module], head: torch.nn.Module | None, in_forward: list[bool]
) -> list[Any]:
    def starts(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            # Checkpointing runs the layer again in the backward; only its first run bounds the forward.
            if in_forward[0]:
                meter.mark(name)

        return hook

    def ends(number: int) -> Callable[..., None]:
        def hook(_: object, __: object, output: Any) -> None:
            tensor = output if isinstance(output, torch.Tensor) else output[0]
            if in_forward[0]:
                meter.mark(f"layer {number} end")
            # The gradient of a layer's output comes when that layer's backward pass is about to begin.
            if in_forward[0] and tensor.requires_grad:
                tensor.register_hook(lambda _: meter.mark(f"gradient {number}"))

        return hook

    handles: list[Any] = []
    for number, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(starts(f"layer {number}")))
        handles.append(layer.register_forward_hook(ends(number)))
    if head is not None:
        handles.append(head.register_forward_pre_hook(starts("head")))
    return handles


def _cut(
    recording: Recording, weight_like: Set[int], gradients: Set[int], sizes: Sequence[Any] | None = None
) -> Phases:
    spans: dict[str, list[int]] = {"": []}
    marks: dict[str, int] = {}
    current = ""
    for name, live in recording.replay(weight_like | gradients, sizes):
        if name:
            current = name
            marks[name] = live
            spans[name] = []
        else:
            spans[current].append(live)
    with_copies, without = (
        dict(entry for entry in recording.replay(ignored) if entry[0])
        for ignored in (gradients, weight_like | gradients)
    )
    names = list(spans)
    by_layer = [
        LayerPhases(
            end=marks[name],
            forward=[live - marks[name.removesuffix(" end")] for live in spans[name.removesuffix(" end")]],
            backward=spans.get(f"gradient {name.split()[1]}", []),
        )
        for name in names
        if name.endswith(" end")
    ]
    last = next(name for name in reversed(names) if name.endswith(" end"))
    start = last.removesuffix(" end")
    head = "head" if "head" in marks else last
    first_gradient = next(number for number, name in enumerate(names) if name.startswith("gradient"))
    return Phases(
        head_start=marks[head],
        layer_forward=[live - marks[start] for live in spans[start]],
        loss_forward=spans[head],
        loss_backward=spans["kept"],
        layer_backward=spans[names[first_gradient]],
        backward=[live for name in names[first_gradient:] for live in spans[name]],
        weight_copy_bytes=with_copies[head] - without[head],
        by_layer=by_layer,
    )
