"""Settings and layout of a training run, as rows and columns of the table of combinations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...ds_configs.legality.combinations import columns_of, incompatibility_errors
from ...ds_configs.specs.errors import ConfigError
from ...ds_configs.specs.layout import Layout, ZeroOptions
from .training_arguments import deepspeed_configuration

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainingArguments

_DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout")


def run_errors(
    arguments: TrainingArguments,
    model: PreTrainedModel,
    *,
    callbacks: Iterable[Any] = (),
    settings: Iterable[str] = (),
    pipeline: bool = False,
    stage_tensor_ranks: int = 1,
    has_own_optimizer: bool = False,
) -> list[ConfigError]:
    """Return an error for each combination of the run's settings and its layout that is not supported.

    Args:
        arguments: The Trainer's.
        model: The trained model, wrapped or not.
        callbacks: Callbacks of the Trainer; ours name their rows of the table in `combined_settings`.
        settings: Further settings of the run, by the table's names.
        pipeline: Whether the model is trained in pipeline stages.
        stage_tensor_ranks: Tensor-parallel ranks of each stage, which no argument of the Trainer contains.
        has_own_optimizer: Whether the Trainer received an optimizer, which `optimizers.py` checks.
    """
    named = [name for callback in callbacks for name in getattr(callback, "combined_settings", ())]
    rows = [*named, *settings, *stated_settings(arguments, model, has_own_optimizer=has_own_optimizer)]
    layout = layout_of(arguments, pipeline=pipeline, stage_tensor_ranks=stage_tensor_ranks)
    errors = incompatibility_errors(rows, columns_of(layout))
    if arguments.neftune_noise_alpha is not None and arguments.world_size > 1:
        rule = "scales the noise by the padded length of each rank's own batch, not of all ranks (transformers 5.17.0)"
        fix = "omit it, or train in one process"
        errors.append(ConfigError(where="neftune_noise_alpha", value=arguments.neftune_noise_alpha, rule=rule, fix=fix))
    kind = str(getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type))
    if layout.zero_stage and (kind == "polynomial" or "min_lr" in (arguments.lr_scheduler_kwargs or {})):
        rule = "reads the optimizer's defaults, which ZeRO optimizers lack (deepspeed 0.19.8)"
        fix = "use linear or cosine, or min_lr_rate instead of min_lr"
        errors.append(ConfigError(where="lr_scheduler_type", value=kind, rule=rule, fix=fix))
    return errors


def trainer_errors(trainer: Trainer) -> list[ConfigError]:
    """Return `run_errors` for a Trainer."""
    extra = list(getattr(trainer, "combined_settings", ()))
    # Trainers of TRL add a balance loss regardless of the model's configuration, and record it in this attribute.
    balances = balances_experts(trainer.model) or getattr(trainer, "aux_loss_enabled", False)
    if balances and not getattr(trainer, "corrects_balance_loss", False):
        extra.append("balance_loss")
    data = trainer.train_dataset
    if data is not None and not hasattr(data, "__len__"):
        extra.append("streams")
    return run_errors(
        trainer.args,
        trainer.model,
        callbacks=trainer.callback_handler.callbacks,
        settings=extra,
        has_own_optimizer=has_own_optimizer(trainer),
    )


def own_class(trainer: Any) -> Any:
    """Return the class of a Trainer as its author wrote it, without the class that Shardwright puts in front."""
    return getattr(type(trainer), "own_class", type(trainer))


def has_own_optimizer(trainer: Trainer) -> bool:
    """Return whether a Trainer received an optimizer, so that `args.optim` has no effect."""
    return getattr(trainer, "has_own_optimizer", False) or trainer.optimizer_cls_and_kwargs is not None


def stated_settings(
    arguments: TrainingArguments, model: PreTrainedModel, *, has_own_optimizer: bool = False
) -> list[str]:
    """Return the settings of training arguments and a model, by the table's names."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    adapted = hasattr(model, "peft_config")
    trains = [parameter.requires_grad for parameter in model.parameters()] if hasattr(model, "parameters") else []
    stated = {
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "label_smoothing": arguments.label_smoothing_factor,
        "compile": arguments.torch_compile,
        "bf16": arguments.bf16,
        "fp16": arguments.fp16,
        "split_batches": arguments.accelerator_config.split_batches,
        "lora": adapted,
        "frozen": not adapted and not all(trains),
        "dropout": any(isinstance(rate := getattr(text, name, 0), float) and rate > 0 for name in _DROPOUTS),
    }
    settings = [name for name, is_set in stated.items() if is_set]
    if has_own_optimizer:
        return settings
    # An optimizer of the DeepSpeed configuration has precedence over the Trainer's.
    section = (deepspeed_configuration(arguments) or {}).get("optimizer")
    if section is None:
        return [str(getattr(arguments.optim, "value", arguments.optim)), *settings]
    name = str(section.get("type", ""))
    rows = {"adam": "adamw_torch", "adamw": "adamw_torch", "sgd": "sgd", "muon": "muon"}
    return [rows.get(name.lower(), name), *settings]


def balances_experts(model: PreTrainedModel) -> bool:
    """Return whether a mixture adds a load-balancing loss to its own."""
    config = getattr(model, "config", None)
    strength = getattr(model, "router_aux_loss_coef", None)
    return bool(getattr(config, "output_router_logits", False) and strength)


def layout_of(arguments: TrainingArguments, *, pipeline: bool = False, stage_tensor_ranks: int = 1) -> Layout:
    """Return engine, offload and axes of a run; `pp` is 2 for a pipeline of any number of stages."""
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
    stated: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1}
    if configuration:
        offloads: dict[str, Any] = {}
        # Without this the optimizer is the user's own, on any device.
        if configuration.get("zero_force_ds_cpu_optimizer", True):
            for part in ("offload_optimizer", "offload_param"):
                device = (zero.get(part) or {}).get("device", "none")
                offloads[part] = str(getattr(device, "value", device))
        options = ZeroOptions(
            hpz_partition_size=zero.get("zero_hpz_partition_size", 1),
            quantized_gradients=bool(zero.get("zero_quantized_gradients")),
        )
        return Layout(engine="deepspeed", zero_stage=int(zero.get("stage", 0)), zero=options, **offloads, **stated)
    if arguments.fsdp:
        offloaded: Any = "cpu" if (arguments.fsdp_config or {}).get("offload_params") else "none"
        return Layout(engine="fsdp2", offload_optimizer=offloaded, offload_param=offloaded, **stated)
    return Layout(engine="single" if arguments.world_size == 1 else "ddp", **stated)


def _size(axes: Any, name: str) -> int:
    return int(getattr(axes, name, None) or 1)
