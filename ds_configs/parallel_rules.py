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


def context_parallel_needs_full_attention(candidate: Candidate) -> Fault | None:
    """Torch context parallelism refuses sliding windows (accelerate/big_modeling.py:805)."""
    window = candidate.model.sliding_window
    if candidate.strategy.cp == 1 or window is None:
        return None
    return Fault(
        where="cp",
        value=candidate.strategy.cp,
        rule=f"needs full attention, and {candidate.model.architecture} looks back {window} tokens",
        fix="use sp with DeepSpeed",
    )


def expert_parallel_excludes(candidate: Candidate) -> Fault | None:
    """AutoEP in stage 3 runs without sequence parallelism, hpZ and qgZ (deepspeed/runtime/engine.py:2197)."""
    strategy = candidate.strategy
    if strategy.ep == 1 or strategy.zero_stage != 3:
        return None
    clashes = {
        "sp": strategy.sp > 1,
        "hpz_partition_size": strategy.zero.hpz_partition_size > 1,
        "quantized_gradients": strategy.zero.quantized_gradients,
    }
    found = [name for name, present in clashes.items() if present]
    if not found:
        return None
    return Fault(where="ep", value=strategy.ep, rule=f"in ZeRO-3 excludes {', '.join(found)}", fix="use stage 2")


PARALLEL_RULES: tuple[Rule, ...] = (
    hpz_partition_fits_the_node,
    quantized_gradients_cross_nodes,
    sequence_parallel_divides,
    context_parallel_divides,
    context_parallel_needs_full_attention,
    expert_parallel_divides,
    expert_parallel_excludes,
    tensor_parallel_divides,
    pipeline_divides,
)
