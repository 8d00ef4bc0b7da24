"""One rank's share of a model that AutoTP divides, as a smaller model."""

from __future__ import annotations

from dataclasses import replace

from ..specs.dimensions import Dimensions
from ..specs.model import ModelSpec, ParameterShape

ROW_PARALLEL = ("o_proj", "down_proj", "c_proj", "out_proj", "dense", "fc2")
"""Modules that AutoTP divides along their input; their biases stay whole (deepspeed/module_inject/auto_tp.py)."""

CONV1D_FAMILIES = ("gpt2",)
"""Model types whose matrices are stored as (in, out)."""


def tensor_parallel_share(model: ModelSpec, tp: int, *, divides_head: bool = True) -> ModelSpec:
    """Return what the fullest of `tp` ranks holds, as AutoTP divides a model (deepspeed 0.19.8, `auto_tp.py`).

    Matrices of attention and MLP are divided, by whole key/value heads with their query heads and by columns. An output
    head of its own holds `1 / tp` of the vocabulary and gathers the logits; norms, the embedding and a head tied to it
    are whole. In a pipeline every output head is whole (`divides_head` false).
    """
    sizes = model.dimensions
    key_value_heads = -(-sizes.num_key_value_heads // tp)
    local = replace(
        sizes,
        num_key_value_heads=key_value_heads,
        num_attention_heads=key_value_heads * (sizes.num_attention_heads // max(1, sizes.num_key_value_heads)),
        intermediate_size=-(-sizes.intermediate_size // tp),
    )
    flipped = model.model_type in CONV1D_FAMILIES
    parameters = tuple(
        parameter if parameter.group == "head" and not divides_head else _divided(parameter, sizes, local, tp, flipped)
        for parameter in model.parameters
    )
    return replace(model, dimensions=local, parameters=parameters)


def _divided(parameter: ParameterShape, sizes: Dimensions, local: Dimensions, tp: int, flipped: bool) -> ParameterShape:
    if parameter.group == "head":
        return replace(parameter, shape=(-(-parameter.shape[0] // tp), *parameter.shape[1:]))
    if parameter.group not in ("attention", "mlp") or parameter.kind not in ("linear", "bias"):
        return parameter
    row = parameter.module.rpartition(".")[2] in ROW_PARALLEL
    if len(parameter.shape) == 1:
        return parameter if row else replace(parameter, shape=(_part(parameter.shape[0], parameter, sizes, local, tp),))
    axis = int(row) ^ int(flipped)
    shape = list(parameter.shape)
    shape[axis] = _part(shape[axis], parameter, sizes, local, tp)
    return replace(parameter, shape=tuple(shape))


def _part(width: int, parameter: ParameterShape, sizes: Dimensions, local: Dimensions, tp: int) -> int:
    """Return what the fullest rank holds of a width; whole heads stay together."""
    if parameter.group == "attention" and sizes.num_key_value_heads:
        return -(-width * local.num_key_value_heads // sizes.num_key_value_heads)
    return -(-width // tp)
