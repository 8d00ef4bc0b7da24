"""Trainer callback for DeepSpeed AutoEP: experts are sharded over ranks, with the results of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins import patches
from ...plugins.deepspeed import auto_ep
from ...plugins.transformers.training_arguments import deepspeed_configuration, trainer_errors
from ..exact import Axis, ExactTrainer, check_attached, count_as_one_process
from .balance_loss import BalanceOverRanks, RoutedTokens, assigned_to, sum_over_ranks

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, Trainer, TrainerControl, TrainerState, TrainingArguments


class ExpertParallelCallback(TrainerCallback):
    """Shard the experts of every layer over ranks that train on different samples.

    Works with ZeRO-0, 1, 2 and 3 on Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and V3. No token is dropped. Checkpoints
    and `save_model` contain all experts under the model's own parameter names.

    >>> callback = ExpertParallelCallback(2)  # doctest: +SKIP
    >>> callback.prepare(arguments, model)  # doctest: +SKIP
    >>> trainer = Trainer(model, arguments, train_dataset=samples)  # doctest: +SKIP
    >>> callback.attach(trainer)  # doctest: +SKIP

    Args:
        expert_parallel_size: Number of ranks that share the experts of a layer; it must divide the number of experts
            and of ranks.

    Raises:
        UsageError: the size is below 2.
    """

    def __init__(self, expert_parallel_size: int) -> None:
        if expert_parallel_size < 2:
            rule, fix = "must be at least 2", "omit the callback to train without expert parallelism"
            raise UsageError(ConfigError(where="expert_parallel_size", value=expert_parallel_size, rule=rule, fix=fix))
        self.expert_parallel_size = expert_parallel_size
        self._axis = ExpertAxis(expert_parallel_size)
        self._shapes: Mapping[str, tuple[int, ...]] | None = None
        self._trainer: Any = None

    def prepare(self, training_arguments: TrainingArguments, model: PreTrainedModel) -> None:
        """Check the model and the layout, and write the DeepSpeed section; call it before the Trainer is created.

        Raises:
            UsageError: the experts cannot be sharded, or the configuration contradicts the callback; lists all errors.
        """
        size = self.expert_parallel_size
        configuration = deepspeed_configuration(training_arguments)
        errors = auto_ep.expert_parallelism_errors(training_arguments, model.config, size)
        errors += auto_ep.configuration_errors(configuration or {}, model.config, size)
        errors += auto_ep.expert_model_errors(model)
        reentrant = (training_arguments.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        if (
            training_arguments.gradient_checkpointing
            and reentrant
            and getattr(model.config, "output_router_logits", False)
        ):
            where = "gradient_checkpointing_kwargs.use_reentrant"
            rule = "runs the routers without a graph, so the balance loss would have no gradient"
            errors.append(ConfigError(where=where, value=True, rule=rule, fix="set it to false"))
        if errors:
            raise UsageError(errors)
        assert configuration is not None, "the rules reject other engines"
        auto_ep.write_section(configuration, model.config, size)
        auto_ep.accept_class_names_of_recorders()
        self._shapes = auto_ep.whole_shapes(model)

    def attach(self, trainer: Trainer) -> None:
        """Give a Trainer the axis of experts; call it once, right after the Trainer is created.

        Raises:
            UsageError: `prepare` was not called with the Trainer's arguments, or the callback has a Trainer already.
        """
        configuration = deepspeed_configuration(trainer.args) or {}
        if self._shapes is None or auto_ep.SECTION not in configuration:
            rule, fix = "was not prepared", "call prepare(training_arguments, model) before the Trainer is created"
            raise UsageError(ConfigError(where="ExpertParallelCallback", rule=rule, fix=fix))
        if self._trainer is not None:
            fix = "create one callback for each Trainer"
            raise UsageError(
                ConfigError(where="ExpertParallelCallback", rule="is already attached to a Trainer", fix=fix)
            )
        trainer.corrects_balance_loss = True
        if errors := trainer_errors(trainer):
            raise UsageError(errors)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        count_as_one_process(trainer, self._axis)
        shapes = self._shapes

        def with_all_experts(state_dict: Callable[..., Any]) -> Callable[..., Any]:
            def get_state_dict(model: Any, *arguments: object, **keywords: object) -> Any:
                module = getattr(model, "module", model)
                if not auto_ep.moe_layers(module):
                    return state_dict(model, *arguments, **keywords)
                return auto_ep.whole_state_dict(module, shapes, keep=trainer.args.should_save)

            return get_state_dict

        patches.apply("expert-parallel-state-dict", with_all_experts, on=trainer.accelerator)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Watch the routers of the engine, which exists now.

        Raises:
            UsageError: `attach` was not called, or the Trainer's settings do not combine with expert parallelism.
        """
        check_attached(self, self._trainer)
        if errors := trainer_errors(self._trainer):
            raise UsageError(errors)
        self._axis.watch(auto_ep.moe_layers(self._trainer.deepspeed.module))
        # The model cannot balance the routing of experts on other ranks.
        self._trainer.rank_balance = BalanceOverRanks(self._trainer, self._axis.new_records)


class ExpertAxis(Axis):
    """Marks the parameter groups of experts, and records the routing of AutoEP's layers.

    Hooks record only while a loss is computed, so that a forward pass that the backward pass repeats is not counted.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._handles: list[Any] = []
        self._records: list[RoutedTokens] | None = None
        """Routing of each layer that has run since the loss began; `None` outside of losses."""
        self._returned = 0
        """How many of them `new_records` has seen."""
        self._logits: Tensor | None = None
        self._assigned_LE: Tensor | None = None
        """Assignments since the last log, in fp64, which keeps counts between two distant logs exact."""

    def watch(self, layers: Mapping[str, Any]) -> None:
        """Record the routing of AutoEP's layers, in order, instead of those of an earlier engine."""
        for handle in self._handles:
            handle.remove()

        def keep_logits(_module: Any, _arguments: Any, output: Any) -> None:
            self._logits = output if self._records is not None else None

        def keep_routing(_module: Any, _arguments: Any, output: Any) -> None:
            if self._records is None:
                return
            assert self._logits is not None, "the gate runs inside the router"
            self._records.append(RoutedTokens(logits_TE=self._logits, selected_TK=output[1]))

        routers = [layer.router for layer in layers.values()]
        self._handles = [router.gate.register_forward_hook(keep_logits) for router in routers]
        self._handles += [router.register_forward_hook(keep_routing) for router in routers]

    def new_records(self) -> list[RoutedTokens]:
        """Return the records of the latest forward pass once; an empty list if only unwatched models ran since."""
        seen, self._returned = self._returned, len(self._records or ())
        return self._latest() if self._returned > seen else []

    def _latest(self) -> list[RoutedTokens]:
        """Return the records of the latest forward pass; a loss may run several."""
        return (self._records or [])[-(len(self._handles) // 2) :]

    def group_parameters(self, trainer: ExactTrainer, optimizer: Any) -> None:
        """Mark the groups of experts; the Trainer groups parameters by weight decay."""
        auto_ep.mark_expert_groups(optimizer, trainer.model, self._size)

    def correct_clipping(self, engine: Any) -> None:
        """Clip by the norm over all ranks' experts; ZeRO does so itself."""
        if not engine.zero_optimization():
            auto_ep.clip_by_the_whole_norm(engine)

    @contextmanager
    def computing_loss(self, trainer: ExactTrainer, model: Any, inputs: Any) -> Iterator[None]:
        """Record the routing of a micro-batch, and add it to the sums for the log without waiting for the device."""
        import torch

        mask = inputs.get("attention_mask") if hasattr(inputs, "get") else None
        mask_T = mask.reshape(-1).float() if mask is not None and mask.dim() == 2 else None
        # Before training begins, no router is watched.
        self._records, self._returned = [] if self._handles else None, 0
        try:
            yield
            if model.training and (records := self._latest()):
                tokens = len(records[0].logits_TE)
                # A loss may have rearranged the batch.
                mask_T = mask_T if mask_T is not None and len(mask_T) == tokens else None
                mask_T = trainer.rank_balance.without_repeated(mask_T, records[0].logits_TE)
                assigned_LE = torch.stack([assigned_to(routed, mask_T) for routed in records]).double()
                self._assigned_LE = assigned_LE if self._assigned_LE is None else self._assigned_LE + assigned_LE
        finally:
            self._records, self._logits = None, None

    def add_to_log(self, trainer: ExactTrainer, logs: dict[str, float]) -> dict[str, float]:
        """Add the load of a layer's fullest expert over the mean load, since the last log: the mean and the maximum."""
        if self._assigned_LE is None:
            return logs
        assigned_LE, self._assigned_LE = self._assigned_LE, None
        sum_over_ranks(assigned_LE)
        load_L = assigned_LE.max(-1).values / assigned_LE.mean(-1).clamp_min(1e-9)
        return logs | {"expert_load": load_L.mean().item(), "expert_load_max": load_L.max().item()}
