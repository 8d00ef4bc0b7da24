"""A second model beside a student under Ulysses sequence parallelism: it reads whole sequences with its own attention.

deepspeed 0.19.8 (runtime/sequence_parallel/ulysses_sp.py, `register_with_transformers`) replaces the student's
attention function under its own name in the registry of Transformers, for every model of the process, and with the
student's number of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, UsageError

if TYPE_CHECKING:
    import torch

_SUFFIX = "_whole_sequence"


def keep_own_attention(model: Any) -> None:
    """Give a model its present attention function under another name, so that no later replacement reaches it.

    Raises:
        UsageError: the model computes attention eagerly, which has no entry in the registry.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config._attn_implementation
    if name.endswith(_SUFFIX):
        return
    if name not in ALL_ATTENTION_FUNCTIONS:
        rule = f"attention implementation {name!r} cannot be kept apart from the student's under sequence parallelism"
        raise UsageError(Fault(where="teacher", rule=rule, fix="load the teacher with attn_implementation='sdpa'"))
    ALL_ATTENTION_FUNCTIONS.register(name + _SUFFIX, ALL_ATTENTION_FUNCTIONS[name])
    ALL_MASK_ATTENTION_FUNCTIONS.register(name + _SUFFIX, ALL_MASK_ATTENTION_FUNCTIONS[name])
    model.set_attn_implementation(name + _SUFFIX)


def sequence_group() -> Any:
    """Return the process group whose ranks share one sequence."""
    from deepspeed.utils import groups

    return groups._get_sequence_parallel_group()


def whole_sequences(inputs: dict[str, Any]) -> dict[str, Any]:
    """Join the shards [B, S / ranks] of every tensor into whole sequences [B, S]; every rank of the group must call."""
    import torch
    import torch.distributed as dist

    group = sequence_group()
    joined: dict[str, Any] = {}
    for name, shard in sorted(inputs.items()):
        if torch.is_tensor(shard) and shard.dim() == 2:
            parts = [torch.empty_like(shard.contiguous()) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, shard.contiguous(), group=group)
            joined[name] = torch.cat(parts, dim=1)
        else:
            joined[name] = shard
    return joined


def own_shard(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor [B, S, ...] along the sequence."""
    import torch.distributed as dist

    group = sequence_group()
    return whole.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]


def gradients_are_added_over_a_sequence(zero_optimization: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed adds gradients over the ranks that share a sequence, and averages over the others only.

    Seen in deepspeed 0.19.8: ZeRO 1 and 2 add (stage_1_and_2.py, `sequence_parallel_size`); ZeRO-3 with
    `reduce_scatter`, its default, averages over all ranks (coalesced_collectives.py, "pre-divide"). ZeRO-3 without it
    adds for buckets up to `reduce_bucket_size` and averages for larger ones (stage3.py,
    `__reduce_and_partition_ipg_grads`), so that no answer is right for all parameters of a model.
    """
    return zero_optimization.get("stage", 0) < 3 or not zero_optimization.get("reduce_scatter", True)
