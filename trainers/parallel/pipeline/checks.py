"""Checks of `PipelineTrainer` before a process group is used: legality rules, arguments and overridden methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ....ds_configs.legality.axes import batch_errors, pipeline_errors
from ....ds_configs.specs.errors import ConfigError, UsageError
from ....ds_configs.specs.layout import Layout, OffloadDevice
from ....ds_configs.specs.model import ModelTraits
from ....plugins.deepspeed_pipeline.engine import BATCH_KEY
from ....plugins.deepspeed_pipeline.stage import ENGINE_SECTION
from ....plugins.transformers.run_settings import own_class
from ....plugins.transformers.training_arguments import deepspeed_configuration

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainingArguments


def check_pipeline(
    args: TrainingArguments,
    model: PreTrainedModel,
    *,
    stages: int,
    tensor_parallel_size: int = 1,
    eval_dataset: Any,
) -> None:
    """Reject a model and arguments that a pipeline does not support.

    Args:
        args: The training arguments.
        model: The model; only its configuration and whether it has adapters are read.
        stages: Number of ranks of one pipeline, without those that share a stage.
        tensor_parallel_size: Number of ranks that share each stage.
        eval_dataset: An evaluation dataset, several by name, or `None`.

    Raises:
        UsageError: a rule is broken; lists all errors with the nearest legal values.
    """
    config = model.config
    deepspeed = deepspeed_configuration(args)
    text = config.get_text_config()
    zero = (deepspeed or {}).get("zero_optimization", {})
    axes = args.parallelism_config
    errors = pipeline_errors(
        ModelTraits(model_type=config.model_type, num_layers=text.num_hidden_layers),
        Layout(
            engine="deepspeed" if deepspeed else "fsdp2" if args.fsdp else "ddp",
            zero_stage=zero.get("stage", 0) if deepspeed else None,
            offload_optimizer=_offload(zero, "offload_optimizer"),
            offload_param=_offload(zero, "offload_param"),
            pp=stages,
            tp=tensor_parallel_size,
            sp=1 if axes is None else axes.sp_size,
            cp=1 if axes is None else axes.cp_size,
            ep=int((deepspeed or {}).get("expert_parallel", {}).get("autoep_size", 1)),
        ),
        world_size=args.world_size,
        micro_batches=args.gradient_accumulation_steps,
        method="lora" if hasattr(model, "peft_config") else "full",
    )
    if stages == 1:
        rule = "a pipeline needs at least two stages"
        errors.append(ConfigError(where="pp", value=1, rule=rule, fix="use the Trainer"))
    replicas = args.world_size // max(1, stages * tensor_parallel_size)
    errors += [*_argument_errors(args, replicas), *_section_errors(args, deepspeed or {}, zero)]
    datasets = list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
    if any(data is not None and not hasattr(data, "__len__") for data in datasets):
        errors += length_errors(None, replicas)
    if errors:
        raise UsageError(errors)


def length_errors(samples: int | None, replicas: int) -> list[ConfigError]:
    """Return the error of an evaluation dataset of unknown length (`samples` is `None`) that several replicas share."""
    if samples is not None or replicas <= 1:
        return []
    rule = "needs a length, so that samples that fill the last batch of a replica are not counted twice"
    return [ConfigError(where="eval_dataset", rule=rule, fix="use a map-style dataset")]


def engine_errors(args: TrainingArguments, *, replicas: int, tensor_parallel_size: int) -> list[ConfigError]:
    """Complete a DeepSpeed configuration for a pipeline; return an error for each user value that contradicts it.

    Args:
        args: Training arguments with a DeepSpeed configuration.
        replicas: Number of copies of the pipeline.
        tensor_parallel_size: Number of ranks that share each stage.
    """
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    errors = []
    # Transformers holds only a configuration passed to TrainingArguments; `accelerate launch` sets the plugin's.
    configuration = getattr(args, "hf_deepspeed_config", None) or args.deepspeed_plugin.hf_ds_config
    micro, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    right = micro * accumulated * replicas
    allowed: list[Any] = [None, "auto", right]
    if args.deepspeed:
        written = getattr(args.deepspeed, "config", None) or HfDeepSpeedConfig(args.deepspeed).config
    else:
        written = configuration.config
        # An earlier Trainer has replaced "auto" by the product with all ranks.
        allowed.append(micro * accumulated * args.world_size)
    if (total := written.get(BATCH_KEY)) not in allowed:
        errors = batch_errors(global_batch_size=int(total), micro_batch_size=micro, data_parallel_size=replicas)
        rule = "must be per_device_train_batch_size * gradient_accumulation_steps * replicas of the pipeline = "
        rule, fix = f"{rule}{micro} * {accumulated} * {replicas}", f'write {right} or "auto"'
        errors = errors or [ConfigError(where="train_batch_size", value=int(total), rule=rule, fix=fix)]
    if tensor_parallel_size > 1:
        section = configuration.config.setdefault("pipeline", {})
        for key, required in ENGINE_SECTION.items():
            if section.setdefault(key, required) != required:
                rule = f"must be {str(required).lower()} for stages that {tensor_parallel_size} ranks share"
                errors.append(ConfigError(where=f"pipeline.{key}", value=section[key], rule=rule, fix="omit it"))
    return errors


def _offload(zero: Mapping[str, Any], name: str) -> OffloadDevice:
    device = (zero.get(name) or {}).get("device", "none")
    value: OffloadDevice = str(getattr(device, "value", device))  # type: ignore[assignment]
    return value


def _argument_errors(args: TrainingArguments, replicas: int) -> list[ConfigError]:
    exact = "the last stage computes only the cross-entropy of tokens"
    schedule = "DeepSpeed's schedule runs all micro-batches of a step"
    optimizer = str(getattr(args.optim, "value", args.optim))
    evaluation = "stages evaluate in the precision in which they train"
    rejected: list[tuple[str, object, bool, str]] = [
        ("fp16", True, bool(args.fp16), "stages do not exchange the loss scale; use bf16 or fp32"),
        ("label_smoothing_factor", args.label_smoothing_factor, args.label_smoothing_factor != 0, exact),
        ("use_liger_kernel", True, args.use_liger_kernel, exact),
        ("neftune_noise_alpha", args.neftune_noise_alpha, args.neftune_noise_alpha is not None, exact),
        ("torch_compile", True, args.torch_compile, "stages are not compiled"),
        ("auto_find_batch_size", True, args.auto_find_batch_size, schedule),
        (
            "train_sampling_strategy",
            args.train_sampling_strategy,
            args.train_sampling_strategy in ("batch_rebalance", "group_by_length"),
            "draws an order that the stages of one pipeline do not share; use random or sequential",
        ),
        (
            "optim",
            optimizer,
            optimizer in ("lomo", "adalomo") or optimizer.startswith("schedule_free"),
            "steps inside the backward pass or changes weights for evaluation, which a schedule does not call",
        ),
        ("torch_empty_cache_steps", args.torch_empty_cache_steps, args.torch_empty_cache_steps is not None, schedule),
        ("bf16_full_eval", True, args.bf16_full_eval, evaluation),
        ("fp16_full_eval", True, args.fp16_full_eval, evaluation),
        (
            "even_batches",
            False,
            replicas > 1 and not args.accelerator_config.even_batches,
            f"the {replicas} replicas must take the same number of steps",
        ),
        ("split_batches", True, bool(args.accelerator_config.split_batches), schedule),
        ("dispatch_batches", True, bool(args.accelerator_config.dispatch_batches), schedule),
    ]
    return [ConfigError(where=name, value=value, rule=rule) for name, value, is_set, rule in rejected if is_set]


def _section_errors(
    args: TrainingArguments, deepspeed: Mapping[str, Any], zero: Mapping[str, Any]
) -> list[ConfigError]:
    errors = []
    kwargs = args.gradient_checkpointing_kwargs or {}
    if args.gradient_checkpointing and kwargs not in ({}, {"use_reentrant": False}):
        rule = "stages recompute each decoder layer, without re-entering autograd"
        errors.append(ConfigError(where="gradient_checkpointing_kwargs", value=kwargs, rule=rule, fix="omit it"))
    fix = "omit it and create PipelineTrainer(tensor_parallel_size=...)"
    if args.parallelism_config is not None and args.parallelism_config.tp_size > 1:
        rule, size = "shards unpartitioned models, not the stages of a pipeline", args.parallelism_config.tp_size
        errors.append(ConfigError(where="parallelism_config.tp_size", value=size, rule=rule, fix=fix))
    if deepspeed.get("tensor_parallel", {}).get("autotp_size", 1) > 1:
        rule = "AutoTP shards unpartitioned models, not the stages of a pipeline"
        errors.append(ConfigError(where="tensor_parallel.autotp_size", rule=rule, fix=fix))
    gradient_dtype = (deepspeed.get("data_types") or {}).get("grad_accum_dtype")
    if gradient_dtype is not None and _offload(zero, "offload_optimizer") != "none":
        where = "data_types.grad_accum_dtype"
        rule = "cannot be combined with offload_optimizer: gradients of tied weights would not be summed"
        errors.append(ConfigError(where=where, value=gradient_dtype, rule=rule, fix="omit one of the two"))
    if deepspeed.get("pipeline", {}).get("activation_checkpoint_interval", 0):
        where, rule = "pipeline.activation_checkpoint_interval", "decoder layers recompute themselves"
        errors.append(ConfigError(where=where, rule=rule, fix="set gradient_checkpointing in TrainingArguments"))
    return errors


_NEVER_CALLED = frozenset(
    """
    compute_loss compute_loss_context_manager autocast_smart_context_manager prediction_step
    _prepare_context_parallel_inputs _clip_grad_norm _get_grad_norm _mixed_mesh_grad_norm _has_mixed_mesh_grads
    _defer_fsdp_gradient_reduction _sync_replicated_trainable_parameters
    """.split()  # noqa: SIM905
)
"""Methods of a Trainer that a schedule does not call: stages compute the loss, and the engine clips over all stages."""
_REPLACEABLE = frozenset({"__init__", "save_model"})
"""Methods of `PipelineTrainer` that a subclass may override; the others run the stages."""
_COUNTED = frozenset({"get_total_train_batch_size", "_get_num_items_in_batch"})
"""Methods of the Trainer whose results are divided by the ranks of a replica."""


def override_errors(trainer: Trainer, pipeline: type) -> list[ConfigError]:
    """Return an error for each overridden method that a pipeline does not call or cannot replace.

    An attribute of the object that wraps a called method, for example to measure it, is allowed.
    """
    own = vars(trainer).keys() & _NEVER_CALLED
    needed = {name for name in vars(pipeline).keys() - _REPLACEABLE if callable(getattr(pipeline, name))} | _COUNTED
    errors = []
    for name in sorted(_NEVER_CALLED | needed):
        if name in own or getattr(own_class(trainer), name, None) is not getattr(pipeline, name, None):
            rule = "is never called" if name in _NEVER_CALLED else "runs the stages of a pipeline and must stay"
            where, fix = f"{type(trainer).__name__}.{name}", "omit it, or use ZeRO with tp or sp and the Trainer"
            errors.append(ConfigError(where=where, rule=rule, fix=fix))
    return errors
