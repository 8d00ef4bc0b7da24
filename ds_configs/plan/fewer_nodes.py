"""A plan on fewer nodes than it was made for, where one has died: the same global batch, from more micro-batches."""

from __future__ import annotations

from dataclasses import replace

from ..memory.estimate import estimate_memory
from ..specs.errors import Fault, UsageError
from ..specs.hardware import with_gpus
from .plan import Plan


def on_fewer_nodes(plan: Plan, nodes: int) -> Plan:
    """Return the plan of the same optimizer steps on fewer nodes: `accumulation' = accumulation * nodes / nodes'`.

    Raises:
        UsageError: ranks divide the model in another way than by data, the global batch cannot be divided, or what
            each rank then holds does not fit.
    """
    strategy, hardware = plan.chosen.strategy, plan.hardware
    if not 0 < nodes <= hardware.nodes:
        raise _refused(plan, nodes, f"the plan has {hardware.nodes}")
    if strategy.axes or (strategy.dp_replicate > 1 and strategy.dp_shard > 1):
        rule = f"{strategy.label} places parts of the model on nodes, and none of them can be missing"
        raise _refused(plan, nodes, rule)
    micro_batches = strategy.gradient_accumulation_steps * hardware.nodes
    if micro_batches % nodes:
        rule = f"a step has {micro_batches} micro-batches for each place of a node, which they do not divide"
        raise _refused(plan, nodes, rule)
    fewer = replace(
        strategy,
        gradient_accumulation_steps=micro_batches // nodes,
        dp_replicate=_part(strategy.dp_replicate, nodes, hardware.nodes),
        dp_shard=_part(strategy.dp_shard, nodes, hardware.nodes),
    )
    part = with_gpus(hardware, nodes=nodes, gpus_per_node=hardware.gpus_per_node)
    memory = estimate_memory(fewer, plan.model, part, plan.job)
    if not memory.fits:
        need, there = memory.gpu.high_bytes / 2**30, memory.gpu.capacity_bytes / 2**30
        rule = f"does not fit there: an accelerator needs {need:.1f} of {there:.1f} GiB"
        raise _refused(plan, nodes, rule)
    return replace(plan, hardware=part, chosen=replace(plan.chosen, strategy=fewer, memory=memory))


def most_nodes(plan: Plan, there: int, *, least: int) -> int | None:
    """Return the largest number of nodes that a plan can go on with, of those that are there; `None` below `least`."""
    for nodes in range(min(there, plan.hardware.nodes), least - 1, -1):
        try:
            on_fewer_nodes(plan, nodes)
        except UsageError:
            continue
        return nodes
    return None


def _refused(plan: Plan, nodes: int, rule: str) -> UsageError:
    fix = f"bring back all {plan.hardware.nodes}, or plan again"
    return UsageError(Fault(where="nodes", value=nodes, rule=rule, fix=fix))


def _part(ranks: int, nodes: int, of_nodes: int) -> int:
    return ranks if ranks == 1 else ranks * nodes // of_nodes
