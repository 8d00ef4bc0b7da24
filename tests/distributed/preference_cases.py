"""Preference and reinforcement learning with TRL: losses, gradient norms and every logged reward of a few steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from equivalence.records import logged, training_record, write_records
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.trl import classes_of_trl, generate_as_one_process
from shardwright.trainers.exact import make_exact
from shardwright.trainers.parallel.planned import parallelism_of
from trainer_cases import TRAINERS, TrainerCase, TrainerKind, data_of, make_trainer, text

GENERATIONS = 4
"""Completions of a prompt: a micro-batch of two ranks has one group, which they share."""
_GENERATED: dict[str, Any] = {
    "num_generations": GENERATIONS,
    "max_completion_length": 8,
    "temperature": 1.0,
    "learning_rate": 0.05,
    "beta": 0.04,
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "adapter": {},
    "none": {},
    "raises": {},
    "nan": {},
    "short": {},
    "text": {},
    "no_reference": {"beta": 0.0},
    "twice": {"num_iterations": 2},
    "longer": {"steps_per_generation": 4},
    "batch": {"scale_rewards": "batch"},
    "unscaled": {"scale_rewards": "none"},
    "normalized": {"normalize_advantages": True},
    **{loss: {"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")},
    "sequence": {"importance_sampling_level": "sequence"},
}
TASKS = {
    name: TrainerKind(
        kind=name.upper(), config=_GENERATED, row=lambda row: {"prompt": text(row, 2 + row % 3)}, options=_OPTIONS
    )
    for name in ("grpo", "rloo")
}
_GKD = TRAINERS["gkd"]
TASKS["gkd_on_policy"] = replace(_GKD, config={**_GKD.config, "lmbda": 1.0, "max_new_tokens": 6})
TRAINERS.update(TASKS)  # type: ignore[attr-defined]
_UNEQUAL = ("runtime", "per_second", "step_time", "learning_rate", "epoch", "step", "total_flos", "train_loss")
"""Values of a log that are no result of the samples, by the end of their names."""
_OF_SAMPLES = (
    "eval_loss",
    "rewards/chosen",
    "rewards/rejected",
    "accuracies",
    "margins",
    "logps/chosen",
    "logps/rejected",
)
_OF_SAMPLES += ("mean_reward", "eval_accuracy", "eval_margin", "log_odds_chosen")
"""Values of an evaluation that are means over samples, by the end of their names; others depend on its batches."""
_OF_BATCHES = dict.fromkeys(("orpo", "cpo"), ("logits/chosen", "logits/rejected", "eval_loss"))
"""Values that TRL averages over padding, or in evaluation over the tokens of a batch."""


@dataclass(frozen=True, kw_only=True)
class PreferenceCase(TrainerCase):
    stock: bool = False
    """Whether one process trains TRL's own class."""

    @property
    def name(self) -> str:
        # `super()` does not find the class that a dataclass with slots replaces.
        return f"{TrainerCase.name.fget(self)}{'-stock' if self.stock else ''}"  # type: ignore[attr-defined]

    def reference(self) -> PreferenceCase:
        return replace(self, layout="single", stock=self.trainer not in TASKS)


def reward_by_length(completions: list[str], **_: Any) -> list[float]:
    return [len(completion.encode()) / 10 for completion in completions]


def reward_of_letters(completions: list[str], **_: Any) -> list[float | None]:
    """Return the share of the letter e; `None` for completions without letters."""
    return [
        completion.count("e") / len(completion) if any(map(str.isalpha, completion)) else None
        for completion in completions
    ]


def wrong_reward(completions: list[str], *, option: str, rank: int, **_: Any) -> list[Any]:
    """Return rewards of which those of the second rank are wrong."""
    rewards: list[Any] = [1.0] * len(completions)
    if rank == 0:
        return rewards
    match option:
        case "raises":
            raise ZeroDivisionError("no completion has a letter")
        case "nan":
            return [*rewards[:-1], math.nan]
        case "text":
            return [*rewards[:-1], "good"]
        case "none":
            return [*rewards[:-1], None]
    return rewards[:-1]


def record(case: PreferenceCase, output: Path) -> dict[str, Any]:
    def result(trainer: Any) -> dict[str, Any]:
        steps = [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
        skipped = _OF_BATCHES.get(case.trainer, ())
        return {
            "losses": logged(trainer),
            "grad_norms": list(map(float, logged(trainer, "grad_norm"))),
            "logs": [
                {
                    name: value
                    for name, value in entry.items()
                    if not name.endswith(_UNEQUAL)
                    and name not in ("loss", "grad_norm", *skipped)
                    and (case.trainer in TASKS or "loss" in entry or name.endswith(_OF_SAMPLES))
                }
                for entry in steps
            ],
            "completions": list(getattr(trainer, "_logs", {}).get("completion", ())),
        }

    return training_record(lambda: _make(case, output / "models", output / case.name), result)


def _make(case: PreferenceCase, models: Path, directory: Path) -> Any:
    if case.trainer not in ("grpo", "rloo"):
        if case.trainer in TASKS and case.layout == "single":
            return _through_trainer_for(case, models, directory)
        return make_trainer(case, models, directory)
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    engine, described = case.full_layout.engine, TASKS[case.trainer]
    overrides = {"use_cpu": True} if engine == "single" else configure_cpu_ranks(engine)
    if "evaluated" in case.options:
        overrides |= {"per_device_eval_batch_size": GENERATIONS}
    fields = described.config | case.arguments(directory) | {"learning_rate": 0.05} | overrides
    arguments = getattr(trl, f"{described.kind}Config")(**described.config | fields)
    set_seed(0)
    place = models / case.family
    settings: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(place / "model", dtype="float32"),
        "args": arguments,
        "train_dataset": Dataset.load_from_disk(str(data_of(models, case.trainer, case.rows))),
        "processing_class": AutoTokenizer.from_pretrained(place / "model"),
        "reward_funcs": [reward_by_length, reward_of_letters],
    }
    if "evaluated" in case.options:
        # One process evaluates as many rows at a time as two ranks do.
        held_out = Dataset.load_from_disk(str(data_of(models, case.trainer, case.rows, held_out=True)))
        settings["eval_dataset"] = held_out
        arguments.per_device_eval_batch_size = GENERATIONS // arguments.world_size
    wrong = {"raises", "nan", "short", "text", "none"} & set(case.options)
    for option in wrong:
        reward: Any = partial(wrong_reward, option=option, rank=arguments.process_index)
        settings["reward_funcs"] = [reward]
    if "adapter" in case.options:
        from peft import LoraConfig

        settings["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    kind: Any = getattr(trl, f"{described.kind}Trainer")
    if "fixed" in case.options:
        kind = _fixed(kind)
    if case.stock:
        return kind(**settings)
    return parallelism_of(case.full_layout).make_trainer(trainer_class=kind, **settings)


def _fixed(kind: Any) -> Any:
    """Return a trainer whose completions are texts of the prompt and of the row, instead of the model's."""

    class Fixed(kind):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            first, end = self.accelerator.process_index * len(prompt_ids), self._tokenizer.eos_token_id
            rows = [sum(ids) + (first + row) % GENERATIONS for row, ids in enumerate(prompt_ids)]
            completions = [[*text(row, 2).encode()[: 2 + row % 6], end] for row in rows]
            return (completions, None) if "GRPOTrainer" in classes_of_trl(kind) else completions

    return Fixed


def _through_trainer_for(case: PreferenceCase, models: Path, directory: Path) -> Any:
    trainer = make_exact(make_trainer(case, models, directory))
    generate_as_one_process(trainer)
    return trainer


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return the largest difference of losses, gradient norms and logged values, over values above 1."""

    def difference(pairs: Any) -> float:
        return max((abs(a - b) / max(1.0, abs(b)) for a, b in pairs), default=0.0)

    results = {name: difference(zip(found[name], expected[name], strict=True)) for name in ("losses", "grad_norms")}
    worst = ("", 0.0)
    for entry, other in zip(found["logs"], expected["logs"], strict=True):
        # Expert parallelism adds values of its own.
        assert entry.keys() >= other.keys() and all("expert" in name for name in entry.keys() - other.keys())
        for name, value in other.items():
            assert (value is None) == (entry[name] is None), name
            if value is not None and (own := difference([(entry[name], value)])) >= worst[1]:
                worst = (name, own)
    return results | {f"logs ({worst[0]})": worst[1]}


if __name__ == "__main__":
    write_records(PreferenceCase, record)
