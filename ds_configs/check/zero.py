"""Rules for `zero_optimization`: which keys act at which stage, and where offload goes.

Sources, deepspeed 0.19.8: runtime/engine.py and runtime/zero/: config, offload_config, stage_1_and_2, stage3.
"""

from __future__ import annotations

from .report import Report

_ZERO = "zero_optimization"
STAGES = {
    "sub_group_size": {3},
    "ignore_unused_parameters": {2},
    "round_robin_gradients": {1, 2},
    "parameter_alignment": {1, 2},
    "use_multi_rank_bucket_allreduce": {1, 2},
    "memory_efficient_linear": {3},
    "override_module_apply": {3},
    "pipeline_loading_checkpoint": {3},
    "log_trace_cache_warnings": {3},
    "enable_sanity_checks": {3},
    "save_muon_momentum_buffer_in_memory": {3},
    "leaf_module": {3},
    "zero_hpz_partition_size": {3},
    "zero_quantized_weights": {3},
    "zero_quantized_nontrainable_weights": {3},
    "zero_quantized_gradients": {3},
    "prefetch_bucket_size": {3},
    "param_persistence_threshold": {3},
    "model_persistence_threshold": {3},
    "max_live_parameters": {3},
    "max_reuse_distance": {3},
    "gather_16bit_weights_on_model_save": {3},
    "module_granularity_threshold": {3},
    "use_all_reduce_for_fetch_params": {3},
    "allgather_sequential": {3},
    "contiguous_gradients": {1, 2, 3},
    "reduce_scatter": {1, 2, 3},
    "reduce_bucket_size": {1, 2, 3},
    "overlap_comm": {1, 2, 3},
    "zenflow": {1, 2, 3},
}
"""Stages at which a key is read; a key that starts with `stage3_` belongs to stage 3."""

LARGE_BUCKET = 250_000_000
"""Elements from which a second 16-bit bucket costs half a gigabyte; DeepSpeed's default is twice that."""

_GATHER_ON_SAVE = "stage3_gather_16bit_weights_on_model_save"

_NVME_ONLY = {
    "offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
    "offload_optimizer": ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
}


def check_zero(report: Report, *, uses_transformers: bool) -> None:
    """Apply every rule that depends on the ZeRO stage."""
    node = report.node(_ZERO)
    if node is None:
        return
    if isinstance(node.scalar, bool):
        stage = 1 if node.scalar else 0
        report.error(_ZERO, "must be a mapping", f'write {{"stage": {stage}}}')
        return
    if node.kind != "mapping":
        return
    stage_value = report.node(f"{_ZERO}.stage")
    number = report.integer(f"{_ZERO}.stage") if stage_value is not None else 0
    if stage_value is None:
        report.warning(_ZERO, "without a stage DeepSpeed takes stage 0, which shards nothing", "add the stage")
    if number is not None and number in (0, 1, 2, 3):
        _check_stage(report, number)
        _check_offload_stage(report, number)
        _check_combinations(report, number)
    _check_buckets(report)
    for section in _NVME_ONLY:
        _check_offload(report, section)
    if uses_transformers:
        _check_replaced_optimizer(report)


def _check_stage(report: Report, stage: int) -> None:
    node = report.node(_ZERO)
    assert node is not None, "the caller has found the section"
    for entry in node.entries:
        stages = STAGES.get(entry.key) or ({3} if entry.key.startswith("stage3_") else None)
        if stages is None or stage in stages:
            continue
        path = f"{_ZERO}.{entry.key}"
        if entry.node.scalar is False or entry.key.startswith("offload"):
            continue
        if entry.key == _GATHER_ON_SAVE and (report.integer("tensor_parallel.autotp_size") or 0) > 1:
            # Accelerate asks for it at every stage before it saves a tensor-parallel model (accelerator.py:4072).
            continue
        listed = ", ".join(str(item) for item in sorted(stages))
        value = entry.node.plain()
        rule = f"has no effect at stage {stage}: only stage {listed} reads it"
        report.warning(path, rule, "remove the key or change the stage", value=value, line=entry.line)


def _check_offload_stage(report: Report, stage: int) -> None:
    parameter = report.text(f"{_ZERO}.offload_param.device")
    optimizer = report.text(f"{_ZERO}.offload_optimizer.device")
    path = f"{_ZERO}.offload_param.device"
    if parameter in ("cpu", "nvme") and stage != 3:
        report.error(path, f"DeepSpeed ignores it at stage {stage}: only stage 3 offloads parameters", "use stage 3")
    path = f"{_ZERO}.offload_optimizer.device"
    if optimizer in ("cpu", "nvme") and stage == 0:
        report.error(path, "stage 0 keeps no optimizer shard to offload", "use stage 1, 2 or 3")
    elif optimizer == "nvme" and stage in (1, 2):
        rule = f"stage {stage} has no NVMe code and offloads to host memory instead"
        report.error(path, rule, "write 'cpu', or use stage 3")
    ratio = report.number(f"{_ZERO}.offload_optimizer.ratio")
    if ratio is not None and ratio < 1 and stage != 3:
        path = f"{_ZERO}.offload_optimizer.ratio"
        report.error(path, f"partial offload exists only at stage 3; the stage is {stage}", "write 1.0")
    if report.true(f"{_ZERO}.offload_optimizer.super_offload") and stage != 3:
        path = f"{_ZERO}.offload_optimizer.super_offload"
        report.error(path, f"SuperOffload exists only at stage 3; the stage is {stage}", "use stage 3")


def _check_offload(report: Report, section: str) -> None:
    base = f"{_ZERO}.{section}"
    node, device = report.node(base), report.text(f"{base}.device")
    if node is None or node.kind != "mapping":
        return
    path_value = report.value(f"{base}.nvme_path")
    if device == "nvme" and (not path_value or path_value in ("none", "None")):
        report.error(f"{base}.device", "needs nvme_path, the directory of a local NVMe drive", "add nvme_path")
    if device is None and node.get("device") is None and node.entries:
        report.warning(base, "without a device nothing is offloaded", "add the device, 'cpu' or 'nvme'")
    if device not in ("cpu", "none"):
        return
    for key in _NVME_ONLY[section]:
        entry = node.get(key)
        if entry is not None and entry.scalar not in (None, False):
            rule = f"has no effect with device {device!r}: only 'nvme' reads it"
            report.warning(f"{base}.{key}", rule, "remove the key")


def _check_buckets(report: Report) -> None:
    path = f"{_ZERO}.allgather_bucket_size"
    size = report.integer(path)
    if size is not None and size % 2:
        report.error(path, "must be even: the optimizer asserts it", f"write {size + 1}")
    elif report.has(path) and not report.has(f"{_ZERO}.zenflow"):
        rule = "has no effect: with current torch DeepSpeed gathers the whole group in one call"
        report.warning(path, rule, "remove the key")
    if report.has(f"{_ZERO}.allgather_partitions"):
        rule = "has no effect: DeepSpeed reads this key and never uses it"
        report.warning(f"{_ZERO}.allgather_partitions", rule, "remove the key")


def _check_combinations(report: Report, stage: int) -> None:
    if report.true(f"{_ZERO}.legacy_stage1"):
        report.error(f"{_ZERO}.legacy_stage1", "DeepSpeed no longer has this implementation", "remove the key")
    if report.true(f"{_ZERO}.elastic_checkpoint") and stage == 3:
        rule = "stage 3 no longer supports elastic checkpoints"
        report.error(f"{_ZERO}.elastic_checkpoint", rule, "use checkpoint.load_universal")
    bucket = report.value(f"{_ZERO}.reduce_bucket_size")
    large = not isinstance(bucket, int | float) or bucket >= LARGE_BUCKET
    if report.true(f"{_ZERO}.overlap_comm") and stage in (1, 2) and large:
        rule = f"doubles the gradient bucket at stage {stage}: each GPU holds two of reduce_bucket_size"
        report.warning(f"{_ZERO}.overlap_comm", rule, "halve reduce_bucket_size, or set it to false")
    if report.value(f"{_ZERO}.compute_grad_norm") is False:
        _check_grad_norm(report, stage)
    muon, path = str(report.value("optimizer.type")).lower() == "muon", f"{_ZERO}.reduce_scatter"
    if muon and stage == 3 and report.value(path) is not False:
        report.error(path, "must be false for Muon at stage 3", "set reduce_scatter to false")
    if str(report.value("gradient_allreduce_op")).lower() == "sum":
        reasons = {
            "ZeRO stage 3": stage == 3,
            "ZenFlow": report.has(f"{_ZERO}.zenflow"),
            "DeepCompile": report.true("compile.deepcompile"),
        }
        for name, present in reasons.items():
            if present:
                report.error("gradient_allreduce_op", f"'sum' is not supported with {name}", "write 'mean'")
    if report.has(f"{_ZERO}.zenflow") and report.text(f"{_ZERO}.offload_optimizer.device") != "cpu":
        rule = "ZenFlow needs offload_optimizer with device 'cpu'"
        report.error(f"{_ZERO}.zenflow", rule, "add the offload or remove zenflow")


def _check_grad_norm(report: Report, stage: int) -> None:
    path = f"{_ZERO}.compute_grad_norm"
    if stage not in (1, 2):
        report.error(path, f"false is supported only at stage 1 or 2; the stage is {stage}", "remove the key")
    elif report.value("gradient_clipping") != 0:
        rule = "false needs gradient_clipping 0; DeepSpeed clips at 1.0 unless told otherwise"
        report.error(path, rule, 'add "gradient_clipping": 0, or remove the key')


def _check_replaced_optimizer(report: Report) -> None:
    path = f"{_ZERO}.offload_optimizer.device"
    if report.text(path) not in ("cpu", "nvme") or report.has("optimizer"):
        return
    if report.has("zero_force_ds_cpu_optimizer"):
        return
    rule = (
        "Accelerate replaces the Trainer's optimizer by DeepSpeedCPUAdam, and 8-bit or paged optimizers"
        " lose their decoupled weight decay"
    )
    fix = "set zero_force_ds_cpu_optimizer to true to accept this, or to false to keep your optimizer"
    report.warning(path, rule, fix)
