"""Gradient checkpointing of a model's first decoder layers, whose inputs may wait in host memory.

`torch.autograd.graph.saved_tensors_hooks` around the checkpoint function of a layer sees exactly the input that the
checkpoint saves, in every release of Transformers and under every engine. Three packages have activation offloading,
and none fits: DeepSpeed 0.19.8 (`CheckpointHiddenStatesOffload`) keeps every input that it copied back until the step
ends, copies it only when the backward pass already waits, and does nothing on CPU ranks; TRL 1.16.0
(`OffloadActivations`) and torch 2.13.0 (`offload_wrapper`) offload whatever autograd saves, not `k` layers' inputs.

A copy to the host runs on its own stream beside the layer that uses the input; at the end of the layer the compute
stream waits for it, so that the input's memory is free from then on. In the backward pass, the copy of a layer's input
runs beside the backward pass of the layer after it: two inputs are on the device at a time.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.images import image_part
from ...ds_configs.specs.units import ROUNDED_PINNED_MB, gigabytes, pinned_block_bytes
from .. import patches

if TYPE_CHECKING:
    import torch
    from torch import nn

_OFFLOADED = "offloaded_checkpoints"


def checkpoint_first_layers(model: nn.Module, count: int) -> int:
    """Recompute only the first `count` decoder layers of a model; return how many decoder layers it has.

    Call it after `gradient_checkpointing_enable`. It changes the longest stack of layers, or the last of equally long
    ones, which is the decoder. On a pipeline stage these are the stage's layers.

    Raises:
        UsageError: the model has no layers that Transformers can recompute, or checkpointing is off.
    """
    layers = decoder_layers(model)
    if not layers:
        rule, fix = "finds no layers to recompute", "use a model whose layers are GradientCheckpointingLayer"
        raise UsageError(ConfigError(where="checkpointed_layers", value=count, rule=rule, fix=fix))
    if not any(layer.gradient_checkpointing for layer in layers):
        rule = "needs gradient checkpointing, which is off"
        fix = "set gradient_checkpointing in TrainingArguments"
        raise UsageError(ConfigError(where="checkpointed_layers", value=count, rule=rule, fix=fix))
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index < count
    _keep_recomputed(model)
    return len(layers)


def _keep_recomputed(model: nn.Module) -> None:
    """Make a model that disables gradient checkpointing for a while recompute the same layers in the same way later."""
    from transformers import PreTrainedModel

    paused: list[Any] = []

    def keeping(original: Callable[..., None]) -> Callable[..., None]:
        def set_gradient_checkpointing(enable: bool = True, *arguments: Any, **settings: Any) -> None:
            if not enable:
                paused.extend(part for part in model.modules() if getattr(part, "gradient_checkpointing", False))
            elif not paused:
                original(enable, *arguments, **settings)
            for part in paused:
                part.gradient_checkpointing = enable
            if enable:
                paused.clear()

        return set_gradient_checkpointing

    # PEFT's model is outside of it, and a pipeline's stage has none.
    if (inner := next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)) is not None:
        patches.apply("recomputed-layers", keeping, on=inner)


def decoder_layers(model: nn.Module) -> list[Any]:
    """Return the layers of a model's longest stack of layers that can be recomputed, in order.

    A vision tower, which may have more layers, is not a decoder.
    """
    stacks = _stacks_of_layers(model)
    text = [stack for name, stack in stacks if image_part(name) is None] or [stack for _, stack in stacks]
    return max(reversed(text), key=len, default=[])


def keep_towers(model: nn.Module) -> None:
    """Recompute no layer of a vision tower; call it after `gradient_checkpointing_enable`."""
    for name, stack in _stacks_of_layers(model):
        for layer in stack if image_part(name) else ():
            layer.gradient_checkpointing = False
    _keep_recomputed(model)


def unmark_frozen_towers(model: nn.Module) -> None:
    """Let frozen vision towers run without a backward pass; call it after `gradient_checkpointing_enable`.

    That marks the outputs of all input embeddings, those of patches too, as trained (transformers 5.17,
    `enable_input_require_grads`), so that a frozen tower would be recomputed for gradients that nobody reads.
    """
    for name, module in model.named_modules():
        if image_part(name) and not any(weight.requires_grad for weight in module.parameters()):
            for key, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__name__", "") == "make_inputs_require_grads":
                    del module._forward_hooks[key]


def _stacks_of_layers(model: nn.Module) -> list[tuple[str, list[Any]]]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    named = (
        (name, [layer for layer in module.children() if isinstance(layer, GradientCheckpointingLayer)])
        for name, module in model.named_modules()
    )
    return [(name, stack) for name, stack in named if stack]


def in_backward_pass() -> bool:
    """Return whether autograd is computing gradients on this thread, which includes the recomputation of checkpoints.

    torch 2.13 exposes the number of the graph task, inside which layers are recomputed, only under a private name.
    """
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def offload_checkpoints(model: nn.Module, count: int) -> None:
    """Move the inputs of the first `count` recomputed layers to host memory; 0 undoes it.

    Call it after `gradient_checkpointing_enable` and after other code that replaces a layer's checkpoint function.

    Raises:
        UsageError: the model has fewer recomputed layers.
    """
    layers = decoder_layers(model)
    recomputed = [layer for layer in layers if layer.gradient_checkpointing]
    if count > len(recomputed):
        rule = f"must be at most {len(recomputed)}, the layers that {type(model).__name__} recomputes"
        fix = "lower it" if recomputed else "set gradient_checkpointing in TrainingArguments, or omit it"
        raise UsageError(ConfigError(where=_OFFLOADED, value=count, rule=rule, fix=fix))
    for layer in layers:
        patches.remove("offloaded-checkpoints", on=layer)
    offload = _Offload(count)
    for index, layer in enumerate(recomputed[:count]):
        patches.apply("offloaded-checkpoints", partial(partial, offload.run, index), on=layer)
    if count:
        _keep_recomputed(model)


def allow_offload_on_cpu_ranks() -> None:
    """Let `gradient_checkpointing_kwargs={"offload": True}` run without an accelerator; values stay the same.

    A saved input is copied to memory that is not pinned, and back when the backward pass needs it.
    """
    import torch

    from ..metering import host_memory

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with host_memory():
            return tensor.clone()

    def replaced(original: Any) -> Any:
        def save_on_cpu(pin_memory: bool = False, device_type: str = "cuda") -> Any:
            if device_type != "cpu":
                return original(pin_memory=pin_memory, device_type=device_type)
            return torch.autograd.graph.saved_tensors_hooks(pack, torch.clone)

        return save_on_cpu

    patches.apply("offload-on-cpu-ranks", replaced)


class _Offload:
    """State of the offloaded layers of one model."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._latest: weakref.ref[_Checkpoint] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._checked_bytes = 0
        # Buffers without a checkpoint: under launches torch keeps no large pinned block that is freed, and pinning
        # takes longer than copying.
        self._free: list[torch.Tensor] = []

    def run(self, index: int, checkpoint: Callable[..., Any], layer: Any, *inputs: Any) -> Any:
        """Call the checkpoint function of a layer; `inputs[0]` are its hidden states."""
        import torch

        if not inputs or not torch.is_tensor(inputs[0]):
            rule, fix = "finds no hidden states: layers get them by keyword", "omit it for this model"
            raise UsageError(ConfigError(where=_OFFLOADED, value=self._layers, rule=rule, fix=fix))
        # Autograd keeps the hooks, which therefore must not refer to the input.
        address, shape = inputs[0].data_ptr(), inputs[0].shape
        saved: list[_Checkpoint] = []

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.data_ptr() != address or tensor.shape != shape:
                return tensor
            if not saved:
                previous = self._latest() if index and self._latest is not None else None
                saved.append(self._to_host(tensor, previous))
                self._latest = weakref.ref(saved[0])
            return saved[0]

        def unpack(packed: Any) -> torch.Tensor:
            return packed.restored() if isinstance(packed, _Checkpoint) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            result = checkpoint(layer, *inputs)
        if saved:
            saved[0].release()
        return result

    def _to_host(self, tensor: torch.Tensor, previous: _Checkpoint | None) -> _Checkpoint:
        import torch

        # Without this, the kernel would kill the process.
        needed = self._needed(tensor)
        if needed > self._checked_bytes and needed > _free_host_bytes():
            raise self._too_small(tensor)
        self._checked_bytes = max(needed, self._checked_bytes)
        if tensor.is_cuda and tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        try:
            buffer = self._buffer(tensor)
        except RuntimeError as error:
            # torch.OutOfMemoryError is of the device; a pinned allocation raises the driver's error.
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" not in str(error):
                raise
            raise self._too_small(tensor) from error
        checkpoint = _Checkpoint(tensor.detach(), buffer, previous, self._streams.get(tensor.device))
        # All copies of a device are on one stream, so that a later one overwrites the buffer after they have ended.
        weakref.finalize(checkpoint, self._free.append, buffer).atexit = False
        return checkpoint

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a free buffer of at least the tensor's size; a new one replaces one that is too small."""
        import torch

        from ..metering import host_memory

        if self._free:
            self._free.sort(key=len)
            if len(self._free[-1]) >= tensor.nbytes:
                return self._free.pop()
            del self._free[0]
        with host_memory():
            return torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=tensor.is_cuda)

    def _needed(self, tensor: torch.Tensor) -> int:
        exact = "pinned_max_round_threshold_mb" in os.environ.get("PYTORCH_ALLOC_CONF", "")
        block = pinned_block_bytes(tensor.nbytes, rounded_mb=ROUNDED_PINNED_MB if exact else math.inf)
        block = block if tensor.is_cuda else tensor.nbytes
        return self._layers * block * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def _too_small(self, tensor: torch.Tensor) -> UsageError:
        rule = (
            f"needs {gigabytes(self._needed(tensor))} GB of host memory for inputs {tuple(tensor.shape)} of that many "
            f"layers on this machine's ranks, and {gigabytes(_free_host_bytes())} GB are free"
        )
        fix = "lower it, shorten the sequences, or use a machine with more memory"
        return UsageError(ConfigError(where=_OFFLOADED, value=self._layers, rule=rule, fix=fix))


def _free_host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


class _Checkpoint:
    """One layer's input in host memory, and its copy on the device while either pass needs it."""

    def __init__(
        self,
        tensor: torch.Tensor,
        buffer: torch.Tensor,
        previous: _Checkpoint | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._previous, self._stream, self._device = previous, stream, tensor.device
        self._on_device: torch.Tensor | None = tensor
        self._host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._copy(tensor, self._host)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        import torch

        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._copied = self._stream.record_event()

    def release(self) -> None:
        """Drop the device's copy once the compute stream has waited for the copy to the host."""
        self._wait()
        self._on_device = None

    def restored(self) -> torch.Tensor:
        """Return the input on the device, and start to copy the input of the layer before."""
        self.fetch()
        self._wait()
        tensor, self._on_device = self._on_device, None
        if self._previous is not None:
            self._previous.fetch()
        assert tensor is not None, "fetch has set it"
        return tensor

    def fetch(self) -> None:
        """Start to copy the input to the device."""
        import torch

        if self._on_device is None:
            self._on_device = torch.empty_like(self._host, device=self._device, pin_memory=False)
            self._copy(self._host, self._on_device)

    def _wait(self) -> None:
        import torch

        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
