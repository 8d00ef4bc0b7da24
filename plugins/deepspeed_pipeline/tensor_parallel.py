"""Tensor parallelism inside the stages of a pipeline: matrices of a decoder layer cut over a group, and made whole.

Seen with deepspeed 0.19.8: AutoTP refuses a `PipelineModule` ("Not able to determine model policy automatically",
module_inject/auto_tp.py) and would replace the pipeline's groups by its own, which know no stages (runtime/engine.py,
`_configure_tensor_parallel_states`). Its layers need neither: given the group of the pipeline's grid, they compute and
reduce as Megatron-LM does (arXiv 1909.08053), and mark their parameters, so that the gradient norm counts each once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ENGINE_SECTION = {"pipe_partitioned": False, "grad_partitioned": False}
"""`pipeline` section of the DeepSpeed configuration: by default, activations that every rank of a group needs whole are
cut before they are sent, by sizes that are told once (runtime/pipe/engine.py, `pipe_partition_input_meta_cache`)."""

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")
_OF_HEADS = ("q_norm", "k_norm")
"""Norms of single heads: whole on every rank, which each sees its own heads."""


def divide_layer(layer: Any, group: Any) -> None:
    """Replace the matrices of a decoder layer by this rank's parts of them, in place.

    Query, key, value, gate and up projections are cut by output features, the others by input features.

    Args:
        layer: Decoder layer of Llama, Mistral, Qwen2, Qwen3 or Gemma-2.
        group: Tensor-parallel process group.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, set_autotp_mode

    # One mode for the process, which the layers ask in every forward pass: it stays until `forget_tensor_parallel`.
    set_autotp_mode(training=True)
    for path, module in list(layer.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in _BY_OUTPUT:
            setattr(layer.get_submodule(parent), name, LinearLayer(module, group, name=path))
        elif name in _BY_INPUT:
            setattr(layer.get_submodule(parent), name, LinearAllreduce(module, group, name=path))
        elif name in _OF_HEADS:
            module.weight.register_hook(_summed_over(group))


def whole_tensor(owner: Any, name: str, tensor: Tensor) -> Tensor:
    """Return a parameter with the parts of all ranks; every rank of the group must call it.

    Args:
        owner: Module that holds the parameter.
        name: `weight` or `bias`.
        tensor: This rank's part.
    """
    import torch

    dimension = _cut_dimension(owner, name)
    if dimension is None:
        return tensor
    parts = [
        tensor.new_empty([size if axis == dimension else length for axis, length in enumerate(tensor.shape)])
        for size in owner._partition_sizes
    ]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=owner.mp_group)
    return torch.cat(parts, dim=dimension)


def _cut_dimension(owner: Any, name: str) -> int | None:
    """Return the dimension in which ranks hold parts; the bias of an input-cut matrix is whole on each."""
    kind = type(owner).__name__
    if kind == "LinearLayer":
        return 0
    return 1 if kind == "LinearAllreduce" and name == "weight" else None


def _summed_over(group: Any) -> Callable[[Tensor], Tensor]:
    def summed(gradient: Tensor) -> Tensor:
        import torch

        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=group)
        return gradient

    return summed
