"""Rules of the axes beyond data parallelism: tensor, pipeline, sequence, context, expert, ZeRO++."""

from __future__ import annotations

from .candidate import Candidate, Rule, divides
from .errors import Fault


def hpz_partition_fits_the_node(candidate: Candidate) -> Fault | None:
    """The secondary shard of ZeRO++ stays within a node and needs stage 3."""
    size = candidate.strategy.zero.hpz_partition_size
    if size == 1:
        return None
    if candidate.strategy.zero_stage != 3:
        return Fault(where="hpz_partition_size", value=size, rule="needs ZeRO stage 3", fix="use 1")
    return divides("hpz_partition_size", size, candidate.hardware.gpus_per_node, "the accelerators of a node")


def quantized_gradients_cross_nodes(candidate: Candidate) -> Fault | None:
    """qgZ works in stage 3 over more than one node (deepspeed/runtime/zero/stage3.py:1925)."""
    if not candidate.strategy.zero.quantized_gradients or (
        candidate.strategy.zero_stage == 3 and candidate.hardware.nodes > 1
    ):
        return None
    return Fault(where="quantized_gradients", value=True, rule="has an effect only with ZeRO-3 on several nodes")


def sequence_parallel_divides(candidate: Candidate) -> Fault | None:
    """heads % sp = 0, kv heads and sp divide one another, sequence % sp = 0 (deepspeed ulysses_sp.py:147, 706)."""
    sp, sizes = candidate.strategy.sp, candidate.model.dimensions
    if sp == 1:
        return None
    if candidate.strategy.engine != "deepspeed":
        return Fault(where="sp", value=sp, rule="runs on DeepSpeed", fix="use a ZeRO stage, or cp with FSDP2")
    kv = sizes.num_key_value_heads
    if kv % sp and sp % kv:
        return Fault(where="sp", value=sp, rule=f"and {kv} key/value heads must divide one another")
    return divides("sp", sp, sizes.num_attention_heads, "the attention heads") or divides(
        "sp", sp, candidate.job.seq_len_tokens, "the sequence length"
    )


def context_parallel_divides(candidate: Candidate) -> Fault | None:
    """cp runs on FSDP2, without sp, and 2 * cp divides the sequence (accelerate/parallelism_config.py, torch)."""
    if candidate.strategy.cp == 1:
        return None
    if candidate.strategy.engine != "fsdp2" or candidate.strategy.sp > 1:
        return Fault(where="cp", value=candidate.strategy.cp, rule="needs FSDP2 and excludes sequence parallelism")
    return divides("2 * cp", 2 * candidate.strategy.cp, candidate.job.seq_len_tokens, "the sequence length")


def expert_parallel_divides(candidate: Candidate) -> Fault | None:
    """ep divides the experts and the data-parallel ranks, on DeepSpeed (auto_ep_folding.py)."""
    if candidate.strategy.ep == 1:
        return None
    if not candidate.model.dimensions.num_experts:
        return Fault(where="ep", value=candidate.strategy.ep, rule="needs a mixture of experts", fix="use ep = 1")
    if candidate.strategy.engine != "deepspeed":
        return Fault(where="ep", value=candidate.strategy.ep, rule="runs on DeepSpeed", fix="use a ZeRO stage")
    return divides("ep", candidate.strategy.ep, candidate.model.dimensions.num_experts, "the experts") or divides(
        "ep", candidate.strategy.ep, candidate.strategy.data_parallel_size, "the data-parallel ranks"
    )


def tensor_parallel_divides(candidate: Candidate) -> Fault | None:
    """tp divides the heads, on DeepSpeed AutoTP with dense models (module_inject/tp_plan_converter.py)."""
    if candidate.strategy.tp == 1:
        return None
    if candidate.model.dimensions.num_experts:
        return Fault(where="tp", value=candidate.strategy.tp, rule="AutoTP refuses mixtures of experts", fix="use ep")
    if candidate.strategy.engine != "deepspeed":
        return Fault(
            where="tp",
            value=candidate.strategy.tp,
            rule="needs DeepSpeed AutoTP",
            fix="use a ZeRO stage up to 2",
        )
    return divides(
        "tp", candidate.strategy.tp, candidate.model.dimensions.num_attention_heads, "the attention heads"
    ) or divides("tp", candidate.strategy.tp, candidate.hardware.gpus_per_node, "the accelerators of a node")


def pipeline_divides(candidate: Candidate) -> Fault | None:
    """Pipelines run with ZeRO 0 or 1 and at most one stage for each layer (deepspeed/runtime/pipe/engine.py:76)."""
    if candidate.strategy.pp == 1:
        return None
    if candidate.strategy.engine != "deepspeed" or (candidate.strategy.zero_stage or 0) > 1:
        return Fault(where="pp", value=candidate.strategy.pp, rule="runs with ZeRO stage 0 or 1")
    if candidate.strategy.pp > candidate.model.dimensions.num_layers:
        return Fault(
            where="pp",
            value=candidate.strategy.pp,
            rule=f"cannot exceed the {candidate.model.dimensions.num_layers} layers",
            fix=f"nearest legal value: {candidate.model.dimensions.num_layers}",
        )
    return None


PARALLEL_RULES: tuple[Rule, ...] = (
    hpz_partition_fits_the_node,
    quantized_gradients_cross_nodes,
    sequence_parallel_divides,
    context_parallel_divides,
    expert_parallel_divides,
    tensor_parallel_divides,
    pipeline_divides,
)
