"""Rank script: train with the arguments that scripts pass to `trainer_for`, case by case."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from equivalence.cases import make_model, samples
from equivalence.combinations import collated
from equivalence.drawn_worker import one_length
from equivalence.records import write_records
from fresh_process import forget_last_run
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import byte_tokenizer, training_arguments
from shardwright.trainers.parallel.trainer_for import parallelism_of
from trainer_parameter_cases import CHAT_TEMPLATE, EVALUATED, GIVEN, REJECTED, STEPS, TRL, VOCAB_SIZE, Given
from transformers import TrainerCallback


class Counts(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1


def train(case: Given, directory: Path, *, resume_from: str | None = None, **more: Any) -> dict[str, Any]:
    engine = case.strategy.engine
    overrides = {"use_cpu": True} if engine == "single" else configure_cpu_ranks(engine)
    arguments = training_arguments(case.arguments(directory) | more, overrides)
    counts = Counts()
    made: dict[str, Any] = {}
    if "init" in case.kind:
        made["model_init"] = lambda: make_model(case.family, {})
        settings = GIVEN[case.kind](None)
    else:
        made["model"] = make_model(case.family, {})
        settings = GIVEN[case.kind](made["model"])
    rows = samples()
    trainer = parallelism_of(case.strategy).make_trainer(
        **made,
        args=arguments,
        train_dataset=rows[: -2 * EVALUATED],
        eval_dataset={"seen": rows[:EVALUATED], "new": rows[-EVALUATED:]},
        data_collator=one_length if case.kind == "functions" else collated,
        callbacks=[counts],
        processing_class=byte_tokenizer(VOCAB_SIZE),
        **settings,
    )
    trainer.train(resume_from_checkpoint=resume_from)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    record: dict[str, Any] = {
        name: [float(one.get(name, 0)) for one in logged] for name in ("loss", "grad_norm", "learning_rate")
    }
    record["steps"] = counts.steps
    if "compute_metrics" in settings:
        found = trainer.evaluate()
        record["metrics"] = [found[f"eval_{part}_{name}"] for part in ("seen", "new") for name in ("right", "tokens")]
    return record


def train_trl(case: Given, directory: Path) -> dict[str, Any]:
    import importlib

    from datasets import Dataset
    from transformers import set_seed

    described = TRL[case.kind]
    module = importlib.import_module(described.module)
    engine = case.strategy.engine
    overrides = {"use_cpu": True} if engine == "single" else configure_cpu_ranks(engine)
    arguments = case.arguments(directory) | described.config | {"bf16": False, "max_length": 64, "learning_rate": 5e-3}
    if engine == "deepspeed":
        arguments["deepspeed"]["bf16"] = {"enabled": "auto"}
    config = getattr(module, f"{described.name}Config")(**arguments, **overrides)
    tokenizer = byte_tokenizer(VOCAB_SIZE)
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, CHAT_TEMPLATE
    sizes = {"vocab_size": VOCAB_SIZE, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    settings = described.given(sizes)
    set_seed(0)
    trainer = parallelism_of(case.strategy).make_trainer(
        model=make_model(case.family, sizes),
        args=config,
        trainer_class=getattr(module, f"{described.name}Trainer"),
        train_dataset=Dataset.from_list(described.rows()),
        processing_class=tokenizer,
        **settings,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: [float(one.get(name, 0)) for one in logged] for name in ("loss", "grad_norm")}


def resume(case: Given, directory: Path) -> dict[str, Any]:
    train(case, directory, save_strategy="steps", save_steps=STEPS // 2)
    forget_last_run()
    return train(case, directory, resume_from=str(directory / f"checkpoint-{STEPS // 2}"))


def reject(case: Given, directory: Path) -> dict[str, Any]:
    arguments = training_arguments(case.arguments(directory), configure_cpu_ranks(case.strategy.engine))
    model = make_model(case.family, {})
    made = REJECTED[case.kind](model, arguments)
    trainer = parallelism_of(case.strategy).make_trainer(
        model=model, args=arguments, train_dataset=samples(), data_collator=collated, **made
    )
    trainer.train()
    return {"trained": trainer.state.global_step}


def record(case: Given, output: Path) -> dict[str, Any]:
    directory = output / case.name
    if case.kind in TRL:
        work = train_trl
    elif case.kind in REJECTED:
        work = reject
    else:
        work = resume if case.kind == "resumed" and case.strategy.engine != "single" else train
    try:
        return work(case, directory)
    except ShardwrightError as error:
        return {"rejected": str(error)}
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    write_records(Given, record)
