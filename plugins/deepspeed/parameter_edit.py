"""Weights that are read whole and changed in place after an optimizer step, wherever an engine keeps them.

Seen with deepspeed 0.19.8, accelerate 1.15.0 and torch 2.13.0:

- DeepSpeed steps fp32 copies of its own, cut up over the ranks, and overwrites the parameters from them. A change of a
  parameter alone is gone one step later; `safe_get_local_fp32_param` and `_hp_mapping` lead to the copies.
- ZeRO-1 and 2: every rank holds whole parameters and a fragment of the copies. Where both have one type, an elementwise
  change of both is exact; otherwise `update_lp_params` gathers the parameters once more.
- ZeRO-3: `ds_tensor` is the rank's part of the parameter, the same elements as the copy's part, padded at the end.
  Small parameters (`ds_persist`) also stay gathered between steps.
- Without ZeRO `FP16_Optimizer` and `FP16_UnfusedOptimizer` keep fp32 copies that nothing leads to.
- FSDP2 keeps the parameter itself in pieces, a `DTensor` of whole rows; there is no other copy.
- AutoTP leaves each rank of a group a matrix of its own, some rows or some columns of the whole one, of which the
  engine then keeps copies as of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault
from ..transformers.training_arguments import deepspeed_configuration
from .engine_layers import own_part, with_all_columns_and_rows

if TYPE_CHECKING:
    from torch import Tensor

    Change = Callable[[str, Tensor, int], None]
    """Changes a flat piece of a weight in place: its name, the piece, and where it starts in the flattened matrix that
    this rank holds a piece of, which tensor parallelism has cut out of the whole one."""

_HIDDEN_MASTERS = ("FP16_Optimizer", "FP16_UnfusedOptimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A piece of a flattened weight, as `WeightEditor.part` cuts it out of the whole one, that this rank changes."""

    start: int
    """First element."""
    length: int
    """Elements, without padding."""
    device: Any
    """Where they lie."""


class WeightEditor:
    """Reads and changes weights under one process, DDP, ZeRO-1, 2 and 3, FSDP2 and AutoTP, between optimizer steps.

    Args:
        weights: Trained parameters by name; the same on every rank that holds a part of them, in the same order.
        optimizer: What the Trainer steps, wrapped or not.
    """

    def __init__(self, weights: Mapping[str, Any], optimizer: Any) -> None:
        self.weights = weights
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        self._stale = False

    def whole(self, name: str) -> Tensor:
        """Return a whole weight in fp32, as the optimizer knows it; every rank must call it and gets all of it."""
        weight = self.weights[name]
        if _has_masters(weight):
            from deepspeed.utils import safe_get_full_fp32_param

            found: Tensor = safe_get_full_fp32_param(weight).detach().float()
            return with_all_columns_and_rows(weight, found)
        value = weight.detach().float()
        if not _is_dtensor(weight):
            return with_all_columns_and_rows(weight, value)
        if value.device.type != value.device_mesh.device_type:
            value = value.to(value.device_mesh.device_type)
        return value.full_tensor()

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return what this rank holds of a matrix that is divided as a weight is, all of it without AutoTP."""
        return own_part(self.weights[name], whole)

    def regions(self, name: str) -> Iterator[Region]:
        """Yield the pieces that `edit` may hand out on this rank."""
        weight = self.weights[name]
        if hasattr(weight, "ds_id"):
            start, length = _partition(weight)
            yield Region(start=start, length=length, device=weight.ds_tensor.device)
            if weight.ds_persist:
                yield Region(start=0, length=weight.ds_numel, device=weight.ds_tensor.device)
        elif _is_dtensor(weight):
            local = weight.to_local()
            yield Region(start=_first_element(weight), length=local.numel(), device=local.device)
        else:
            yield Region(start=0, length=weight.numel(), device=weight.device)
            mapping = getattr(weight, "_hp_mapping", None)
            if mapping is not None:
                address = mapping.lp_fragment_address
                yield Region(start=address.start, length=address.numel, device=mapping.hp_fragment.device)

    def edit(self, name: str, change: Change, *, survives_rounding: bool) -> None:
        """Change every piece of a weight that this rank holds; call `finish` after the last weight.

        Args:
            name: Of the weight.
            change: Elementwise, in place; called with each piece.
            survives_rounding: Whether changing and rounding to 16 bit may be exchanged, as setting to zero may.
        """
        import torch

        weight = self.weights[name]
        with torch.no_grad():
            if hasattr(weight, "ds_id"):
                self._edit_zero3(name, weight, change, survives_rounding=survives_rounding)
            elif hasattr(weight, "_hp_mapping"):
                self._edit_zero12(name, weight, change, survives_rounding=survives_rounding)
            elif _is_dtensor(weight):
                local = weight.to_local()
                change(name, local.view(-1), _first_element(weight))
            else:
                change(name, weight.data.view(-1), 0)

    def finish(self) -> None:
        """Let the parameters follow their fp32 copies where that takes the other ranks; every rank must call it."""
        if self._stale:
            self._optimizer.update_lp_params()
        self._stale = False

    def _edit_zero12(self, name: str, weight: Any, change: Change, *, survives_rounding: bool) -> None:
        mapping = weight._hp_mapping
        if mapping is not None:
            change(name, mapping.hp_fragment.data, mapping.lp_fragment_address.start)
        if survives_rounding or weight.dtype == _master_dtype(weight, self._optimizer):
            change(name, weight.data.view(-1), 0)
        else:
            self._stale = True

    def _edit_zero3(self, name: str, weight: Any, change: Change, *, survives_rounding: bool) -> None:
        import torch
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
        from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

        start, length = _partition(weight)
        master = safe_get_local_fp32_param(weight)
        change(name, master[:length], start)
        safe_set_local_fp32_param(weight, master)
        weight.ds_tensor.data.view(-1)[:length].copy_(master[:length])
        if not (weight.ds_persist and weight.ds_status == ZeroParamStatus.AVAILABLE):
            return
        if survives_rounding or weight.dtype == torch.float32:
            change(name, weight.data.view(-1), 0)
        else:
            weight.data.copy_(self.whole(name))


def edit_faults(
    weights: Mapping[str, Any], arguments: Any, optimizer: Any, *, tiny_changes: bool = False
) -> list[Fault]:
    """Return why weights could not be changed between steps so that the change lasts; all at once.

    Args:
        weights: Parameters by name.
        arguments: `TrainingArguments`.
        optimizer: What the Trainer steps, wrapped or not.
        tiny_changes: Whether changes are as small as those of an optimizer, which 16-bit numbers lose.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    faults = list(_engine_faults(arguments, inner))
    found = [_weight_fault(name, weight) for name, weight in weights.items()]
    faults += [fault for fault in found if fault is not None][:_SHOWN]
    if tiny_changes and not faults:
        small = [name for name, weight in weights.items() if _master_dtype(weight, inner).itemsize < 4]
        if small:
            rule = f"{small[0]} is trained in 16 bit without an fp32 copy, where changes of one step round to nothing"
            fix = "load the model in float32 and train with bf16=True"
            faults.append(Fault(where="precision", value=str(weights[small[0]].dtype), rule=rule, fix=fix))
    return faults


_SHOWN = 8


def _engine_faults(arguments: Any, inner: Any) -> Iterator[Fault]:
    zero = (deepspeed_configuration(arguments) or {}).get("zero_optimization", {})
    for section in ("offload_optimizer", "offload_param"):
        if (zero.get(section) or {}).get("device") == "nvme":
            rule = "weights on NVMe would be read and written once more for every change of every step"
            yield Fault(where=f"zero_optimization.{section}", value="nvme", rule=rule, fix="offload to cpu")
    asynchronous = {
        "zero_optimization.zenflow": zero.get("zenflow"),
        "zero_optimization.offload_optimizer.super_offload": (zero.get("offload_optimizer") or {}).get("super_offload"),
    }
    for where, value in asynchronous.items():
        if value:
            rule = "steps the optimizer beside the next forward pass, so that no moment belongs to a change of weights"
            yield Fault(where=where, rule=rule, fix="remove it")
    if type(inner).__name__ in _HIDDEN_MASTERS:
        rule = "keeps fp32 copies that cannot be reached, and would undo every change"
        yield Fault(where="optimizer", value=type(inner).__name__, rule=rule, fix="use ZeRO stage 1, 2 or 3")


def _weight_fault(name: str, weight: Any) -> Fault | None:
    if not weight.requires_grad:
        rule = "is frozen, and what is trained beside it would fill its zeros when they are merged"
        return Fault(where="targets", value=name, rule=rule, fix="train all weights, or leave it out")
    shape = getattr(weight, "ds_shape", weight.shape)
    if len(shape) != 2:
        rule = f"has shape {tuple(shape)} on this rank: FSDP version 1 cuts matrices anywhere"
        return Fault(where="targets", value=name, rule=rule, fix="use FSDP version 2 or ZeRO")
    if _is_dtensor(weight):
        sharded = [placement for placement in weight.placements if not placement.is_replicate()]
        if len(sharded) > 1 or any(type(each).__name__ != "Shard" or each.dim != 0 for each in sharded):
            rule = f"is cut up as {tuple(weight.placements)}; whole rows on each rank can be changed"
            return Fault(where="targets", value=name, rule=rule, fix="train without tensor parallelism")
    return None


def _has_masters(weight: Any) -> bool:
    return hasattr(weight, "ds_id") or hasattr(weight, "_hp_mapping")


def _master_dtype(weight: Any, optimizer: Any) -> Any:
    """Return the type in which the optimizer steps a weight; all ranks agree, also one without a piece of it."""
    if not _has_masters(weight):
        return weight.dtype
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        found = getattr(optimizer, name, None)
        if found:
            return found[0].dtype
    raise AssertionError(f"{type(optimizer).__name__} is none of DeepSpeed's optimizers with fp32 copies")


def _partition(weight: Any) -> tuple[int, int]:
    """Return where this rank's part of a ZeRO-3 parameter starts, and its elements without padding."""
    import torch.distributed as distributed

    size = weight.ds_tensor.numel()
    start = size * distributed.get_rank(weight.ds_process_group)
    return start, max(0, min(size, weight.ds_numel - start))


def _is_dtensor(weight: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


def _first_element(weight: Any) -> int:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return int(offset[0]) * int(weight.shape[1:].numel())
