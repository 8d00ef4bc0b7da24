"""Losses of TRL that several ranks compute as one process does.

With trl 1.16.0, `DPOTrainer` with the loss type `sft`, `CPOTrainer`, `ORPOTrainer` and `TPOTrainer` add a mean over the
tokens of a micro-batch, and engines average the means of ranks with different numbers of tokens.

`KTOTrainer` estimates the KL term from prompts with the completions of other rows, which are rotated within each
`per_device_train_batch_size` rows. Rows keep their order, so rotating within the rows of all ranks yields the pairs of
one process.

`GRPOTrainer` and `RLOOTrainer` sample completions on each rank for its own rows.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import patches

if TYPE_CHECKING:
    import torch
    from transformers import Trainer


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


def classes_of_trl(kind: type) -> set[str]:
    """Return the names of a trainer class and its bases in TRL."""
    return {base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == "trl"}


def sample_by_row(trainer: Any) -> None:
    """Make the tokens that GRPO and RLOO sample with `generate` a function of seed, step and row, not of the rank.

    TRL 1.16.0 seeds ranks alike, and each draws for its own rows, so that any other number of ranks samples other
    completions. Here every row of the global batch draws from a generator of its own, by inverting the cumulative
    distribution: layouts and one process sample the same completions, from the same distributions.
    """
    if not classes_of_trl(type(trainer)) & {"GRPOTrainer", "RLOOTrainer"} or trainer.args.use_vllm:
        return
    axes = trainer.accelerator.parallelism_config
    shared = 1 if axes is None else axes.tp_size * axes.sp_size
    data_ranks, data_rank = (number // shared for number in (trainer.args.world_size, trainer.args.process_index))
    generated: dict[tuple[bool, int], int] = {}

    def drawing(generate: Callable[..., Any]) -> Callable[..., Any]:
        def generate_turn(prompt_ids: Any, *args: Any, **settings: Any) -> Any:
            import torch

            step, count = (bool(trainer.model.training), trainer.state.global_step), len(prompt_ids)
            first = generated.get(step, 0) + data_rank * count
            generated[step] = generated.get(step, 0) + data_ranks * count
            numbers = [random.Random(repr((trainer.args.seed, *step, row))) for row in range(first, first + count)]

            def by_row(sample: Callable[..., Any]) -> Callable[..., Any]:
                def multinomial(probabilities: torch.Tensor, num_samples: int, **options: Any) -> torch.Tensor:
                    if probabilities.shape[:-1] != (count,) or num_samples != 1:
                        return sample(probabilities, num_samples, **options)
                    cumulative_BV = probabilities.double().cumsum(-1)
                    drawn = [[number.random()] for number in numbers]
                    drawn_B1 = torch.tensor(drawn, dtype=torch.float64, device=probabilities.device)
                    below_B1 = torch.searchsorted(cumulative_BV, drawn_B1 * cumulative_BV[:, -1:], right=True)
                    return below_B1.clamp(max=probabilities.shape[-1] - 1)

                return multinomial

            with patches.applied("sampled-rows", by_row):
                return generate(prompt_ids, *args, **settings)

        return generate_turn

    patches.apply("rows-of-a-generation", drawing, on=trainer)


def weigh_token_means(trainer: Any) -> None:
    """Make means over the tokens of a rank's micro-batch means over those of all ranks, in training."""
    own: Any = trainer
    kinds = classes_of_trl(type(trainer))
    if trainer.args.world_size == 1:
        return

    def share(tokens: torch.Tensor) -> torch.Tensor:
        """Return the number of a rank's tokens over the mean of all ranks."""
        count = tokens.sum().float().reshape(1).to(trainer.args.device)
        return count[0] / trainer.accelerator.gather(count).mean().clamp(min=1)

    def sharing_preferred(forward: Callable[..., Any]) -> Callable[..., Any]:
        def concatenated_forward(model: Any, batch: Any) -> Any:
            result = forward(model, batch)
            if not model.training:
                return result
            if "ORPOTrainer" in kinds and not own.is_encoder_decoder:
                trained = batch["chosen_attention_mask"] == 1
            else:
                trained = batch["chosen_labels"] != -100
            # The fifth value is the mean over the tokens of the preferred answers.
            mean = result[4] * share(trained if own.is_encoder_decoder else trained[:, 1:])
            return (*result[:4], mean, *result[5:])

        return concatenated_forward

    @contextmanager
    def over_all_ranks(inputs: Any) -> Iterator[None]:
        # Rows are preferred answers, rejected answers and, in TPO, references.
        if "TPOTrainer" in kinds:
            before = {"tpo_alpha": own.tpo_alpha}
            shared = {"tpo_alpha": own.tpo_alpha * share(inputs["completion_mask"].chunk(3)[2][:, 1:])}
        else:
            before, factor = {"loss_weights": own.loss_weights}, share(inputs["completion_mask"].chunk(2)[0][:, 1:])
            pairs = zip(own.loss_types, own.loss_weights, strict=True)
            shared = {"loss_weights": [each * factor if loss == "sft" else each for loss, each in pairs]}
        vars(own).update(shared)
        try:
            yield
        finally:
            vars(own).update(before)

    if kinds & {"CPOTrainer", "ORPOTrainer"}:
        patches.apply("mean-of-preferred-tokens", sharing_preferred, on=trainer)
    args: Any = trainer.args
    if ("DPOTrainer" in kinds and "sft" in args.loss_type) or ("TPOTrainer" in kinds and args.tpo_alpha):
        own.token_means = over_all_ranks
