"""The settings and columns of the table of combinations that a training run has, read from what it is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...ds_configs.legality.combinations import columns_of, incompatibility_faults
from ...ds_configs.specs.errors import Fault
from ...ds_configs.specs.strategy import Strategy
from .training_arguments import deepspeed_configuration

_DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout")


def run_faults(
    arguments: Any,
    model: Any,
    *,
    callbacks: Iterable[Any] = (),
    settings: Iterable[str] = (),
    pipeline: bool = False,
    stage_tensor_ranks: int = 1,
) -> list[Fault]:
    """Return a fault for each pair of the run's settings and its layout that is not proven.

    Args:
        arguments: `TrainingArguments`.
        model: What is trained, wrapped or not.
        callbacks: Those of the Trainer; ours say in `combined_settings` what they are in the table.
        settings: What the run has besides, by the table's names.
        pipeline: Whether stages of the model are trained.
        stage_tensor_ranks: Ranks that hold each stage together, which no argument of the Trainer says.
    """
    named = [name for callback in callbacks for name in getattr(callback, "combined_settings", ())]
    found = [*named, *settings, *stated_settings(arguments, model)]
    layout = layout_of(arguments, pipeline=pipeline, stage_tensor_ranks=stage_tensor_ranks)
    return incompatibility_faults(found, columns_of(layout))


def trainer_faults(trainer: Any) -> list[Fault]:
    """Return `run_faults` of a Trainer with everything that it was given."""
    extra = list(getattr(trainer, "combined_settings", ()))
    if balances_experts(trainer.model) and not getattr(trainer, "corrects_balance_loss", False):
        extra.append("balance_loss")
    data = trainer.train_dataset
    if data is not None and not hasattr(data, "__len__"):
        extra.append("streams")
    return run_faults(trainer.args, trainer.model, callbacks=trainer.callback_handler.callbacks, settings=extra)


def stated_settings(arguments: Any, model: Any) -> list[str]:
    """Return what arguments and a model say of themselves."""
    stated = {
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "label_smoothing": arguments.label_smoothing_factor,
        "compile": arguments.torch_compile,
        "bf16": arguments.bf16,
        "fp16": arguments.fp16,
        "split_batches": arguments.accelerator_config.split_batches,
        **_model_settings(model),
    }
    return [_optimizer(arguments), *(name for name, is_set in stated.items() if is_set)]


def _optimizer(arguments: Any) -> str:
    """Return what steps: DeepSpeed's section comes before the Trainer's name."""
    section = (deepspeed_configuration(arguments) or {}).get("optimizer")
    if section is None:
        return str(getattr(arguments.optim, "value", arguments.optim))
    name = str(section.get("type", ""))
    return {"adam": "adamw_torch", "adamw": "adamw_torch", "sgd": "sgd"}.get(name.lower(), name)


def balances_experts(model: Any) -> bool:
    """Return whether a mixture adds a load-balancing loss to its own."""
    config = getattr(model, "config", None)
    strength = getattr(model, "router_aux_loss_coef", None)
    return bool(getattr(config, "output_router_logits", False) and strength)


def _model_settings(model: Any) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    adapted = hasattr(model, "peft_config")
    trains = [parameter.requires_grad for parameter in model.parameters()] if hasattr(model, "parameters") else []
    return {
        "lora": adapted,
        "frozen": not adapted and not all(trains),
        "dropout": any(isinstance(rate := getattr(text, name, 0), float) and rate > 0 for name in _DROPOUTS),
    }


def layout_of(arguments: Any, *, pipeline: bool = False, stage_tensor_ranks: int = 1) -> Strategy:
    """Return engine, offload and axes of a run; sizes are 2 where they are above 1."""
    configuration = deepspeed_configuration(arguments) or {}
    zero = configuration.get("zero_optimization", {})
    axes = arguments.parallelism_config
    sizes = {
        "sp": max(_size(axes, "sp_size"), int(configuration.get("sequence_parallel_size", 1) or 1)),
        "cp": _size(axes, "cp_size"),
        "tp": max(stage_tensor_ranks, int((configuration.get("tensor_parallel") or {}).get("autotp_size", 1) or 1)),
        "ep": int((configuration.get("expert_parallel") or {}).get("autoep_size", 1) or 1),
        "pp": 2 if pipeline else 1,
    }
    stated: dict[str, Any] = {name: 2 for name, size in sizes.items() if size > 1}
    if configuration:
        offloads: dict[str, Any] = {f"offload_{part}": _device(zero, part) for part in ("optimizer", "param")}
        if not configuration.get("zero_force_ds_cpu_optimizer", True):
            # The optimizer is the user's own then, on whatever device.
            offloads = {}
        return Strategy(engine="deepspeed", zero_stage=int(zero.get("stage", 0)), **offloads, **stated)
    if arguments.fsdp:
        offloaded: Any = "cpu" if (arguments.fsdp_config or {}).get("offload_params") else "none"
        return Strategy(engine="fsdp2", offload_optimizer=offloaded, offload_param=offloaded, **stated)
    return Strategy(engine="single" if arguments.world_size == 1 else "ddp", **stated)


def _size(axes: Any, name: str) -> int:
    return int(getattr(axes, name, None) or 1)


def _device(zero: Any, part: str) -> str:
    device = (zero.get(f"offload_{part}") or {}).get("device", "none")
    return str(getattr(device, "value", device))
