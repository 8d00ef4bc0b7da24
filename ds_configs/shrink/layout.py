"""A plan's strategy, ZeRO sizes and files for a few CPU ranks that rehearse it with a shrunken model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from math import ceil, lcm
from typing import Any

from ..specs.changes import Change, Rewriting, is_count
from ..specs.errors import Fault, UsageError
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy, ZeroOptions

MOST_MICRO_BATCH = 2
"""Sequences of a rehearsed micro-batch."""
MOST_ACCUMULATION = 2
"""Micro-batches of a rehearsed step; two show accumulation as well as more would, but a pipeline has one a stage."""

_SMALLEST_BUCKET = 4096
_LOOPBACK = "127.0.0.1"
_ZERO_KEYS: Mapping[str, tuple[str, ...]] = {
    "reduce_bucket_size": ("reduce_bucket_size",),
    "stage3_prefetch_bucket_size": ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
    "stage3_param_persistence_threshold": ("stage3_param_persistence_threshold", "param_persistence_threshold"),
    "stage3_max_live_parameters": ("stage3_max_live_parameters", "max_live_parameters"),
    "stage3_max_reuse_distance": ("stage3_max_reuse_distance", "max_reuse_distance"),
    "sub_group_size": ("sub_group_size",),
}
"""Keys of `zero_optimization` that set each field, DeepSpeed's second spelling included (runtime/zero/config.py)."""


def shrink_strategy(strategy: Strategy, *, ranks: int, nodes: int = 1) -> tuple[Strategy, tuple[Change, ...]]:
    """Return the same layout on `ranks` ranks of `nodes` nodes, with at most two sequences and two micro-batches.

    Every axis stays but the one that data parallelism may choose: `dp_replicate` without sharding, else `dp_shard`.

    Raises:
        UsageError: the axes that stay do not divide the ranks; all faults together, with the nearest legal counts.
    """
    faults = _rank_faults(strategy, ranks, nodes)
    if faults:
        raise UsageError(faults)
    data = ranks // (strategy.tp * strategy.pp * strategy.sp * strategy.cp)
    replicates = strategy.engine in ("single", "ddp") or strategy.zero_stage == 0
    smaller = replace(
        strategy,
        dp_replicate=data if replicates else strategy.dp_replicate,
        dp_shard=strategy.dp_shard if replicates else data // strategy.dp_replicate,
        micro_batch_size=min(strategy.micro_batch_size, MOST_MICRO_BATCH),
        gradient_accumulation_steps=min(strategy.gradient_accumulation_steps, _most_accumulation(strategy)),
        # A rehearsed model has few layers, of which one recomputes and the others do not.
        checkpointed_layers=None if strategy.checkpointed_layers is None else 1,
    )
    return smaller, _field_changes(strategy, smaller)


def _most_accumulation(strategy: Strategy | None) -> int:
    return MOST_ACCUMULATION if strategy is None else max(MOST_ACCUMULATION, strategy.pp)


def _rank_faults(strategy: Strategy, ranks: int, nodes: int) -> list[Fault]:
    axes = {name: getattr(strategy, name) for name in ("tp", "pp", "sp", "cp", "ep", "dp_replicate", "dp_shard")}
    counts = {**axes, "hpz_partition_size": strategy.zero.hpz_partition_size, "ranks": ranks, "nodes": nodes}
    wrong = [
        Fault(where=name, value=value, rule="must be an integer of at least 1")
        for name, value in counts.items()
        if not is_count(value)
    ]
    if wrong:
        return wrong
    if strategy.engine == "single":
        fix = "use --ranks 1"
        return [Fault(where="ranks", value=ranks, rule="must be 1: the plan is one process", fix=fix)] * (ranks != 1)
    unit = strategy.tp * strategy.pp * strategy.sp * strategy.cp
    sharded = strategy.engine == "fsdp2" or (strategy.zero_stage or 0) > 0
    replicas = strategy.dp_replicate if sharded else 1
    hybrid = replicas > 1 and strategy.dp_shard > 1
    divisors = {
        "tp * pp * sp * cp": unit,
        "tp * pp * sp * cp * dp_replicate": unit * replicas,
        "tp * pp * sp * cp * ep": unit * strategy.ep,
        "nodes": nodes,
        "nodes * tp": nodes * strategy.tp,
        "nodes * hpz_partition_size": nodes * strategy.zero.hpz_partition_size,
    }
    step = lcm(*divisors.values())
    # A hybrid with one shard in each replica would not shard at all.
    least = ceil(2 * unit * replicas / step) * step if hybrid else step
    fix = f"use --ranks {' or '.join(str(count) for count in _nearest(ranks, step, least))}"
    broken: dict[int, str] = {}
    for name, divisor in divisors.items():
        if ranks % divisor:
            broken.setdefault(divisor, name)
    faults = [
        Fault(where="ranks", value=ranks, rule=f"must be a multiple of {name} = {divisor}", fix=fix)
        for divisor, name in broken.items()
    ]
    if not faults and ranks < least:
        rule = f"must leave at least 2 shards to each of {replicas} replicas"
        faults.append(Fault(where="ranks", value=ranks, rule=rule, fix=fix))
    if strategy.zero.quantized_gradients and nodes == 1:
        rule, way_out = "has an effect only on several nodes", "rehearse the plan's nodes as ranks"
        faults.append(Fault(where="quantized_gradients", value=True, rule=rule, fix=way_out))
    return faults


def _nearest(ranks: int, step: int, least: int) -> list[int]:
    below = ranks // step * step
    return [below, below + step] if below >= least else [least]


def _field_changes(before: Strategy | ZeroOptions, after: Strategy | ZeroOptions) -> tuple[Change, ...]:
    return tuple(
        Change(where=field.name, before=getattr(before, field.name), after=getattr(after, field.name))
        for field in fields(before)
        if getattr(before, field.name) != getattr(after, field.name)
    )


def shrink_zero_options(
    zero: ZeroOptions,
    *,
    original: ModelSpec,
    shrunken: ModelSpec,
    shards_before: int = 1,
    shards: int = 1,
) -> tuple[ZeroOptions, tuple[Change, ...]]:
    """Return ZeRO sizes that stand to the shrunken model as the given ones stand to the original.

    Buckets, prefetch, live parameters and reuse distance follow the parameter count; sub-groups follow the shard of
    one rank, `shards_before` and `shards` being the ranks that share the parameters. One module can still be gathered
    where it could, and what took several buckets or sub-groups still does. Sizes of 0 stay 0.
    """
    ratio = shrunken.parameter_count / original.parameter_count

    def scaled(size: int, *, whole_before: int, whole: int, least: int = _SMALLEST_BUCKET) -> int:
        several = size < whole_before
        wanted = max(least, ceil(size * whole / whole_before))
        return min(size, max(1, min(wanted, whole // 2)) if several else max(wanted, whole))

    def bucket(size: int, least: int = _SMALLEST_BUCKET) -> int:
        whole_before, whole = original.parameter_count, shrunken.parameter_count
        return size and scaled(size, whole_before=whole_before, whole=whole, least=least)

    def gathered(size: int) -> int:
        fits = size >= original.largest_gather_unit()
        return bucket(size, least=shrunken.largest_gather_unit() if fits else _SMALLEST_BUCKET)

    threshold = _persistence_threshold(zero.stage3_param_persistence_threshold, original, shrunken)
    reduce_bucket = bucket(zero.reduce_bucket_size)
    smaller = replace(
        zero,
        reduce_bucket_size=min(zero.reduce_bucket_size, reduce_bucket + reduce_bucket % 2),
        stage3_prefetch_bucket_size=bucket(zero.stage3_prefetch_bucket_size),
        stage3_param_persistence_threshold=threshold,
        stage3_max_live_parameters=gathered(zero.stage3_max_live_parameters),
        stage3_max_reuse_distance=gathered(zero.stage3_max_reuse_distance),
        sub_group_size=zero.sub_group_size
        and scaled(
            zero.sub_group_size,
            whole_before=ceil(original.parameter_count / shards_before),
            whole=ceil(shrunken.parameter_count / shards),
        ),
    )
    if zero.parameter_buffer_elements:
        swapped = [p.numel for p in shrunken.parameters if p.numel > threshold]
        wanted = max([ceil(zero.parameter_buffer_elements * ratio), *swapped])
        smaller = replace(smaller, parameter_buffer_elements=wanted)
    return smaller, _field_changes(zero, smaller)


def _persistence_threshold(threshold: int, original: ModelSpec, shrunken: ModelSpec) -> int:
    """Return the threshold under which the fewest tensors change between staying gathered and being sharded."""
    persistent = {p.name for p in original.parameters if p.numel <= threshold}
    sizes = [(p.numel, p.name in persistent) for p in shrunken.parameters]

    def mismatches(candidate: int) -> int:
        return sum((numel <= candidate) != kept for numel, kept in sizes)

    aim = threshold * shrunken.dimensions.hidden_size // max(1, original.dimensions.hidden_size)
    edges = {numel - 1 for numel, _ in sizes} | {numel for numel, _ in sizes} | {aim, 0}
    legal = [candidate for candidate in edges if 0 <= candidate <= threshold]
    return min(legal, key=lambda candidate: (mismatches(candidate), abs(candidate - aim)))


def shrink_deepspeed_config(
    config: Mapping[str, Any],
    *,
    zero: ZeroOptions,
    nvme_path: str | None,
    world_size_before: int,
    ranks: int,
    strategy: Strategy | None = None,
) -> tuple[dict[str, Any], tuple[Change, ...]]:
    """Return a `ds_config.json` with the sizes of `zero` wherever it states a number, and all else as it was.

    `world_size_before` and `ranks` count the ranks that see different sequences. `strategy`, the plan's before it was
    shrunk, stands for batch sizes that are `"auto"` or absent. A batch that contradicted the ranks, or the strategy,
    still does, so that the rehearsal meets the same error.
    """
    copy = Rewriting(config)
    section = copy.inside("zero_optimization")
    if section is not None:
        for field, keys in _ZERO_KEYS.items():
            for key in keys:
                _put_smaller(section, key, getattr(zero, field))
        for name in ("offload_optimizer", "offload_param"):
            offload = section.inside(name)
            if offload is not None:
                if offload.get("nvme_path") is not None and nvme_path is not None:
                    offload.put("nvme_path", nvme_path)
                if name == "offload_param" and zero.parameter_buffer_elements:
                    _put_smaller(offload, "buffer_size", zero.parameter_buffer_elements)
    _shrink_batch(copy, strategy, world_size_before, ranks)
    return copy.values, tuple(copy.changes)


def _put_smaller(section: Rewriting, key: str, value: int) -> None:
    stated = section.get(key)
    if isinstance(stated, int | float) and not isinstance(stated, bool) and stated > value:
        section.put(key, value)


def _shrink_batch(config: Rewriting, strategy: Strategy | None, world_size_before: int, ranks: int) -> None:
    total = config.get("train_batch_size")
    before, after = {"ranks": world_size_before}, {"ranks": ranks}
    for key, field, most in (
        ("train_micro_batch_size_per_gpu", "micro_batch_size", MOST_MICRO_BATCH),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", _most_accumulation(strategy)),
    ):
        stated = config.get(key)
        planned = getattr(strategy, field) if strategy is not None else None
        if is_count(stated):
            before[key] = stated
            after[key] = min(stated, most) if planned is None else _follow(stated, planned, min(planned, most))
            config.put(key, after[key])
        elif planned is not None:
            before[key], after[key] = planned, min(planned, most)
    if is_count(total) and len(before) == 2:
        # Accelerate and DeepSpeed derive the one size that is left from the others.
        known = world_size_before * next(value for key, value in before.items() if key != "ranks")
        if total % known == 0:
            before["rest"], after["rest"] = total // known, min(total // known, MOST_MICRO_BATCH)
    if is_count(total) and len(before) == 3:
        config.put("train_batch_size", _follow(total, _product(before), _product(after)))


def _follow(stated: int, before: int, after: int) -> int:
    """Return `after` for a value that was `before`, and something else for one that was something else."""
    if stated == before:
        return after
    return before if stated == after else stated


def _product(factors: Mapping[str, int]) -> int:
    product = 1
    for factor in factors.values():
        product *= factor
    return product


def shrink_accelerate_config(
    config: Mapping[str, Any], *, ranks: int, nodes: int, deepspeed_config_file: str | None
) -> tuple[dict[str, Any], tuple[Change, ...]]:
    """Return an `accelerate.yaml` for CPU ranks of this machine, with all else as it was.

    Only keys that are there are replaced. `parallelism_config_dp_shard_size` follows the ranks when it agreed with
    `num_processes`.
    """
    copy = Rewriting(config)
    axes = copy.inside("parallelism_config")
    if axes is not None and is_count(axes.get("parallelism_config_dp_shard_size")):
        _shrink_shards(axes, config.get("num_processes"), ranks)
    values = {"num_processes": ranks, "num_machines": nodes, "main_process_ip": _LOOPBACK}
    for key, value in values.items():
        if copy.get(key) is not None:
            copy.put(key, value)
    deepspeed = copy.inside("deepspeed_config")
    if deepspeed is not None and deepspeed_config_file is not None and deepspeed.get("deepspeed_config_file"):
        deepspeed.put("deepspeed_config_file", deepspeed_config_file)
    return copy.values, tuple(copy.changes)


def _shrink_shards(axes: Rewriting, processes: object, ranks: int) -> None:
    key = "parallelism_config_dp_shard_size"
    sizes = {name: value for name, value in axes.values.items() if name.endswith("_size") and is_count(value)}
    others = _product(sizes) // sizes[key]
    if _product(sizes) == processes and ranks % others == 0:
        axes.put(key, ranks // others)


def shrink_training_arguments(
    arguments: Mapping[str, Any], *, strategy: Strategy
) -> tuple[dict[str, Any], tuple[Change, ...]]:
    """Return `TrainingArguments` with micro-batch and accumulation of the shrunken `strategy`, else as they were."""
    copy = Rewriting(arguments)
    copy.put("per_device_train_batch_size", strategy.micro_batch_size)
    copy.put("gradient_accumulation_steps", strategy.gradient_accumulation_steps)
    return copy.values, tuple(copy.changes)
