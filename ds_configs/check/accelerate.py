"""Rules for an Accelerate launch YAML: what Accelerate 1.15.0 refuses, ignores or keeps from the processes.

Sources: accelerate/commands/launch.py, commands/config/config_args.py, utils/launch.py, utils/dataclasses.py.
"""

from __future__ import annotations

from .combinations import check_combinations, columns_of_accelerate, settings_of_accelerate
from .fsdp import check_fsdp
from .keys import KeyWalker, Schema, load_keys, nearest_key
from .parallelism import check_parallelism
from .report import Report
from .tree import Entry

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
"""Keys of `deepspeed_config` that Accelerate refuses beside `deepspeed_config_file`."""

_SECTION_OF = {
    "DEEPSPEED": "deepspeed_config",
    "FSDP": "fsdp_config",
    "MEGATRON_LM": "megatron_lm_config",
}
_FP8_NAMES = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}
_CONSEQUENCES = {
    "rdzv_backend": "the rendezvous stays static",
    "same_network": "the launcher uses an rdzv_endpoint instead of a master address",
    "enable_cpu_affinity": "the processes are not pinned",
    "downcast_bf16": "bf16 is not downcast",
    "tpu_use_sudo": "sudo is not used",
}
_OPTIONS = {"rdzv_backend": "--rdzv_backend", "same_network": "--same_network"}


def check_accelerate(report: Report, *, world_size: int | None) -> None:
    """Apply every rule for an Accelerate launch configuration."""
    schema = load_keys("accelerate")
    if report.text("compute_environment") == "AMAZON_SAGEMAKER":
        _check_sagemaker(report, schema)
        return
    _check_keys(report, schema)
    _check_precision(report)
    _check_processes(report, world_size)
    _check_sections(report)
    _check_overridden(report, schema)
    _check_deepspeed(report, schema)
    check_fsdp(report)
    check_parallelism(report, world_size=world_size)
    check_combinations(settings_of_accelerate(report), columns_of_accelerate(report))


def _check_sagemaker(report: Report, schema: Schema) -> None:
    for entry in report.root.entries:
        if entry.key not in schema["sagemaker"]:
            fix = nearest_key(entry.key, schema["sagemaker"])
            report.error(entry.key, "unknown key; Accelerate refuses the file", fix, line=entry.line)


def _check_keys(report: Report, schema: Schema) -> None:
    root = schema["root"]["keys"]

    def unknown(path: str, entry: Entry, parent: Schema) -> None:
        key, line = entry.key, entry.line
        if parent["strict"]:
            if key in schema["command_line_only"]:
                rule = "Accelerate refuses this key in a file; it exists only on the command line"
                report.error(path, rule, f"pass --{key} to accelerate launch", line=line)
                return
            owner = next((name for name, node in root.items() if key in node.get("keys", {})), "")
            fix = f"move it into {owner}" if owner else nearest_key(key, list(root))
            report.error(path, "unknown key; Accelerate refuses the file", fix, line=line)
            return
        section = path.split(".")[0]
        fix = _FP8_NAMES.get(key.removeprefix("fp8_"), "") if section == "fp8_config" else ""
        fix = f"write {fix}" if fix else _nearest_in(section, key, parent)
        report.error(path, "unknown key; Accelerate ignores it silently", fix, line=line)

    def auto(path: str, node: Schema) -> None:
        report.error(path, "Accelerate fills no 'auto' here", "write the value")

    KeyWalker(report, unknown=unknown, auto=auto).walk(report.root, schema["root"])


def _nearest_in(section: str, key: str, parent: Schema) -> str:
    known = list(parent["keys"])
    if section == "parallelism_config" and f"parallelism_config_{key}" in known:
        return f"write parallelism_config_{key}: the prefix is required"
    prefix = parent.get("prefix") or "parallelism_config_" * (section == "parallelism_config")
    return nearest_key(key if key.startswith(prefix) else prefix + key, known)


def _check_precision(report: Report) -> None:
    if report.value("mixed_precision") is False:
        return  # the key walker has named the missing quotes
    if report.text("mixed_precision") == "fp8" and not report.has("fp8_config"):
        rule = "fp8 without fp8_config takes the first installed backend"
        report.warning("mixed_precision", rule, "add fp8_config with a backend")
    if report.has("fp8_config") and report.text("mixed_precision") != "fp8":
        rule = "has no effect unless mixed_precision is fp8"
        report.warning("fp8_config", rule, "set mixed_precision: fp8, or remove the section")
    if report.has("fp16"):
        rule = "is a legacy key" + (", ignored beside mixed_precision" if report.has("mixed_precision") else "")
        report.warning("fp16", rule, "write mixed_precision: fp16")
    if report.has("dynamo_backend"):
        rule = "is a legacy key" + (", which replaces dynamo_config" if report.has("dynamo_config") else "")
        report.warning("dynamo_backend", rule, "write dynamo_config with dynamo_backend")


def _check_processes(report: Report, world_size: int | None) -> None:
    kind = report.text("distributed_type")
    if not report.has("distributed_type"):
        report.error("distributed_type", "is missing, and Accelerate refuses the file", "add it, for example FSDP")
    processes, machines = report.integer("num_processes"), report.integer("num_machines") or 1
    if not report.has("num_processes") and kind != "NO":
        rule = "is missing, and accelerate launch stops; it counts the processes of all machines"
        fix = f"write {world_size}" if world_size else "add it, or pass --num_processes"
        report.error("num_processes", rule, fix)
    if kind == "NO" and processes is not None and processes > 1:
        rule = "distributed_type NO starts a single process"
        report.warning("num_processes", rule, "choose MULTI_GPU, FSDP or DEEPSPEED")
    if processes is not None and world_size is not None and processes != world_size:
        report.error("num_processes", f"must equal the {world_size} processes asked for", f"write {world_size}")
    if processes is not None and machines > 1 and processes % machines:
        rule = f"must be a multiple of num_machines = {machines}; the launcher rounds down"
        below = max(processes // machines, 1) * machines
        report.error("num_processes", rule, f"write {below} or {(processes // machines + 1) * machines}")
    if machines > 1:
        _check_machines(report, machines)
    if kind == "MULTI_CPU" and not report.has("mpirun_config.mpirun_hostfile") and (processes or 0) > 1:
        rule = "starts one plain process: only mpirun makes several of MULTI_CPU"
        report.warning("distributed_type", rule, "add mpirun_config.mpirun_hostfile, or start with torchrun")


def _check_machines(report: Report, machines: int) -> None:
    rank = report.integer("machine_rank")
    if rank is not None and rank >= machines:
        report.error("machine_rank", f"must be less than num_machines = {machines}")
    launcher = report.text("deepspeed_config.deepspeed_multinode_launcher")
    if not report.value("main_process_ip"):
        if report.text("distributed_type") == "DEEPSPEED" and launcher not in ("standard", "nossh"):
            return
        rule = "is missing, and with several machines the rendezvous becomes None:29500"
        report.error("main_process_ip", rule, "write the address of machine 0")


def _check_sections(report: Report) -> None:
    kind = report.text("distributed_type")
    for owner, section in _SECTION_OF.items():
        node = report.node(section)
        if node is not None and node.entries and kind is not None and kind != owner:
            rule = f"has no effect with distributed_type {kind}"
            report.warning(section, rule, f"write distributed_type: {owner}, or remove the section")
    dynamo = report.node("dynamo_config")
    backend = report.value("dynamo_config.dynamo_backend") or report.value("dynamo_config.backend")
    if kind == "DEEPSPEED" and dynamo is not None and dynamo.entries and str(backend).upper() != "NO":
        rule = "is not handed to the processes with DEEPSPEED, so that torch.compile stays off"
        report.warning("dynamo_config", rule, "set torch_compile in TrainingArguments")
    if kind == "DEEPSPEED" and report.true("use_cpu"):
        report.warning("use_cpu", "is not handed to the processes with DEEPSPEED", "set use_cpu in TrainingArguments")


def _check_overridden(report: Report, schema: Schema) -> None:
    for key, default in schema["overridden_by_command_line_default"].items():
        node = report.node(key)
        if node is None or node.kind != "scalar" or node.scalar is None:
            continue
        value = node.scalar
        if value == default or str(value).lower() in ("no", "false", str(default).lower()):
            continue
        if key == "same_network" and (report.integer("num_machines") or 1) <= 1:
            continue
        rule = f"is ignored: the command-line default wins, and {_CONSEQUENCES.get(key, 'nothing changes')}"
        report.warning(key, rule, f"pass {_OPTIONS.get(key, '--' + key)} to accelerate launch")


def _check_deepspeed(report: Report, schema: Schema) -> None:
    if report.text("distributed_type") != "DEEPSPEED":
        return
    section = report.node("deepspeed_config")
    if section is None or (section.kind == "mapping" and not section.entries):
        rule = "DEEPSPEED without deepspeed_config runs stage 2 with every default"
        report.error("deepspeed_config", rule, "add deepspeed_config with a deepspeed_config_file")
        return
    base = "deepspeed_config"
    for entry in section.entries:
        path = f"{base}.{entry.key}"
        known = entry.key in schema["root"]["keys"][base]["keys"]
        if known and entry.key not in schema["exported_for_deepspeed"]:
            rule = "is parsed and never handed to the processes"
            fix = "write nvme_path in a DeepSpeed JSON and name it as deepspeed_config_file"
            report.error(path, rule, fix, line=entry.line)
    if report.has(f"{base}.deepspeed_config_file"):
        _check_beside_file(report)
    else:
        _check_inline(report)


def _check_beside_file(report: Report) -> None:
    rule = "must not stand beside deepspeed_config_file: Accelerate stops with a ValueError"
    for key in BESIDE_CONFIG_FILE:
        path = f"deepspeed_config.{key}"
        if report.has(path):
            report.error(path, rule, "remove it here and write it in the DeepSpeed JSON")
    if report.value("mixed_precision") is not None:
        report.error("mixed_precision", rule, "remove it here and enable bf16 or fp16 in the DeepSpeed JSON")


def _check_inline(report: Report) -> None:
    base = "deepspeed_config"
    stage = report.integer(f"{base}.zero_stage")
    if not report.has(f"{base}.zero_stage"):
        report.warning(base, "without zero_stage Accelerate takes stage 2", "add zero_stage")
        stage = 2
    for target in ("optimizer", "param"):
        path = f"{base}.offload_{target}_device"
        device = report.text(path)
        if device == "nvme":
            rule = "the NVMe path never reaches the processes, and DeepSpeed gets the directory 'none'"
            report.error(path, rule, "write the offload in a DeepSpeed JSON and name it as deepspeed_config_file")
        elif device == "cpu" and target == "param" and stage != 3:
            report.error(path, f"DeepSpeed ignores it at stage {stage}: only stage 3 offloads parameters", "write none")
        elif device == "cpu" and stage == 0:
            report.error(path, "stage 0 keeps no optimizer shard to offload", "use stage 1, 2 or 3")
    for key in ("zero3_init_flag", "zero3_save_16bit_model"):
        path = f"{base}.{key}"
        if str(report.value(path)).lower() == "true" and stage is not None and stage != 3:
            report.warning(path, f"has no effect at stage {stage}", "remove the key")
