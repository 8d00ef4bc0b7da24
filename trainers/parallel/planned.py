"""Create the Trainer that runs a plan's layout: the stock Trainer with callbacks, or `PipelineTrainer`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ...ds_configs.legality.combinations import (
    AXES,
    COLUMNS,
    STEP_METHODS,
    TRAINERS,
    batch_loss_errors,
    cell,
    columns_of,
    incompatibility_errors,
)
from ...ds_configs.legality.trainer_parameters import PARAMETERS, parameter_errors
from ...ds_configs.memory.rank_parameters import pipeline_stages
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.layout import Layout, PipelineStage
from ...plugins.accelerate import RepeatedSamples, let_ranks_read_streams
from ...plugins.deepspeed.engine import refuse_run_effects
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.transformers.attention import attend_by_document
from ...plugins.transformers.gradient_checkpointing import allow_offload_on_cpu_ranks
from ...plugins.transformers.optimizers import (
    OwnOptimizer,
    model_errors,
    note_hidden_shapes,
    optimizer_class_errors,
    optimizer_errors,
    prepare_optimizer,
    replaces_optimizers,
)
from ...plugins.transformers.output_heads import accepts_shifted_labels, base_model
from ...plugins.transformers.training_arguments import balances_experts, layout_of, trainer_errors
from ...plugins.trl import classes_of_trl, pairs_of_a_micro_step, train_as_one_process
from ..checkpoints import checked_checkpoint
from ..counting.counts import OwnLoss
from ..exact import count_as_one_process, exact_class
from .balance_loss import balance_over_ranks, check_balance_loss

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments

    from ...ds_configs.plan.plan import Plan
    from ...ds_configs.specs.job import TrainingJob

_PIPELINE_PARAMETERS = ("attn_implementation",)
"""Parameters that `PipelineTrainer` has and the Trainer does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedParallelism:
    """What runs the axes of a layout beyond data parallelism."""

    layout: Layout
    callbacks: tuple[Any, ...]
    """One for each axis that the stock Trainer runs, with `prepare` and `attach`."""
    stages: tuple[PipelineStage, ...] = ()
    """The layers of each pipeline stage; empty for stages that `PipelineTrainer` balances."""
    job: TrainingJob | None = None
    """With the layout decides about tiles and checkpoints in host memory; `None` for neither."""

    @property
    def is_pipeline(self) -> bool:
        """Whether the layers are split into pipeline stages."""
        return self.layout.pp > 1

    def columns(self, args: TrainingArguments) -> tuple[str, ...]:
        """Return the columns of a run in the tables of combinations; none for one process."""
        axes: dict[str, Any] = dict.fromkeys(self.layout.axes, 2)
        return columns_of(replace(layout_of(args, pipeline=self.is_pipeline), **axes))

    def class_errors(self, kind: type, args: TrainingArguments) -> list[ConfigError]:
        """Return why the layout would train a trainer class with this configuration other than one process does."""
        columns = self.columns(args)
        # With a `parallelism_config` in its arguments, a class runs sequence parallelism itself.
        shares = getattr(kind, "shares_sequences", False) and self.layout.sp == 1
        errors = incompatibility_errors(
            table_rows(kind, args), [each for each in columns if each != "sp" or not shares]
        )
        errors += batch_loss_errors(classes_of_trl(kind), args, data_ranks=args.world_size // self.layout.tp)
        axes = [column for column in columns if column in AXES]
        if axes and not errors and (own := own_steps(kind)):
            rule = f"is not supported with {', '.join(COLUMNS[axis] for axis in axes)}: {own}"
            fix = "use a layout without these axes, or a subclass that changes neither data nor steps"
            errors.append(ConfigError(where="trainer_class", value=kind.__name__, rule=rule, fix=fix))
        return errors

    def make_trainer(
        self,
        *,
        model: Any = None,
        args: TrainingArguments,
        revision: str | None = None,
        trainer_class: Any = None,
        own_loss: OwnLoss | None = None,
        **settings: Any,
    ) -> Any:
        """Return the trainer for the layout.

        Raises:
            UsageError: model, arguments and layout do not combine; lists all errors of an axis.
                `ds_configs/legality/trainer_parameters.py` lists the parameters that a layout rejects.
        """
        from transformers import Trainer

        refuse_run_effects(args)
        columns = self.columns(args)
        if errors := self._settings_errors(model, args, trainer_class, settings, columns):
            raise UsageError(errors)
        optimizer, scheduler = settings.get("optimizers") or (None, None)
        if attaches_optimizer := optimizer is not None and replaces_optimizers(columns):
            # Transformers would drop it or reject it.
            del settings["optimizers"]
        for callback in self.callbacks:
            callback.prepare(args, model)
        if self.is_pipeline:
            from .pipeline import PipelineTrainer

            if trainer_class is not None and not issubclass(trainer_class, PipelineTrainer):
                rule = "does not run pipeline stages, which compute only the loss of labels"
                fix = "use a layout other than pp, or a subclass of PipelineTrainer"
                raise UsageError(ConfigError(where="trainer_class", value=trainer_class.__name__, rule=rule, fix=fix))
            trainer: Any = exact_class(trainer_class or PipelineTrainer)(
                model=model,
                args=args,
                pipeline_stages=self.stages or self.layout.pp,
                tensor_parallel_size=self.layout.tp,
                revision=revision,
                **settings,
            )
        else:
            kind = trainer_class or Trainer
            with pairs_of_a_micro_step(kind, args.world_size // self.layout.tp):
                trainer = exact_class(kind)(model=model, args=args, **settings)
        trainer.checked_checkpoint = checked_checkpoint
        if optimizer is not None:
            trainer.has_own_optimizer = True
            note_hidden_shapes(optimizer)
            if errors := model_errors(optimizer, trainer.model, columns):
                raise UsageError(errors)
        if attaches_optimizer:
            trainer.given_optimizer = OwnOptimizer(optimizer, scheduler)
        if getattr(args, "train_sampling_strategy", None) == "group_by_length":
            from ...plugins.transformers.length_groups import LengthGroupOrder

            trainer.add_callback(LengthGroupOrder())
        if own_loss is not None:
            trainer.own_loss = own_loss
        trainer.label_ranks = ranks_of_labels(trainer)
        train_as_one_process(trainer, self.layout.tp)
        if not self.is_pipeline:
            let_ranks_read_streams(trainer)
            check_second_models(trainer)
            check_balance_of_batches(trainer)
            check_learned_positions(trainer)
            attend_by_document(base_model(trainer.model))
            if not self.callbacks:
                count_as_one_process(trainer, weighs_own_losses=True)
                if balances_experts(trainer.model):
                    check_balance_loss(trainer.model)
                balance_over_ranks(trainer)
        for callback in self.callbacks:
            callback.attach(trainer)
        if self.job is not None and not self.is_pipeline:
            attach_long_sequences(trainer, self.layout, self.job)
        trainer.repeated_samples = RepeatedSamples()
        if not self.is_pipeline and (errors := trainer_errors(trainer)):
            raise UsageError(errors)
        prepare_optimizer(trainer)
        return trainer

    def _settings_errors(
        self,
        model: Any,
        args: TrainingArguments,
        trainer_class: Any,
        settings: Mapping[str, Any],
        columns: tuple[str, ...],
    ) -> list[ConfigError]:
        """Return which of the Trainer's arguments the layout rejects; warn about unknown arguments."""
        from transformers import Trainer

        kind = trainer_class or Trainer
        names = [name for name, value in settings.items() if value is not None and value != (None, None)]
        rows = table_rows(kind, args)
        errors = self.class_errors(kind, args)
        if "PipelineTrainer" in rows and not self.is_pipeline and not errors:
            rule = cell("PipelineTrainer", "ddp").reason
            errors.append(ConfigError(where="trainer_class", value=kind.__name__, rule=rule, fix="omit trainer_class"))
        if "sp" in columns and any(row.startswith("SFTTrainer") for row in rows):
            # TRL rejects them too, with a message that does not name the layout.
            rejects = {
                "compute_loss_func": "compute_loss_func" in names,
                "label_smoothing_factor": args.label_smoothing_factor > 0,
            }
            rule = f"is not supported by {rows[0]} with sp: {cell('SFTTrainer.dft', 'sp').reason}"
            fix = "omit it, or use a layout other than sp"
            errors += [ConfigError(where=name, rule=rule, fix=fix) for name, is_set in rejects.items() if is_set]
        errors += parameter_errors(names, columns)
        rejected = {error.where for error in errors}
        parameters = inspect.signature(kind).parameters
        accepted = {*parameters, *(_PIPELINE_PARAMETERS if self.is_pipeline else ())}
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        for name in names:
            if name not in rejected and name not in accepted and not takes_all:
                near = get_close_matches(name, accepted, n=1)
                fix = f"did you mean {near[0]}?" if near else f"pass one of {', '.join(parameters)}, or omit it"
                errors.append(ConfigError(where=name, rule=f"is not a parameter of {kind.__name__}", fix=fix))
        if model is None and "model_init" not in names:
            errors.append(ConfigError(where="model", rule="is missing", fix="pass model=..., or model_init=..."))
        if self.callbacks and isinstance(model, str):
            rule = "must be a loaded model under this layout"
            errors.append(ConfigError(where="model", value=model, rule=rule, fix="load it with from_pretrained"))
        if errors:
            return errors
        if "model_init" in names and "optimizers" in names:
            rule = "holds parameters of a model that model_init creates again when training starts"
            return [ConfigError(where="optimizers", rule=rule, fix="use optimizer_cls_and_kwargs, or pass model=...")]
        if "optimizers" in names:
            optimizer, scheduler = settings["optimizers"]
            errors += optimizer_errors(optimizer, scheduler, args, columns)
        if "optimizer_cls_and_kwargs" in names:
            errors += optimizer_class_errors(settings["optimizer_cls_and_kwargs"], args, columns)
        if columns and not _is_from(kind, "shardwright"):
            for name in names:
                if name not in (*PARAMETERS, *_PIPELINE_PARAMETERS):
                    note_on_first_rank(
                        f"Shardwright has not verified the parameter {name} of {kind.__name__} under this layout. "
                        "It is passed on unchanged: compare a few steps with one process before you rely on it"
                    )
        return errors


def _is_from(kind: type, package: str) -> bool:
    return kind.__module__.partition(".")[0] == package


def _row_of(base: type) -> str | None:
    package, name = base.__module__.partition(".")[0], base.__name__
    if package == "trl" and name == "DistillationTrainer":
        name = "trl.DistillationTrainer"
    return name if package in ("transformers", "trl", "shardwright") and name in TRAINERS else None


def own_steps(kind: type) -> str:
    """Return what a trainer class changes in the samples or steps of its nearest base in the table; empty for nothing.

    Samplers that count processes, for example, count also those that share samples. A class of TRL without a row is not
    proven, whatever it changes.
    """
    from transformers import Trainer

    proven = next((base.__mro__ for base in kind.__mro__ if _row_of(base)), ())
    for base in takewhile(lambda base: base is not Trainer, kind.__mro__):
        if base in proven or _is_from(base, "transformers") or _is_from(base, "shardwright"):
            continue
        if methods := sorted(STEP_METHODS & vars(base).keys()):
            return (
                f"{base.__name__} overrides {', '.join(methods)}, and may give each rank samples that ranks must share"
            )
        if _is_from(base, "trl") and base.__name__ != "_BaseTrainer":
            return f"no test compares {base.__name__} with one process"
    return ""


def table_rows(kind: type, args: TrainingArguments) -> list[str]:
    """Return the rows of a trainer class in the table of combinations: its nearest base, or the settings it adds."""
    name = next((row for row in map(_row_of, kind.__mro__) if row), kind.__name__)
    added = {
        "SFTTrainer.packing": getattr(args, "packing", False) or getattr(args, "padding_free", False),
        "SFTTrainer.dft": getattr(args, "loss_type", None) == "dft",
        "DPOTrainer.precomputed": getattr(args, "precompute_ref_log_probs", False),
    }
    return [row for row, is_set in added.items() if is_set and row.startswith(f"{name}.")] or [name]


def engine_logits(trainer: Any, input_ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, T, V] that a trained engine computes for complete sequences, in evaluation mode.

    Every rank must call it with the same B sequences of T tokens; sequence parallelism must divide T. V is the
    vocabulary size.
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


def parallelism_of(
    layout: Layout, *, stages: tuple[PipelineStage, ...] = (), job: TrainingJob | None = None
) -> PlannedParallelism:
    """Return what runs the axes of a layout."""
    callbacks: list[Any] = []
    if layout.sp > 1:
        from .sequence import SequenceParallelCallback

        callbacks.append(SequenceParallelCallback(layout.sp))
    if layout.cp > 1:
        from .context import ContextParallelism

        callbacks.append(ContextParallelism(layout.cp))
    if layout.ep > 1:
        from .expert import ExpertParallelCallback

        callbacks.append(ExpertParallelCallback(layout.ep))
    if layout.tp > 1 and layout.pp == 1:
        from .tensor import TensorParallelCallback

        callbacks.append(TensorParallelCallback(layout.tp))
    assert len(stages) in (0, layout.pp), "stages belong to the layout"
    return PlannedParallelism(layout=layout, callbacks=tuple(callbacks), stages=stages, job=job)


def planned_parallelism(plan: Plan) -> PlannedParallelism:
    """Return what runs a plan's axes; the plan's cost terms balance the pipeline."""
    layout = plan.chosen.layout
    stages: tuple[PipelineStage, ...] = ()
    if layout.pp > 1:
        stages = pipeline_stages(plan.model, plan.job, layout.pp, tensor_parallel_size=layout.tp)
    return parallelism_of(layout, stages=stages, job=plan.job)


def attach_long_sequences(trainer: Any, layout: Layout, job: TrainingJob) -> None:
    """Attach the tiles and the checkpoints in host memory of a layout, unless a Trainer has them already.

    A distillation computes its own loss in chunks, so that no loss is tiled here.

    Raises:
        UsageError: the model or the Trainer does not support them; lists all errors.
    """
    from .long_sequences import LongSequenceCallback

    tiled_loss = job.loss == "chunked" and not job.second_models and layout.pp == 1 and layout.tp == 1
    tiled_loss = tiled_loss and accepts_shifted_labels(base_model(trainer.model))
    attached = any(isinstance(other, LongSequenceCallback) for other in trainer.callback_handler.callbacks)
    offloaded = layout.offloaded_checkpoints
    if offloaded and job.offload_activations == "transformers":
        allow_offload_on_cpu_ranks()
        offloaded = 0
    if not attached and (layout.tiled_mlp or tiled_loss or offloaded):
        LongSequenceCallback(tiled_mlp=layout.tiled_mlp, tiled_loss=tiled_loss, offloaded_checkpoints=offloaded).attach(
            trainer
        )


MULTIPLY_BY_RANKS = frozenset({"AsyncGRPOTrainer", "DistillationTrainer", "SFTTrainer"})
"""Trainers of TRL whose loss multiplies by the number of ranks, as `Trainer` does (trl 1.16.0).

`compute_loss` gets the number of labels on all ranks, and engines average gradients over the ranks. The losses of other
classes are therefore too small by the number of ranks.
"""


def ranks_of_labels(trainer: Any) -> int:
    """Return by how many ranks to divide the number of labels, for a loss of TRL that does not multiply by them.

    1 for a `compute_loss` of the user, who decides whether to multiply, and for runs with a `parallelism_config`, whose
    ranks count their own shards.
    """
    losses = (base for base in type(trainer).__mro__ if _is_from(base, "trl") and "compute_loss" in vars(base))
    nearest = next(losses, None)
    shards = getattr(trainer.accelerator, "parallelism_config", None) is not None
    if nearest is None or nearest.__name__ in MULTIPLY_BY_RANKS or shards:
        return 1
    return int(trainer.accelerator.num_processes)


def check_balance_of_batches(trainer: Any) -> None:
    """Reject a balance loss in a trainer of TRL that generates answers, on several ranks.

    Seen with trl 1.16.0: each rank shuffles the answers that it generated before it splits them into micro-batches. The
    balance loss of a micro-batch is no sum over its rows, and no process would train these micro-batches.

    Raises:
        UsageError: there are several ranks, and the balance loss is switched on.
    """
    config, args = getattr(trainer.model, "config", None), trainer.args
    shuffles = {"GRPOTrainer", "RLOOTrainer"} & {base.__name__ for base in type(trainer).__mro__}
    if not shuffles or config is None or args.world_size == 1:
        return
    text = config.get_text_config()
    # TRL adds the loss whenever the model has one.
    coefficient = getattr(args, "router_aux_loss_coef", None)
    coefficient = getattr(text, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient
    if hasattr(text, "output_router_logits") and coefficient:
        rule = f"adds the balance loss of micro-batches that each rank of {type(trainer).__name__} shuffles"
        fix = "set router_aux_loss_coef=0.0 in its configuration"
        raise UsageError(ConfigError(where="router_aux_loss_coef", value=coefficient, rule=rule, fix=fix))


def check_second_models(trainer: Any) -> None:
    """Reject a second model that would compute other values under the layout.

    Seen with trl 1.16.0: under FSDP2 Accelerate can load weights on the first rank only, and TRL shards the empty
    reference of the other ranks. Under sequence parallelism a second model attends only to a shard of the sequence.

    Raises:
        UsageError: a second model would compute other values than in one process.
    """
    import torch

    if getattr(trainer, "shares_sequences", False):
        return
    trained = (trainer.model, trainer.model_wrapped)
    modules = {name: value for name, value in vars(trainer).items() if isinstance(value, torch.nn.Module)}
    second = next((name for name, module in modules.items() if not any(module is model for model in trained)), None)
    if second is None:
        return
    where = f"{type(trainer).__name__}.{second}"
    axes = trainer.accelerator.parallelism_config
    if axes is not None and axes.sp_size > 1:
        rule = "is a second model, which would attend only to a rank's shard of the sequence"
        raise UsageError(ConfigError(where=where, rule=rule, fix="use a layout other than sp"))
    loads_on_first_rank = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() in ("true", "1")
    is_complete = getattr(modules[second], "has_weights_on_every_rank", False)
    if trainer.is_fsdp_enabled and loads_on_first_rank and not is_complete:
        rule = "is a second model, whose weights only the first rank would load"
        fix = "set os.environ['FSDP_CPU_RAM_EFFICIENT_LOADING'] = 'false' before it is loaded, or use ZeRO"
        raise UsageError(ConfigError(where=where, rule=rule, fix=fix))


def check_learned_positions(trainer: Any) -> None:
    """Reject TRL's distillation, GKD, GRPO and RLOO of a model with learned positions, on several ranks.

    Seen with trl 1.16.0: prompts are padded on the left to the longest prompt of the rank, and no positions are passed
    on. A rank therefore trains other positions than one process.

    Raises:
        UsageError: the model has a position embedding.
    """
    import torch

    kinds = {base.__name__ for base in type(trainer).__mro__ if _is_from(base, "trl")}
    distills = bool(kinds & {"DistillationTrainer", "GKDTrainer"})
    if not (distills or kinds & {"GRPOTrainer", "RLOOTrainer"}) or trainer.args.world_size == 1:
        return
    model = trainer.model
    longest = getattr(model.config, "max_position_embeddings", None) or 0
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    # Some models have two more rows for padding.
    learned = [table for table in tables if longest <= table.num_embeddings <= longest + 2]
    if any(table is not model.get_input_embeddings() for table in learned):
        rule = "has learned positions, and prompts are padded on the left to the longest prompt of each rank"
        fix = "use a model with rotary positions"
        fix += ", or shardwright.trainers.DistillationTrainer" if distills else ", or one process"
        raise UsageError(ConfigError(where="model", value=type(trainer.model).__name__, rule=rule, fix=fix))
