"""Rules for `fsdp_config`: keys of FSDP1 and FSDP2 that Accelerate reads for one version only.

Source: accelerate 1.15.0, utils/dataclasses.py (`FullyShardedDataParallelPlugin`) and utils/launch.py.
"""

from __future__ import annotations

from .report import Report

_BASE = "fsdp_config"
_VERSION_1_ONLY = {
    "sharding_strategy": "use fsdp_reshard_after_forward: true or false",
    "use_orig_params": "remove the key: FSDP2 always keeps the original parameters",
    "sync_module_states": "remove the key: FSDP2 does not need it",
    "forward_prefetch": "remove the key",
    "backward_prefetch": "remove the key",
}
_TRUE = {"true", "yes", "y", "t", "on", "1"}
_FALSE = {"false", "no", "n", "f", "off", "0"}


def check_fsdp(report: Report) -> None:
    """Apply every rule for FSDP; `fsdp_` may stand before each key or not."""
    if report.text("distributed_type") != "FSDP":
        return
    node = report.node(_BASE)
    if node is None or not node.entries:
        rule = "FSDP without fsdp_config wraps the whole model as one unit of FSDP1"
        report.error(_BASE, rule, "add fsdp_version: 2 and fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP")
        return
    path = _path(report, "version")
    version = 1
    if not report.has(path):
        report.warning(path, "is missing, and accelerate launch takes version 1", "write fsdp_version: 2")
    elif str(report.value(path)) in ("1", "2"):
        version = int(str(report.value(path)))
    if version == 2:
        _check_version_2(report)
    else:
        _check_version_1(report)
    _check_wrapping(report)
    _check_activation_offload(report, version)


def _path(report: Report, name: str) -> str:
    """Return the path as the file spells it."""
    short = f"{_BASE}.{name}"
    return short if report.has(short) else f"{_BASE}.fsdp_{name}"


def _word(report: Report, name: str) -> str | None:
    value = report.value(_path(report, name))
    return None if value is None else str(value)


def _check_version_2(report: Report) -> None:
    for name, fix in _VERSION_1_ONLY.items():
        if report.has(_path(report, name)):
            report.error(_path(report, name), "belongs to FSDP1; FSDP2 ignores it", fix)
    path, reshard = _path(report, "reshard_after_forward"), _word(report, "reshard_after_forward")
    if reshard is not None and reshard.lower() not in _TRUE | _FALSE:
        fix = "write false" if reshard.upper() in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else "write true"
        report.error(path, "must be true or false with FSDP2; Accelerate stops at a strategy name", fix)
    if (_word(report, "state_dict_type") or "").upper() == "LOCAL_STATE_DICT":
        path = _path(report, "state_dict_type")
        report.error(path, "FSDP2 has no local state dict", "write SHARDED_STATE_DICT or FULL_STATE_DICT")


def _check_version_1(report: Report) -> None:
    path, reshard = _path(report, "reshard_after_forward"), _word(report, "reshard_after_forward")
    strategy = _word(report, "sharding_strategy") or "FULL_SHARD"
    if reshard is not None and _as_strategy(reshard) != strategy.upper():
        rule = f"has no effect with fsdp_version 1: the exported sharding strategy {strategy} wins"
        report.error(path, rule, f"write fsdp_sharding_strategy: {_as_strategy(reshard)}")
    efficient = (_word(report, "cpu_ram_efficient_loading") or "true").lower() in _TRUE
    path = _path(report, "sync_module_states")
    if efficient and report.value(path) is False:
        rule = "must be true while fsdp_cpu_ram_efficient_loading is on; accelerate launch stops"
        report.error(path, rule, "write true, or fsdp_cpu_ram_efficient_loading: false")


def _as_strategy(reshard: str) -> str:
    if reshard.lower() in _TRUE:
        return "FULL_SHARD"
    return "SHARD_GRAD_OP" if reshard.lower() in _FALSE else reshard.upper()


def _check_wrapping(report: Report) -> None:
    policy = (_word(report, "auto_wrap_policy") or "NO_WRAP").upper()
    path = _path(report, "auto_wrap_policy")
    if policy == "NO_WRAP":
        rule = "without a policy the model is one unit, and each forward gathers all of it"
        report.warning(path, rule, "write TRANSFORMER_BASED_WRAP")
    classes = _path(report, "transformer_layer_cls_to_wrap")
    if report.has(classes) and policy != "TRANSFORMER_BASED_WRAP":
        report.warning(classes, f"has no effect with the policy {policy}", "write TRANSFORMER_BASED_WRAP")
    smallest = _path(report, "min_num_params")
    if policy == "SIZE_BASED_WRAP" and report.integer(smallest) == 0:
        report.error(smallest, "0 switches SIZE_BASED_WRAP off silently", "write the size of one layer")


def _check_activation_offload(report: Report, version: int) -> None:
    path = _path(report, "activation_checkpointing_offload")
    if str(report.value(path)).lower() not in _TRUE:
        return
    if version != 2:
        report.error(path, "needs fsdp_version 2", "write fsdp_version: 2")
    if (_word(report, "activation_checkpointing") or "false").lower() not in _TRUE:
        report.error(path, "needs fsdp_activation_checkpointing: true", "add it")
