"""TRL's losses that are no sums over rows, and pairs of prompts and completions in `KTOTrainer`.

Both are the same on several ranks as in one process, or rejected.

In trl 1.16.0 the KL term is estimated from prompts with the completions of other rows, which are rotated within each
`per_device_train_batch_size` rows. Rows keep their order, so rotating within the rows of all ranks yields the pairs of
one process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..ds_configs.specs.errors import ConfigError
from . import patches

if TYPE_CHECKING:
    from transformers import Trainer

_LOSSES_OF_BATCHES = {
    "aot": "sorts the log-ratios of a micro-batch",
    "aot_unpaired": "sorts the log-ratios of a micro-batch",
    "sft": "is a mean over the tokens of a micro-batch",
    "bnpo": "is a mean over the tokens of a micro-batch",
}
"""Values of `loss_type` in trl 1.16.0 whose loss of a batch is no sum over its rows."""


def batch_loss_errors(trainer: Any) -> list[ConfigError]:
    """Return an error for each setting of a TRL trainer whose loss of a batch is no sum over its rows.

    Ranks and micro-batches then train another loss than one process with the complete batch. One process without
    accumulation accepts all of them. Seen with trl 1.16.0:

    - `DPOTrainer`: of its losses `sft` is a mean over tokens, `aot` and `aot_unpaired` sort the batch. `bco_pair` has
      no running mean there.
    - `CPOTrainer`: `cpo_alpha` weighs a mean over tokens; 0 leaves a mean over rows.
    - `GRPOTrainer`: `bnpo` is a mean over tokens. `grpo`, `sapo`, `dr_grpo` and `luspo` are means over rows, and
      `dapo`, `cispo` and `vespo` divide by the tokens of all ranks.
    - The balance loss of a mixture is a product of means over a batch, and `GRPOTrainer` adds it by default.
    """
    names = [base.__name__ for base in type(trainer).__mro__ if base.__module__.partition(".")[0] == "trl"]
    args = trainer.args
    if not names or args.world_size * args.gradient_accumulation_steps == 1:
        return []
    errors = []
    kinds = getattr(args, "loss_type", None)
    trainers = {"DPOTrainer", "GRPOTrainer", "GMPOTrainer"} & set(names)
    for kind in [kinds] if isinstance(kinds, str) else kinds or []:
        if trainers and kind in _LOSSES_OF_BATCHES:
            rule = f"{_LOSSES_OF_BATCHES[kind]}, so ranks and micro-batches train another loss than one process"
            fix = 'use "dapo" or "grpo"' if "DPOTrainer" not in names else "use another loss, such as sigmoid or ipo"
            errors.append(ConfigError(where="loss_type", value=kind, rule=rule, fix=fix))
    if "CPOTrainer" in names and args.cpo_alpha:
        rule = "weighs a mean over the tokens of a micro-batch, so ranks train another loss than one process"
        errors.append(ConfigError(where="cpo_alpha", value=args.cpo_alpha, rule=rule, fix="set cpo_alpha=0"))
    samples_answers = {"GRPOTrainer", "RLOOTrainer"} & set(names)
    if samples_answers and getattr(trainer, "aux_loss_enabled", False):
        rule = (
            "adds a balance loss, a product of means over a micro-batch, so ranks train another loss than one process"
        )
        value = trainer.router_aux_loss_coef
        errors.append(ConfigError(where="router_aux_loss_coef", value=value, rule=rule, fix="set it to 0.0"))
    return errors


@contextmanager
def pairs_of_a_micro_step(trainer_class: Any, data_ranks: int) -> Iterator[None]:
    """Make a `KTOTrainer` that is created in the block pair the rows of all data-parallel ranks."""
    module = sys.modules.get("trl.trainer.kto_trainer")
    if module is None or data_ranks == 1 or not issubclass(trainer_class, module.KTOTrainer):
        yield
        return

    def pairing(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_merged(trainer: Trainer, dataset: Any, processing_class: Any, args: Any, *rest: object) -> Any:
            whole = copy.copy(args)
            whole.per_device_train_batch_size *= data_ranks
            return prepare(trainer, dataset, processing_class, whole, *rest)

        return prepare_merged

    with patches.applied("pairs-of-a-micro-step", pairing):
        yield
