"""`PipelineTrainer`: a Trainer whose optimizer step runs one schedule of DeepSpeed's pipeline engine.

Shapes: B samples of a micro-batch, S tokens of its longest sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, has_length

from ...ds_configs.legality.axes import batch_errors, pipeline_errors
from ...ds_configs.legality.trainer_parameters import parameter_errors
from ...ds_configs.memory.rank_parameters import pipeline_stages
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.job import TrainingJob
from ...ds_configs.specs.layout import Layout, OffloadDevice, PipelineStage, partition_errors
from ...ds_configs.specs.model import ModelTraits
from ...plugins.accelerate import SamplesOnce
from ...plugins.deepspeed_pipeline.checkpoint import check_cut, save_cut, save_pipeline_checkpoint
from ...plugins.deepspeed_pipeline.engine import (
    BATCH_KEY,
    ShapeWatch,
    free_logits_early,
    optimizer_step,
    read_own_replica,
    repair_clipping,
    set_global_batch,
    summed_loss,
)
from ...plugins.deepspeed_pipeline.module import build_pipeline_module
from ...plugins.deepspeed_pipeline.stage import ENGINE_SECTION, stage_inputs
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.transformers.meta_model import model_spec_from_meta
from ...plugins.transformers.prepared_model import prepare_before_training
from ...plugins.transformers.training_arguments import deepspeed_configuration, own_class, run_errors, weights_dtype
from ..counting.counts import evaluated_mean, labelled_tokens
from ..data.chat import IGNORED_LABEL
from ..exact import Axis, ExactTrainer, count_as_one_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST_SEQUENCE_TOKENS = 4096
"""Sequence length for which stages are balanced, if the model supports it."""
_SEED_STRIDE = 1000
"""Distance between the seeds of neighbouring stages."""


class PipelineAxis(Axis):
    """All ranks of a pipeline read the same samples, and its stages compute losses and norms."""

    computes_losses = False

    def labels(self, trainer: ExactTrainer, batches: list[Any], device: Any, count: Callable[..., Any]) -> Any:
        """Return the labels of a step; the ranks of a replica counted the same ones."""
        tokens = count(batches, device)
        shared = tokens is not None and trainer.args.average_tokens_across_devices
        return tokens // self.ranks_of_a_sample if shared else tokens

    def correct_clipping(self, engine: Any) -> None:
        """Clip by the norm over all stages, and keep no logits after the loss."""
        repair_clipping(engine)
        free_logits_early(engine)


class PipelineTrainer(Trainer):
    """Train a causal language model in pipeline stages, with the arguments, callbacks and files of the Trainer.

    The loss of a step is the mean over all predicted tokens of the global batch,
    `sum(cross-entropy) / num_items_in_batch`, as in one process. `gradient_accumulation_steps` is the number m of
    micro-batches per step; 1F1B with p stages idles for the fraction `(p - 1) / (m + p - 1)`. Ranks are numbered stage
    by stage: `(stage * replicas + replica) * tensor_parallel_size + tensor_rank`.

    Args:
        model: A causal language model; or the directory or Hub id of a checkpoint, of which every rank reads only its
            own stage, in bf16 if `args` select it and otherwise in fp32.
        args: `TrainingArguments` with a DeepSpeed configuration of ZeRO stage 0 or 1.
        pipeline_stages: Number of stages, balanced by the cost terms of the planner; or the stages themselves.
        tensor_parallel_size: Number of ranks that share each stage.
        revision: Revision of a Hub id.
        attn_implementation: Attention of a model from a checkpoint; `None` for Transformers' default.
        **kwargs: Further arguments of the Trainer: `train_dataset`, `eval_dataset`, `data_collator`,
            `processing_class`, `callbacks`, `optimizer_cls_and_kwargs`.

    Overrides of methods that the schedule does not call, or that run the stages, are rejected.

    Raises:
        UsageError: the model, the arguments, the layout or an overridden method break a rule of pipelines.

    >>> trainer = PipelineTrainer(model, arguments, pipeline_stages=2, train_dataset=samples)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        *,
        pipeline_stages: int | tuple[PipelineStage, ...],
        tensor_parallel_size: int = 1,
        revision: str | None = None,
        attn_implementation: str | None = None,
        **kwargs: Any,
    ) -> None:
        if overridden := override_errors(self, PipelineTrainer):
            raise UsageError(overridden)
        unpartitioned = source_of(model, revision=revision)
        ranks = pipeline_stages if isinstance(pipeline_stages, int) else len(pipeline_stages)
        check_pipeline(args, unpartitioned, stages=ranks, tensor_parallel_size=tensor_parallel_size, **kwargs)
        self._stages, self._tensor_ranks = ranks, tensor_parallel_size
        self._replicas = args.world_size // self._ranks_of_a_replica
        stages = pipeline_stages
        if isinstance(stages, int):
            stages = balanced(unpartitioned, args, ranks, tensor_parallel_size=tensor_parallel_size)
        errors = partition_errors(stages, unpartitioned.config.get_text_config().num_hidden_layers)
        errors += engine_errors(args, replicas=self._replicas, tensor_parallel_size=tensor_parallel_size)
        if errors:
            raise UsageError(errors)
        self._cut = stages
        self._step_batches: list[Mapping[str, torch.Tensor]] = []
        self._warned_of_dropped_batches = False
        self._shapes = ShapeWatch()
        super().__init__(model=unpartitioned, args=args, **kwargs)
        self._set_signature_columns_if_needed()
        module: Any = build_pipeline_module(
            model,
            stages,
            activation_checkpointing=args.gradient_checkpointing,
            tensor_parallel_size=tensor_parallel_size,
            dtype=weights_dtype(args, method="full"),
            attn_implementation=attn_implementation,
            revision=revision,
        )
        module.config = unpartitioned.config
        # The stages were built with recomputation. Transformers 5.23 calls the second name first.
        module.gradient_checkpointing_enable = module.activation_checkpointing_enable = lambda **_: None
        self.model = self.model_wrapped = self.callback_handler.model = module
        count_as_one_process(self, PipelineAxis(self._ranks_of_a_replica))

    @property
    def _ranks_of_a_replica(self) -> int:
        """Number of ranks that read the same samples."""
        return self._stages * self._tensor_ranks

    def create_accelerator_and_postprocess(self) -> None:
        """Make all stages of one pipeline read the same samples, and count them once."""
        super().create_accelerator_and_postprocess()
        samples = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self._replicas
        set_global_batch(self.accelerator.state.deepspeed_plugin.hf_ds_config, samples)
        replica = self.args.process_index // self._tensor_ranks % self._replicas
        read_own_replica(self.accelerator, replicas=self._replicas, replica=replica)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None = None
    ) -> Any:
        if overridden := override_errors(self, PipelineTrainer):
            raise UsageError(overridden)
        if resume_from_checkpoint is not None:
            check_cut(Path(resume_from_checkpoint), self._cut, tensor_parallel_size=self._tensor_ranks)
        self._step_batches = []
        if torch.cuda.is_available():
            # Each stage draws different dropout masks. Samplers and collators draw from the CPU's generator, which
            # the stages of one replica share; `read_own_replica` seeds the workers of a loader.
            torch.cuda.manual_seed(self.args.seed + _SEED_STRIDE * self.model.stage_id)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Pad all micro-batches of a step to one shape before the first stage runs."""
        if self._step_batches and not self._warned_of_dropped_batches:
            note_on_first_rank(
                f"{len(self._step_batches)} micro-batches at the end of the data, fewer than "
                f"gradient_accumulation_steps = {self.args.gradient_accumulation_steps}, are not trained on. This "
                "always happens with data of unknown length"
            )
            self._warned_of_dropped_batches = True
        self._step_batches = []
        batches, tokens = super().get_batch_samples(*args, **kwargs)
        return (of_one_shape(batches) if batches else batches), tokens

    def training_step(
        self, model: Any, inputs: Mapping[str, torch.Tensor], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Collect a micro-batch; with the last one of the step, run the schedule and return the loss of the step."""
        self._step_batches.append(self._prepare_inputs(dict(inputs)))
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._step_batches = self._step_batches, []
        # The engine divides by the configured number of micro-batches and averages over replicas.
        terms = self.args.gradient_accumulation_steps
        terms *= self._replicas if self.args.average_tokens_across_devices else 1
        factor = terms / torch.as_tensor(num_items_in_batch, device=self.args.device).clamp(min=1).float()
        return optimizer_step(model, self._scheduled(model, batches, factor)).detach().to(self.args.device)

    def _scheduled(self, engine: Any, batches: list[Any], factor: torch.Tensor) -> list[Any]:
        """Return the inputs of the first stage, and for the last one the labels and the factor of their summed loss."""
        micro_batches = [
            (
                stage_inputs(batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")),
                (batch["labels"], factor),
            )
            for batch in batches
        ]
        self._shapes.expect(engine, micro_batches[0][0])
        return micro_batches

    def floating_point_ops(self, inputs: Mapping[str, torch.Tensor]) -> int:
        """Return the operations of this stage for a batch, 6 per token and weight; the Trainer sums over ranks."""
        multiplied = (module for module in self.model.modules() if not isinstance(module, torch.nn.Embedding))
        weights = sum(weight.numel() for module in multiplied for weight in module.parameters(recurse=False))
        return int(6 * inputs["input_ids"].numel() * weights)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return the mean loss over all predicted tokens; stages keep no logits.

        Raises:
            UsageError: replicas share data of unknown length, stages do not support a batch, or no batch has labels.
        """
        samples = len(dataloader.dataset) if has_length(dataloader.dataset) else None
        if errors := length_errors(samples, self._replicas):
            raise UsageError(errors)
        prepare_before_training(self, dataloader)
        engine = self.model_wrapped
        self.callback_handler.eval_dataloader = dataloader
        per_schedule = max(self.args.gradient_accumulation_steps, 4 * self._stages)
        loss, tokens = 0.0, torch.zeros((), dtype=torch.long, device=self.args.device)
        group: list[Any] = []
        unscaled = torch.ones((), device=self.args.device)
        once = SamplesOnce(dataloader, self.accelerator.gradient_state)

        def run() -> float:
            scheduled = self._scheduled(engine, of_one_shape(group), unscaled)
            group.clear()
            return float(summed_loss(engine, scheduled, replicas=self._replicas).item())

        for sampled in dataloader:
            if errors := sampled_batch_errors(sampled):
                raise UsageError(errors)
            batch = once.step(sampled).batch
            group.append(self._prepare_inputs(dict(batch)))
            labelled: Any = labelled_tokens([batch])
            tokens += labelled.to(tokens.device)
            self.control: Any = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            if len(group) == per_schedule:
                loss += run()
        if group:
            loss += run()
        # Summed over replicas; the ranks of one agree.
        counted = self.accelerator.gather(tokens).sum() // self._ranks_of_a_replica
        mean = evaluated_mean([loss], [float(counted)])
        metrics = {f"{metric_key_prefix}_loss": mean}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=samples or 0)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: only the last stage has logits.

        Raises:
            UsageError: always.
        """
        fix = "save the model and load it with from_pretrained"
        raise UsageError(ConfigError(where="predict", rule="stages of a pipeline keep no logits", fix=fix))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a normal model directory; every rank must call it, and the first replica of each stage writes."""
        directory = Path(output_dir or self.args.output_dir)
        save_pipeline_checkpoint(self.model, directory, config=self.model.config)
        if self.args.should_save:
            processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(directory)
            if _internal_call:
                save_cut(directory, self._cut, tensor_parallel_size=self._tensor_ranks)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


def source_of(model: Any, *, revision: str | None = None) -> Any:
    """Return the model itself; for the directory or Hub id of a checkpoint, its model without weights.

    Raises:
        UsageError: there is no checkpoint, or it has no causal language model.
    """
    if not isinstance(model, str | Path):
        return model
    try:
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        rule = f"has no readable config ({str(error).partition(chr(10))[0]})"
        fix = "pass the directory or Hub id of a checkpoint"
        raise UsageError(ConfigError(where="model", value=str(model), rule=rule, fix=fix)) from None
    if type(config) not in AutoModelForCausalLM._model_mapping:
        rule = "has no causal language model in transformers"
        raise UsageError(ConfigError(where="model_type", value=config.model_type, rule=rule))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def balanced(
    model: PreTrainedModel,
    args: TrainingArguments,
    ranks: int,
    *,
    tensor_parallel_size: int = 1,
) -> tuple[PipelineStage, ...]:
    """Return the stages that the planner selects for a model."""
    config = {**json.loads(model.config.to_json_string(use_diff=False)), "architectures": [type(model).__name__]}
    longest = getattr(model.config, "max_position_embeddings", LONGEST_SEQUENCE_TOKENS)
    job = TrainingJob(
        seq_len_tokens=min(longest, LONGEST_SEQUENCE_TOKENS),
        micro_batch_size=args.per_device_train_batch_size,
        precision="bf16" if args.bf16 else "fp32",
        gradient_checkpointing="on" if args.gradient_checkpointing else "off",
    )
    spec = model_spec_from_meta(config, name="model")
    return pipeline_stages(spec, job, ranks, tensor_parallel_size=tensor_parallel_size)


def check_pipeline(
    args: TrainingArguments,
    model: PreTrainedModel,
    *,
    stages: int,
    tensor_parallel_size: int = 1,
    **settings: Any,
) -> None:
    """Reject a model and arguments that a pipeline does not support.

    Raises:
        UsageError: a rule is broken; lists all errors with the nearest legal values.
    """
    config = model.config
    deepspeed = deepspeed_configuration(args) or {}
    zero = deepspeed.get("zero_optimization", {})
    axes = args.parallelism_config
    offload_optimizer = _offload(zero, "offload_optimizer")
    errors = pipeline_errors(
        ModelTraits(model_type=config.model_type, num_layers=config.get_text_config().num_hidden_layers),
        Layout(
            engine="deepspeed" if deepspeed else "fsdp2" if args.fsdp else "ddp",
            zero_stage=zero.get("stage", 0) if deepspeed else None,
            offload_optimizer=offload_optimizer,
            offload_param=_offload(zero, "offload_param"),
            pp=stages,
            tp=tensor_parallel_size,
            sp=1 if axes is None else axes.sp_size,
            cp=1 if axes is None else axes.cp_size,
            ep=int(deepspeed.get("expert_parallel", {}).get("autoep_size", 1)),
        ),
        world_size=args.world_size,
        micro_batches=args.gradient_accumulation_steps,
        method="lora" if hasattr(model, "peft_config") else "full",
    )
    errors += run_errors(
        args,
        model,
        callbacks=settings.get("callbacks") or (),
        pipeline=True,
        stage_tensor_ranks=tensor_parallel_size,
        has_own_optimizer=settings.get("optimizer_cls_and_kwargs") is not None,
    )
    named = [name for name, value in settings.items() if value is not None and value != (None, None)]
    errors += parameter_errors(named, ("pp",))
    if settings.get("dual_pipe"):
        rule = "is removed: stages run the 1F1B schedule"
        errors.append(ConfigError(where="dual_pipe", rule=rule, fix="omit it"))
    if stages == 1:
        rule = "a pipeline needs at least two stages"
        errors.append(ConfigError(where="pp", value=1, rule=rule, fix="use the Trainer"))
    replicas = args.world_size // max(1, stages * tensor_parallel_size)
    schedule = "DeepSpeed's schedule runs all micro-batches of a step"
    evaluation = "stages evaluate in the precision in which they train"
    order = args.train_sampling_strategy
    rejected: list[tuple[str, object, bool, str]] = [
        ("fp16", True, bool(args.fp16), "stages do not exchange the loss scale; use bf16 or fp32"),
        ("use_liger_kernel", True, args.use_liger_kernel, "the last stage computes only the cross-entropy of tokens"),
        ("auto_find_batch_size", True, args.auto_find_batch_size, schedule),
        (
            "train_sampling_strategy",
            order,
            order in ("batch_rebalance", "group_by_length"),
            "draws an order that the stages of one pipeline do not share; use random or sequential",
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
        ("dispatch_batches", True, bool(args.accelerator_config.dispatch_batches), schedule),
    ]
    errors += [ConfigError(where=name, value=value, rule=rule) for name, value, is_set, rule in rejected if is_set]
    kwargs = args.gradient_checkpointing_kwargs or {}
    if args.gradient_checkpointing and kwargs not in ({}, {"use_reentrant": False}):
        rule = "stages recompute each decoder layer, without re-entering autograd"
        errors.append(ConfigError(where="gradient_checkpointing_kwargs", value=kwargs, rule=rule, fix="omit it"))
    fix = "omit it and create PipelineTrainer(tensor_parallel_size=...)"
    if axes is not None and axes.tp_size > 1:
        rule = "shards unpartitioned models, not the stages of a pipeline"
        errors.append(ConfigError(where="parallelism_config.tp_size", value=axes.tp_size, rule=rule, fix=fix))
    if deepspeed.get("tensor_parallel", {}).get("autotp_size", 1) > 1:
        rule = "AutoTP shards unpartitioned models, not the stages of a pipeline"
        errors.append(ConfigError(where="tensor_parallel.autotp_size", rule=rule, fix=fix))
    gradient_dtype = (deepspeed.get("data_types") or {}).get("grad_accum_dtype")
    if gradient_dtype is not None and offload_optimizer != "none":
        where = "data_types.grad_accum_dtype"
        rule = "cannot be combined with offload_optimizer: gradients of tied weights would not be summed"
        errors.append(ConfigError(where=where, value=gradient_dtype, rule=rule, fix="omit one of the two"))
    if deepspeed.get("pipeline", {}).get("activation_checkpoint_interval", 0):
        where, rule = "pipeline.activation_checkpoint_interval", "decoder layers recompute themselves"
        errors.append(ConfigError(where=where, rule=rule, fix="set gradient_checkpointing in TrainingArguments"))
    data = settings.get("eval_dataset")
    datasets = list(data.values()) if isinstance(data, dict) else [data]
    if any(each is not None and not hasattr(each, "__len__") for each in datasets):
        errors += length_errors(None, replicas)
    if errors:
        raise UsageError(errors)


def _offload(zero: Mapping[str, Any], name: str) -> OffloadDevice:
    device = (zero.get(name) or {}).get("device", "none")
    value: OffloadDevice = str(getattr(device, "value", device))  # type: ignore[assignment]
    return value


def length_errors(samples: int | None, replicas: int) -> list[ConfigError]:
    """Return the error of an evaluation dataset of unknown length (`samples` is `None`) that several replicas share."""
    if samples is not None or replicas <= 1:
        return []
    rule = "needs a length, so that samples that fill the last batch of a replica are not counted twice"
    return [ConfigError(where="eval_dataset", rule=rule, fix="use a map-style dataset")]


def engine_errors(args: TrainingArguments, *, replicas: int, tensor_parallel_size: int) -> list[ConfigError]:
    """Complete a DeepSpeed configuration for a pipeline; return an error for each user value that contradicts it."""
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


_FILL = {"input_ids": 0, "attention_mask": 0, "position_ids": 0, "labels": IGNORED_LABEL}


def sampled_batch_errors(batch: Mapping[str, Any]) -> list[ConfigError]:
    """Return an error for each entry of a collated batch that stages cannot pass on, and for each missing entry."""
    import torch

    rule, fix = f"pipeline stages accept only {', '.join(_FILL)}", "omit it in the collator"
    errors = [ConfigError(where="batch", value=name, rule=rule, fix=fix) for name in batch if name not in _FILL]
    for name in ("input_ids", "labels"):
        if name not in batch:
            errors.append(ConfigError(where="batch", rule=f"needs {name}", fix="add it in the collator"))
    for name, tensor in batch.items():
        if name in _FILL and (not torch.is_tensor(tensor) or tensor.dim() != 2):
            shape = str(list(tensor.shape)) if torch.is_tensor(tensor) else type(tensor).__name__
            errors.append(ConfigError(where=f"batch: {name}", value=shape, rule="must be a tensor [samples, tokens]"))
    return errors


def of_one_shape(batches: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Pad the batches of a step to the largest number of samples and of tokens among them.

    Added tokens are on the right, where no token attends to them, and have no label. An existing mask excludes them. A
    batch without a mask gets one only if another batch of the step has one: without a mask, positions separate packed
    sequences. Added samples repeat the first sample of their batch without its labels, because attention cannot
    normalize over a sample without visible tokens.

    Raises:
        UsageError: a batch has entries that stages cannot pass on, or only some batches have positions.
    """
    import torch

    errors = [error for batch in batches for error in sampled_batch_errors(batch)]
    if len({"position_ids" in batch for batch in batches}) > 1:
        rule = "must be in every micro-batch of a step or in none of them"
        errors.append(ConfigError(where="batch: position_ids", rule=rule, fix="add it in the collator"))
    if errors:
        raise UsageError(list(dict.fromkeys(errors)))
    samples = max(len(batch["input_ids"]) for batch in batches)
    tokens = max(batch["input_ids"].shape[1] for batch in batches)
    is_masked = any("attention_mask" in batch for batch in batches)
    padded = []
    for batch in batches:
        entries = dict(batch)
        if is_masked and "attention_mask" not in entries:
            entries["attention_mask"] = torch.ones_like(entries["input_ids"])
        for name, tensor_BS in entries.items():
            missing = tokens - tensor_BS.shape[1]
            grown_BS = torch.nn.functional.pad(tensor_BS, (0, missing), value=_FILL[name]) if missing else tensor_BS
            if more := samples - len(grown_BS):
                added_BS = grown_BS[:1].expand(more, -1)
                grown_BS = torch.cat(
                    [grown_BS, added_BS if name != "labels" else torch.full_like(added_BS, IGNORED_LABEL)]
                )
            entries[name] = grown_BS
        padded.append(entries)
    return padded
