"""Reads every configuration key that the installed libraries accept, for the data files of the checker.

Seen with deepspeed 0.19.8 and transformers 5.17.0: DeepSpeed validates some sections with pydantic and reads
the others as plain dictionaries, where a misspelt key is ignored. Sections without a schema upstream are
described here from the constants and readers that use them.

`python tools/config_keys.py --write` refreshes the shipped files.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import inspect
import json
import math
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from key_nodes import Node, booleans, from_dataclass, from_pydantic, from_values, leaf, section

DATA_DIRECTORY = Path(__file__).resolve().parent.parent / "ds_configs" / "data"

_TORCH_DTYPE_NAMES = [
    "fp16",
    "float16",
    "half",
    "fp32",
    "float32",
    "float",
    "bf16",
    "bfloat16",
    "torch.float16",
    "torch.float32",
    "torch.bfloat16",
]
_REMOVED_OPTIMIZERS = ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"]


def _parameters(*callables: Callable[..., Any]) -> list[str]:
    names = {name for item in callables for name in inspect.signature(item).parameters}
    return sorted(names - {"self", "params", "model_params", "optimizer", "last_batch_iteration"})


def _optimizers() -> Node:
    """Keyword arguments of each optimizer that a `type` can name (deepspeed/runtime/engine.py)."""
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.engine import DeepSpeedEngine

    optim = torch.optim
    adam = [*_parameters(FusedAdam, DeepSpeedCPUAdam, optim.AdamW), "torch_adam", "fp32_optimizer_states"]
    muon = {"muon_lr", "adam_lr", "adam_w_mode", "torch_adam", "fp32_optimizer_states"}
    muon |= {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS}
    named = {
        "adam": sorted({*adam, "adam_w_mode"}),
        "adamw": sorted({*adam, "adam_w_mode"}),
        "adagrad": _parameters(DeepSpeedCPUAdagrad, optim.Adagrad),
        "lamb": _parameters(FusedLamb),
        "lion": _parameters(FusedLion, DeepSpeedCPULion),
        "muon": sorted(muon),
    }
    native = {name: _parameters(item) for name, item in vars(optim).items() if _is_optimizer(item, optim.Optimizer)}
    return {
        "deepspeed": {name: named.get(name) for name in sorted(DEEPSPEED_OPTIMIZERS)},
        "torch": dict(sorted(native.items())),
        "removed": _REMOVED_OPTIMIZERS,
    }


def _is_optimizer(item: object, base: type) -> bool:
    return isinstance(item, type) and issubclass(item, base) and item is not base


def _filled_by_transformers() -> list[str]:
    """Key paths whose `auto` the Trainer replaces: first arguments of `fill_match` and `fill_only`."""
    from transformers.integrations import deepspeed as integration

    tree = ast.parse(textwrap.dedent(inspect.getsource(integration.HfTrainerDeepSpeedConfig)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return sorted(
        str(call.args[0].value)
        for call in calls
        if typing.cast(ast.Attribute, call.func).attr in ("fill_match", "fill_only")
        and call.args
        and isinstance(call.args[0], ast.Constant)
    )


def _plain_sections() -> dict[str, Node]:
    """Sections that DeepSpeed reads with `dict.get`, so that it never reports an unknown key in them."""
    from deepspeed.autotuning import constants as tuning
    from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig
    from deepspeed.profiling import constants as profiling
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.config import get_pipeline_config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    def constants(module: Any, prefix: str, excluded: Iterable[str] = ()) -> dict[str, Any]:
        names = [name for name in vars(module) if name.startswith(prefix) and f"{name}_DEFAULT" in vars(module)]
        found = {getattr(module, name): getattr(module, f"{name}_DEFAULT") for name in names}
        return {key: value for key, value in found.items() if key not in excluded}

    strict_integers = {key: leaf("count") for key in ("block_size", "queue_depth", "intra_op_parallelism")}
    pipeline = {
        **from_values(get_pipeline_config({})),
        **booleans("use_reentrant"),
        "stages": leaf("any", auto=True),
    }
    model_info = section(from_values(tuning.MODEL_INFO_KEY_DEFAULT_DICT), strict=False)
    checkpointing = {**from_values(ACT_CHKPT_DEFAULT), "number_checkpoints": leaf("integer", "null", above=0)}
    plain = {
        "activation_checkpointing": checkpointing,
        "aio": {**from_values(AIO_DEFAULT_DICT), **strict_integers},
        "autotuning": {**from_values(constants(tuning, "AUTOTUNING_")), "model_info": model_info},
        "expert_parallel": from_dataclass(AutoEPConfig) | {"load_balance_coeff": leaf("null")},
        "flops_profiler": from_values(constants(profiling, "FLOPS_PROFILER_")),
        "pipeline": pipeline,
    }
    return {name: section(keys, strict=False) for name, keys in plain.items()}


def _data_efficiency() -> dict[str, Node]:
    """Keys of deepspeed/runtime/data_pipeline; metrics and layer schedules hold names of the user's own."""
    curriculum = {
        "enabled": leaf("boolean"),
        "data_cluster_path": leaf("string"),
        "curriculum_metrics": leaf("object"),
    }
    batching = dict.fromkeys(("metrics_path", "lr_scaling_method", "sequence_picking_order"), leaf("string"))
    batching |= dict.fromkeys(("min_batch_size", "max_batch_size", "max_tokens"), leaf("integer", above=0))
    sampling = {
        **booleans("enabled", "pin_memory"),
        **dict.fromkeys(("num_epochs", "num_workers"), leaf("integer", min=0)),
        "curriculum_learning": section(curriculum, strict=False),
        "dynamic_batching": section({**batching, **booleans("enabled", "verbose")}, strict=False),
    }
    routing = {"enabled": leaf("boolean"), "random_ltd": leaf("object")}
    return {
        "enabled": leaf("boolean"),
        "seed": leaf("integer"),
        "data_sampling": section(sampling, strict=False),
        "data_routing": section(routing, strict=False),
    }


def _documented_sections() -> dict[str, Node]:
    """Plain sections read all over DeepSpeed: runtime/config.py, model_checkpointing, data_pipeline."""
    from deepspeed.runtime.model_checkpointing import constants as saving

    writer = {
        "type": leaf("string", choices=saving.CHECKPOINT_WRITER_TYPES, ignore_case=True),
        "data_parallel": leaf("string", "null", choices=saving.CHECKPOINT_DATA_PARALLEL_UNITS, ignore_case=True),
        "io_buffer_size": leaf("integer", above=0),
        "io_multiplier": leaf("integer", above=0),
        **booleans("decoupled", "io_buffer_double", "show_statistics"),
    }
    checkpoint = {
        "tag_validation": leaf("string", choices=saving.CHECKPOINT_TAG_VALIDATION_MODES, ignore_case=True),
        **booleans("load_universal", "use_node_local_storage", "checkpoint_serialization"),
        "parallel_write": section(booleans("pipeline_stage"), strict=False),
        "writer": section(writer, strict=False),
    }
    dtype = leaf("string", "null", choices=_TORCH_DTYPE_NAMES)
    data_types: dict[str, Node] = dict.fromkeys(("grad_accum_dtype", "param_dtype", "buffer_dtype"), dtype)
    data_types["keep_in_fp32_modules"] = leaf("list", auto=True)
    autocast = {
        "enabled": leaf("boolean"),
        "dtype": leaf("string", choices=_TORCH_DTYPE_NAMES),
        "lower_precision_safe_modules": leaf("list"),
    }
    free = leaf("any")
    optimizer = {"type": leaf("string"), "params": leaf("object"), "legacy_fusion": leaf("boolean")}
    return {
        "checkpoint": section(checkpoint, strict=False),
        "data_efficiency": section(_data_efficiency(), strict=False),
        "data_types": section(data_types, strict=False),
        "datastates_ckpt": free,
        "optimizer": section(optimizer, strict=False),
        "scheduler": section({"type": leaf("string"), "params": leaf("object")}, strict=False),
        "torch_autocast": section(autocast, strict=False),
    }


def _deepspeed_scalars() -> dict[str, Node]:
    """Top-level values of deepspeed/runtime/config.py; unknown ones beside them are ignored upstream."""
    batch = leaf("count", above=0)
    comm_dtype = leaf("string", "null", choices=["fp16", "bf16", "fp32"], ignore_case=True)
    flags = booleans(
        "managed_gradient_accumulation",
        "prescale_gradients",
        "disable_allgather",
        "dump_state",
        "disable_python_gc",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dataloader_drop_last",
        "use_data_before_expert_parallelism",
    )
    return {
        **flags,
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), batch),
        "steps_per_print": leaf("number", "null", above=0),
        "gradient_clipping": leaf("number", min=0),
        "gradient_predivide_factor": leaf("number", above=0),
        "gradient_allreduce_op": leaf("string", choices=["mean", "sum"], ignore_case=True),
        "communication_data_type": comm_dtype,
        "seq_parallel_communication_data_type": comm_dtype,
        "sequence_parallel_size": leaf("count", above=0),
        "data_parallel_size": leaf("count", above=0),
        "vocabulary_size": leaf("integer", "null", above=0),
        "log_level": leaf("string", "null"),
    }


def deepspeed_keys() -> Node:
    """Every key of a DeepSpeed configuration, from the installed library."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime import config, lr_schedules
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "fp16": DeepSpeedFP16Config,
        "hybrid_engine": config.HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "weight_quantization": WeightQuantConfig,
        "zero_optimization": DeepSpeedZeroConfig,
    }
    monitors = from_pydantic(DeepSpeedMonitorConfig)["keys"]
    top = {name: from_pydantic(model) for name, model in models.items()}
    top |= {name: node for name, node in monitors.items() if "keys" in node}
    top["timers"] = section({"throughput": from_pydantic(DeepSpeedThroughputTimerConfig)}, strict=False)
    top["bfloat16"]["deprecated"] = "bf16"
    top |= _deepspeed_scalars() | _plain_sections() | _documented_sections()
    schedulers = {name: _parameters(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES}
    return {
        "versions": _versions("deepspeed", "transformers", "torch"),
        "root": section(top, strict=False),
        "removed": {
            "": sorted(config._REMOVED_TOP_LEVEL_CONFIG_KEYS),
            "zero_optimization": sorted(config._REMOVED_ZERO_CONFIG_KEYS),
        },
        "optimizers": _optimizers(),
        "schedulers": schedulers,
        "filled_by_transformers": _filled_by_transformers(),
    }


def _versions(*names: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name).split("+")[0] for name in names}


def main(arguments: list[str] | None = None) -> int:
    """Print or write the key files."""
    from accelerate_keys import accelerate_keys
    from trl_keys import trl_keys

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true", help="replace the shipped files")
    options = parser.parse_args(arguments)
    for name, read in (("deepspeed", deepspeed_keys), ("accelerate", accelerate_keys), ("trl", trl_keys)):
        text = as_json(read())
        if options.write:
            (DATA_DIRECTORY / f"{name}_keys.json").write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)
    return 0


def as_json(keys: Node) -> str:
    """The text of a key file; `inf` and Enum members never reach it."""
    assert not any(isinstance(value, float) and not math.isfinite(value) for value in keys.values())
    return json.dumps(keys, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.exit(main())
