"""What a script does with one Trainer besides one `train()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from equivalence.cases import Case, samples
from equivalence.records import Record, logged
from transformers import TrainerCallback


class Interrupts(TrainerCallback):
    """Raises an exception at the end of a step, or after the first micro-batch of the next one."""

    event, step = "", 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (self.event, self.step) == ("step", state.global_step):
            raise KeyboardInterrupt

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (self.event, self.step) == ("micro-batch", state.global_step):
            raise RuntimeError("interrupted")


def figures_of_stages(trainer: Any, case: Case, directory: Path) -> Record:
    """Evaluate first, train several times, interrupt and resume, and return the figures of each by name."""
    interrupts = Interrupts()
    trainer.add_callback(interrupts)
    rows, record = samples(), {}

    def evaluate(name: str, **data: Any) -> None:
        # Context parallelism cannot evaluate.
        if case.full_layout.cp == 1:
            record[name] = [trainer.evaluate(**data)["eval_loss"]]

    def run(name: str, **settings: Any) -> None:
        trainer.train(**settings)
        for figure in ("loss", "grad_norm", "learning_rate"):
            record[f"{figure} of {name}"] = [float(value) for value in logged(trainer, figure)]

    def interrupted(event: str, step: int) -> None:
        interrupts.event, interrupts.step = event, step
        try:
            trainer.train()
        except (KeyboardInterrupt, RuntimeError):
            record[f"interrupted by {event}"] = [float(trainer.state.global_step)]
        interrupts.event = ""

    if case.full_layout.cp == case.full_layout.pp == 1:
        record["first prediction"] = [float(trainer.predict(rows[8:16]).metrics["test_loss"])]
    evaluate("first evaluation")
    run("first stage")
    evaluate("evaluation of other rows", eval_dataset=rows[:8])
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
        evaluate("last evaluation")
    return record
