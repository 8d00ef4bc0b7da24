"""Losses of TRL that several ranks compute as one process does.

With trl 1.16.0, `DPOTrainer` with the loss type `sft`, `CPOTrainer`, `ORPOTrainer` and `TPOTrainer` add a mean over the
tokens of a micro-batch, and engines average the means of ranks with different numbers of tokens.

`KTOTrainer` estimates the KL term from prompts with the completions of other rows, which are rotated within each
`per_device_train_batch_size` rows. Rows keep their order, so rotating within the rows of all ranks yields the pairs of
one process.

Trainers that generate completions sample them from the random numbers of each rank, and `GRPOTrainer` and `RLOOTrainer`
shuffle only a rank's completions before they split them into micro-batches. Here the noise of a token depends on the
seed, the step and the row's index in the batch of all ranks, and rows are shuffled over all ranks. Completions of vLLM
and of continuous batching keep their own random numbers.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from threading import Timer
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..ds_configs.specs.errors import ShardwrightError
from . import patches

if TYPE_CHECKING:
    import torch
    from transformers import Trainer

logger = logging.getLogger(__name__)
_SLOW_REWARD_SECONDS = 60.0
"""After this time a reward function is named in the log: other ranks wait for it."""


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


def vllm_releases() -> tuple[SpecifierSet, str | None]:
    """Return the releases of vLLM that the installed TRL generates with, and the installed one, without its build."""
    requirements = map(Requirement, metadata.requires("trl") or ())
    supported = next((each.specifier for each in requirements if each.name == "vllm"), SpecifierSet())
    try:
        return supported, Version(metadata.version("vllm")).base_version
    except metadata.PackageNotFoundError:
        return supported, None


def task_of(arguments: object) -> str | None:
    """Return the task of a configuration of TRL, such as `dpo` of `DPOConfig`; `None` for other classes.

    >>> task_of(object()) is None
    True
    """
    for base in type(arguments).__mro__:
        if base.__module__.partition(".")[0] == "trl" and base.__name__ != "_BaseConfig":
            return base.__name__.removesuffix("Config").lower()
    return None


def classes_of_trl(kind: type) -> set[str]:
    """Return the names of a trainer class and its bases in TRL."""
    return {base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == "trl"}


def train_as_one_process(trainer: Any, ranks_of_a_sample: int = 1) -> None:
    """Make losses, completions and logged values of a trainer of TRL those of one process; call it after it was made.

    `ranks_of_a_sample` read the same samples.
    """
    if hasattr(trainer, "_tp_size") and trainer.accelerator.parallelism_config is None:
        # TRL counts the tokens of every rank of a tensor-parallel group that DeepSpeed has made.
        trainer._tp_size = ranks_of_a_sample
    weigh_token_means(trainer)
    generate_as_one_process(trainer, ranks_of_a_sample)


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

    @contextmanager
    def over_tokens_of_all_ranks(inputs: Any) -> Iterator[None]:
        # The loss is a mean over the tokens of a micro-batch, divided by the number of micro-batches.
        mask = inputs["completion_mask"]
        mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
        before = own.current_gradient_accumulation_steps
        own.current_gradient_accumulation_steps = before / share(mask).item()
        try:
            yield
        finally:
            own.current_gradient_accumulation_steps = before

    if kinds & {"CPOTrainer", "ORPOTrainer"}:
        patches.apply("mean-of-preferred-tokens", sharing_preferred, on=trainer)
    args: Any = trainer.args
    if ("DPOTrainer" in kinds and "sft" in args.loss_type) or ("TPOTrainer" in kinds and args.tpo_alpha):
        own.token_means = over_all_ranks
    if "GRPOTrainer" in kinds and args.loss_type == "bnpo":
        own.token_means = over_tokens_of_all_ranks


def weigh_evaluated_batches(trainer: Any, samples: list[float]) -> None:
    """Make the values that TRL logs of an evaluation means over samples; it counts incomplete batches as full ones.

    Smallest and largest values stay those of batches. Values over tokens or over one kind of answers are weighed by the
    samples of their batches on all ranks too, so that they remain approximate. Call it before the evaluation's log.
    """
    if not classes_of_trl(type(trainer)):
        return
    for stored in (getattr(trainer, "_metrics", {}), getattr(trainer, "_stored_metrics", {})):
        values = stored.get("eval", {})
        for name, of_batches in values.items():
            if len(of_batches) == len(samples) and "min" not in name and "max" not in name:
                scale = len(samples) / sum(samples)
                values[name] = [value * count * scale for value, count in zip(of_batches, samples, strict=True)]


def generate_as_one_process(trainer: Any, ranks_of_a_sample: int = 1) -> None:
    """Make a trainer of TRL generate and shuffle the completions of one process, whatever its layout is."""
    kinds, own = classes_of_trl(type(trainer)), trainer
    if not kinds & {"GRPOTrainer", "RLOOTrainer", "GKDTrainer", "DistillationTrainer"}:
        return
    step_rows = [-1, 0]

    @contextmanager
    def generating(trains: bool) -> Iterator[None]:
        # Micro-batches of a step have numbers, so that a resumed run draws the noise of an uninterrupted one. The model
        # itself is in training mode only from the first step on.
        step = own.state.global_step
        step_rows[:] = [step, step_rows[1] + 1 if step_rows[0] == step else 0]
        seeds = (own.args.seed, int(trains), *step_rows)
        rank = own.accelerator.process_index // ranks_of_a_sample
        with ExitStack() as contexts:
            contexts.enter_context(patches.applied("noise-of-a-row", _with_noise_of_rows(seeds, rank)))
            for name in ("grpo", "rloo"):
                if f"{name.upper()}Trainer" in kinds:
                    contexts.enter_context(patches.applied(f"rows-of-all-ranks-{name}", _over_all_ranks(own, seeds)))
            yield

    own.generating = generating
    if kinds & {"GRPOTrainer", "RLOOTrainer"}:
        _check_rewards(own)


def _generator(device: Any, *seeds: int) -> torch.Generator:
    import numpy as np
    import torch

    seed = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(seed))


def _with_noise_of_rows(seeds: tuple[int, ...], rank: int) -> Callable[..., Any]:
    """Return what makes `generate` sample with noise that depends on the row's index in the batch of all ranks.

    The token with the largest sum of log-probability and Gumbel noise is a sample of the probabilities. All others get
    the probability 0, so that `torch.multinomial` returns it.
    """
    calls = iter(range(sys.maxsize))

    class NoiseOfRows:
        def __init__(self, call: int) -> None:
            self.call = call
            self.generators: list[torch.Generator] = []

        def __call__(self, input_ids_BT: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
            import torch

            rows, vocab_size = scores_BV.shape
            if not self.generators:
                first = rank * rows
                self.generators = [
                    _generator(scores_BV.device, *seeds, self.call, row) for row in range(first, first + rows)
                ]
            noise_BV = torch.stack(
                [
                    torch.empty(vocab_size, device=scores_BV.device).exponential_(generator=generator)
                    for generator in self.generators
                ]
            )
            sampled_B = (scores_BV.float() - noise_BV.log()).argmax(dim=-1, keepdim=True)
            return torch.full_like(scores_BV, -math.inf).scatter(1, sampled_B, 0.0)

    def with_noise(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def get_logits_processor(model: Any, generation_config: Any, *rest: Any, **keywords: Any) -> Any:
            processors = prepare(model, generation_config, *rest, **keywords)
            if generation_config.do_sample:
                processors.append(NoiseOfRows(next(calls)))
            return processors

        return get_logits_processor

    return with_noise


def _over_all_ranks(trainer: Any, seeds: tuple[int, ...]) -> Callable[..., Any]:
    """Return what shuffles the completions of all ranks, and gives each rank its rows of every micro-batch."""

    def shuffling(shuffle: Callable[..., Any]) -> Callable[..., Any]:
        def shuffle_sequence_dict(completions: dict[str, Any]) -> dict[str, Any]:
            import torch

            if any(isinstance(value, list) for value in completions.values()):
                # Parts of images have other numbers than rows.
                return shuffle(completions)  # type: ignore[no-any-return]
            accelerator, micro_batches = trainer.accelerator, trainer.args.steps_per_generation
            padding = {"prompt_ids": trainer._tokenizer.pad_token_id, "completion_ids": trainer._tokenizer.pad_token_id}
            gathered = {}
            for name, value in completions.items():
                if value is None or value.ndim == 0:
                    continue
                if value.ndim > 1:
                    first = name.startswith("prompt")
                    value = accelerator.pad_across_processes(
                        value, dim=1, pad_index=padding.get(name, 0), pad_first=first
                    )
                gathered[name] = accelerator.gather(value)
            rows = len(next(iter(gathered.values())))
            order = torch.randperm(rows, generator=_generator("cpu", *seeds))
            by_rank = order.view(micro_batches, accelerator.num_processes, -1)
            mine = by_rank[:, accelerator.process_index].reshape(-1)
            return {name: gathered[name][mine] if name in gathered else value for name, value in completions.items()}

        return shuffle_sequence_dict

    return shuffling


def _check_rewards(trainer: Any) -> None:
    """Make every rank raise one error that names the reward function, the rank and the completion.

    TRL ends only the rank whose function raises, and the others wait for it; the reward NaN counts as `None`, with
    which a function declines to score a completion.
    """
    import torch

    is_async_callable = sys.modules["trl.trainer.utils"].is_async_callable
    failures: list[tuple[str, str, BaseException | None]] = []
    own, names = trainer, trainer.reward_func_names
    rank = own.accelerator.process_index

    def problem(rewards: Any, rows: int) -> str:
        try:
            rewards = list(rewards)
        except TypeError:
            return f"returned a {type(rewards).__name__} on rank {rank}"
        if len(rewards) != rows:
            return f"returned {len(rewards)} rewards for {rows} completions on rank {rank}"
        for row, reward in enumerate(rewards):
            try:
                is_finite = reward is None or math.isfinite(reward)
            except (TypeError, ValueError):
                return f"returned a {type(reward).__name__} for completion {row} of rank {rank}"
            if not is_finite:
                return f"returned {float(reward)} for completion {row} of rank {rank}"
        return ""

    @contextmanager
    def scoring(name: str) -> Iterator[None]:
        waiting = f"The reward function {name} has run for {_SLOW_REWARD_SECONDS:.0f} s on rank {rank}"
        timer = Timer(_SLOW_REWARD_SECONDS, logger.warning, [waiting])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def result(name: str, rewards: Any, rows: int) -> list[Any]:
        if error := problem(rewards, rows):
            failures.append((name, error, None))
        return [None] * rows if error else list(rewards)

    def failed(name: str, error: BaseException, rows: int) -> list[Any]:
        text = " ".join(str(error).split())
        failures.append((name, f"raised {type(error).__name__} on rank {rank}: {text}", error))
        return [None] * rows

    def checked(function: Any, name: str) -> Any:
        async def score_later(prompts: Any, **columns: Any) -> list[Any]:
            with scoring(name):
                try:
                    return result(name, await function(prompts=prompts, **columns), len(prompts))
                except (Exception, SystemExit) as error:
                    return failed(name, error, len(prompts))

        def score(prompts: Any, **columns: Any) -> list[Any]:
            with scoring(name):
                try:
                    return result(name, function(prompts=prompts, **columns), len(prompts))
                except (Exception, SystemExit) as error:
                    return failed(name, error, len(prompts))

        return score_later if is_async_callable(function) else score

    def on_every_rank(calculate: Callable[..., Any]) -> Callable[..., Any]:
        def calculate_rewards(inputs: Any, prompts: Any, *rest: Any) -> Any:
            from accelerate.utils import gather_object

            failures.clear()
            rewards_BF = calculate(inputs, prompts, *rest)
            first = rank * len(prompts)
            for column, function in enumerate(own.reward_funcs):
                if isinstance(function, torch.nn.Module):
                    result(names[column], rewards_BF[first : first + len(prompts), column].tolist(), len(prompts))
            errors = gather_object([(name, error) for name, error, _ in failures])
            if errors:
                cause = failures[0][2] if failures else None
                raise ShardwrightError(
                    "; ".join(f"reward function {name} {error}" for name, error in dict.fromkeys(errors))
                    + ". It must return one finite number, or None, per completion"
                ) from cause
            return rewards_BF

        return calculate_rewards

    own.reward_funcs = [
        function if isinstance(function, torch.nn.Module) else checked(function, name)
        for function, name in zip(own.reward_funcs, names, strict=True)
    ]
    patches.apply("rewards-of-all-ranks", on_every_rank, on=trainer)
