"""What a compiled model keeps for its backward pass, from the partition that torch.compile makes of its graph.

Inductor's decompositions, graph passes and partition (`min_cut_rematerialization_partition`) run as they do for a GPU;
its code generation, which allocates less or the same, does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any

import torch
from shardwright.ds_configs.memory.activations import Mode
from shardwright.ds_configs.specs.model import Dimensions

from .families import Shape, build_inputs, build_subject
from .fit import TraceError

# Sizes whose products differ, so that a tensor's size has one feature.
SHAPE = Shape(
    dimensions=Dimensions(
        num_layers=2,
        hidden_size=136,
        intermediate_size=328,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=24,
        vocab_size=1031,
        num_experts=0,
        experts_per_token=0,
        expert_intermediate_size=0,
    ),
    micro_batch_size=5,
    seq_len_tokens=61,
    lora_rank=0,
)
Coefficients = Counter[str]
"""Bytes by feature."""


def kept_by_compiled(family: str, mode: Mode, layers: int) -> Coefficients:
    """Return the bytes by feature that the compiled graphs of a model save."""
    from dataclasses import replace

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    kept: Coefficients = Counter()

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        joint_graph_passes(joint)
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
        )
        (outputs,) = next(node for node in reversed(forward.graph.nodes) if node.op == "output").args
        for node in outputs[num_fwd_outputs:]:
            value = getattr(node, "meta", {}).get("val")
            if isinstance(value, torch.Tensor) and node.op != "placeholder":
                kept.update(_coefficients(tuple(value.shape), value.element_size()))
        return forward, backward

    torch._dynamo.reset()
    size = replace(SHAPE.dimensions, num_layers=layers)
    subject = build_subject(family, size, mode=mode, adapter="none", lora_rank=0, checkpointing=False)
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "bf16_autocast"):
        torch.compile(subject.model, backend=backend)(**build_inputs(SHAPE, attention="fused"))
    return kept


def _coefficients(shape: tuple[int, ...], width: int) -> Mapping[str, int]:
    size, count = SHAPE.dimensions, prod(shape)
    batch, length = SHAPE.micro_batch_size, SHAPE.seq_len_tokens
    tokens = batch * length
    factors = {
        1: "token",
        size.hidden_size: "token*hidden_size",
        size.intermediate_size: "token*intermediate_size",
        size.query_size: "token*query_size",
        size.key_value_size: "token*key_value_size",
        size.num_attention_heads: "token*attention_heads",
        size.num_key_value_heads: "token*key_value_heads",
        size.vocab_size: "token*vocab_size",
    }
    other = {tokens * length: "attention_mask", length * size.head_dim: "position*head_dim", length: "position"}
    if count in other:
        return {other[count]: width}
    if count % tokens == 0:
        per_token = count // tokens
        for factor, name in sorted(factors.items(), reverse=True):
            if per_token % factor == 0 and per_token // factor <= 4:
                return {name: width * per_token // factor}
    if count == batch * (length + 1):
        return {"token": width, "sequence": width}
    # What has no dimension of the batch is a copy of weights, which plans count per parameter, or a few numbers.
    return {"constant": width * count} if count <= length else {"weights": width * count}


def derive_compiled_table(family: str, mode: Mode, eager: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of compiled layers: kept bytes of the partition, and transients of one eager layer as a bound.

    The loss is fused: it keeps the logits and writes their gradient, both in the type of the head's product.

    Raises:
        TraceError: layers keep different numbers of bytes.
    """
    two, three, four = (kept_by_compiled(family, mode, layers) for layers in (2, 3, 4))
    layer, again = ({name: more[name] - less[name] for name in more} for less, more in pairwise((two, three, four)))
    if any(layer.get(name, 0) != count for name, count in again.items()):
        raise TraceError(f"{family} {mode}: compiled layers keep different numbers of bytes")
    around = {name: two[name] - 2 * layer.get(name, 0) for name in two}
    features = [*eager["features"], *(name for name in ("attention_mask",) if name not in eager["features"])]
    added = len(features) - len(eager["features"])

    def row(coefficients: Mapping[str, int]) -> list[float]:
        return [coefficients.get(name, 0) for name in features]

    saved = row(layer)
    logits = around.get("token*vocab_size", 0)
    loss = {"token*vocab_size": logits, "token": 16, "constant": 16}
    wider = [[*old, *[0] * added] for old in eager["saved_per_layer"]]
    more = [max(column) - new for column, new in zip(zip(*wider, strict=True), saved, strict=True)]

    def bounded(rows: list[list[float]]) -> list[list[float]]:
        return [[old + extra for old, extra in zip([*values, *[0] * added], more, strict=True)] for values in rows]

    return {name: [[*values, *[0] * added] for values in rows] for name, rows in eager.items() if _is_table(rows)} | {
        "features": features,
        "saved_per_layer": [saved],
        "outside_layers": [row({name: count for name, count in around.items() if name != "token*vocab_size"})],
        "backward_transient": bounded(eager["backward_transient"]),
        # Under autocast, Accelerate also returns the logits in fp32, which live until the loss is returned.
        "loss_forward_peak": [row(loss | {"token*vocab_size": logits + (4 if mode == "bf16_autocast" else 0)})],
        # The targets are scattered into fp32 zeros, besides the logits and their gradient.
        "loss_backward_peak": [
            row(loss | {"token*vocab_size": 2 * logits + 4}),
            row(loss | {"token*vocab_size": 2 * logits, "token*hidden_size": 8}),
        ],
        "weight_copy_bytes_per_parameter": 2 if two["weights"] else 0,
    }


def _is_table(rows: Any) -> bool:
    return isinstance(rows, list) and isinstance(rows[0], list)
