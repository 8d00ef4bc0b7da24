"""Parameters under every engine: gather them on the first rank, or read and change them between optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError
from ..launching.background import is_first_rank
from ..transformers.training_arguments import deepspeed_configuration
from .auto_ep import moe_layers, saved_tensors, whole_state_dict
from .engine import own_part, with_all_columns_and_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, TrainingArguments


def gathered_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor | None]]:
    """Yield names and unsharded tensors of parameters and persistent buffers, in the order of the state dict.

    Every rank must exhaust the iterator: each step gathers one tensor. Tied tensors are yielded once, under their first
    name. The first rank gets a tensor on the host, which must not be written to; the others get `None`.
    """
    first, seen = is_first_rank(), set[int]()
    if moe_layers(model):
        for name, tensor in whole_state_dict(model, None, keep=first).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor
        return
    for name, tensor in saved_tensors(model):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if hasattr(tensor, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([tensor]):
                # Copied, because the gathered tensor is freed when the block ends, also on the host.
                value = tensor.detach().to("cpu", copy=True) if first else None
            yield name, value
            continue
        value = tensor.detach()
        if hasattr(value, "full_tensor"):
            value = value.to(value.device_mesh.device_type).full_tensor()
        value = with_all_columns_and_rows(tensor, value)
        yield name, value.cpu() if first else None


def training_device(model: PreTrainedModel) -> Any:
    """Return the device that a model computes on; offloaded and sharded parameters may be on another one."""
    import torch

    for parameter in model.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return parameter.device
        if hasattr(parameter, "device_mesh"):
            kind = parameter.device_mesh.device_type
            return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
        if hasattr(parameter, "ds_id"):
            device = torch.device(parameter.ds_tensor.device)
            offloaded = device.type == "cpu" and torch.accelerator.is_available() and torch.distributed.is_initialized()
            if offloaded and torch.distributed.get_backend() != "gloo":
                return torch.device("cuda", torch.cuda.current_device())
            return device
    return torch.device("cpu")


if TYPE_CHECKING:
    Change = Callable[[str, Tensor, int], None]
    """Changes a flat piece of a weight in place. Arguments: the weight's name, the piece, and the index of its first
    element in the flattened matrix, which is this rank's shard under tensor parallelism."""

_HIDDEN_MASTERS = ("FP16_Optimizer", "FP16_UnfusedOptimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A piece that this rank changes of the flattened weight that `WeightEditor.part` returns, without padding."""

    start: int
    length: int
    device: torch.device


class WeightEditor:
    """Reads and changes weights under one process, DDP, ZeRO-1, 2 and 3, FSDP2 and AutoTP, between optimizer steps.

    `weights` are in the same order on every rank that holds a shard of them.
    """

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.weights = weights

    def whole(self, name: str) -> Tensor:
        """Return an unsharded weight in fp32, from the optimizer's copy if it has one; every rank must call it."""
        weight = self.weights[name]
        if hasattr(weight, "ds_id") or hasattr(weight, "_hp_mapping"):
            from deepspeed.utils import safe_get_full_fp32_param

            return with_all_columns_and_rows(weight, safe_get_full_fp32_param(weight).detach().float())
        value = weight.detach().float()
        if not _is_dtensor(weight):
            return with_all_columns_and_rows(weight, value)
        if value.device.type != value.device_mesh.device_type:
            value = value.to(value.device_mesh.device_type)
        return value.full_tensor()

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's AutoTP shard of a matrix that is sharded like a weight; without AutoTP, the matrix."""
        return own_part(self.weights[name], whole)

    def regions(self, name: str) -> Iterator[Region]:
        """Yield the pieces that `edit` may pass to its callback on this rank."""
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

    def edit(self, name: str, change: Change) -> None:
        """Change every piece of a weight that this rank holds, elementwise in place.

        The change must commute with rounding to 16 bit, as setting to zero does.
        """
        import torch

        weight = self.weights[name]
        with torch.no_grad():
            if hasattr(weight, "ds_id"):
                from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
                from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

                start, length = _partition(weight)
                master = safe_get_local_fp32_param(weight)
                change(name, master[:length], start)
                safe_set_local_fp32_param(weight, master)
                weight.ds_tensor.data.view(-1)[:length].copy_(master[:length])
                if weight.ds_persist and weight.ds_status == ZeroParamStatus.AVAILABLE:
                    change(name, weight.data.view(-1), 0)
            elif _is_dtensor(weight):
                local = weight.to_local()
                change(name, local.view(-1), _first_element(weight))
            else:
                if (mapping := getattr(weight, "_hp_mapping", None)) is not None:
                    change(name, mapping.hp_fragment.data, mapping.lp_fragment_address.start)
                change(name, weight.data.view(-1), 0)


def edit_errors(
    weights: Mapping[str, Any], arguments: TrainingArguments, optimizer: torch.optim.Optimizer
) -> list[ConfigError]:
    """Return why changes of weights between steps would not last."""
    inner = getattr(optimizer, "optimizer", optimizer)
    errors = []
    zero = (deepspeed_configuration(arguments) or {}).get("zero_optimization", {})
    for section in ("offload_optimizer", "offload_param"):
        if (zero.get(section) or {}).get("device") == "nvme":
            where, rule = f"zero_optimization.{section}", "every change would read and write weights on NVMe once more"
            errors.append(ConfigError(where=where, value="nvme", rule=rule, fix="offload to cpu"))
    asynchronous = {
        "zero_optimization.zenflow": zero.get("zenflow"),
        "zero_optimization.offload_optimizer.super_offload": (zero.get("offload_optimizer") or {}).get("super_offload"),
    }
    for where, value in asynchronous.items():
        if value:
            rule = "runs the optimizer step during the next forward pass, so no point in time is safe for changes"
            errors.append(ConfigError(where=where, rule=rule, fix="remove it"))
    if (kind := type(inner).__name__) in _HIDDEN_MASTERS:
        rule = "keeps fp32 copies that cannot be accessed and would undo every change"
        errors.append(ConfigError(where="optimizer", value=kind, rule=rule, fix="use ZeRO stage 1, 2 or 3"))
    unchangeable = []
    for name, weight in weights.items():
        shape = getattr(weight, "ds_shape", weight.shape)
        shards = (
            [placement for placement in weight.placements if not placement.is_replicate()]
            if _is_dtensor(weight)
            else []
        )
        if not weight.requires_grad:
            rule, fix = "is frozen, and merging an adapter would fill its zeros", "train all weights, or exclude it"
        elif len(shape) != 2:
            rule = f"has shape {tuple(shape)} on this rank, because FSDP version 1 flattens matrices"
            fix = "use FSDP version 2 or ZeRO"
        elif len(shards) > 1 or any(type(shard).__name__ != "Shard" or shard.dim != 0 for shard in shards):
            rule = f"is sharded as {tuple(weight.placements)}; only weights sharded by rows can be changed"
            fix = "train without tensor parallelism"
        else:
            continue
        unchangeable.append(ConfigError(where="targets", value=name, rule=rule, fix=fix))
    return errors + unchangeable[:8]


def _partition(weight: torch.Tensor) -> tuple[int, int]:
    """Return the first element of this rank's ZeRO-3 shard of a parameter, and its length without padding."""
    import torch.distributed as distributed

    size = weight.ds_tensor.numel()
    start = size * distributed.get_rank(weight.ds_process_group)
    return start, max(0, min(size, weight.ds_numel - start))


def _is_dtensor(weight: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


def _first_element(weight: torch.Tensor) -> int:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return int(offset[0]) * int(weight.shape[1:].numel())
