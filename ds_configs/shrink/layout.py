"""Shrink a plan's layout, ZeRO sizes and files to a few CPU ranks, for a rehearsal with a shrunken model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from math import ceil, lcm, prod
from typing import Any

from ..specs.errors import ConfigError, UsageError
from ..specs.layout import Layout, ZeroOptions
from ..specs.model import ModelSpec
from .config import Change, is_count, section_of

MOST_MICRO_BATCH = 2
"""Maximum sequences of a rehearsed micro-batch."""
MOST_ACCUMULATION = 2
"""Maximum micro-batches of a rehearsed step: two are sufficient to test accumulation. A pipeline has one per stage."""

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
"""Keys of `zero_optimization` for each field, including DeepSpeed's aliases (runtime/zero/config.py)."""


def shrink_layout(layout: Layout, *, ranks: int) -> tuple[Layout, tuple[Change, ...]]:
    """Return the same layout on `ranks` ranks of one node, with at most two sequences and two micro-batches.

    Only the data-parallel size changes: `dp_replicate` without sharding, otherwise `dp_shard`.

    Raises:
        UsageError: The other axes do not divide the ranks; all errors together, with the nearest legal numbers.
    """
    errors = _rank_errors(layout, ranks)
    if errors:
        raise UsageError(errors)
    data = ranks // (layout.tp * layout.pp * layout.sp * layout.cp)
    replicates = layout.engine in ("single", "ddp") or layout.zero_stage == 0
    smaller = replace(
        layout,
        dp_replicate=data if replicates else layout.dp_replicate,
        dp_shard=layout.dp_shard if replicates else data // layout.dp_replicate,
        micro_batch_size=min(layout.micro_batch_size, MOST_MICRO_BATCH),
        gradient_accumulation_steps=min(layout.gradient_accumulation_steps, max(MOST_ACCUMULATION, layout.pp)),
        # The rehearsed model has few layers: one is recomputed, the others are not.
        checkpointed_layers=None if layout.checkpointed_layers is None else 1,
        offloaded_checkpoints=min(layout.offloaded_checkpoints, 1),
    )
    changes = (
        Change(where=field.name, before=getattr(layout, field.name), after=getattr(smaller, field.name))
        for field in fields(layout)
    )
    return smaller, tuple(change for change in changes if change.before != change.after)


def _rank_errors(layout: Layout, ranks: int) -> list[ConfigError]:
    if layout.engine == "single":
        rule, fix = "must be 1: the plan has one process", "use --ranks 1"
        return [] if ranks == 1 else [ConfigError(where="ranks", value=ranks, rule=rule, fix=fix)]
    unit = layout.tp * layout.pp * layout.sp * layout.cp
    sharded = layout.engine == "fsdp2" or (layout.zero_stage or 0) > 0
    replicas = layout.dp_replicate if sharded else 1
    hybrid = replicas > 1 and layout.dp_shard > 1
    divisors = {
        "tp * pp * sp * cp": unit,
        "tp * pp * sp * cp * dp_replicate": unit * replicas,
        "tp * pp * sp * cp * ep": unit * layout.ep,
        "hpz_partition_size": layout.zero.hpz_partition_size,
    }
    step = lcm(*divisors.values())
    # A hybrid layout with one shard per replica would not shard anything.
    least = ceil(2 * unit * replicas / step) * step if hybrid else step
    below = ranks // step * step
    nearest = [below, below + step] if below >= least else [least]
    fix = f"use --ranks {' or '.join(map(str, nearest))}"
    violations: dict[int, str] = {}
    for name, divisor in divisors.items():
        if ranks % divisor:
            violations.setdefault(divisor, name)
    errors = [
        ConfigError(where="ranks", value=ranks, rule=f"must be a multiple of {name} = {divisor}", fix=fix)
        for divisor, name in violations.items()
    ]
    if not errors and ranks < least:
        rule = f"must provide at least 2 shards for each of the {replicas} replicas"
        errors.append(ConfigError(where="ranks", value=ranks, rule=rule, fix=fix))
    if layout.zero.quantized_gradients:
        rule, nodes_fix = "requires several nodes, and a rehearsal has one", "rehearse a plan without it"
        errors.append(ConfigError(where="quantized_gradients", value=True, rule=rule, fix=nodes_fix))
    return errors


def shrink_zero_options(
    zero: ZeroOptions, *, original: ModelSpec, shrunken: ModelSpec, shards_before: int = 1, shards: int = 1
) -> ZeroOptions:
    """Return ZeRO sizes scaled from the original model to the shrunken one.

    Buckets, prefetch, live parameters and reuse distance scale with the parameter count. Sub-groups scale with the
    shard of one rank; `shards_before` and `shards` are the ranks that share the parameters. A module that could be
    gathered still can be, and parameters in several buckets or sub-groups still are. Sizes of 0 stay 0.
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
    return smaller


def _persistence_threshold(threshold: int, original: ModelSpec, shrunken: ModelSpec) -> int:
    """Return the threshold for which the fewest tensors change between persistent and sharded."""
    persistent = {p.name for p in original.parameters if p.numel <= threshold}
    sizes = [(p.numel, p.name in persistent) for p in shrunken.parameters]

    def mismatches(candidate: int) -> int:
        return sum((numel <= candidate) != is_persistent for numel, is_persistent in sizes)

    aim = threshold * shrunken.dimensions.hidden_size // max(1, original.dimensions.hidden_size)
    edges = {numel - 1 for numel, _ in sizes} | {numel for numel, _ in sizes} | {aim, 0}
    legal = [candidate for candidate in edges if 0 <= candidate <= threshold]
    return min(legal, key=lambda candidate: (mismatches(candidate), abs(candidate - aim)))


def shrink_deepspeed_config(
    copy: dict[str, Any], *, zero: ZeroOptions, nvme_path: str, before: Layout, after: Layout
) -> None:
    """Write the sizes of `zero` into a `ds_config.json` in place of its numbers; all other values are unchanged.

    Batch sizes of the planned layout `before` become those of the rehearsed layout `after`.
    """
    section = section_of(copy, "zero_optimization")
    if section is not None:
        for field, keys in _ZERO_KEYS.items():
            for key in keys:
                _put_smaller(section, key, getattr(zero, field))
        for name in ("offload_optimizer", "offload_param"):
            offload = section_of(section, name)
            if offload is not None:
                if offload.get("nvme_path") is not None:
                    offload["nvme_path"] = nvme_path
                if name == "offload_param" and zero.parameter_buffer_elements:
                    _put_smaller(offload, "buffer_size", zero.parameter_buffer_elements)
    for key, planned, smaller in (
        ("train_micro_batch_size_per_gpu", before.micro_batch_size, after.micro_batch_size),
        ("gradient_accumulation_steps", before.gradient_accumulation_steps, after.gradient_accumulation_steps),
        ("train_batch_size", before.global_batch_size, after.global_batch_size),
    ):
        stated = copy.get(key)
        if is_count(stated):
            # A value that differs from the plan's still does, so that the launch fails as it would on GPUs.
            copy[key] = smaller if stated == planned else planned if stated == smaller else stated


def _put_smaller(section: dict[str, Any], key: str, value: int) -> None:
    stated = section.get(key)
    if isinstance(stated, int | float) and not isinstance(stated, bool) and stated > value:
        section[key] = value


def shrink_accelerate_config(copy: dict[str, Any], *, ranks: int, deepspeed_config_file: str) -> None:
    """Make an `accelerate.yaml` one for ranks of this machine; all other values are unchanged.

    Absent keys stay absent. `parallelism_config_dp_shard_size` changes with the ranks if it was consistent with
    `num_processes`.
    """
    axes = section_of(copy, "parallelism_config")
    if axes is not None and is_count(axes.get("parallelism_config_dp_shard_size")):
        key = "parallelism_config_dp_shard_size"
        sizes = {name: value for name, value in axes.items() if name.endswith("_size") and is_count(value)}
        others = prod(sizes.values()) // sizes[key]
        if others * sizes[key] == copy.get("num_processes") and ranks % others == 0:
            axes[key] = ranks // others
    values = {"num_processes": ranks, "num_machines": 1, "main_process_ip": _LOOPBACK}
    for key, value in values.items():
        if copy.get(key) is not None:
            copy[key] = value
    deepspeed = section_of(copy, "deepspeed_config")
    if deepspeed is not None and deepspeed.get("deepspeed_config_file"):
        deepspeed["deepspeed_config_file"] = deepspeed_config_file
