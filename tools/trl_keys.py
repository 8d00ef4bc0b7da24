"""Reads the keys of the files that `trl TASK --config FILE` and `TrlParser` accept.

Seen with trl 1.16.0: a file has the fields of four dataclasses (script, trainer, model and mixture of datasets) and
`env`. Other keys of a file become arguments of `accelerate launch` (cli/commands/training.py).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.resources
from typing import Any

import yaml
from key_nodes import Node, from_dataclass, leaf, section

_TASKS = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "ORPOConfig": "orpo",
    "CPOConfig": "cpo",
    "RewardConfig": "reward",
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "GKDConfig": "gkd",
    "DistillationConfig": "distillation",
}
_DPO_LOSSES = (
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop sft"
    " sigmoid_norm"
)
_NEWER: dict[str, Node] = {
    "activation_checkpointing": leaf("boolean", "null"),
    "activation_checkpointing_kwargs": leaf("null", "object", "string"),
}
"""Keys of `TrainingArguments` that transformers 5.17 lacks and 5.24 has."""
_POSITIVE = (
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps num_generations_eval"
    " steps_per_generation generation_batch_size max_completion_length max_length max_new_tokens num_iterations"
    " vllm_tensor_parallel_size vllm_max_model_length temperature lora_r ref_model_sync_steps torch_empty_cache_steps"
    " precompute_ref_batch_size"
)
_FRACTIONS = "min_p ld_alpha lmbda lora_dropout ref_model_mixup_alpha"
_NOT_NEGATIVE = (
    "beta learning_rate warmup_steps epsilon top_k label_smoothing label_smoothing_factor dataloader_num_workers"
    " weight_decay"
)
_RANGES: dict[str, Node] = {
    **{key: {"above": 0} for key in _POSITIVE.split()},
    **{key: {"min": 0, "max": 1} for key in _FRACTIONS.split()},
    **{key: {"min": 0} for key in _NOT_NEGATIVE.split()},
    **{key: {"min": 0, "max": 65535} for key in ("vllm_server_port", "vllm_group_port")},
    **{key: {"above": 0, "max": 1} for key in ("vllm_gpu_memory_utilization", "top_p")},
}
_CHOICES = {
    # generation/vllm_generation.py:380 passes the implementation to vLLM.
    "vllm_mode": ["server", "colocate"],
    "vllm_model_impl": ["auto", "vllm", "transformers", "terratorch"],
    # trainer/grpo_trainer.py:3084, :2761 and :2690; trainer/dpo_trainer.py:1340.
    "importance_sampling_level": ["token", "sequence"],
    "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
    "vllm_importance_sampling_mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "f_divergence_type": ["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"],
}


def _keys(config: Any) -> dict[str, Node]:
    """Nodes with the choices and defaults of the fields of a configuration class."""
    nodes = from_dataclass(config)
    for field in dataclasses.fields(config):
        node = nodes[field.name]
        # argparse keeps 8.0, which is not an integer for `range`.
        node["types"] = ["count" if kind == "integer" else kind for kind in node["types"]]
        if choices := field.metadata.get("choices"):
            node["choices"] = list(choices)
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        default = getattr(default, "value", default)
        if isinstance(default, bool | int | float | str) or (isinstance(default, list) and default):
            node["default"] = default
        node |= _RANGES.get(field.name, {})
        if field.name in _CHOICES:
            node["choices"] = _CHOICES[field.name]
    return nodes


def _refined(name: str, nodes: dict[str, Node]) -> None:
    """Correct what annotations do not say."""
    if name == "DPOConfig":
        losses = _DPO_LOSSES.split()
        nodes["loss_type"] |= {"types": ["list", "string"], "choices": losses, "items": leaf("string", choices=losses)}
    if name == "GRPOConfig":
        nodes["loss_type"]["choices"] = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
        nodes["scale_rewards"]["types"] = ["boolean", "string"]
    if "packing_strategy" in nodes:
        nodes["packing_strategy"]["choices"].append("bfd-requeue")
    if "num_generations" in nodes:
        nodes["num_generations"]["types"] = ["count"]
    if "reward_clip_range" in nodes:
        nodes["reward_clip_range"] |= {"items": leaf("number")}
    if name in ("GKDConfig", "DistillationConfig"):
        nodes["beta"] |= {"min": 0, "max": 1}


def trl_keys() -> Node:
    """Every key of a configuration file of TRL, from the installed library."""
    import trl
    from accelerate.commands.launch import launch_command_parser
    from transformers import TrainingArguments
    from trl.experimental import cpo, gkd, orpo
    from trl.scripts.grpo import GRPOScriptArguments
    from trl.scripts.utils import DatasetConfig

    configs = {name: next(getattr(m, name) for m in (trl, cpo, gkd, orpo) if hasattr(m, name)) for name in _TASKS}
    script: dict[str, Node] = {"env": leaf("object")}
    for part in (trl.ScriptArguments, trl.ModelConfig, trl.DatasetMixtureConfig):
        script |= _keys(part)
    script["datasets"] = leaf("list")
    # `LoraConfig` takes a pattern, or the word all-linear.
    script["lora_target_modules"]["types"].append("string")
    nodes = dict(script)
    rewards = {key: node for key, node in _keys(GRPOScriptArguments).items() if key not in script}
    common = {field.name for field in dataclasses.fields(TrainingArguments) if not field.name.startswith("_")}
    classes: dict[str, Node] = {}
    for name, config in configs.items():
        own = _NEWER | _keys(config)
        own["parallelism_config"] = leaf("unsettable")
        own["trackio_static_space_id"] = leaf("any")
        _refined(name, own)
        own |= rewards if name in ("GRPOConfig", "RLOOConfig") else {}
        for key, node in own.items():
            nodes.setdefault(key, node)
        classes[name] = {
            "task": _TASKS[name],
            "keys": sorted(key for key in own if key not in common and key not in _NEWER),
            "differing": {key: node for key, node in sorted(own.items()) if nodes[key] != node},
        }
    actions = launch_command_parser()._actions
    presets = importlib.resources.files("trl.accelerate_configs")
    return {
        "versions": {"trl": importlib.metadata.version("trl")},
        "keys": dict(sorted(nodes.items())),
        "common": sorted(common | set(_NEWER) | set(script)),
        "classes": classes,
        "dataset": section(_keys(DatasetConfig), strict=False),
        "launcher": {
            "values": sorted(action.dest for action in actions if action.option_strings and action.nargs != 0),
            "flags": sorted(action.dest for action in actions if action.option_strings and action.nargs == 0),
        },
        "accelerate_configs": {
            file.name.removesuffix(".yaml"): yaml.safe_load(file.read_text())
            for file in sorted(presets.iterdir(), key=lambda file: file.name)
            if file.name.endswith(".yaml")
        },
    }
