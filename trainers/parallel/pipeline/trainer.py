"""`PipelineTrainer`: the Trainer of Transformers, whose optimizer step is one schedule of DeepSpeed's pipeline engine.

Shapes: B samples of a micro-batch, S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, has_length

from ....ds_configs.specs.errors import Fault, UsageError
from ....ds_configs.specs.stages import PipelineStage, partition_faults
from ....plugins.deepspeed_pipeline.checkpoint import check_cut, save_cut, save_pipeline_checkpoint
from ....plugins.deepspeed_pipeline.engine import (
    ShapeWatch,
    evaluation_engine,
    free_logits_early,
    optimizer_step,
    read_own_replica,
    repair_clipping,
    set_global_batch,
    summed_loss,
    written_global_batch,
)
from ....plugins.deepspeed_pipeline.module import build_pipeline_module
from ....plugins.launching.notes import note_on_first_rank
from ....plugins.transformers.run_settings import run_faults
from ....plugins.transformers.training_arguments import deepspeed_configuration, weights_dtype
from .checks import check_pipeline, configuration_in_use, engine_faults, global_batch_faults, length_faults
from .evaluation import own_samples
from .hooks import override_faults
from .micro_batches import for_stages, of_one_shape, predicted_tokens, without_labels
from .source import balanced, source_of

_SEED_STRIDE = 1000
"""Between the seeds of neighbouring stages."""


class PipelineTrainer(Trainer):
    """Trains a causal language model in pipeline stages, with the arguments, callbacks and files of the Trainer.

    The loss of a step is the mean over all predicted tokens of the global batch,
    `sum(cross-entropy) / num_items_in_batch`, as one process computes it. `gradient_accumulation_steps` are the
    micro-batches of a step, of which 1F1B leaves `(p - 1) / (m + p - 1)` idle. Ranks are numbered stage by stage: rank
    `(stage * replicas + replica) * tensor_parallel_size + tensor_rank`.

    Args:
        model: A causal language model; or the directory or Hub id of a checkpoint, of which every rank reads its own
            stage alone, in bf16 where `args` ask for it and else in fp32.
        args: `TrainingArguments` with a DeepSpeed configuration of ZeRO stage 0 or 1.
        pipeline_stages: How many stages, balanced by the terms of the planner; or the stages themselves, with
            `dual_pipe` two for each rank.
        tensor_parallel_size: Ranks that hold each stage together.
        dual_pipe: Whether DualPipeV runs the micro-batches; every rank then holds two stages.
        revision: Revision of a Hub id.
        attn_implementation: Attention of a model from a checkpoint; `None` for Transformers' choice.
        **kwargs: What the Trainer takes besides: `train_dataset`, `eval_dataset`, `data_collator`,
            `processing_class`, `callbacks`, `optimizer_cls_and_kwargs`.

    Subclasses may override what `hooks.HONOURED` names; others would not be called, and are refused.

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
        dual_pipe: bool = False,
        revision: str | None = None,
        attn_implementation: str | None = None,
        **kwargs: Any,
    ) -> None:
        if overridden := override_faults(self, PipelineTrainer):
            raise UsageError(overridden)
        whole = source_of(model, revision=revision)
        ranks = _ranks(pipeline_stages, dual_pipe=dual_pipe)
        check_pipeline(
            args,
            whole,
            stages=ranks,
            tensor_parallel_size=tensor_parallel_size,
            dual_pipe=dual_pipe,
            eval_dataset=kwargs.get("eval_dataset"),
        )
        self._stages, self._tensor_ranks, self._dual_pipe = ranks, tensor_parallel_size, dual_pipe
        self._replicas = args.world_size // self._ranks_of_a_replica
        stages = pipeline_stages
        if isinstance(stages, int):
            stages = balanced(whole, args, ranks, dual_pipe=dual_pipe, tensor_parallel_size=tensor_parallel_size)
        layers = whole.config.get_text_config().num_hidden_layers
        faults = run_faults(
            args,
            whole,
            callbacks=kwargs.get("callbacks") or (),
            pipeline=True,
            stage_tensor_ranks=tensor_parallel_size,
        )
        faults += [*partition_faults(stages, layers, dual_pipe=dual_pipe), *_unsupported(kwargs)]
        faults += engine_faults(args, replicas=self._replicas, tensor_parallel_size=tensor_parallel_size)
        if faults:
            raise UsageError(faults)
        self._cut = stages
        # Before the Trainer fills in its own.
        self._written_global_batch = written_global_batch(args.deepspeed, configuration_in_use(args))
        self._step_batches: list[Mapping[str, torch.Tensor]] = []
        self._told_of_dropped_batches = False
        self._shapes = ShapeWatch()
        super().__init__(model=whole, args=args, **kwargs)
        self._set_signature_columns_if_needed()
        module: Any = build_pipeline_module(
            model,
            stages,
            activation_checkpointing=args.gradient_checkpointing,
            tensor_parallel_size=tensor_parallel_size,
            dual_pipe=dual_pipe,
            dtype=weights_dtype(args, method="full"),
            attn_implementation=attn_implementation,
            revision=revision,
        )
        module.config, module.gradient_checkpointing_enable = whole.config, _already_recomputed
        self.model = self.model_wrapped = self.callback_handler.model = module

    @property
    def _ranks_of_a_replica(self) -> int:
        """Ranks that read the same samples."""
        return self._stages * self._tensor_ranks

    @property
    def _ranks_of_a_stage(self) -> dict[str, Any]:
        return {"tensor_parallel_size": self._tensor_ranks, "dual_pipe": self._dual_pipe}

    @property
    def _replica(self) -> int:
        """Index of the copy of the pipeline that this rank belongs to."""
        return int(self.args.process_index // self._tensor_ranks % self._replicas)

    def create_accelerator_and_postprocess(self) -> None:
        """Let all stages of one pipeline read the same samples, and count them so."""
        super().create_accelerator_and_postprocess()
        configuration = self.accelerator.state.deepspeed_plugin.hf_ds_config
        written = set_global_batch(configuration, written=self._written_global_batch, replicas=self._replicas)
        if written is not None:
            raise UsageError(global_batch_faults(self.args, written, self._replicas))
        read_own_replica(self.accelerator, replicas=self._replicas, replica=self._replica)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of one optimizer step over all replicas of the pipeline."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self._replicas)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None = None
    ) -> Any:
        if overridden := override_faults(self, PipelineTrainer):
            raise UsageError(overridden)
        if resume_from_checkpoint is not None:
            check_cut(Path(resume_from_checkpoint), self._cut, **self._ranks_of_a_stage)
        self.model_wrapped = self.model
        if torch.cuda.is_available():
            # Dropout of one stage is not to repeat another's. Samplers and collators draw from the CPU's generator,
            # which stages of one replica share; workers of a loader are seeded by `read_own_replica`.
            torch.cuda.manual_seed(self.args.seed + _SEED_STRIDE * self.model.stage_id)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        repair_clipping(self.model_wrapped)
        free_logits_early(self.model_wrapped)
        return prepared

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Give all micro-batches of a step one shape before any stage sees the first."""
        if self._step_batches and not self._told_of_dropped_batches:
            note_on_first_rank(
                f"{len(self._step_batches)} micro-batches at the end of the data, fewer than "
                f"gradient_accumulation_steps = {self.args.gradient_accumulation_steps}, are not trained on, as always "
                "with data of unknown length"
            )
            self._told_of_dropped_batches = True
        self._step_batches = []
        batches, tokens = super().get_batch_samples(*args, **kwargs)
        return (of_one_shape(batches) if batches else batches), tokens

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        tokens: torch.Tensor | int | None = super()._get_num_items_in_batch(batch_samples, device)
        # The Trainer adds up all ranks, of which those of one replica counted the same samples.
        added_up = tokens is not None and self.args.average_tokens_across_devices
        return tokens // self._ranks_of_a_replica if added_up and tokens is not None else tokens

    def training_step(
        self, model: Any, inputs: Mapping[str, torch.Tensor], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Keep a micro-batch; with the last one of the step run the schedule and return the loss of the whole step."""
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
        """Return micro-batches for the stages, as many as the schedule needs at least."""
        if self._dual_pipe:
            missing = 2 * self._stages - len(batches)
            batches = [*batches, *(without_labels(batches[0]) for _ in range(missing))]
        micro_batches = [for_stages(batch, factor) for batch in batches]
        self._shapes.expect(engine, micro_batches[0][0])
        return micro_batches

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        # The Trainer adds up all ranks, of which those of one replica saw the same tokens.
        added = (self.state.num_input_tokens_seen - before) // self._ranks_of_a_replica
        self.state.num_input_tokens_seen = before + added

    def floating_point_ops(self, inputs: Mapping[str, torch.Tensor]) -> int:
        """Return what this stage computes for a batch, 6 operations for each token and weight; ranks are added up."""
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
            UsageError: replicas share data of unknown length, or a batch is not what stages take.
        """
        samples = len(dataloader.dataset) if has_length(dataloader.dataset) else None
        if faults := length_faults(samples, self._replicas):
            raise UsageError(faults)
        engine = self._engine_for_evaluation()
        self.callback_handler.eval_dataloader = dataloader
        at_once = max(self.args.gradient_accumulation_steps, 4 * self._stages)
        loss, tokens, group = 0.0, torch.zeros((), dtype=torch.long, device=self.args.device), []
        one = torch.ones((), device=self.args.device)
        batches = own_samples(dataloader, samples=samples, replicas=self._replicas, replica=self._replica)
        for batch, is_last in batches:
            group.append(self._prepare_inputs(batch))
            tokens += predicted_tokens(batch).to(tokens.device)
            self.control: Any = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            if len(group) == at_once or is_last:
                scheduled = self._scheduled(engine, of_one_shape(group), one)
                loss += summed_loss(engine, scheduled, replicas=self._replicas).item()
                group = []
        mean = loss / max(1, int(self._over_replicas(tokens)))
        metrics = {f"{metric_key_prefix}_loss": mean}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=samples or 0)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: logits exist on the last stage alone.

        Raises:
            UsageError: always.
        """
        fix = "save the model and load it with from_pretrained"
        raise UsageError(Fault(where="predict", rule="stages of a pipeline keep no logits", fix=fix))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a normal model directory; every rank must call it, and each pipeline's first replica writes."""
        directory = Path(output_dir or self.args.output_dir)
        save_pipeline_checkpoint(self.model, directory, config=self.model.config)
        if self.args.should_save:
            processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(directory)
            if _internal_call:
                save_cut(directory, self._cut, **self._ranks_of_a_stage)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _over_replicas(self, tokens: torch.Tensor) -> torch.Tensor:
        """Add up a count of every replica, on which the ranks of one agree."""
        return self.accelerator.gather(tokens).sum() // self._ranks_of_a_replica

    def _engine_for_evaluation(self) -> Any:
        """Return the engine that trains, or before training one without an optimizer."""
        if self.model_wrapped is self.model:
            configuration = deepspeed_configuration(self.args)
            assert configuration is not None, "checked by the constructor"
            self.model_wrapped = evaluation_engine(self.model, configuration)
        return self.model_wrapped


def _already_recomputed(**_: Any) -> None:
    """Take the Trainer's request to recompute activations, with which the stages were made."""


def _ranks(stages: int | tuple[PipelineStage, ...], *, dual_pipe: bool) -> int:
    """Return the ranks of one pipeline."""
    if isinstance(stages, int):
        return stages
    return -(-len(stages) // 2) if dual_pipe else len(stages)


def _unsupported(kwargs: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for each argument of the Trainer that needs logits or a whole model."""
    needs_logits = "needs logits, which exist on the last stage alone"
    reasons = {
        "compute_metrics": needs_logits,
        "compute_loss_func": needs_logits,
        "preprocess_logits_for_metrics": needs_logits,
        "model_init": "a pipeline is made of one model",
        "optimizers": "an optimizer is made for the parameters of each stage; use optimizer_cls_and_kwargs",
    }
    return [
        Fault(where=name, rule=reason, fix="leave it out")
        for name, reason in reasons.items()
        if kwargs.get(name) not in (None, (None, None))
    ]
