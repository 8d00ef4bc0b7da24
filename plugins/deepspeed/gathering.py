"""Whole parameters on the first rank, whichever engine divided them, and its word on every other rank.

Seen with deepspeed 0.19.8, torch 2.13.0 and accelerate 1.15.0:

- ZeRO-3 leaves an empty tensor in each parameter's place; `GatheredParameters` fills it on all ranks together. Nothing
  depends on `stage3_gather_16bit_weights_on_model_save`, which gathers the whole model at once and 16-bit copies alone.
- FSDP2 holds DTensors, whose `full_tensor` gathers a copy; shards that are offloaded lie on the host, which the
  accelerator's process group does not gather from.
- DDP, ZeRO-1 and ZeRO-2 keep parameters whole on every rank.
- AutoTP divides matrices among the ranks of a group, and AutoEP experts, which it renames.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, FaultsError, RefusedInputError, ShardwrightError, UsageError
from .auto_ep import moe_layers
from .auto_ep_checkpoint import whole_state_dict
from .engine_layers import with_all_columns_and_rows

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_WORK = timedelta(hours=12)
"""How long ranks wait for the first one; the default of NCCL, ten minutes, is shorter than a large model's export."""
_KINDS: dict[str, type[FaultsError]] = {kind.__name__: kind for kind in (UsageError, RefusedInputError)}


def gathered_parameters(model: Any) -> Iterator[tuple[str, Tensor | None]]:
    """Yield names and whole tensors of parameters and persistent buffers, in the order of the state dict.

    Every rank must exhaust the iterator: each step gathers on all of them. Only one tensor is whole at a time, tied
    ones come once, under their first name. Tensors must not be written to.

    Args:
        model: A model or a part of one, without the wrapper of DDP or DeepSpeed.

    Yields:
        The name, and the tensor on the host on the first rank, `None` on the others.
    """
    first, seen = is_first_rank(), set[int]()
    if moe_layers(model):
        whole = whole_state_dict(model, None, keep=first)
        for name, tensor in whole.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor
        return
    for prefix, module in model.named_modules():
        for name, tensor in _own_tensors(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, _whole(tensor, keep=first)


def training_device(model: Any) -> Any:
    """Return the device that a model computes on, which offloaded and divided parameters do not lie on."""
    import torch

    for parameter in model.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return parameter.device
        if hasattr(parameter, "device_mesh"):
            kind = parameter.device_mesh.device_type
            return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
        if hasattr(parameter, "ds_id"):
            found = torch.device(parameter.ds_tensor.device)
            offloaded = found.type == "cpu" and torch.accelerator.is_available() and torch.distributed.is_initialized()
            if offloaded and torch.distributed.get_backend() != "gloo":
                return torch.device("cuda", torch.cuda.current_device())
            return found
    return torch.device("cpu")


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or alone."""
    import torch

    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


class FirstRank:
    """The rank that works while the others wait for what comes of it."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.is_here = is_first_rank()
        """Whether this is that rank."""

    def does(self, work: Callable[[], Any]) -> Any:
        """Return on every rank what `work` returned on the first, as JSON can say it.

        Raises:
            ShardwrightError: the first rank's own error, on all ranks; others than ours are described.
        """
        if self._group is None:
            return work()
        answer, failure = None, None
        if self.is_here:
            try:
                answer = work()
            except Exception as error:
                # The others would wait for hours otherwise.
                failure = error
        said = _broadcast(json.dumps({"answer": answer, "error": _described(failure)}), self._group)
        if failure is not None:
            raise failure
        _raise(said["error"])
        return answer if self.is_here else said["answer"]


@contextmanager
def first_rank() -> Iterator[FirstRank]:
    """Give the ranks a way to follow the first one; every rank must enter."""
    import torch

    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        yield FirstRank(None)
        return
    group = torch.distributed.new_group(backend="gloo", timeout=_LONGEST_WORK)
    try:
        yield FirstRank(group)
    finally:
        torch.distributed.destroy_process_group(group)


def _own_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    yield from ((name, one) for name, one in module._parameters.items() if one is not None)
    skipped = module._non_persistent_buffers_set
    yield from ((name, one) for name, one in module._buffers.items() if one is not None and name not in skipped)


def _whole(tensor: Any, *, keep: bool) -> Tensor | None:
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            # What lies on the host already is freed when the block ends.
            return tensor.detach().to("cpu", copy=True) if keep else None
    found = tensor.detach()
    if hasattr(found, "full_tensor"):
        found = found.to(found.device_mesh.device_type).full_tensor()
    found = with_all_columns_and_rows(tensor, found)
    return found.cpu() if keep else None


def _broadcast(text: str, group: Any) -> Any:
    """Send the first rank's text to all; as bytes, because objects would be unpickled."""
    import torch

    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    torch.distributed.broadcast(length, src=0, group=group)
    if not is_first_rank():
        data = torch.empty(int(length), dtype=torch.uint8)
    torch.distributed.broadcast(data, src=0, group=group)
    return json.loads(bytes(data.tolist()).decode())


def _described(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    if isinstance(error, FaultsError) and type(error).__name__ in _KINDS:
        faults = [
            asdict(fault) | {"value": None if fault.value is None else str(fault.value)} for fault in error.faults
        ]
        return {"kind": type(error).__name__, "faults": faults}
    return {"kind": None, "text": str(error) if isinstance(error, ShardwrightError) else repr(error)}


def _raise(described: dict[str, Any] | None) -> None:
    if described is None:
        return
    if described["kind"] is not None:
        raise _KINDS[described["kind"]]([Fault(**fault) for fault in described["faults"]])
    raise ShardwrightError(f"the first rank failed: {described['text']}")
