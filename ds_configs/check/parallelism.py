"""Rules for `parallelism_config`, after parallelism_config.py of accelerate 1.15.0."""

from __future__ import annotations

from .report import Report

_BASE = "parallelism_config"
_SEQUENCE_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")
_DEVICES = (
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
)


def check_parallelism(report: Report, *, world_size: int | None) -> None:
    """Check which dimensions combine and that their product is the number of processes."""
    node = report.node(_BASE)
    if node is None or not node.entries:
        return
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = {name: _size(report, name) for name in names}
    if any(size is None or size < 1 for size in sizes.values()):
        return
    replicate, shard, tensor, context, sequence = (sizes[name] or 1 for name in names)
    if context > 1 and sequence > 1:
        rule = f"context and sequence parallelism exclude each other: cp_size {context}, sp_size {sequence}"
        report.error(_path("sp_size"), rule, "set one of the two to 1")
    if (tensor > 1 or context > 1) and replicate > 1 and shard == 1:
        rule = "replicas do not combine with tensor or context parallelism unless the parameters are sharded"
        report.error(_path("dp_replicate_size"), rule, "set dp_shard_size above 1, or dp_replicate_size to 1")
    total = replicate * shard * tensor * context * sequence
    _check_type(report, total, shard=shard, context=context)
    processes = report.integer("num_processes") or world_size
    if processes is None or processes < 1:
        return
    if sequence > 1:
        _check_sequence(report, sequence, replicate * shard, processes)
    elif total not in (1, processes):
        product = " · ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
        rule = f"the sizes multiply to {total} ({product}), which must equal num_processes {processes}"
        rest = tensor * context * replicate
        fix = f"write dp_shard_size {processes // rest}" if processes % rest == 0 else ""
        report.error(_BASE, rule, fix)


def _path(name: str) -> str:
    return f"{_BASE}.parallelism_config_{name}"


def _size(report: Report, name: str) -> int | None:
    path = _path(f"{name}_size")
    return report.integer(path) if report.has(path) else 1


def _check_type(report: Report, total: int, *, shard: int, context: int) -> None:
    kind = report.text("distributed_type")
    version = report.value("fsdp_config.fsdp_version") or report.value("fsdp_config.version")
    if total > 1 and kind is not None and kind not in (*_DEVICES, "FSDP", "DEEPSPEED"):
        rule = f"does not work with distributed_type {kind}"
        report.error(_BASE, rule, "use FSDP with fsdp_version 2, or DEEPSPEED")
    if kind == "FSDP" and total > 1:
        if str(version) != "2":
            report.error(_BASE, "needs fsdp_version 2", "write fsdp_version: 2")
        elif shard == 1 and context == 1:
            rule = "FSDP2 needs dp_shard_size or cp_size above 1: it has no dimension to shard across"
            report.error(_BASE, rule, "raise dp_shard_size")
    if context > 1 and kind in (*_DEVICES, "DEEPSPEED"):
        report.error(_path("cp_size"), "context parallelism needs FSDP2", "write distributed_type: FSDP")
    attention = report.text(_path("sp_attn_implementation"))
    from_hub = attention is not None and "/" in attention and "flash-attn" in attention
    if attention is not None and attention not in _SEQUENCE_ATTENTION and not from_hub:
        rule = f"must be one of {', '.join(_SEQUENCE_ATTENTION)}, or a flash-attn kernel from the Hub"
        report.error(_path("sp_attn_implementation"), rule, "write sdpa")
    sequence = _size(report, "sp") or 1
    if sequence > 1 and kind is not None and kind != "DEEPSPEED":
        report.error(_path("sp_size"), "sequence parallelism needs DeepSpeed", "write distributed_type: DEEPSPEED")


def _check_sequence(report: Report, sequence: int, data: int, processes: int) -> None:
    if processes % sequence:
        report.error(_path("sp_size"), f"must divide num_processes {processes}")
    elif data != processes // sequence:
        rule = (
            f"dp_replicate_size · dp_shard_size is {data} and must be num_processes / sp_size"
            f" = {processes // sequence}: Accelerate computes the batch from it"
        )
        path = _path("dp_shard_size")
        report.error(
            path if report.has(path) else _path("sp_size"),
            rule,
            f"write dp_shard_size {processes // sequence}",
        )
