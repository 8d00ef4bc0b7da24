"""Checks of an Accelerate configuration, including its FSDP and parallelism sections."""

from __future__ import annotations

from ..specs.errors import nearest_divisors
from .report import (
    FALSE_WORDS,
    TRUE_WORDS,
    Entry,
    KeyWalker,
    Report,
    Schema,
    check_combinations,
    columns_of_accelerate,
    load_keys,
    nearest_key,
    settings_of_accelerate,
)

_BASE = "fsdp_config"
_VERSION_1_ONLY = {
    "sharding_strategy": "use fsdp_reshard_after_forward: true or false",
    "use_orig_params": "remove the key: FSDP2 always keeps the original parameters",
    "sync_module_states": "remove the key: FSDP2 does not need it",
    "forward_prefetch": "remove the key",
    "backward_prefetch": "remove the key",
}


def check_fsdp(report: Report) -> None:
    if report.text("distributed_type") != "FSDP":
        return
    node = report.node(_BASE)
    if node is None or not node.entries:
        rule = "without fsdp_config, FSDP1 wraps the whole model as one unit"
        report.error(_BASE, rule, "add fsdp_version: 2 and fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP")
        return

    def path(name: str) -> str:
        """Return the path of a key as the file spells it."""
        short = f"{_BASE}.{name}"
        return short if report.has(short) else f"{_BASE}.fsdp_{name}"

    def word(name: str, default: str = "") -> str:
        value = report.value(path(name))
        return default if value is None else str(value)

    version = 2 if word("version") == "2" else 1
    if not report.has(path("version")):
        report.warning(path("version"), "is missing, so accelerate launch uses version 1", "write fsdp_version: 2")
    reshard = word("reshard_after_forward")
    if version == 2:
        for name, fix in _VERSION_1_ONLY.items():
            if report.has(path(name)):
                report.error(path(name), "has no effect: only FSDP1 reads it", fix)
        if reshard and reshard.lower() not in TRUE_WORDS | FALSE_WORDS:
            fix = "write false" if reshard.upper() in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else "write true"
            rule = "must be true or false with FSDP2; Accelerate fails on a strategy name"
            report.error(path("reshard_after_forward"), rule, fix)
        if word("state_dict_type").upper() == "LOCAL_STATE_DICT":
            fix = "write SHARDED_STATE_DICT or FULL_STATE_DICT"
            report.error(path("state_dict_type"), "FSDP2 does not support local state dicts", fix)
    else:
        wanted = "FULL_SHARD" if reshard.lower() in TRUE_WORDS else reshard.upper()
        wanted = "SHARD_GRAD_OP" if reshard.lower() in FALSE_WORDS else wanted
        strategy = word("sharding_strategy", "FULL_SHARD")
        if reshard and wanted != strategy.upper():
            rule = f"has no effect with fsdp_version 1: the sharding strategy {strategy} overrides it"
            report.error(path("reshard_after_forward"), rule, f"write fsdp_sharding_strategy: {wanted}")
        efficient = word("cpu_ram_efficient_loading", "true").lower() in TRUE_WORDS
        if efficient and report.value(path("sync_module_states")) is False:
            rule = "must be true with fsdp_cpu_ram_efficient_loading; otherwise accelerate launch fails"
            fix = "write true, or fsdp_cpu_ram_efficient_loading: false"
            report.error(path("sync_module_states"), rule, fix)
    policy = word("auto_wrap_policy", "NO_WRAP").upper()
    if policy == "NO_WRAP":
        rule = "without a policy, the model is one unit, and each forward pass gathers all of it"
        report.warning(path("auto_wrap_policy"), rule, "write TRANSFORMER_BASED_WRAP")
    classes = path("transformer_layer_cls_to_wrap")
    if report.has(classes) and policy != "TRANSFORMER_BASED_WRAP":
        report.warning(classes, f"has no effect with the policy {policy}", "write TRANSFORMER_BASED_WRAP")
    if policy == "SIZE_BASED_WRAP" and report.integer(path("min_num_params")) == 0:
        rule = "0 silently disables SIZE_BASED_WRAP"
        report.error(path("min_num_params"), rule, "write the number of parameters of one layer")
    offload = path("activation_checkpointing_offload")
    if word("activation_checkpointing_offload").lower() in TRUE_WORDS:
        if version != 2:
            report.error(offload, "requires fsdp_version 2", "write fsdp_version: 2")
        if word("activation_checkpointing", "false").lower() not in TRUE_WORDS:
            rule = "requires fsdp_activation_checkpointing: true"
            report.error(offload, rule, "add fsdp_activation_checkpointing: true")


_PARALLELISM_BASE = "parallelism_config"
_SEQUENCE_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")
_DEVICES = ("MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON")


def check_parallelism(report: Report, *, world_size: int | None) -> None:
    """Check which dimensions are combined, and that their product is the number of processes."""
    node = report.node(_PARALLELISM_BASE)
    if node is None or not node.entries:
        return

    def path(name: str) -> str:
        return f"{_PARALLELISM_BASE}.parallelism_config_{name}"

    sizes = {
        name: report.integer(path(f"{name}_size")) if report.has(path(f"{name}_size")) else 1
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    if any(size is None or size < 1 for size in sizes.values()):
        return
    replicate, shard, tensor, context, sequence = (size or 1 for size in sizes.values())
    if context > 1 and sequence > 1:
        rule = f"context and sequence parallelism cannot be combined: cp_size {context}, sp_size {sequence}"
        report.error(path("sp_size"), rule, "set one of the two to 1")
    if (tensor > 1 or context > 1) and replicate > 1 and shard == 1:
        rule = "replicas with tensor or context parallelism require sharded parameters (dp_shard_size above 1)"
        report.error(path("dp_replicate_size"), rule, "set dp_shard_size above 1, or dp_replicate_size to 1")
    total = replicate * shard * tensor * context * sequence
    kind = report.text("distributed_type")
    version = report.value("fsdp_config.fsdp_version") or report.value("fsdp_config.version")
    if total > 1 and kind is not None and kind not in (*_DEVICES, "FSDP", "DEEPSPEED"):
        rule = f"is not supported with distributed_type {kind}"
        report.error(_PARALLELISM_BASE, rule, "use FSDP with fsdp_version 2, or DEEPSPEED")
    if kind == "FSDP" and total > 1:
        if str(version) != "2":
            report.error(_PARALLELISM_BASE, "requires fsdp_version 2", "write fsdp_version: 2")
        elif shard == 1 and context == 1:
            rule = "FSDP2 requires dp_shard_size or cp_size above 1, the dimensions that it shards"
            report.error(_PARALLELISM_BASE, rule, "raise dp_shard_size")
    if context > 1 and kind in (*_DEVICES, "DEEPSPEED"):
        report.error(path("cp_size"), "context parallelism requires FSDP2", "write distributed_type: FSDP")
    attention = report.text(path("sp_attn_implementation"))
    from_hub = attention is not None and "/" in attention and "flash-attn" in attention
    if attention is not None and attention not in _SEQUENCE_ATTENTION and not from_hub:
        rule = f"must be one of {', '.join(_SEQUENCE_ATTENTION)}, or a flash-attn kernel from the Hub"
        report.error(path("sp_attn_implementation"), rule, "write sdpa")
    if sequence > 1 and kind is not None and kind != "DEEPSPEED":
        rule = "sequence parallelism requires DeepSpeed"
        report.error(path("sp_size"), rule, "write distributed_type: DEEPSPEED")
    processes = report.integer("num_processes") or world_size
    if processes is None or processes < 1:
        return
    if sequence > 1 and processes % sequence:
        fix = f"nearest legal values: {nearest_divisors(processes, sequence)}"
        report.error(path("sp_size"), f"must divide num_processes {processes}", fix)
    elif sequence > 1 and replicate * shard != processes // sequence:
        rule = (
            f"dp_replicate_size · dp_shard_size is {replicate * shard} and must be num_processes / sp_size"
            f" = {processes // sequence}: Accelerate computes the batch from it"
        )
        where = path("dp_shard_size") if report.has(path("dp_shard_size")) else path("sp_size")
        report.error(where, rule, f"write dp_shard_size {processes // sequence}")
    elif sequence == 1 and total not in (1, processes):
        product = " · ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
        rule = f"the sizes multiply to {total} ({product}), which must equal num_processes {processes}"
        rest = tensor * context * replicate
        fix = f"write dp_shard_size {processes // rest}" if processes % rest == 0 else "change the sizes"
        report.error(_PARALLELISM_BASE, rule, fix)


BESIDE_CONFIG_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
"""Keys of `deepspeed_config` that Accelerate rejects if `deepspeed_config_file` is set."""

_SECTION_OF = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config", "MEGATRON_LM": "megatron_lm_config"}
_FP8_NAMES = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}
_CONSEQUENCES = {
    "rdzv_backend": "the rendezvous remains static",
    "same_network": "the launcher uses an rdzv_endpoint instead of a main address",
    "enable_cpu_affinity": "the processes are not pinned",
    "downcast_bf16": "bf16 is not downcast",
    "tpu_use_sudo": "sudo is not used",
}
_OPTIONS = {"rdzv_backend": "--rdzv_backend", "same_network": "--same_network"}


def check_accelerate(report: Report, *, world_size: int | None) -> None:
    schema = load_keys("accelerate")
    if report.text("compute_environment") == "AMAZON_SAGEMAKER":
        for entry in report.root.entries:
            if entry.key not in schema["sagemaker"]:
                fix = nearest_key(entry.key, schema["sagemaker"])
                report.error(entry.key, "unknown key; Accelerate rejects the file", fix, line=entry.line)
        return
    _check_keys(report, schema)
    # `mixed_precision: no` without quotes is the boolean false: `_check_keys` reports the missing quotes.
    if (precision := report.value("mixed_precision")) is not False:
        if precision == "fp8" and not report.has("fp8_config"):
            rule = "fp8 without fp8_config uses the first installed backend"
            report.warning("mixed_precision", rule, "add fp8_config with a backend")
        if report.has("fp8_config") and precision != "fp8":
            rule = "has no effect unless mixed_precision is fp8"
            report.warning("fp8_config", rule, "set mixed_precision: fp8, or remove the section")
        if report.has("fp16"):
            rule = "is a legacy key" + (", which mixed_precision overrides" if report.has("mixed_precision") else "")
            report.warning("fp16", rule, "write mixed_precision: fp16")
        if report.has("dynamo_backend"):
            rule = "is a legacy key" + (", which replaces dynamo_config" if report.has("dynamo_config") else "")
            report.warning("dynamo_backend", rule, "write dynamo_config with dynamo_backend")
    _check_processes(report, world_size)
    kind = report.text("distributed_type")
    for owner, section in _SECTION_OF.items():
        node = report.node(section)
        if node is not None and node.entries and kind is not None and kind != owner:
            rule = f"has no effect with distributed_type {kind}"
            report.warning(section, rule, f"write distributed_type: {owner}, or remove the section")
    dynamo = report.node("dynamo_config")
    backend = report.value("dynamo_config.dynamo_backend") or report.value("dynamo_config.backend")
    if kind == "DEEPSPEED" and dynamo is not None and dynamo.entries and str(backend).upper() != "NO":
        rule = "is not passed to the processes with DEEPSPEED, so that torch.compile stays off"
        report.warning("dynamo_config", rule, "set torch_compile in TrainingArguments")
    if kind == "DEEPSPEED" and report.true("use_cpu"):
        report.warning("use_cpu", "is not passed to the processes with DEEPSPEED", "set use_cpu in TrainingArguments")
    for key, default in schema["overridden_by_command_line_default"].items():
        value = report.value(key)
        if value is None or value == default or str(value).lower() in ("no", "false", str(default).lower()):
            continue
        if key == "same_network" and (report.integer("num_machines") or 1) <= 1:
            continue
        rule = f"has no effect: the command-line default overrides it, and {_CONSEQUENCES.get(key, 'nothing changes')}"
        report.warning(key, rule, f"pass {_OPTIONS.get(key, '--' + key)} to accelerate launch")
    if kind == "DEEPSPEED":
        _check_deepspeed(report, schema)
    check_fsdp(report)
    check_parallelism(report, world_size=world_size)
    check_combinations(report, settings_of_accelerate(report), columns_of_accelerate(report))


def _check_keys(report: Report, schema: Schema) -> None:
    root = schema["root"]["keys"]

    def unknown(path: str, entry: Entry, parent: Schema) -> None:
        key, line = entry.key, entry.line
        if parent["strict"]:
            if key in schema["command_line_only"]:
                rule = "Accelerate rejects this key in a file; it exists only on the command line"
                report.error(path, rule, f"pass --{key} to accelerate launch", line=line)
                return
            owner = next((name for name, node in root.items() if key in node.get("keys", {})), "")
            fix = f"move it into {owner}" if owner else nearest_key(key, list(root))
            report.error(path, "unknown key; Accelerate rejects the file", fix, line=line)
            return
        section = path.split(".")[0]
        fix = _FP8_NAMES.get(key.removeprefix("fp8_"), "") if section == "fp8_config" else ""
        known = list(parent["keys"])
        prefix = parent.get("prefix") or "parallelism_config_" * (section == "parallelism_config")
        if fix:
            fix = f"write {fix}"
        elif section == "parallelism_config" and f"parallelism_config_{key}" in known:
            fix = f"write parallelism_config_{key}: the prefix is required"
        else:
            fix = nearest_key(key if key.startswith(prefix) else prefix + key, known)
        report.error(path, "unknown key; Accelerate ignores it silently", fix, line=line)

    def auto(path: str, node: Schema) -> None:
        report.error(path, "Accelerate does not fill 'auto' here", "write the value")

    KeyWalker(report, unknown=unknown, auto=auto).walk(report.root, schema["root"])


def _check_processes(report: Report, world_size: int | None) -> None:
    kind = report.text("distributed_type")
    if not report.has("distributed_type"):
        report.error("distributed_type", "is missing, but Accelerate requires it", "add it, for example FSDP")
    processes, machines = report.integer("num_processes"), report.integer("num_machines") or 1
    if not report.has("num_processes") and kind != "NO":
        rule = "is missing, but accelerate launch requires it: the number of processes on all machines"
        fix = f"write {world_size}" if world_size else "add it, or pass --num_processes"
        report.error("num_processes", rule, fix)
    if kind == "NO" and processes is not None and processes > 1:
        rule = "distributed_type NO starts a single process"
        report.warning("num_processes", rule, "choose MULTI_GPU, FSDP or DEEPSPEED")
    if processes is not None and world_size is not None and processes != world_size:
        report.error("num_processes", f"must equal the {world_size} requested processes", f"write {world_size}")
    if processes is not None and machines > 1 and processes % machines:
        rule = f"must be a multiple of num_machines = {machines}; the launcher rounds down"
        below = max(processes // machines, 1) * machines
        report.error("num_processes", rule, f"write {below} or {(processes // machines + 1) * machines}")
    rank = report.integer("machine_rank")
    if machines > 1 and rank is not None and rank >= machines:
        report.error("machine_rank", f"must be less than num_machines = {machines}", "number the machines from 0")
    launcher = report.text("deepspeed_config.deepspeed_multinode_launcher")
    finds_address = kind == "DEEPSPEED" and launcher not in ("standard", "nossh")
    if machines > 1 and not report.value("main_process_ip") and not finds_address:
        rule = "is missing: with several machines, the rendezvous address would be None:29500"
        report.error("main_process_ip", rule, "write the address of machine 0")
    if kind == "MULTI_CPU" and not report.has("mpirun_config.mpirun_hostfile") and (processes or 0) > 1:
        rule = "starts one process: MULTI_CPU requires mpirun to start several"
        report.warning("distributed_type", rule, "add mpirun_config.mpirun_hostfile, or start with torchrun")


def _check_deepspeed(report: Report, schema: Schema) -> None:
    base = "deepspeed_config"
    section = report.node(base)
    if section is None or (section.kind == "mapping" and not section.entries):
        rule = "DEEPSPEED without deepspeed_config runs stage 2 with every default"
        report.error(base, rule, "add deepspeed_config with a deepspeed_config_file")
        return
    for entry in section.entries:
        known = entry.key in schema["root"]["keys"][base]["keys"]
        if known and entry.key not in schema["exported_for_deepspeed"]:
            fix = "write nvme_path in a DeepSpeed JSON, and set deepspeed_config_file to it"
            report.error(f"{base}.{entry.key}", "is never passed to the processes", fix, line=entry.line)
    if report.has(f"{base}.deepspeed_config_file"):
        rule = "must not be set together with deepspeed_config_file: Accelerate raises a ValueError"
        for key in BESIDE_CONFIG_FILE:
            if report.has(f"{base}.{key}"):
                report.error(f"{base}.{key}", rule, "remove it here, and write it in the DeepSpeed JSON")
        if report.value("mixed_precision") is not None:
            report.error("mixed_precision", rule, "remove it here, and enable bf16 or fp16 in the DeepSpeed JSON")
        return
    stage = report.integer(f"{base}.zero_stage")
    if not report.has(f"{base}.zero_stage"):
        report.warning(base, "without zero_stage, Accelerate uses stage 2", "add zero_stage")
        stage = 2
    for target in ("optimizer", "param"):
        path = f"{base}.offload_{target}_device"
        device = report.text(path)
        if device == "nvme":
            rule = "is not supported here: Accelerate does not pass the NVMe path, and DeepSpeed uses the path 'none'"
            report.error(path, rule, "write the offload in a DeepSpeed JSON, and set deepspeed_config_file to it")
        elif device == "cpu" and target == "param" and stage != 3:
            report.error(path, f"has no effect at stage {stage}: only stage 3 offloads parameters", "write none")
        elif device == "cpu" and stage == 0:
            report.error(path, "stage 0 has no optimizer shard to offload", "use stage 1, 2 or 3")
    for key in ("zero3_init_flag", "zero3_save_16bit_model"):
        path = f"{base}.{key}"
        if str(report.value(path)).lower() == "true" and stage is not None and stage != 3:
            report.warning(path, f"has no effect at stage {stage}", "remove the key")
