"""What a script does with one Trainer besides one `train()`, and the layouts under which it does that."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equivalence.cases import MICRO_STEP_SAMPLES, Case, make_model, samples
from equivalence.combinations import ALL_LAYOUTS, collated
from equivalence.records import write_records
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.transformers.prepared_model import prepare_models_once
from shardwright.plugins.transformers.training_arguments import training_arguments
from shardwright.trainers.parallel.trainer_for import parallelism_of
from transformers import Trainer, TrainerCallback

ACCUMULATION = 2
STEPS = 3
EVALUATED = 8
WITHOUT_AXES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
OTHERS = (
    *("sp2-zero1", "sp2-zero3", "cp2-fsdp2", "tp2-zero1", "pp2-zero0", "ep2-zero2"),
    *("zero2-offload", "zero3-offload-param"),
)
KINDS = ("stock", "adapters", "init", "schedule")
"""A script's stock Trainer, LoRA, `model_init`, and DeepSpeed's optimizer and scheduler."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    layout: str
    kind: str = "planned"
    """`planned` for `trainer_for`, or one of `KINDS`."""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.layout}"

    @property
    def family(self) -> str:
        return "mixtral" if "ep2" in self.layout or "mixtral" in self.layout else "llama"

    @property
    def strategy(self) -> Layout:
        strategy = ALL_LAYOUTS.get(self.layout, Layout(engine="single"))
        micro = MICRO_STEP_SAMPLES // strategy.data_parallel_size
        return replace(strategy, micro_batch_size=micro, gradient_accumulation_steps=ACCUMULATION)

    def reference(self) -> Staged:
        return Staged(layout=f"single-{self.family}", kind=self.kind)

    def arguments(self, directory: Path) -> dict[str, Any]:
        # DeepSpeed's schedulers warm up for at least two steps.
        case = Case(layout=self.layout, strategy=self.strategy, optimizer="adamw_torch")
        arguments = case.training_arguments(directory)
        arguments |= {"max_steps": STEPS, "lr_scheduler_type": "linear", "warmup_steps": 2, "learning_rate": 1e-3}
        arguments["per_device_eval_batch_size"] = EVALUATED // self.strategy.data_parallel_size
        if self.kind == "schedule" and "deepspeed" in arguments:
            rates = {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_type": "linear"}
            lengths = {"total_num_steps": "auto", "warmup_num_steps": "auto"}
            betas = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": arguments["adam_epsilon"], "weight_decay": 0.0}
            arguments["deepspeed"] |= {
                "optimizer": {"type": "AdamW", "params": betas | {"torch_adam": True}},
                "scheduler": {"type": "WarmupDecayLR", "params": rates | lengths},
            }
        if self.kind == "schedule":
            arguments["weight_decay"] = 0.0
        return arguments


class Interrupts(TrainerCallback):
    """Raises an exception at the end of a step, or after the first micro-batch of the next one."""

    event, step = "", 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (self.event, self.step) == ("step", state.global_step):
            raise KeyboardInterrupt

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (self.event, self.step) == ("micro-batch", state.global_step):
            raise RuntimeError("interrupted")


def made_trainer(case: Staged, directory: Path, interrupts: Interrupts) -> Any:
    engine = case.strategy.engine
    overrides = {"use_cpu": True} if engine == "single" else configure_cpu_ranks(engine)
    arguments = training_arguments(case.arguments(directory), overrides)

    def make() -> Any:
        model = make_model(case.family, {})
        if case.kind != "adapters":
            return model
        from peft import LoraConfig, get_peft_model
        from transformers import set_seed

        set_seed(0)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))

    rows = samples()
    settings: dict[str, Any] = {
        **({"model_init": make} if case.kind == "init" else {"model": make()}),
        "args": arguments,
        "train_dataset": rows[:24],
        "eval_dataset": None if case.strategy.cp > 1 else rows[-EVALUATED:],
        "data_collator": collated,
        "callbacks": [interrupts],
    }
    if engine == "single" or case.kind == "stock":
        prepare_models_once()
        return Trainer(**settings)
    return parallelism_of(case.strategy).make_trainer(**settings)


def train(case: Staged, directory: Path) -> dict[str, Any]:
    interrupts = Interrupts()
    trainer = made_trainer(case, directory, interrupts)
    rows, record = samples(), {}

    def evaluate(name: str, **data: Any) -> None:
        # Context parallelism cannot evaluate.
        if case.strategy.cp == 1:
            record[name] = [trainer.evaluate(**data)["eval_loss"]]

    def run(name: str, **settings: Any) -> None:
        trainer.train(**settings)
        for figure in ("loss", "grad_norm", "learning_rate"):
            # DeepSpeed's ZeRO-0 without the corrections of a plan reports no norm.
            logged = [
                float(entry[figure]) for entry in trainer.state.log_history if "loss" in entry and figure in entry
            ]
            record[f"{figure} of {name}"] = logged

    def interrupted(event: str, step: int) -> None:
        interrupts.event, interrupts.step = event, step
        try:
            trainer.train()
        except (KeyboardInterrupt, RuntimeError):
            record[f"interrupted by {event}"] = [float(trainer.state.global_step)]
        interrupts.event = ""

    if case.strategy.cp == case.strategy.pp == 1:
        prediction = trainer.predict(rows[EVALUATED : 2 * EVALUATED])
        record["first prediction"] = [float(prediction.metrics["test_loss"])]
    evaluate("first evaluation")
    run("first stage")
    evaluate("evaluation of other rows", eval_dataset=rows[:EVALUATED])
    trainer.train_dataset = rows[8:40]
    run("second stage")
    interrupted("micro-batch", 1)
    interrupted("step", 2)
    evaluate("evaluation after interruptions")
    trainer.args.max_steps, trainer.args.save_steps, trainer.args.save_strategy = 4, 2, "steps"
    run("third stage")
    # Under expert parallelism, only a new Trainer resumes.
    if case.family == "llama":
        run("resumed stage", resume_from_checkpoint=str(directory / "checkpoint-2"))
    if case.family == "llama":
        evaluate("last evaluation")
    return record


def record(case: Staged, output: Path) -> dict[str, Any]:
    try:
        return train(case, output / case.name)
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    write_records(Staged, record)
