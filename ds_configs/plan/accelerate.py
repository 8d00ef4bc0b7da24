"""The Accelerate YAML of a strategy, as `accelerate launch --config_file` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from .deepspeed import deepspeed_config
from .plan import Plan


def accelerate_config(plan: Plan) -> dict[str, Any]:
    """Return the Accelerate configuration of a plan.

    The DeepSpeed configuration stands in it as text, which accelerate 1.15.0 takes in the place of a path
    (utils/deepspeed.py, `HfDeepSpeedConfig`): a path is taken from the working directory of the launch, and names
    nothing once the directory has moved. `num_processes` counts the processes of all machines. With a DeepSpeed file
    neither `mixed_precision` nor any value of that file may stand beside it (accelerate/utils/dataclasses.py:1507).
    """
    strategy, hardware = plan.chosen.strategy, plan.hardware
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(plan),
        "num_machines": hardware.nodes,
        "num_processes": hardware.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "debug": False,
    }
    if hardware.nodes > 1:
        config["main_process_ip"] = "main-process-host"
        config["main_process_port"] = 29500
    if strategy.engine == "deepspeed":
        config["deepspeed_config"] = {
            "deepspeed_config_file": json.dumps(deepspeed_config(plan), indent=2) + "\n",
            "zero3_init_flag": strategy.zero_stage == 3,
        }
        if hardware.nodes > 1:
            config["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
        if strategy.sp > 1:
            config["parallelism_config"] = _sequence_section(plan)
        return config
    config["mixed_precision"] = "no" if plan.job.precision == "fp32" else plan.job.precision
    if strategy.engine == "fsdp2":
        config["fsdp_config"] = _fsdp_section(plan)
        if strategy.dp_replicate > 1 or strategy.cp > 1:
            config["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": strategy.dp_replicate,
                "parallelism_config_dp_shard_size": strategy.dp_shard,
            }
        if strategy.cp > 1:
            config["parallelism_config"] |= {
                "parallelism_config_cp_size": strategy.cp,
                "parallelism_config_cp_comm_strategy": "allgather",
            }
    return config


def accelerate_text(config: Mapping[str, Any]) -> str:
    """Return the YAML of a configuration, with texts of several lines as they read."""
    return yaml.dump(dict(config), Dumper=_ReadableDumper, sort_keys=False)


class _ReadableDumper(yaml.SafeDumper):
    """Dumper that indents a text of several lines below its key instead of quoting it."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_ReadableDumper.add_representer(str, _ReadableDumper.represent_str)


def _sequence_section(plan: Plan) -> dict[str, Any]:
    """Sequence parallelism over DeepSpeed.

    `dp_shard_size` counts the groups that share a sequence, from which Accelerate computes the batch; the attention
    stands for the one that the model is loaded with, which the callback puts in its place.
    """
    strategy = plan.chosen.strategy
    return {
        "parallelism_config_dp_shard_size": plan.hardware.world_size // strategy.sp,
        "parallelism_config_sp_size": strategy.sp,
        "parallelism_config_sp_backend": "deepspeed",
        "parallelism_config_sp_seq_length_is_variable": True,
        "parallelism_config_sp_attn_implementation": plan.model.attention or "sdpa",
    }


def _distributed_type(plan: Plan) -> str:
    """Type by engine, MULTI_GPU also for CPU ranks: accelerate 1.15.0 starts one plain process for MULTI_CPU."""
    engine = plan.chosen.strategy.engine
    if engine == "ddp" and plan.hardware.gpu.startswith("Gaudi"):
        return "MULTI_HPU"
    return {"single": "NO", "ddp": "MULTI_GPU", "deepspeed": "DEEPSPEED", "fsdp2": "FSDP"}[engine]


def _fsdp_section(plan: Plan) -> dict[str, Any]:
    """FSDP2 keys; checkpointing stays with the Trainer, which refuses both switches at once (trainer.py:847)."""
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(plan.model.layer_classes),
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": plan.chosen.strategy.offload_param == "cpu",
        # Accelerate 1.15.0 leaves it out for 4-bit weights, which every rank reads itself (utils/fsdp_utils.py:830).
        "fsdp_cpu_ram_efficient_loading": plan.job.method != "qlora",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_activation_checkpointing": False,
    }
