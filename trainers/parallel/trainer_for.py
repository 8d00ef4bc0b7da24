"""From a plan's layout to the Trainer that runs it: the stock one with callbacks, or `PipelineTrainer` for stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ...ds_configs.memory.pipeline_stages import pipeline_stages
from ...ds_configs.specs.errors import Fault, UsageError
from ...ds_configs.specs.stages import PipelineStage
from ...ds_configs.specs.strategy import Strategy
from ...plugins.accelerate.repeated_samples import weigh_repeated_samples_zero
from ...plugins.transformers.run_settings import balances_experts, trainer_faults

if TYPE_CHECKING:
    from ...ds_configs.plan.plan import Plan


class ParallelCallback(Protocol):
    """Interface of the callbacks of sequence, expert and tensor parallelism."""

    def prepare(self, training_arguments: Any, model: Any) -> None:
        """Do what must happen before a Trainer builds its accelerator."""

    def attach(self, trainer: Any) -> None:
        """Join a Trainer right after it was made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedParallelism:
    """The axes of a layout beyond data parallelism, as what runs them."""

    callbacks: tuple[ParallelCallback, ...] = ()
    """One for each axis that a callback of the stock Trainer runs."""
    pipeline_stages: int | tuple[PipelineStage, ...] = 1
    """Stages of the pipeline, or which layers each holds; 1 without a pipeline."""
    tensor_parallel_size: int = 1
    """Ranks that share the matrices of one pipeline stage; without a pipeline a callback divides them."""
    context_parallel_size: int = 1
    """Ranks that pass keys and values of a sequence around."""

    @property
    def is_pipeline(self) -> bool:
        """Whether the layers are divided among stages."""
        return self.pipeline_stages != 1

    @property
    def _holds_whole_models(self) -> bool:
        """Whether ranks differ in their samples alone."""
        return not (self.callbacks or self.is_pipeline or self.context_parallel_size > 1)

    def make_trainer(
        self, *, model: Any, args: Any, revision: str | None = None, trainer_class: Any = None, **settings: Any
    ) -> Any:
        """Return the trainer of the layout; `settings` are further arguments of the Trainer of Transformers.

        `trainer_class` takes the place of that Trainer, and not of `PipelineTrainer`.

        A pipeline may get the directory or Hub id of a checkpoint as its model, with its `revision`; every rank then
        reads its own stage alone.

        Raises:
            UsageError: model, arguments and layout do not go together; all faults of an axis together.
        """
        for callback in self.callbacks:
            callback.prepare(args, model)
        if self.context_parallel_size > 1:
            settings["data_collator"] = self._prepare_context(model, args, settings.get("data_collator"))
        if self.is_pipeline:
            if trainer_class is not None:
                rule = "does not run stages of a pipeline, which compute the loss of labels alone"
                fix = "use another layout than pp"
                raise UsageError(Fault(where="trainer_class", value=trainer_class.__name__, rule=rule, fix=fix))
            from .pipeline.trainer import PipelineTrainer

            trainer: Any = PipelineTrainer(
                model=model,
                args=args,
                pipeline_stages=self.pipeline_stages,
                tensor_parallel_size=self.tensor_parallel_size,
                revision=revision,
                **settings,
            )
        else:
            from transformers import Trainer

            trainer = (trainer_class or Trainer)(model=model, args=args, **settings)
        if self.context_parallel_size > 1:
            from .context.callback import check_context_parallel_trainer

            check_context_parallel_trainer(trainer)
        weigh_repeated_samples_zero(trainer)
        if self._holds_whole_models and balances_experts(trainer.model):
            _balance_over_ranks(trainer)
        for callback in self.callbacks:
            callback.attach(trainer)
        if not self.is_pipeline and (faults := trainer_faults(trainer)):
            raise UsageError(faults)
        return trainer

    def _prepare_context(self, model: Any, args: Any, collator: Any) -> Any:
        """Tell Accelerate of context parallelism and return a collator whose batches fit."""
        from transformers import default_data_collator

        from .context.callback import ContextParallelCollator, prepare_context_parallel

        prepare_context_parallel(args, model, self.context_parallel_size)
        return ContextParallelCollator(collator or default_data_collator, self.context_parallel_size)


def _balance_over_ranks(trainer: Any) -> None:
    if not getattr(trainer, "corrects_balance_loss", False):
        from .expert.balance_over_ranks import balance_over_ranks

        balance_over_ranks(trainer)


def engine_logits(trainer: Any, input_ids_BT: Any) -> Any:
    """Return the logits [B, T, V] that a trained engine computes for whole sequences, in evaluation mode.

    Every rank must call it, with the same B sequences of T tokens that sequence parallelism divides; V is the
    vocabulary.
    """
    import torch

    model = trainer.model_wrapped
    if hasattr(model, "eval_batch"):
        from ...plugins.deepspeed_pipeline.engine import whole_logits

        logits_BTV = whole_logits(model, (input_ids_BT,), input_ids_BT)
    else:
        model.eval()
        with torch.no_grad():
            logits_BTV = model(input_ids=input_ids_BT, use_cache=False).logits
    return logits_BTV.detach().float().contiguous()


def parallelism_of(strategy: Strategy, *, stages: Sequence[PipelineStage] = ()) -> PlannedParallelism:
    """Return what runs the axes of a strategy; `stages` says which layers each of `strategy.pp` stages holds."""
    callbacks: list[ParallelCallback] = []
    if strategy.sp > 1:
        from .sequence.callback import SequenceParallelCallback

        callbacks.append(SequenceParallelCallback(strategy.sp))
    if strategy.ep > 1:
        from .expert.callback import ExpertParallelCallback

        callbacks.append(ExpertParallelCallback(strategy.ep))
    if strategy.tp > 1 and strategy.pp == 1:
        from .tensor.callback import TensorParallelCallback

        callbacks.append(TensorParallelCallback(strategy.tp))
    assert len(stages) in (0, strategy.pp), "stages belong to the strategy"
    return PlannedParallelism(
        callbacks=tuple(callbacks),
        pipeline_stages=tuple(stages) or strategy.pp,
        tensor_parallel_size=strategy.tp if strategy.pp > 1 else 1,
        context_parallel_size=strategy.cp,
    )


def planned_parallelism(plan: Plan) -> PlannedParallelism:
    """Return what runs a plan's axes, its pipeline balanced by the plan's own cost terms."""
    strategy = plan.chosen.strategy
    stages: tuple[PipelineStage, ...] = ()
    if strategy.pp > 1:
        stages = pipeline_stages(plan.model, plan.job, strategy.pp, tensor_parallel_size=strategy.tp)
    return parallelism_of(strategy, stages=stages)
