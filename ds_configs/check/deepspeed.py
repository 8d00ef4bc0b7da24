"""Checks of a DeepSpeed configuration: ZeRO, batch sizes and parallel axes."""

from __future__ import annotations

from ..legality.axes import LARGEST_ZERO_STAGE
from ..plan.rendering import HEADER
from ..specs.errors import nearest_divisors
from .effects import check_effects
from .report import (
    MAXIMUM_FINDINGS,
    Entry,
    KeyWalker,
    Node,
    Report,
    Schema,
    check_combinations,
    columns_of_deepspeed,
    load_keys,
    nearest_key,
    settings_of_deepspeed,
)

_ZERO = "zero_optimization"
_READ_BY = {
    (1, 2): "round_robin_gradients parameter_alignment use_multi_rank_bucket_allreduce",
    (2,): "ignore_unused_parameters",
    (1, 2, 3): "contiguous_gradients reduce_scatter reduce_bucket_size overlap_comm zenflow",
    (3,): """
        sub_group_size memory_efficient_linear override_module_apply pipeline_loading_checkpoint
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
        zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
        prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters
        max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold
        use_all_reduce_for_fetch_params allgather_sequential
    """,
}
STAGES = {key: set(stages) for stages, keys in _READ_BY.items() for key in keys.split()}
"""Stages that read a key. Only stage 3 reads keys that start with `stage3_`."""

LARGE_BUCKET = 250_000_000
"""Elements of a 16-bit bucket of half a gigabyte; DeepSpeed's default is twice that."""

_GATHER_ON_SAVE = "stage3_gather_16bit_weights_on_model_save"

_NVME_ONLY = {
    "offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
    "offload_optimizer": ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
}


def check_zero(report: Report, *, uses_transformers: bool) -> None:
    node = report.node(_ZERO)
    if node is None:
        return
    if isinstance(node.scalar, bool):
        report.error(_ZERO, "must be a mapping", f'write {{"stage": {int(node.scalar)}}}')
        return
    if node.kind != "mapping":
        return
    stage = report.integer(f"{_ZERO}.stage") if report.has(f"{_ZERO}.stage") else 0
    if not report.has(f"{_ZERO}.stage"):
        report.warning(_ZERO, "without a stage, DeepSpeed uses stage 0, which shards nothing", "add the stage")
    if stage in (0, 1, 2, 3):
        _check_stage(report, stage, node)
    path = f"{_ZERO}.allgather_bucket_size"
    size = report.integer(path)
    if size is not None and size % 2:
        report.error(path, "must be even", f"write {size + 1}")
    elif report.has(path) and not report.has(f"{_ZERO}.zenflow"):
        rule = "has no effect: with current torch versions, DeepSpeed gathers the whole group in one call"
        report.warning(path, rule, "remove the key")
    if report.has(f"{_ZERO}.allgather_partitions"):
        rule = "has no effect: DeepSpeed reads this key but never uses it"
        report.warning(f"{_ZERO}.allgather_partitions", rule, "remove the key")
    for section, nvme_only in _NVME_ONLY.items():
        path = f"{_ZERO}.{section}"
        node, device = report.node(path), report.text(f"{path}.device")
        if node is None or node.kind != "mapping":
            continue
        if device == "nvme" and report.value(f"{path}.nvme_path") in (None, False, 0, "", "none", "None"):
            report.error(f"{path}.device", "requires nvme_path, the directory of a local NVMe drive", "add nvme_path")
        if device is None and node.get("device") is None and node.entries:
            report.warning(path, "without a device, nothing is offloaded", "add the device, 'cpu' or 'nvme'")
        for key in nvme_only if device in ("cpu", "none") else ():
            value = node.get(key)
            if value is not None and value.scalar not in (None, False):
                rule = f"has no effect with device {device!r}: only 'nvme' reads it"
                report.warning(f"{path}.{key}", rule, "remove the key")
    path = f"{_ZERO}.offload_optimizer.device"
    keeps_optimizer = report.has("optimizer") or report.has("zero_force_ds_cpu_optimizer")
    if uses_transformers and report.text(path) in ("cpu", "nvme") and not keeps_optimizer:
        rule = (
            "Accelerate replaces the Trainer's optimizer with DeepSpeedCPUAdam, so that 8-bit and paged optimizers"
            " lose their decoupled weight decay"
        )
        fix = "set zero_force_ds_cpu_optimizer to true to accept this, or to false to keep your optimizer"
        report.warning(path, rule, fix)


def _check_stage(report: Report, stage: int, section: Node) -> None:
    for entry in section.entries:
        stages = STAGES.get(entry.key) or ({3} if entry.key.startswith("stage3_") else None)
        if stages is None or stage in stages or entry.node.scalar is False or entry.key.startswith("offload"):
            continue
        if entry.key == _GATHER_ON_SAVE and (report.integer("tensor_parallel.autotp_size") or 0) > 1:
            # Accelerate requires it at every stage to save a tensor-parallel model (accelerator.py:4072).
            continue
        rule = f"has no effect at stage {stage}: only stage {', '.join(map(str, sorted(stages)))} reads it"
        fix = "remove the key or change the stage"
        report.warning(f"{_ZERO}.{entry.key}", rule, fix, value=entry.node.plain(), line=entry.line)
    path = f"{_ZERO}.offload_param.device"
    if report.text(path) in ("cpu", "nvme") and stage != 3:
        report.error(path, f"has no effect at stage {stage}: only stage 3 offloads parameters", "use stage 3")
    path = f"{_ZERO}.offload_optimizer"
    device, ratio = report.text(f"{path}.device"), report.number(f"{path}.ratio")
    if device in ("cpu", "nvme") and stage == 0:
        report.error(f"{path}.device", "stage 0 has no optimizer shard to offload", "use stage 1, 2 or 3")
    elif device == "nvme" and stage in (1, 2):
        rule = f"stage {stage} does not support NVMe and offloads to host memory instead"
        report.error(f"{path}.device", rule, "write 'cpu', or use stage 3")
    if ratio is not None and ratio < 1 and stage != 3:
        report.error(f"{path}.ratio", f"partial offload requires stage 3; the stage is {stage}", "write 1.0")
    if report.true(f"{path}.super_offload") and stage != 3:
        report.error(f"{path}.super_offload", f"requires stage 3; the stage is {stage}", "use stage 3")
    if report.true(f"{_ZERO}.legacy_stage1"):
        report.error(f"{_ZERO}.legacy_stage1", "DeepSpeed no longer has this implementation", "remove the key")
    if report.true(f"{_ZERO}.elastic_checkpoint") and stage == 3:
        rule = "stage 3 no longer supports elastic checkpoints"
        report.error(f"{_ZERO}.elastic_checkpoint", rule, "use checkpoint.load_universal")
    bucket = report.value(f"{_ZERO}.reduce_bucket_size")
    large = not isinstance(bucket, int | float) or bucket >= LARGE_BUCKET
    if report.true(f"{_ZERO}.overlap_comm") and stage in (1, 2) and large:
        rule = f"doubles the gradient bucket at stage {stage}: each GPU allocates two of reduce_bucket_size"
        report.warning(f"{_ZERO}.overlap_comm", rule, "halve reduce_bucket_size, or set overlap_comm to false")
    path = f"{_ZERO}.compute_grad_norm"
    if report.value(path) is False and stage not in (1, 2):
        report.error(path, f"false requires stage 1 or 2; the stage is {stage}", "remove the key")
    elif report.value(path) is False and report.value("gradient_clipping") != 0:
        rule = "false requires gradient_clipping 0; DeepSpeed clips at 1.0 by default"
        report.error(path, rule, 'add "gradient_clipping": 0, or remove the key')
    muon, path = str(report.value("optimizer.type")).lower() == "muon", f"{_ZERO}.reduce_scatter"
    if muon and stage == 3 and report.value(path) is not False:
        report.error(path, "must be false for Muon at stage 3", "set reduce_scatter to false")
    if str(report.value("gradient_allreduce_op")).lower() == "sum":
        features = {
            "ZeRO stage 3": stage == 3,
            "ZenFlow": report.has(f"{_ZERO}.zenflow"),
            "DeepCompile": report.true("compile.deepcompile"),
        }
        for name, present in features.items():
            if present:
                report.error("gradient_allreduce_op", f"'sum' is not supported with {name}", "write 'mean'")
    if report.has(f"{_ZERO}.zenflow") and report.text(f"{_ZERO}.offload_optimizer.device") != "cpu":
        rule = "requires offload_optimizer with device 'cpu'"
        report.error(f"{_ZERO}.zenflow", rule, "add the offload, or remove zenflow")


_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


def check_batch(report: Report, *, world_size: int | None, uses_transformers: bool) -> None:
    """Check the three batch keys against each other and against the number of processes.

    The equation, and the order in which missing values are derived, follow deepspeed/runtime/config.py
    (`_set_batch_related_parameters`), which rounds down and then asserts.
    """
    if not report.has(_TRAIN) and not report.has(_MICRO):
        fix = f'add "{_MICRO}": "auto"' if uses_transformers else f"add {_MICRO}"
        report.error("", f"{_TRAIN} or {_MICRO} is required", fix)
        return
    if any(report.value(key) == "auto" for key in (_TRAIN, _MICRO, _STEPS)):
        return
    sizes = {key: report.integer(key) for key in (_TRAIN, _MICRO, _STEPS) if report.has(key)}
    if any(value is None or value <= 0 for value in sizes.values()):
        return
    # The data-parallel ranks: ranks that share a sequence also share its batch.
    ranks, sequence = world_size, report.integer("sequence_parallel_size")
    data = report.integer("data_parallel_size")
    if sequence is not None and data is not None and sequence > 0 and data > 0:
        if world_size is not None and sequence * data != world_size:
            rule = f"times sequence_parallel_size {sequence} must equal the {world_size} processes"
            fix = f"write {world_size // sequence}" if world_size % sequence == 0 else "change sequence_parallel_size"
            report.error("data_parallel_size", rule, fix)
            return
        ranks = data
    elif world_size is not None and sequence is not None and sequence > 0:
        if world_size % sequence:
            fix = f"nearest legal values: {nearest_divisors(world_size, sequence)}"
            report.error("sequence_parallel_size", f"must divide the {world_size} processes", fix)
            return
        ranks = world_size // sequence
    train, micro, steps = sizes.get(_TRAIN), sizes.get(_MICRO), sizes.get(_STEPS)
    if train is None or (ranks is not None and ranks < 1):
        return
    if ranks is not None and micro is not None and steps is not None:
        if train != (product := micro * steps * ranks):
            rule = f"must equal micro batch · accumulation · ranks = {micro} · {steps} · {ranks} = {product}"
            report.error(_TRAIN, rule, f"write {product}, or remove one of the three keys")
        return
    # DeepSpeed derives the value that is missing, so that the product of the others must divide the batch.
    factor = (micro or 1) * (steps or 1) * (ranks or 1)
    if train % factor == 0:
        return
    lower, upper = max(train // factor, 1) * factor, (train // factor + 1) * factor
    if ranks is None:
        parts = " · ".join(str(value) for value in (micro, steps) if value)
        factors = f"micro batch and accumulation, {parts} = {factor}"
    elif micro or steps:
        factors = f"{_MICRO if micro else _STEPS} · ranks = {micro or steps} · {ranks} = {factor}"
    else:
        factors = f"the {ranks} ranks"
    report.error(_TRAIN, f"must be a multiple of {factors}", f"write {lower}" + f" or {upper}" * (upper != lower))


_TENSOR = "tensor_parallel.autotp_size"
_EXPERT = "expert_parallel.autoep_size"


def check_axes(report: Report, *, world_size: int | None) -> None:
    tensor, expert = (report.integer(path) or 1 for path in (_TENSOR, _EXPERT))
    stage = report.integer("zero_optimization.stage") or 0
    enabled = report.true("expert_parallel.enabled")
    if expert > 1 and not enabled:
        report.warning(_EXPERT, "has no effect: AutoEP is not enabled", 'add "enabled": true')
    for path, size in ((_TENSOR, tensor), (_EXPERT, expert if enabled else 1)):
        if size > 1 and world_size is not None and world_size % size:
            fix = f"nearest legal values: {nearest_divisors(world_size, size)}"
            report.error(path, f"must divide the {world_size} ranks", fix)
    if tensor > 1 and stage > LARGEST_ZERO_STAGE:
        rule = f"requires ZeRO stage 0 to {LARGEST_ZERO_STAGE}; the stage is {stage}"
        report.error(_TENSOR, rule, "use stage 2, or autotp_size 1")
    if tensor > 1 and expert > 1 and enabled:
        report.error(_EXPERT, "AutoTP does not support mixtures of experts", "set one of the two sizes to 1")
    if expert > 1 and enabled and stage == 3:
        clashes = {
            "zero_hpz_partition_size": (report.integer("zero_optimization.zero_hpz_partition_size") or 1) > 1,
            "zero_quantized_gradients": report.true("zero_optimization.zero_quantized_gradients"),
        }
        for key, present in clashes.items():
            if present:
                rule = "is not supported with AutoEP at stage 3 (runtime/engine.py:2197)"
                report.error(f"zero_optimization.{key}", rule, "remove it, or use stage 2")


_COMPRESSION = "use `shardwright qat`, `shardwright student` or MagnitudePruningCallback"

REPLACEMENTS = {
    "nebula": "use the `checkpoint` section with a local or shared directory",
    "compression_training": _COMPRESSION,
    "amp": "use `bf16`, `fp16` or `torch_autocast`",
    "quantize_training": _COMPRESSION,
    "sparse_gradients": "remove it: gradients of `torch.nn.Embedding(sparse=True)` are reduced sparsely without a key",
    "eigenvalue": "remove it",
    "sparse_attention": "use a sparse attention implementation of the model",
    "elasticity": "set train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps",
    "graph_harvesting": "remove it, or use `compile`",
    "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "remove it",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size for a shard group inside each node",
    "zero_optimization.mics_hierarchical_params_gather": "use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "use zero_quantized_gradients without error feedback",
}
"""Replacements for the keys that DeepSpeed removed and now rejects, even if they are null or false."""

_NO_EFFECT = {
    "disable_allgather": "DeepSpeed reads this key but never uses it",
    "pipeline.stages": "PipelineModule's argument `num_stages` sets the number of stages",
    "pipeline.partition": "PipelineModule's argument `partition_method` sets the partitioning",
    "pipeline.seed_layers": "PipelineModule's argument `seed_layers` sets the seeding",
}


def check_deepspeed(report: Report, *, world_size: int | None, uses_transformers: bool) -> None:
    schema = load_keys("deepspeed")
    _check_keys(report, schema, uses_transformers)
    _check_precision(report)
    _check_optimizer(report, schema)
    if report.has("scheduler") and not report.has("scheduler.type"):
        report.error("scheduler", "without a type, DeepSpeed ignores the section", "add scheduler.type")
    name = report.text("scheduler.type")
    if name is not None and name in schema["schedulers"]:
        _check_arguments(report, "scheduler.params", schema["schedulers"][name], name)
    elif name is not None:
        choices = list(schema["schedulers"])
        report.error("scheduler.type", f"must be one of {', '.join(choices)}", nearest_key(name, choices))
    path = "scheduler.params.warmup_num_steps"
    if uses_transformers and report.value(path) == "auto":
        rule = "becomes 0 unless TrainingArguments set a warm-up, but DeepSpeed rejects 0"
        report.warning(path, rule, "set warmup_steps, or remove the scheduler so that the Trainer builds it")
    steps = report.number(path)
    if steps is not None and (steps <= 0 or report.value(path) != int(steps) or isinstance(report.value(path), float)):
        report.error(path, "must be a positive integer", "write 1 for no warm-up")
    for path, reason in _NO_EFFECT.items():
        if report.has(path):
            report.warning(path, f"has no effect: {reason}", "remove the key")
    if report.has("bf16") and report.has("bfloat16"):
        report.warning("bfloat16", "has no effect: DeepSpeed reads bf16 instead", "remove the section")
    check_effects(report, uses_transformers=uses_transformers)
    check_zero(report, uses_transformers=uses_transformers)
    check_axes(report, world_size=world_size)
    check_batch(report, world_size=world_size, uses_transformers=uses_transformers)
    if uses_transformers:
        if not report.has("gradient_clipping"):
            rule = "is missing: DeepSpeed clips at 1.0 and ignores max_grad_norm"
            report.warning("gradient_clipping", rule, 'add "gradient_clipping": "auto"')
        if not report.has("gradient_accumulation_steps"):
            rule = "is missing: Accelerate writes 1, which must equal the value of TrainingArguments"
            report.warning("gradient_accumulation_steps", rule, 'add "gradient_accumulation_steps": "auto"')
        node = report.node("activation_checkpointing")
        if node is not None and any(entry.node.scalar not in (None, False) for entry in node.entries):
            rule = "has no effect: Transformers does not use deepspeed.checkpointing"
            fix = "set gradient_checkpointing in TrainingArguments"
            if report.true("activation_checkpointing.cpu_checkpointing"):
                fix += ", and plan with --offload-activations on"
            report.warning("activation_checkpointing", rule, fix)
        if not report.has("zero_optimization"):
            report.error("zero_optimization", "is missing, but Accelerate requires it", "add the section")
        check_combinations(report, settings_of_deepspeed(report), columns_of_deepspeed(report))
        has_precision = any(report.has(section) for section in ("bf16", "bfloat16", "fp16"))
        if (report.integer(_TENSOR) or 1) > 1 and not has_precision:
            why = "because no section sets a precision; TrainingArguments have no effect on this"
            report.warning(_TENSOR, f"loads the model in fp32, {why}", 'write "bf16": {"enabled": "auto"}')


def _check_keys(report: Report, schema: Schema, uses_transformers: bool) -> None:
    removed = {f"{section}.{key}".lstrip(".") for section, keys in schema["removed"].items() for key in keys}
    filled = set(schema["filled_by_transformers"])

    def unknown(path: str, entry: Entry, parent: Schema) -> None:
        if path == HEADER:
            return
        key, line = entry.key, entry.line
        if path in removed:
            fix = REPLACEMENTS.get(path, "remove it")
            report.error(path, "DeepSpeed 0.19 removed this key and rejects it", fix, line=line)
            return
        if key == "max_grad_norm" and path == key:
            report.error(path, "unknown key; DeepSpeed ignores it", "write gradient_clipping", line=line)
            return
        effect = "rejects it" if parent["strict"] else "ignores it silently"
        fix = nearest_key(key, list(parent["keys"]))
        if not fix:
            # All known keys down to the third level, those of outer levels first.
            levels = [[("", schema["root"])]]
            for _ in range(3):
                levels.append(
                    [(f"{at}.{name}", node) for at, part in levels[-1] for name, node in part.get("keys", {}).items()]
                )
            known = [at.lstrip(".") for level in levels[1:] for at, _ in level]
            paths = [at for at in known if at.rpartition(".")[2] == key]
            fix = f"the key belongs at {paths[0]}" if len(paths) in (1, 2) and paths[0] != path else ""
        report.error(path, f"unknown key; DeepSpeed {effect}", fix, line=line)

    def auto(path: str, node: Schema) -> None:
        if not uses_transformers:
            rule = "only Transformers replaces 'auto'; DeepSpeed uses its default or fails"
            report.error(path, rule, "write the value")
        elif path not in filled:
            section = path.split(".")[0]
            strict = schema["root"]["keys"].get(section, {}).get("strict", False)
            outcome = "uses its default instead" if strict else "receives the word itself"
            report.error(path, f"Transformers does not fill this 'auto', so that DeepSpeed {outcome}", "write a value")

    KeyWalker(report, unknown=unknown, auto=auto).walk(report.root, schema["root"])


def bf16_section(report: Report) -> str:
    """Return the section that DeepSpeed reads: `bfloat16`, the old name, only if `bf16` is absent."""
    return "bfloat16" if report.has("bfloat16") and not report.has("bf16") else "bf16"


def _check_precision(report: Report) -> None:
    section = bf16_section(report)
    master, states = f"{section}.bf16_master_weights_and_grads", f"{section}.bf16_optimizer_states"
    bf16, fp16 = report.true(f"{section}.enabled"), report.true("fp16.enabled")
    if bf16 and fp16:
        report.error("fp16.enabled", "bf16 and fp16 cannot both be enabled", "disable one of them")
    stage = report.integer("zero_optimization.stage") or 0
    for path in (master, states, "fp16.fp16_master_weights_and_grads"):
        if report.true(path) and stage not in (1, 2, 3):
            report.error(path, f"requires ZeRO stage 1, 2 or 3; the stage is {stage}", "raise the stage")
    if report.true(states) and not report.true(master):
        report.error(states, "requires bf16_master_weights_and_grads", "set both to true")
    offloaded = report.text("zero_optimization.offload_optimizer.device") in ("cpu", "nvme")
    if report.true(master) and not report.true(states) and not offloaded:
        rule = "requires offload_optimizer: fp32 optimizer states are supported on the host only"
        report.error(master, rule, "add offload_optimizer, or set bf16_optimizer_states to true")
    scale = report.number("fp16.loss_scale")
    if scale is not None and scale < 0:
        report.error("fp16.loss_scale", "must be at least 0", "write 0 for dynamic loss scaling")
    if report.true("fp16.enabled") and not scale:
        for key in ("loss_scale_window", "min_loss_scale"):
            value = report.number(f"fp16.{key}")
            if value is not None and value <= 0:
                report.error(f"fp16.{key}", "must be greater than 0 with dynamic loss scaling", "omit it")
    names = {"fp16": {"fp16", "float16", "half"}, "bf16": {"bf16", "bfloat16"}, "fp32": {"fp32", "float32", "float"}}
    mode = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    if "auto" in (report.value(f"{bf16_section(report)}.enabled"), report.value("fp16.enabled")):
        return

    def canonical(path: str) -> str | None:
        text = (report.text(path) or "").removeprefix("torch.")
        return next((name for name, spellings in names.items() if text in spellings), None)

    parameter = canonical("data_types.param_dtype")
    if parameter is not None and parameter != mode:
        report.error("data_types.param_dtype", f"must equal the enabled precision, {mode}", "remove the key")
    path = "data_types.grad_accum_dtype"
    accumulation = canonical(path)
    if accumulation is None or accumulation == mode:
        return
    if stage == 0:
        report.error(
            path,
            f"stage 0 accumulates in the model's precision, {mode}",
            f"write {mode!r}, or use ZeRO stage 1, 2 or 3",
        )
    elif stage == 1 and mode == "bf16" and accumulation == "fp32":
        if report.text("zero_optimization.offload_optimizer.device") == "cpu":
            return
        rule = (
            "with bf16 and stage 1, DeepSpeed uses BF16_Optimizer, which keeps the full fp32 gradient"
            " (4 bytes per parameter) on every GPU"
        )
        report.warning(path, rule, "use stage 2, or write 'bf16'")


def _check_optimizer(report: Report, schema: Schema) -> None:
    known = schema["optimizers"]
    if report.has("optimizer.params.max_grad_norm"):
        rule = "DeepSpeed rejects this as an optimizer argument"
        report.error("optimizer.params.max_grad_norm", rule, "write the top-level key gradient_clipping")
    if report.has("optimizer") and not report.has("optimizer.type"):
        report.error("optimizer", "without a type, DeepSpeed ignores the section", "add optimizer.type")
    name = report.text("optimizer.type")
    if name is None:
        return
    if name.lower() in known["deepspeed"]:
        arguments = known["deepspeed"][name.lower()]
    elif name in known["torch"]:
        arguments = known["torch"][name]
    else:
        rule, fix = "DeepSpeed 0.19 removed the 1-bit optimizers", "use AdamW"
        if name.lower() not in {item.lower() for item in known["removed"]}:
            rule = "neither DeepSpeed nor torch.optim has this optimizer"
            fix = nearest_key(name, [*known["deepspeed"], *known["torch"]])
        report.error("optimizer.type", rule, fix)
        return
    if name == "Adam" and not report.has("optimizer.params.adam_w_mode"):
        rule = "DeepSpeed runs AdamW for this name, with decoupled weight decay"
        report.warning("optimizer.type", rule, "write AdamW, or set params.adam_w_mode to false for L2 decay")
    _check_arguments(report, "optimizer.params", arguments, name)


def _check_arguments(report: Report, path: str, arguments: list[str] | None, name: str) -> None:
    node = report.node(path)
    if node is None or arguments is None:
        return
    filled = load_keys("deepspeed")["filled_by_transformers"]
    for entry in node.entries[: MAXIMUM_FINDINGS + 1]:
        child = f"{path}.{entry.key}"
        if entry.key not in arguments and entry.key != "max_grad_norm":
            report.error(child, f"{name} has no such argument", nearest_key(entry.key, arguments))
        elif entry.node.scalar == "auto" and child not in filled:
            report.error(child, "Transformers does not fill this 'auto'", "write a value")
