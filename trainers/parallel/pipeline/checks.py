"""Refusals of `PipelineTrainer` before a process group is used: broken rules, and arguments it has no place for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....ds_configs.legality.pipeline import batch_faults, pipeline_faults
from ....ds_configs.specs.errors import Fault, UsageError
from ....plugins.deepspeed_pipeline.engine import set_global_batch, written_global_batch
from ....plugins.deepspeed_pipeline.tensor_parallel import ENGINE_SECTION
from ....plugins.transformers.training_arguments import deepspeed_configuration


def check_pipeline(
    args: Any, model: Any, *, stages: int, tensor_parallel_size: int = 1, dual_pipe: bool, eval_dataset: Any
) -> None:
    """Refuse what a pipeline of a model cannot train with, all faults together.

    Args:
        args: `TrainingArguments`.
        model: The model; only its configuration and whether it has adapters count.
        stages: Ranks of one pipeline, without those that share a stage.
        tensor_parallel_size: Ranks that hold each stage together.
        dual_pipe: Whether DualPipeV is asked for.
        eval_dataset: What is evaluated: a data set, several by name, or `None`.

    Raises:
        UsageError: a rule is broken; each fault names the nearest legal values.
    """
    config = model.config
    deepspeed = deepspeed_configuration(args)
    text = config.get_text_config()
    zero = (deepspeed or {}).get("zero_optimization", {})
    faults = pipeline_faults(
        stages=stages,
        num_layers=text.num_hidden_layers,
        model_type=config.model_type,
        zero_stage=zero.get("stage", 0) if deepspeed else None,
        engine="deepspeed" if deepspeed else "fsdp2" if args.fsdp else "ddp",
        offload_optimizer=_offload(zero, "offload_optimizer"),
        offload_param=_offload(zero, "offload_param"),
        method="lora" if hasattr(model, "peft_config") else "full",
        world_size=args.world_size,
        micro_batches=args.gradient_accumulation_steps,
        dual_pipe=dual_pipe,
        tensor_parallel_size=tensor_parallel_size,
        **_other_axes(args, deepspeed or {}),
    )
    if stages == 1:
        faults.append(Fault(where="pp", value=1, rule="a pipeline has at least two stages", fix="use the Trainer"))
    replicas = args.world_size // max(1, stages * tensor_parallel_size)
    faults += [*_argument_faults(args, replicas), *_section_faults(args, deepspeed or {}, zero)]
    datasets = list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
    if any(data is not None and not hasattr(data, "__len__") for data in datasets):
        faults += length_faults(None, replicas)
    if faults:
        raise UsageError(faults)


def length_faults(samples: int | None, replicas: int) -> list[Fault]:
    """Return the fault of evaluation data of unknown length (`samples` is `None`) that several replicas share."""
    if samples is not None or replicas <= 1:
        return []
    rule = "needs a length, so that samples which fill the last batch of a replica are not counted twice"
    return [Fault(where="eval_dataset", rule=rule, fix="use a map-style data set")]


def engine_faults(args: Any, *, replicas: int, tensor_parallel_size: int) -> list[Fault]:
    """Complete a DeepSpeed configuration for a pipeline; return a fault for each written value that contradicts it.

    Args:
        args: `TrainingArguments` with a DeepSpeed configuration.
        replicas: Copies of the pipeline.
        tensor_parallel_size: Ranks that hold each stage together.
    """
    faults = []
    configuration = configuration_in_use(args)
    given = written_global_batch(args.deepspeed, configuration)
    written = set_global_batch(configuration, written=given, replicas=replicas)
    if written is not None:
        faults += global_batch_faults(args, written, replicas)
    if tensor_parallel_size > 1:
        section = configuration.config.setdefault("pipeline", {})
        for key, needed in ENGINE_SECTION.items():
            if section.setdefault(key, needed) != needed:
                rule = f"stages that {tensor_parallel_size} ranks hold together need {str(needed).lower()}"
                faults.append(Fault(where=f"pipeline.{key}", value=section[key], rule=rule, fix="leave it out"))
    return faults


def configuration_in_use(args: Any) -> Any:
    """Return the holder of the DeepSpeed configuration in use."""
    # Only what TrainingArguments were given is Transformers' own; `accelerate launch` leaves the plugin's.
    return getattr(args, "hf_deepspeed_config", None) or args.deepspeed_plugin.hf_ds_config


def global_batch_faults(args: Any, written: int, replicas: int) -> list[Fault]:
    """Return the faults of a `train_batch_size` in a DeepSpeed configuration that the training arguments contradict."""
    micro, micro_batches = args.per_device_train_batch_size, args.gradient_accumulation_steps
    faults = batch_faults(global_batch_size=written, micro_batch_size=micro, data_parallel_size=replicas)
    if faults:
        return faults
    rule = (
        "must be per_device_train_batch_size * gradient_accumulation_steps * replicas of the pipeline = "
        f"{micro} * {micro_batches} * {replicas}"
    )
    fix = f'write {micro * micro_batches * replicas} or "auto"'
    return [Fault(where="train_batch_size", value=written, rule=rule, fix=fix)]


def _offload(zero: Mapping[str, Any], name: str) -> str:
    device = (zero.get(name) or {}).get("device", "none")
    return str(getattr(device, "value", device))


def _other_axes(args: Any, deepspeed: Mapping[str, Any]) -> dict[str, int]:
    config = args.parallelism_config
    return {
        "sequence_parallel_size": 1 if config is None else config.sp_size,
        "context_parallel_size": 1 if config is None else config.cp_size,
        "expert_parallel_size": int(deepspeed.get("expert_parallel", {}).get("autoep_size", 1)),
    }


def _argument_faults(args: Any, replicas: int) -> list[Fault]:
    exact = "the last stage computes the cross-entropy of tokens and nothing else"
    schedule = "DeepSpeed's schedule runs all micro-batches of a step"
    optimizer = str(getattr(args.optim, "value", args.optim))
    of_evaluation = "stages evaluate in the precision in which they train"
    refused: list[tuple[str, Any, bool, str]] = [
        ("fp16", True, bool(args.fp16), "the loss scale is not carried between stages; use bf16 or fp32"),
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
            "steps inside backward or changes weights for evaluation, which a schedule of stages does not call",
        ),
        ("torch_empty_cache_steps", args.torch_empty_cache_steps, args.torch_empty_cache_steps is not None, schedule),
        ("bf16_full_eval", True, args.bf16_full_eval, of_evaluation),
        ("fp16_full_eval", True, args.fp16_full_eval, of_evaluation),
        (
            "even_batches",
            False,
            replicas > 1 and not args.accelerator_config.even_batches,
            f"the {replicas} replicas must take equally many steps",
        ),
        ("split_batches", True, bool(args.accelerator_config.split_batches), schedule),
        ("dispatch_batches", True, bool(args.accelerator_config.dispatch_batches), schedule),
    ]
    return [Fault(where=name, value=value, rule=rule) for name, value, is_set, rule in refused if is_set]


def _section_faults(args: Any, deepspeed: Mapping[str, Any], zero: Mapping[str, Any]) -> list[Fault]:
    faults = []
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}) not in ({}, {"use_reentrant": False}):
        where, rule = (
            "gradient_checkpointing_kwargs",
            "stages recompute each decoder layer, without re-entering autograd",
        )
        faults.append(Fault(where=where, value=args.gradient_checkpointing_kwargs, rule=rule, fix="leave it out"))
    fix = "leave it out and make PipelineTrainer(tensor_parallel_size=...)"
    if args.parallelism_config is not None and args.parallelism_config.tp_size > 1:
        rule, size = "divides whole models, not the stages of a pipeline", args.parallelism_config.tp_size
        faults.append(Fault(where="parallelism_config.tp_size", value=size, rule=rule, fix=fix))
    if deepspeed.get("tensor_parallel", {}).get("autotp_size", 1) > 1:
        rule = "AutoTP divides whole models, not the stages of a pipeline"
        faults.append(Fault(where="tensor_parallel.autotp_size", rule=rule, fix=fix))
    kept_in = (deepspeed.get("data_types") or {}).get("grad_accum_dtype")
    if kept_in is not None and _offload(zero, "offload_optimizer") != "none":
        where = "data_types.grad_accum_dtype"
        rule = "with offload_optimizer keeps gradients where those of tied weights are not summed"
        faults.append(Fault(where=where, value=kept_in, rule=rule, fix="leave one of the two out"))
    if deepspeed.get("pipeline", {}).get("activation_checkpoint_interval", 0):
        rule = "decoder layers recompute by themselves"
        where = "pipeline.activation_checkpoint_interval"
        faults.append(Fault(where=where, rule=rule, fix="set gradient_checkpointing in TrainingArguments"))
    return faults
