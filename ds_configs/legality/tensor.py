"""Rules of tensor parallelism for a model, a layout and a node: DeepSpeed AutoTP with ZeRO 0 to 2, dense models.

Seen in deepspeed 0.19.8 (module_inject/tp_shard.py): sizes that `tp` does not divide are cut unevenly without a word,
and ranks beyond the key/value heads hold no attention at all. Both train, and neither pays: they are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from ..specs.errors import Fault
from .candidate import divides, nearest_divisors, one_of

LARGEST_ZERO_STAGE = 2
"""ZeRO-3 divides over the data-parallel ranks what `tp` has divided already, and gathers it again in every layer."""

TENSOR_PARALLEL_FAMILIES = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "starcoder2",
    }
)
"""`model_type`s whose losses, weights and checkpoints were shown equal to those of one process."""

WITHOUT_VOCABULARY_PARALLEL_HEAD: Mapping[str, str] = {
    "gemma": "scales its token embedding",
    "gemma2": "scales its token embedding",
    "olmo2": "splits the input of its output projections, as a head would",
    "phi3": "splits the input of its output projections, as a head would",
}
"""Families whose output head AutoTP does not divide by the vocabulary, and why (module_inject/layers.py)."""

WITHOUT_TENSOR_PLAN: Mapping[str, str] = {
    "gpt2": "keeps its weights in Conv1D, transposed and with query, key and value fused, which AutoTP does not cut",
    "bloom": "has no tensor-parallel plan in transformers",
    "falcon": "has no tensor-parallel plan in transformers",
    "opt": "has no tensor-parallel plan in transformers",
    "stablelm": "has no tensor-parallel plan in transformers",
}
"""Why families are refused, where the reason is known."""


def tensor_parallel_faults(
    *,
    tensor_parallel_size: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    intermediate_size: int,
    vocab_size: int,
    model_type: str | None = None,
    num_experts: int = 0,
    vocabulary_parallel_head: bool = False,
    engine: str = "deepspeed",
    zero_stage: int | None = 0,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    method: str = "full",
    sequence_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    where: str = "tp",
) -> list[Fault]:
    """Return every rule that a tensor-parallel layout breaks; none for a size of 1.

    What holds inside the stages of a pipeline besides is a rule of pipelines.

    Args:
        tensor_parallel_size: Ranks that share each layer.
        num_attention_heads: Query heads of a layer.
        num_key_value_heads: Key/value heads of a layer.
        intermediate_size: Width of the dense MLP.
        vocab_size: Rows of the output head.
        model_type: `model_type` of `config.json`; `None` leaves the family unchecked.
        num_experts: Routed experts of a layer, 0 for a dense model.
        vocabulary_parallel_head: Whether ranks keep the logits of their own part of the vocabulary.
        engine: `deepspeed`, or who else is to train.
        zero_stage: Stage of ZeRO; `None` without DeepSpeed.
        world_size: All ranks; `None` while it is not known.
        ranks_per_node: Accelerators of a node; `None` while it is not known.
        method: `full`, `lora` or `qlora`.
        sequence_parallel_size: Ulysses ranks.
        context_parallel_size: Ring-attention ranks.
        expert_parallel_size: Ranks that share the experts.
        where: What the size is called where the user gave it.
    """
    if tensor_parallel_size == 1:
        return []
    if tensor_parallel_size < 1:
        return [Fault(where=where, value=tensor_parallel_size, rule="must be at least 1", fix="use 1, 2, 4 or 8")]
    sizes = {
        "the attention heads": num_attention_heads,
        "the key/value heads": num_key_value_heads,
        "the width of the MLP": intermediate_size,
        "the accelerators of a node": ranks_per_node,
        "the ranks": world_size,
    }
    if vocabulary_parallel_head:
        sizes["the vocabulary, which a vocabulary-parallel head divides"] = vocab_size
    if num_experts:
        # The width of the MLP is that of one expert, which nothing divides.
        del sizes["the width of the MLP"]
    found: list[Fault | None] = [*_size_faults(where, tensor_parallel_size, sizes)]
    found += [
        _family_fault(model_type, num_experts, tensor_parallel_size, where),
        _engine_fault(engine, zero_stage, tensor_parallel_size, where),
        _method_fault(method, tensor_parallel_size, where),
        _head_fault(model_type) if vocabulary_parallel_head else None,
    ]
    others = {
        "sp": sequence_parallel_size,
        "cp": context_parallel_size,
        "ep": expert_parallel_size,
    }
    found += [_combination_fault(where, tensor_parallel_size, name, size) for name, size in others.items()]
    return [fault for fault in found if fault is not None]


def _size_faults(where: str, size: int, sizes: Mapping[str, int | None]) -> list[Fault]:
    """Return what `size` does not divide; the values named instead divide everything."""
    known = {what: number for what, number in sizes.items() if number is not None}
    found = [divides(where, size, number, what) for what, number in known.items()]
    fix = f"nearest legal values: {nearest_divisors(gcd(*known.values()), size)}"
    return [replace(fault, fix=fix) for fault in found if fault is not None]


def _family_fault(model_type: str | None, num_experts: int, size: int, where: str) -> Fault | None:
    if num_experts:
        rule = f"AutoTP refuses mixtures of experts ({num_experts} experts in each layer)"
        return Fault(where=where, value=size, rule=rule, fix="divide the experts: ep")
    if model_type is None:
        return None
    reason = WITHOUT_TENSOR_PLAN.get(model_type, "was not shown to train equally under AutoTP")
    shown = ", ".join(sorted(TENSOR_PARALLEL_FAMILIES))
    return one_of(
        "model_type", model_type, TENSOR_PARALLEL_FAMILIES, reason, f"use tp = 1 with ZeRO-3 or pp; tp trains {shown}"
    )


def _engine_fault(engine: str, zero_stage: int | None, size: int, where: str) -> Fault | None:
    fix = f"use a ZeRO stage up to {LARGEST_ZERO_STAGE}"
    if engine != "deepspeed" or zero_stage is None:
        return Fault(where=where, value=size, rule="needs DeepSpeed AutoTP", fix=fix)
    if zero_stage > LARGEST_ZERO_STAGE:
        rule = f"runs with ZeRO stages 0 to {LARGEST_ZERO_STAGE}, not {zero_stage}"
        return Fault(where=where, value=size, rule=rule, fix=f"{fix}, or tp = 1")
    return None


def _head_fault(model_type: str | None) -> Fault | None:
    if model_type is None or model_type not in WITHOUT_VOCABULARY_PARALLEL_HEAD:
        return None
    rule = f"does not go with {model_type}, which {WITHOUT_VOCABULARY_PARALLEL_HEAD[model_type]}"
    return Fault(where="vocabulary_parallel_head", value=True, rule=rule, fix="use False")


def _method_fault(method: str, size: int, where: str) -> Fault | None:
    if method == "full":
        return None
    rule = f"does not go with {method}: AutoTP finds no layer of its plan under the adapters' names"
    return Fault(where=where, value=size, rule=rule, fix="train all weights, or use tp = 1")


def _combination_fault(where: str, size: int, name: str, other: int) -> Fault | None:
    if other == 1:
        return None
    rule = (
        f"and {name} = {other} do not compose under the Trainer (AutoTP makes a mesh of tp and data parallelism alone)"
    )
    return Fault(where=where, value=size, rule=rule, fix=f"use tp = 1 or {name} = 1")
