"""One row for each rule on Accelerate launch configurations."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from checking import DEEPSPEED_YAML, FSDP2, E, W, found
from shardwright.ds_configs.check.files import check_text


def launch(text: str = "", **changes: Any) -> str:
    """Return a good FSDP2 file with top-level values replaced, or removed by `...`."""
    config = yaml.safe_load(text or FSDP2)
    config |= changes
    return yaml.safe_dump({key: value for key, value in config.items() if value is not ...})


def fsdp(**keys: Any) -> str:
    base = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    return launch(fsdp_config=base | keys, parallelism_config=...)


def engine(**keys: Any) -> str:
    return launch(DEEPSPEED_YAML, deepspeed_config=keys)


def parallel(kind: str = "FSDP", **sizes: Any) -> str:
    named = {f"parallelism_config_{name}": value for name, value in sizes.items()}
    changes: dict[str, Any] = {"distributed_type": kind, "parallelism_config": named}
    if kind == "DEEPSPEED":
        changes |= {"fsdp_config": ..., "deepspeed_config": {"zero_stage": 2}}
    elif kind != "FSDP":
        changes["fsdp_config"] = ...
    return launch(**changes)


PARALLEL = "parallelism_config.parallelism_config_"
ACCELERATE_ROWS: list[tuple[str, str, str, str]] = [
    (launch(mixed_precison="bf16"), E, "mixed_precison", "did you mean 'mixed_precision'"),
    (launch(max_restarts=3), E, "max_restarts", "pass --max_restarts"),
    (launch(fsdp_version=2), E, "fsdp_version", "move it into fsdp_config"),
    (fsdp(fsdp_limit_all_gathers=True), E, "fsdp_config.fsdp_limit_all_gathers", "ignores it silently"),
    (launch(parallelism_config={"tp_size": 2}), E, "parallelism_config.tp_size", "prefix is required"),
    (launch(parallelism_config={"parallelism_config_ep_size": 2}), E, f"{PARALLEL}ep_size", "silently"),
    (launch(mixed_precision="fp8", fp8_config={"backend": "TE", "amax_history_length": 16}),
     E, "fp8_config.amax_history_length", "write amax_history_len"),
    (launch(mpirun_config={"hostfile": "h"}), E, "mpirun_config.hostfile", "'mpirun_hostfile'"),
    (launch(fp8_config={"backend": "TE"}), W, "fp8_config", "unless mixed_precision is fp8"),
    (FSDP2.replace("mixed_precision: bf16", "mixed_precision: no"), E, "mixed_precision", "quote the word"),
    (launch(mixed_precision="fp15"), E, "mixed_precision", "did you mean 'fp16'"),
    (launch(distributed_type="TP"), E, "distributed_type", "must be one of NO"),
    (launch(distributed_type=...), E, "distributed_type", "is missing"),
    (launch(num_processes=...), E, "num_processes", "is missing"),
    (launch(num_processes="8"), E, "num_processes", "write 8 without quotes"),
    (launch(num_processes=0), E, "num_processes", "greater than 0"),
    (launch(num_machines=3, main_process_ip="10.0.0.1"), E, "num_processes", "write 6 or 9"),
    (launch(num_machines=2), E, "main_process_ip", "None:29500"),
    (launch(num_machines=2, machine_rank=2, main_process_ip="10.0.0.1"), E, "machine_rank", "less than"),
    (launch(rdzv_backend="c10d"), W, "rdzv_backend", "pass --rdzv_backend"),
    (launch(num_machines=2, main_process_ip="10.0.0.1"), W, "same_network", "command-line default overrides"),
    (launch(enable_cpu_affinity=True), W, "enable_cpu_affinity", "not pinned"),
    (launch(distributed_type="MULTI_CPU", parallelism_config=..., fsdp_config=...), W, "distributed_type", "mpirun"),
    (launch(distributed_type="MULTI_GPU"), W, "fsdp_config", "no effect with distributed_type MULTI_GPU"),
    (engine(), E, "deepspeed_config", "stage 2 with every default"),
    (engine(offload_optimizer_device="nvme", zero_stage=3, offload_optimizer_nvme_path="/n"),
     E, "deepspeed_config.offload_optimizer_nvme_path", "never passed"),
    (engine(offload_optimizer_device="nvme", zero_stage=3), E, "deepspeed_config.offload_optimizer_device", "'none'"),
    (engine(offload_param_device="cpu", zero_stage=2), E, "deepspeed_config.offload_param_device", "only stage 3"),
    (engine(offload_param_device="gpu", zero_stage=3), E, "deepspeed_config.offload_param_device", "one of none"),
    (engine(deepspeed_config_file="x.json", zero_stage=3), E, "deepspeed_config.zero_stage", "ValueError"),
    (launch(DEEPSPEED_YAML, mixed_precision="bf16"), E, "mixed_precision", "ValueError"),
    (engine(zero_stage=2, zero3_init_flag=True), W, "deepspeed_config.zero3_init_flag", "no effect at stage 2"),
    (engine(zero_stage=2, deepspeed_multinode_launcher="wat"),
     E, "deepspeed_config.deepspeed_multinode_launcher", "one of pdsh"),
    (launch(DEEPSPEED_YAML, dynamo_config={"dynamo_backend": "INDUCTOR"}), W, "dynamo_config", "stays off"),
    (launch(DEEPSPEED_YAML, use_cpu=True), W, "use_cpu", "not passed"),
    (launch(fsdp_config=...), E, "fsdp_config", "as one unit"),
    (fsdp(fsdp_sharding_strategy="FULL_SHARD"), E, "fsdp_config.fsdp_sharding_strategy", "reshard_after_forward"),
    (fsdp(backward_prefetch="BACKWARD_PRE"), E, "fsdp_config.backward_prefetch", "FSDP1"),
    (fsdp(fsdp_reshard_after_forward="SHARD_GRAD_OP"), E, "fsdp_config.fsdp_reshard_after_forward", "write false"),
    (fsdp(fsdp_state_dict_type="LOCAL_STATE_DICT"), E, "fsdp_config.fsdp_state_dict_type", "local state dicts"),
    (fsdp(fsdp_version=1, fsdp_reshard_after_forward="SHARD_GRAD_OP"),
     E, "fsdp_config.fsdp_reshard_after_forward", "write fsdp_sharding_strategy: SHARD_GRAD_OP"),
    (fsdp(fsdp_version=1, fsdp_sync_module_states=False), E, "fsdp_config.fsdp_sync_module_states", "launch fails"),
    (fsdp(fsdp_auto_wrap_policy="NO_WRAP"), W, "fsdp_config.fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    (fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=0),
     E, "fsdp_config.fsdp_min_num_params", "silently disables"),
    (fsdp(fsdp_activation_checkpointing_offload=True),
     E, "fsdp_config.fsdp_activation_checkpointing_offload", "fsdp_activation_checkpointing: true"),
    (launch(fsdp_config={"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, parallelism_config=...),
     W, "fsdp_config.fsdp_version", "uses version 1"),
    (parallel(cp_size=2, sp_size=2), E, f"{PARALLEL}sp_size", "cannot be combined"),
    (parallel(dp_shard_size=2, tp_size=2), E, "parallelism_config", "multiply to 4"),
    (parallel(tp_size=2, dp_replicate_size=4), E, f"{PARALLEL}dp_replicate_size", "require sharded"),
    (parallel("MULTI_CPU", dp_shard_size=8), E, "parallelism_config", "MULTI_CPU"),
    (parallel(tp_size=8), E, "parallelism_config", "dimensions that it shards"),
    (parallel("DEEPSPEED", sp_size=2, sp_backend="ring", dp_shard_size=4), E, f"{PARALLEL}sp_backend", "deepspeed"),
    (parallel("DEEPSPEED", sp_size=2), E, f"{PARALLEL}sp_size", "write dp_shard_size 4"),
    (parallel("DEEPSPEED", sp_size=3), E, f"{PARALLEL}sp_size", "must divide"),
    (parallel("DEEPSPEED", sp_size=2, dp_shard_size=4, sp_attn_implementation="eager"),
     E, f"{PARALLEL}sp_attn_implementation", "write sdpa"),
    (parallel(sp_size=2, dp_shard_size=4), E, f"{PARALLEL}sp_size", "requires DeepSpeed"),
    (parallel("DEEPSPEED", cp_size=2, dp_shard_size=4), E, f"{PARALLEL}cp_size", "requires FSDP2"),
    (parallel(dp_shard_size="8"), E, f"{PARALLEL}dp_shard_size", "write 8 without quotes"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind", "path", "fragment"), ACCELERATE_ROWS, ids=range(len(ACCELERATE_ROWS)))
def test_each_accelerate_rule(text: str, kind: str, path: str, fragment: str) -> None:
    findings = check_text(text, filename="accelerate.yaml")
    assert found(findings, kind, path, fragment), [str(finding.error) for finding in findings]
