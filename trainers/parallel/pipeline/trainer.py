"""`PipelineTrainer`: a Trainer whose optimizer step runs one schedule of DeepSpeed's pipeline engine.

Shapes: B samples of a micro-batch, S tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, has_length

from ....ds_configs.memory.rank_parameters import pipeline_stages
from ....ds_configs.specs.errors import ConfigError, UsageError
from ....ds_configs.specs.job import TrainingJob
from ....ds_configs.specs.layout import PipelineStage, partition_errors
from ....plugins.accelerate.repeated_samples import SamplesOnce
from ....plugins.deepspeed_pipeline.checkpoint import check_cut, save_cut, save_pipeline_checkpoint
from ....plugins.deepspeed_pipeline.engine import (
    ShapeWatch,
    free_logits_early,
    optimizer_step,
    read_own_replica,
    repair_clipping,
    set_global_batch,
    summed_loss,
)
from ....plugins.deepspeed_pipeline.module import build_pipeline_module
from ....plugins.launching.messages import note_on_first_rank
from ....plugins.transformers.meta_model import model_spec_from_meta
from ....plugins.transformers.prepared_model import prepare_before_training
from ....plugins.transformers.run_settings import run_errors
from ....plugins.transformers.training_arguments import weights_dtype
from ...counting.counts import evaluated_mean
from ...exact import Axis, ExactTrainer, count_as_one_process
from ..sequence.shards import labelled_tokens
from .batches import for_stages, of_one_shape, sampled_batch_errors
from .checks import (
    check_pipeline,
    engine_errors,
    length_errors,
    override_errors,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST_SEQUENCE_TOKENS = 4096
"""Sequence length for which stages are balanced, if the model supports it."""
_SEED_STRIDE = 1000
"""Distance between the seeds of neighbouring stages."""


class PipelineAxis(Axis):
    """All ranks of a pipeline read the same samples, and its stages compute losses and norms."""

    computes_losses = False

    def __init__(self, ranks: int) -> None:
        self.ranks_of_a_sample = ranks

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
        check_pipeline(
            args,
            unpartitioned,
            stages=ranks,
            tensor_parallel_size=tensor_parallel_size,
            eval_dataset=kwargs.get("eval_dataset"),
        )
        self._stages, self._tensor_ranks = ranks, tensor_parallel_size
        self._replicas = args.world_size // self._ranks_of_a_replica
        stages = pipeline_stages
        if isinstance(stages, int):
            stages = balanced(unpartitioned, args, ranks, tensor_parallel_size=tensor_parallel_size)
        layers = unpartitioned.config.get_text_config().num_hidden_layers
        errors = run_errors(
            args,
            unpartitioned,
            callbacks=kwargs.get("callbacks") or (),
            pipeline=True,
            stage_tensor_ranks=tensor_parallel_size,
            has_own_optimizer=kwargs.get("optimizer_cls_and_kwargs") is not None,
        )
        errors += partition_errors(stages, layers)
        needs_logits = "needs logits, which only the last stage has"
        unsupported = {
            "compute_metrics": needs_logits,
            "compute_loss_func": needs_logits,
            "preprocess_logits_for_metrics": needs_logits,
            "model_init": "is not supported: a pipeline is built from one model",
            "dual_pipe": "is removed: stages run the 1F1B schedule",
            "optimizers": "holds parameters of the complete model; use optimizer_cls_and_kwargs",
        }
        errors += [
            ConfigError(where=name, rule=rule, fix="omit it")
            for name, rule in unsupported.items()
            if kwargs.get(name) not in (None, False, (None, None))
        ]
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

    @property
    def _replica(self) -> int:
        """Index of the copy of the pipeline that this rank belongs to."""
        return int(self.args.process_index // self._tensor_ranks % self._replicas)

    def create_accelerator_and_postprocess(self) -> None:
        """Make all stages of one pipeline read the same samples, and count them once."""
        super().create_accelerator_and_postprocess()
        samples = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self._replicas
        set_global_batch(self.accelerator.state.deepspeed_plugin.hf_ds_config, samples)
        read_own_replica(self.accelerator, replicas=self._replicas, replica=self._replica)

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
        """Return micro-batches of one shape for the stages."""
        micro_batches = [for_stages(batch, factor) for batch in batches]
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
    """Return the stages that the planner selects for a model.

    Args:
        model: A causal language model; only its configuration and class are read.
        args: The training arguments.
        ranks: Number of ranks of one pipeline.
        tensor_parallel_size: Number of ranks that share each stage.
    """
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
