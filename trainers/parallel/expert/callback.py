"""`ExpertParallelCallback`: DeepSpeed AutoEP in any Trainer, equal to the training of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from ....ds_configs.specs.errors import Fault, UsageError
from ....plugins.deepspeed import auto_ep
from ....plugins.deepspeed.auto_ep_checkpoint import Shapes, whole_shapes, whole_state_dict
from ....plugins.transformers.run_settings import trainer_faults
from ....plugins.transformers.training_arguments import deepspeed_configuration
from .balance import balance_loss_share
from .balance_over_ranks import balance_factor, sum_over_ranks
from .router_watch import RouterWatch


class ExpertParallelCallback(TrainerCallback):
    """Divides the experts of every layer over ranks that train on different samples.

    Works with ZeRO-0, 1, 2 and 3 on Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and V3. No token is dropped. Checkpoints
    and `save_model` hold all experts under the model's own names.

    >>> callback = ExpertParallelCallback(2)  # doctest: +SKIP
    >>> callback.prepare(arguments, model)  # doctest: +SKIP
    >>> trainer = Trainer(model, arguments, train_dataset=samples)  # doctest: +SKIP
    >>> callback.attach(trainer)  # doctest: +SKIP

    Args:
        expert_parallel_size: Ranks that share the experts of a layer; divides the experts and the ranks.
        log_routing: Whether to log `expert_load` (tokens of the fullest expert by those of the mean one, averaged over
            layers), `expert_load_max` (of the worst layer), `router_entropy` (nats) and `dropped_tokens`.

    Raises:
        UsageError: the size is below 2.
    """

    def __init__(self, expert_parallel_size: int, *, log_routing: bool = True) -> None:
        if expert_parallel_size < 2:
            rule, fix = "must be at least 2", "leave the callback out to train without expert parallelism"
            raise UsageError(Fault(where="expert_parallel_size", value=expert_parallel_size, rule=rule, fix=fix))
        self.expert_parallel_size = expert_parallel_size
        self._log_routing = log_routing
        self._shapes: Shapes | None = None
        self._trainer: Any = None
        self._watch: RouterWatch | None = None

    def prepare(self, training_arguments: Any, model: Any) -> None:
        """Check everything and write the DeepSpeed section; call it before the Trainer is made.

        Raises:
            UsageError: the experts cannot be divided so, or the configuration contradicts; all faults at once.
        """
        size = self.expert_parallel_size
        configuration = deepspeed_configuration(training_arguments)
        faults = auto_ep.expert_parallelism_faults(training_arguments, model.config, size)
        faults += auto_ep.configuration_faults(configuration or {}, model.config, size)
        faults += auto_ep.expert_model_faults(model)
        faults += _argument_faults(training_arguments, model.config)
        if faults:
            raise UsageError(faults)
        assert configuration is not None, "the rules refuse other engines"
        auto_ep.write_section(configuration, model.config, size)
        self._shapes = whole_shapes(model)

    def attach(self, trainer: Any) -> None:
        """Take over what only the Trainer's instance can; call it once, right after the Trainer was made.

        Raises:
            UsageError: `prepare` was not called with the Trainer's arguments, or the callback has a Trainer already.
        """
        configuration = deepspeed_configuration(trainer.args) or {}
        if self._shapes is None or auto_ep.SECTION not in configuration:
            rule, fix = "was not prepared", "call prepare(training_arguments, model) before the Trainer is made"
            raise UsageError(Fault(where="ExpertParallelCallback", rule=rule, fix=fix))
        if self._trainer is not None:
            fix = "make one callback for each Trainer"
            raise UsageError(Fault(where="ExpertParallelCallback", rule="has a Trainer already", fix=fix))
        trainer.corrects_balance_loss = True
        if faults := trainer_faults(trainer):
            raise UsageError(faults)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._override_optimizer(trainer)
        self._override_loss(trainer)
        self._override_log(trainer)
        self._override_saving(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch the routers of the engine, which exists by now."""
        if self._trainer is None:
            rule, fix = "was not attached", "call attach(trainer) before trainer.train()"
            raise UsageError(Fault(where="ExpertParallelCallback", rule=rule, fix=fix))
        if faults := trainer_faults(self._trainer):
            raise UsageError(faults)
        engine = self._trainer.deepspeed
        if not engine.zero_optimization():
            auto_ep.clip_by_the_whole_norm(engine)
        if self._watch is not None:
            self._watch.remove()
        self._watch = RouterWatch(auto_ep.moe_layers(engine.module))

    def _override_optimizer(self, trainer: Any) -> None:
        create = trainer.create_optimizer

        def create_optimizer(*arguments: Any, **keywords: Any) -> Any:
            optimizer = create(*arguments, **keywords)
            auto_ep.mark_expert_groups(optimizer, trainer.model, self.expert_parallel_size)
            return optimizer

        trainer.create_optimizer = create_optimizer

    def _override_loss(self, trainer: Any) -> None:
        compute = trainer.compute_loss

        def compute_loss(
            model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **keywords: Any
        ) -> Any:
            if self._watch is None:
                return compute(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch, **keywords)
            mask = inputs.get("attention_mask")
            mask_T = mask.reshape(-1).float() if mask is not None and mask.dim() == 2 else None
            config = trainer.model.config
            # Families without a balance loss of their own accept the flag and do nothing.
            strength = getattr(trainer.model, "router_aux_loss_coef", None)
            balances = bool(getattr(config, "output_router_logits", False))
            with self._watch.recording() as records, _without_balance_loss(config):
                loss, outputs = compute(model, inputs, True, num_items_in_batch=num_items_in_batch, **keywords)
            if self._log_routing and model.training:
                self._watch.add(records, mask_T)
            if balances and strength is not None:
                factor = balance_factor(trainer, num_items_in_batch, training=model.training)
                share = balance_loss_share(records, mask_T, sum_over_ranks)
                loss = loss + strength * factor * share
            return (loss, outputs) if return_outputs else loss

        trainer.compute_loss = compute_loss

    def _override_log(self, trainer: Any) -> None:
        log = trainer.log

        def log_with_routing(logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
            if "loss" in logs and self._watch is not None and self._log_routing:
                logs = logs | self._watch.report(sum_over_ranks)
            log(logs, *arguments, **keywords)

        trainer.log = log_with_routing

    def _override_saving(self, trainer: Any) -> None:
        state_dict = trainer.accelerator.get_state_dict

        def get_state_dict(model: Any, *arguments: Any, **keywords: Any) -> Any:
            module = getattr(model, "module", model)
            if not auto_ep.moe_layers(module):
                return state_dict(model, *arguments, **keywords)
            assert self._shapes is not None, "attached after prepare"
            return whole_state_dict(module, self._shapes, keep=trainer.args.should_save)

        trainer.accelerator.get_state_dict = get_state_dict


@contextmanager
def _without_balance_loss(config: Any) -> Iterator[None]:
    """Keep a model from adding its own balance loss, which knows neither ranks nor accumulation."""
    wanted = getattr(config, "output_router_logits", None)
    if wanted:
        config.output_router_logits = False
    try:
        yield
    finally:
        if wanted:
            config.output_router_logits = wanted


def _argument_faults(arguments: Any, model_config: Any) -> list[Fault]:
    reentrant = (arguments.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if arguments.gradient_checkpointing and reentrant and getattr(model_config, "output_router_logits", False):
        rule = "runs the routers without a graph, so that the balance loss would train nothing"
        where = "gradient_checkpointing_kwargs.use_reentrant"
        return [Fault(where=where, value=True, rule=rule, fix="set it to false")]
    return []
