"""Reads what `accelerate launch --config_file` accepts, and what of it reaches the training process.

Seen with accelerate 1.15.0: unknown top-level keys raise, keys of the nested mappings are copied onto the
argument namespace unchecked (commands/launch.py, `_validate_launch_command`), and a top-level scalar is
applied only where the command-line default is `None`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import typing
from typing import Any

from key_nodes import Node, leaf, section

_NESTED_GROUPS = {
    "deepspeed_config": "DeepSpeed Arguments",
    "fsdp_config": "FSDP Arguments",
    "parallelism_config": "ParallelismConfig Arguments",
    "megatron_lm_config": "Megatron-LM Arguments",
    "fp8_config": "FP8 Arguments",
    "mpirun_config": "MPI Arguments",
}
# Read without an argument of their own (utils/launch.py, utils/dataclasses.py).
_WITHOUT_ARGUMENT = {
    # The launcher passes it on where it `is not None` (accelerate 1.15.0, utils/launch.py).
    "fsdp_config": {"fsdp_ignored_modules": leaf("string", "null")},
    "fp8_config": {"fp8_use_mxfp8_block_scaling": leaf("boolean")},
    "mpirun_config": {"bind-to": leaf("string")},
}
# The launcher merges the nested keys into the namespace before it adds these prefixes.
_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
_FLAGS = {"true", "false"}
# Handled by name in the launcher, so that the rule on command-line defaults does not apply.
_HANDLED = {"debug", "tpu_use_cluster"}
_LEGACY = {"fp16": leaf("boolean"), "dynamo_backend": leaf("string")}


def _node(action: argparse.Action) -> Node:
    default = action.default
    if (isinstance(default, str) and default in _FLAGS) or action.nargs == 0:
        return leaf("flag")
    kind = getattr(action.type, "__name__", "str")
    kinds = {"int": "integer", "float": "number", "bool": "boolean", "str_to_bool": "flag"}
    node = leaf(kinds.get(kind, "any" if "lambda" in kind else "text"))
    if action.choices:
        node["choices"] = [str(choice) for choice in action.choices]
    return node


def _arguments(parser: argparse.ArgumentParser, title: str) -> dict[str, Node]:
    groups = [group for group in parser._action_groups if group.title == title]
    assert len(groups) == 1, f"accelerate launch has no argument group {title!r}"
    return {action.dest: _node(action) for action in groups[0]._group_actions}


def _refined(nested: dict[str, dict[str, Node]]) -> None:
    """Add the value sets that Accelerate states outside its argument parser."""
    from accelerate.utils import constants

    devices = ["none", "cpu", "nvme"]
    deepspeed, fsdp = nested["deepspeed_config"], nested["fsdp_config"]
    deepspeed["zero_stage"] |= {"choices": [0, 1, 2, 3]}
    for name in ("offload_optimizer_device", "offload_param_device"):
        deepspeed[name] |= {"choices": devices}
    for name in ("zero3_init_flag", "zero3_save_16bit_model"):
        deepspeed[name] = leaf("flag")
    deepspeed["gradient_accumulation_steps"] |= {"types": ["count"], "above": 0, "auto": True}
    deepspeed["gradient_clipping"] |= {"min": 0, "auto": True}
    deepspeed["deepspeed_multinode_launcher"] |= {"choices": list(constants.DEEPSPEED_MULTINODE_LAUNCHERS)}
    fsdp["fsdp_version"] = leaf("integer", choices=[1, 2])
    policies = {
        "fsdp_sharding_strategy": constants.FSDP_SHARDING_STRATEGY,
        "fsdp_auto_wrap_policy": constants.FSDP_AUTO_WRAP_POLICY,
        "fsdp_backward_prefetch": constants.FSDP_BACKWARD_PREFETCH,
        "fsdp_state_dict_type": constants.FSDP_STATE_DICT_TYPE,
    }
    for name, choices in policies.items():
        fsdp[name] |= {"choices": list(choices), "ignore_case": True}
    fsdp["fsdp_reshard_after_forward"] = leaf("any")
    fsdp["fsdp_min_num_params"] |= {"min": 0}
    for node in nested["megatron_lm_config"].values():
        node["types"] = ["any" if kind == "text" else kind for kind in node["types"]]
    for name in ("fp8_backend", "fp8_format", "fp8_amax_compute_algo"):
        nested["fp8_config"][name]["ignore_case"] = True
    nested["parallelism_config"]["parallelism_config_sp_seq_length_is_variable"] = leaf("flag")
    for name, node in nested["parallelism_config"].items():
        if name.endswith("_size"):
            node |= {"types": ["count"], "above": 0}


def _scalars(config: Any, known: set[str]) -> dict[str, Node]:
    """Top-level keys by the type of their dataclass field, with the choices of enumerations."""
    from accelerate.utils import ComputeEnvironment, DistributedType
    from accelerate.utils.dataclasses import PrecisionType

    kinds: dict[Any, str] = {int: "count", bool: "boolean", str: "string"}
    nodes: dict[str, Node] = {}
    for name, hint in typing.get_type_hints(config).items():
        if name in known or name not in {field.name for field in dataclasses.fields(config)}:
            continue
        parts = [part for part in typing.get_args(hint) or (hint,) if part is not type(None)]
        kind = "list" if typing.get_origin(hint) is list else kinds.get(parts[0], "string")
        nodes[name] = (
            leaf(kind, "null") if name in config.__dataclass_fields__ and _optional(config, name) else leaf(kind)
        )
    nodes["compute_environment"] = leaf("string", choices=[item.value for item in ComputeEnvironment])
    nodes["distributed_type"] = leaf("string", choices=[item.value for item in DistributedType])
    nodes["mixed_precision"] = leaf("string", "null", choices=PrecisionType.list(), ignore_case=True)
    nodes["gpu_ids"] = leaf("text", "null")
    nodes["downcast_bf16"] = leaf("boolean", "string")
    for name, lowest in (
        ("num_processes", {"above": 0}),
        ("num_machines", {"above": 0}),
        ("machine_rank", {"min": 0}),
    ):
        nodes[name] |= lowest
    nodes["main_process_port"] |= {"min": 0, "max": 65535}
    return nodes


def _optional(config: Any, name: str) -> bool:
    return config.__dataclass_fields__[name].default is None


def accelerate_keys() -> Node:
    """Every key of an Accelerate launch configuration, from the installed library."""
    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.constants import TORCH_DYNAMO_MODES
    from accelerate.utils.dataclasses import DynamoBackend

    parser = launch_command_parser()
    defaults = vars(parser.parse_args(["--module", "training_script"]))
    nested = {name: _arguments(parser, title) for name, title in _NESTED_GROUPS.items() if name != "mpirun_config"}
    nested["mpirun_config"] = {"mpirun_hostfile": leaf("string")}
    resources = _arguments(parser, "Resource Selection Arguments")
    nested["dynamo_config"] = {name: node for name, node in resources.items() if name.startswith("dynamo_")}
    nested["dynamo_config"]["dynamo_backend"] = leaf("string", choices=DynamoBackend.list(), ignore_case=True)
    nested["dynamo_config"]["dynamo_mode"] = leaf("string", choices=list(TORCH_DYNAMO_MODES))
    for name, extra in _WITHOUT_ARGUMENT.items():
        nested[name] |= extra
    _refined(nested)
    top: dict[str, Node] = {
        name: section(keys, strict=False, prefix=_PREFIXES.get(name, ""), nullable=True)
        for name, keys in nested.items()
    }
    top |= _scalars(ClusterConfig, set(nested)) | _LEGACY
    in_file = set(top) | {key for keys in nested.values() for key in keys}
    overridden = {
        name: defaults[name]
        for name in sorted(top)
        if name in defaults and defaults[name] is not None and name not in nested and name not in _HANDLED
    }
    return {
        "versions": {"accelerate": importlib.metadata.version("accelerate")},
        "root": section(top, strict=True),
        "sagemaker": sorted(field.name for field in dataclasses.fields(SageMakerConfig)),
        "command_line_only": sorted(set(defaults) - in_file - {"training_script", "training_script_args"}),
        "overridden_by_command_line_default": overridden,
        "exported_for_deepspeed": _exported_for_deepspeed(set(nested["deepspeed_config"])),
    }


def _exported_for_deepspeed(keys: set[str]) -> list[str]:
    """The keys of `deepspeed_config` that the DeepSpeed launcher reads; the others are parsed and dropped."""
    import inspect

    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    source = inspect.getsource(prepare_deepspeed_cmd_env)
    return sorted(key for key in keys if f"args.{key}" in source)
