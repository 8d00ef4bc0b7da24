"""Rules for a DeepSpeed JSON: what DeepSpeed 0.19.8 refuses, ignores or does otherwise than written."""

from __future__ import annotations

from ..plan.deepspeed_copy import HEADER
from ..quantization.compression_training import REMOVED_BLOCKS, message
from .axes import check_axes
from .batch import check_batch
from .combinations import check_deepspeed_combinations
from .keys import KeyWalker, Schema, load_keys, nearest_key
from .report import MAXIMUM_FINDINGS, Report
from .tree import Entry
from .zero import check_zero

REPLACEMENTS = {
    "nebula": "use the `checkpoint` section with a local or shared directory",
    "compression_training": "use `shardwright qat` and the sparsity callbacks",
    "amp": "use `bf16`, `fp16` or `torch_autocast`",
    "quantize_training": "use `shardwright qat`",
    "sparse_gradients": "remove it: `torch.nn.Embedding(sparse=True)` is reduced sparsely without a key",
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
"""What replaces each key that DeepSpeed removed and now refuses even when it is null or false."""

_NO_EFFECT = {
    "disable_allgather": "DeepSpeed reads this key and never uses it",
    "pipeline.stages": "the number of stages is the `num_stages` argument of PipelineModule",
    "pipeline.partition": "the partitioning is the `partition_method` argument of PipelineModule",
    "pipeline.seed_layers": "seeding is the `seed_layers` argument of PipelineModule",
}


def check_deepspeed(report: Report, *, world_size: int | None, uses_transformers: bool) -> None:
    """Apply every rule for a DeepSpeed configuration."""
    schema = load_keys("deepspeed")
    _check_keys(report, schema, uses_transformers)
    _check_precision(report)
    _check_optimizer(report, schema)
    _check_scheduler(report, schema)
    _check_warmup(report, uses_transformers)
    _check_no_effect(report)
    check_zero(report, uses_transformers=uses_transformers)
    check_axes(report, world_size=world_size)
    check_batch(report, world_size=world_size, uses_transformers=uses_transformers)
    if uses_transformers:
        _check_trainer_keys(report)
        check_deepspeed_combinations(report)


def _check_keys(report: Report, schema: Schema, uses_transformers: bool) -> None:
    removed = {f"{section}.{key}".lstrip(".") for section, keys in schema["removed"].items() for key in keys}
    filled = set(schema["filled_by_transformers"])

    def unknown(path: str, entry: Entry, parent: Schema) -> None:
        if path == HEADER:
            return
        key, line = entry.key, entry.line
        if path in removed:
            fix = REPLACEMENTS.get(path, "remove it")
            if path in REMOVED_BLOCKS:
                fix = message({path: entry.node.plain()})
            report.error(path, "DeepSpeed 0.19 removed this key and refuses it", fix, line=line)
            return
        if key == "max_grad_norm" and path == key:
            report.error(path, "DeepSpeed has no such key and ignores it", "write gradient_clipping", line=line)
            return
        effect = "refuses it" if parent["strict"] else "ignores it silently"
        elsewhere = _other_place(key, path, schema["root"])
        report.error(
            path, f"unknown key; DeepSpeed {effect}", nearest_key(key, list(parent["keys"])) or elsewhere, line=line
        )

    def auto(path: str, node: Schema) -> None:
        if not uses_transformers:
            rule = "only Transformers replaces 'auto'; DeepSpeed alone takes its default or stops"
            report.error(path, rule, "write the value")
        elif path not in filled:
            section = path.split(".")[0]
            strict = schema["root"]["keys"].get(section, {}).get("strict", False)
            outcome = "uses its default instead" if strict else "receives the word itself"
            report.error(path, f"Transformers does not fill this 'auto', so that DeepSpeed {outcome}", "write a value")

    KeyWalker(report, unknown=unknown, auto=auto).walk(report.root, schema["root"])


def _other_place(key: str, path: str, root: Schema) -> str:
    """Return where a misplaced key belongs, or an empty string."""
    places = [key] if key in root["keys"] else []
    places += [f"{name}.{key}" for name, node in root["keys"].items() if key in node.get("keys", {})]
    places += [
        f"{name}.{inner}.{key}"
        for name, node in root["keys"].items()
        for inner, below in node.get("keys", {}).items()
        if key in below.get("keys", {})
    ]
    return f"the key belongs at {places[0]}" if len(places) in (1, 2) and places[0] != path else ""


def bf16_section(report: Report) -> str:
    """Return the section that DeepSpeed reads: the old name counts only where the new one is absent."""
    return "bfloat16" if report.has("bfloat16") and not report.has("bf16") else "bf16"


def _check_precision(report: Report) -> None:
    section = bf16_section(report)
    master, states = f"{section}.bf16_master_weights_and_grads", f"{section}.bf16_optimizer_states"
    bf16, fp16 = report.true(f"{section}.enabled"), report.true("fp16.enabled")
    if bf16 and fp16:
        report.error("fp16.enabled", "bf16 and fp16 cannot both be enabled", "disable one of them")
    stage = report.integer("zero_optimization.stage") or 0
    for path in (
        master,
        states,
        "fp16.fp16_master_weights_and_grads",
    ):
        if report.true(path) and stage not in (1, 2, 3):
            report.error(path, f"needs ZeRO stage 1, 2 or 3; the stage is {stage}", "raise the stage")
    if report.true(states) and not report.true(master):
        report.error(states, "needs bf16_master_weights_and_grads", "set both to true")
    offloaded = report.text("zero_optimization.offload_optimizer.device") in ("cpu", "nvme")
    if report.true(master) and not report.true(states) and not offloaded:
        rule = "keeps fp32 optimizer states only on the host, so it needs offload_optimizer"
        report.error(master, rule, "add offload_optimizer, or set bf16_optimizer_states to true")
    _check_data_types(report, stage, bf16=bf16, fp16=fp16)
    _check_loss_scale(report)


def _check_data_types(report: Report, stage: int, *, bf16: bool, fp16: bool) -> None:
    names = {
        "fp16": {"fp16", "float16", "half"},
        "bf16": {"bf16", "bfloat16"},
        "fp32": {"fp32", "float32", "float"},
    }
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
        report.error(path, f"stage 0 accumulates in the model's precision, {mode}", f"write {mode!r} or use ZeRO")
    elif stage == 1 and mode == "bf16" and accumulation == "fp32":
        if report.text("zero_optimization.offload_optimizer.device") == "cpu":
            return
        rule = (
            "with bf16 and stage 1 this switches to BF16_Optimizer, which keeps the whole fp32 gradient,"
            " 4 bytes per parameter, on every GPU"
        )
        report.warning(path, rule, "use stage 2, or 'bf16'")


def _check_loss_scale(report: Report) -> None:
    if not report.has("fp16"):
        return
    scale = report.number("fp16.loss_scale")
    if scale is not None and scale < 0:
        report.error("fp16.loss_scale", "must be at least 0, where 0 means dynamic")
    if report.true("fp16.enabled") and not scale:
        for key in ("loss_scale_window", "min_loss_scale"):
            value = report.number(f"fp16.{key}")
            if value is not None and value <= 0:
                report.error(f"fp16.{key}", "must be greater than 0 with dynamic loss scaling")


def _check_optimizer(report: Report, schema: Schema) -> None:
    known = schema["optimizers"]
    if report.has("optimizer.params.max_grad_norm"):
        rule = "DeepSpeed refuses this as an optimizer argument"
        report.error("optimizer.params.max_grad_norm", rule, "write the top-level key gradient_clipping")
    if report.has("optimizer") and not report.has("optimizer.type"):
        report.error("optimizer", "without a type DeepSpeed ignores the whole section", "add optimizer.type")
    name = report.text("optimizer.type")
    if name is None:
        return
    if name.lower() in known["deepspeed"]:
        arguments = known["deepspeed"][name.lower()]
    elif name in known["torch"]:
        arguments = known["torch"][name]
    else:
        removed = name.lower() in {item.lower() for item in known["removed"]}
        rule = (
            "DeepSpeed 0.19 removed the 1-bit optimizers"
            if removed
            else "no such optimizer in DeepSpeed or torch.optim"
        )
        choices = [*known["deepspeed"], *known["torch"]]
        report.error("optimizer.type", rule, "use AdamW" if removed else nearest_key(name, choices))
        return
    if name == "Adam" and not report.has("optimizer.params.adam_w_mode"):
        rule = "DeepSpeed runs AdamW under this name, with decoupled weight decay"
        report.warning("optimizer.type", rule, "write AdamW, or set params.adam_w_mode to false for L2 decay")
    _check_arguments(report, "optimizer.params", arguments, name)


def _check_scheduler(report: Report, schema: Schema) -> None:
    if report.has("scheduler") and not report.has("scheduler.type"):
        report.error("scheduler", "without a type DeepSpeed ignores the whole section", "add scheduler.type")
    name = report.text("scheduler.type")
    if name is None:
        return
    if name not in schema["schedulers"]:
        choices = list(schema["schedulers"])
        listed = ", ".join(choices)
        report.error("scheduler.type", f"must be one of {listed}", nearest_key(name, choices))
        return
    _check_arguments(report, "scheduler.params", schema["schedulers"][name], name)


def _check_warmup(report: Report, uses_transformers: bool) -> None:
    path = "scheduler.params.warmup_num_steps"
    if uses_transformers and report.value(path) == "auto":
        rule = "is 0 when TrainingArguments set no warm-up, their default, and DeepSpeed refuses 0"
        report.warning(path, rule, "set warmup_steps, or remove the scheduler so that the Trainer builds it")
    steps = report.number(path)
    if steps is not None and (steps <= 0 or report.value(path) != int(steps) or isinstance(report.value(path), float)):
        report.error(path, "must be a positive integer", "write 1 for no warm-up")


def _check_arguments(report: Report, path: str, arguments: list[str] | None, name: str) -> None:
    node = report.node(path)
    if node is None or arguments is None:
        return
    filled = load_keys("deepspeed")["filled_by_transformers"]
    for entry in node.entries[: MAXIMUM_FINDINGS + 1]:
        child = f"{path}.{entry.key}"
        if entry.key not in arguments and entry.key != "max_grad_norm":
            report.error(child, f"{name} takes no such argument", nearest_key(entry.key, arguments))
        elif entry.node.scalar == "auto" and child not in filled:
            report.error(child, "Transformers does not fill this 'auto'", "write a value")


def _check_no_effect(report: Report) -> None:
    for path, reason in _NO_EFFECT.items():
        if report.has(path):
            report.warning(path, f"has no effect: {reason}", "remove the key")
    if report.has("bf16") and report.has("bfloat16"):
        report.warning("bfloat16", "has no effect beside bf16", "remove the section")


def _check_trainer_keys(report: Report) -> None:
    if not report.has("gradient_clipping"):
        rule = "is missing: DeepSpeed clips at 1.0 whatever max_grad_norm says"
        report.warning("gradient_clipping", rule, 'add "gradient_clipping": "auto"')
    if not report.has("gradient_accumulation_steps"):
        rule = "is missing: Accelerate writes 1, which must then equal TrainingArguments"
        report.warning("gradient_accumulation_steps", rule, 'add "gradient_accumulation_steps": "auto"')
    node = report.node("activation_checkpointing")
    if node is not None and any(entry.node.scalar not in (None, False) for entry in node.entries):
        rule = "acts only on deepspeed.checkpointing; Transformers' gradient checkpointing does not read it"
        report.warning("activation_checkpointing", rule, "set gradient_checkpointing in TrainingArguments")
    if not report.has("zero_optimization"):
        report.error("zero_optimization", "is missing, and Accelerate refuses such a config", "add the section")
