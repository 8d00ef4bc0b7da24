"""The whole model on the ranks that save it, under its own names, out of AutoEP's layers.

Seen with deepspeed 0.19.8 and transformers 5.17.0: `AutoEPMoELayer` keeps `gate_up_proj` as `w1` (gate) and `w3` (up),
`down_proj` as `w2`, the router below `router.gate`, and a shared expert below `shared_experts`, whatever the model
calls it; a second attribute for the router puts its weight into the state dict twice. Each rank holds the experts
`[rank * n, (rank + 1) * n)` of its group. `accelerator.get_state_dict` would save one rank's experts under those names,
and `_zero3_consolidated_16bit_state_dict` refuses them in ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .auto_ep import moe_layers

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


def whole_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a model's state dict, of divided parameters their whole ones."""
    return {name: tuple(getattr(value, "ds_shape", value.shape)) for name, value in _state(model)}


def whole_state_dict(model: Any, shapes: Shapes | None, *, keep: bool) -> dict[str, Tensor]:
    """Gather a model that AutoEP has divided; every rank must call.

    Args:
        model: The module of an engine.
        shapes: What `whole_shapes` said before there was an engine; `None` where nobody asked.
        keep: Whether this rank gets the tensors, on the host; the others get an empty dictionary.
    """
    layers = moe_layers(model)
    found: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    for name, value in _state(model):
        owner = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), None)
        if owner is not None and name.startswith(f"{owner}.experts."):
            continue
        original = name if owner is None else f"{owner}.{original_name(layers[owner], name[len(owner) + 1 :])}"
        if id(value) in seen:
            # Tied weights stay one tensor, which `save_pretrained` writes once.
            if keep:
                found[original] = found[seen[id(value)]]
            continue
        seen[id(value)] = original
        with _gathered(value):
            if keep:
                found[original] = value.detach().to("cpu", copy=True)
    for prefix, layer in layers.items():
        for name, whole in _whole_experts(layer, keep=keep):
            if keep:
                found[f"{prefix}.experts.{name}"] = whole
    if keep and shapes is not None:
        assert {name: tuple(value.shape) for name, value in found.items()} == dict(shapes), "names have changed"
    return found


def _whole_experts(layer: Any, *, keep: bool) -> Iterator[tuple[str, Tensor]]:
    import torch

    gate, down, up = (
        _over_ranks(getattr(layer.experts, name), layer.ep_group, keep=keep) for name in ("w1", "w2", "w3")
    )
    yield "gate_up_proj", torch.cat([gate, up], dim=1)
    yield "down_proj", down


def _over_ranks(parameter: Any, group: Any, *, keep: bool) -> Tensor:
    """Return the experts of all ranks of a group in their order, on the host; empty on ranks that do not keep them."""
    import torch
    import torch.distributed as dist

    with _gathered(parameter):
        own = parameter.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
    # On the host at once: the device already holds the parts.
    return torch.cat([part.cpu() for part in parts]) if keep else own.new_empty(0, 0, device="cpu")


def original_name(layer: Any, name: str) -> str:
    """Return what a tensor of AutoEP's layer is called below the block of the model."""
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset

    preset = get_preset(layer.model_family)
    renamed = {
        "router.gate.": f"{preset.router_pattern}.",
        "router.": f"{preset.router_pattern}.",
        "shared_experts.": f"{preset.shared_experts_pattern}.",
        "shared_experts_gate.": f"{preset.shared_experts_gate_pattern}.",
    }
    for prefix, original in renamed.items():
        if name.startswith(prefix):
            return original + name[len(prefix) :]
    return name


def _state(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield parameters and persistent buffers, tied ones under each of their names, and no module twice."""
    for prefix, module in model.named_modules():
        kept = (one for one in module._buffers.items() if one[0] not in module._non_persistent_buffers_set)
        for name, value in (*module._parameters.items(), *kept):
            if value is not None:
                yield f"{prefix}.{name}" if prefix else name, value


@contextmanager
def _gathered(value: Any) -> Iterator[None]:
    if not hasattr(value, "ds_id"):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([value]):
        yield
