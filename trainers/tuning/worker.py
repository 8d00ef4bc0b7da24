"""Runs on every rank of a trial: trains a few steps with random weights, and times them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.rendering import planned_training_arguments
from ...ds_configs.search.tuning import WARM_UP_STEPS, cannot_win
from ...ds_configs.specs.errors import ShardwrightError
from ...plugins.metering import Meter, start_meter
from ...plugins.transformers.sound_model import gathered
from ..runs.out_of_memory import memory_errors
from ..runs.plan_callback import PlanCallback
from ..runs.ranks import rank_arguments, synthetic_trainer, write_json
from ..runs.settings import RESULT_FILE, RankTask

_NO_OUTPUT: dict[str, Any] = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
    "push_to_hub": False,
    "disable_tqdm": True,
}
"""Values of `TrainingArguments` for a run that only times steps."""
_IDLE_SECONDS = 300.0
"""Longest time in which a rank may neither compute nor end; DeepSpeed compiles operators while other ranks wait."""


class TrialTask(RankTask):
    """A few steps under one layout, on every rank."""

    task: Literal["tune"] = "tune"
    plan: str = Field(description="directory of the trial's plan")
    steps: int = Field(description="timed steps")
    best_seconds: float | None = Field(description="median step of the best trial so far; null before the first")

    @property
    def hang_seconds(self) -> float | None:
        return _IDLE_SECONDS

    def run(self, work: Path) -> None:
        """Train on this rank; the first one writes the step times and the largest peak of all ranks."""
        plan = Plan.load(self.plan)
        meter = start_meter()
        with memory_errors(plan), ExitStack() as metered:
            metered.enter_context(meter)
            # Counting the tensors of CPU ranks slows every operator, so it ends before the first timed step.
            clock = self._clock(work, plan, meter, metered.close)
            _train(self, plan, work, clock)

    def _clock(self, work: Path, plan: Plan, meter: Meter, warmed_up: Callable[[], None]) -> PlanCallback:
        """Return the clock that ends a training that cannot win; it calls `warmed_up` before the first timed step."""
        trial = self

        class TrialClock(PlanCallback):
            """Waits for the accelerator at the end of each step, after which ranks agree whether to continue."""

            slowest: list[float]

            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                super().on_train_begin(args, state, control, **kwargs)
                self.slowest = []

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                super().on_step_end(args, state, control, **kwargs)
                self.slowest.append(max(gathered(self.steps.read(waits=True)[-1])))
                timed = self.slowest[WARM_UP_STEPS:]
                if len(self.slowest) == WARM_UP_STEPS:
                    warmed_up()
                elif cannot_win(timed, steps=trial.steps, best_seconds=trial.best_seconds):
                    control.should_training_stop = True

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                peak = max(gathered(self.peak_bytes()))
                if args.process_index == 0:
                    result = {"step_seconds": self.slowest[WARM_UP_STEPS:], "peak_allocated_bytes": peak}
                    write_json(result, work / RESULT_FILE)

        return TrialClock(plan, meter=meter)


def _train(trial: TrialTask, plan: Plan, work: Path, clock: Any) -> None:
    import torch

    job = plan.job
    settings = planned_training_arguments(plan) | _NO_OUTPUT
    settings |= {"output_dir": str(work / "output"), "max_steps": WARM_UP_STEPS + trial.steps}
    arguments, engine = rank_arguments(settings, method=job.method)
    if arguments.world_size != plan.hardware.world_size:
        raise ShardwrightError(f"{arguments.world_size} ranks started, but the plan has {plan.hardware.world_size}")
    vocab_size = plan.model.dimensions.vocab_size

    class RandomTokens(torch.utils.data.Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return (WARM_UP_STEPS + trial.steps) * plan.chosen.layout.global_batch_size

        def __getitem__(self, index: int) -> dict[str, Any]:
            draw = torch.Generator().manual_seed(index)
            tokens_T = torch.randint(vocab_size, (job.seq_len_tokens,), generator=draw)
            return {"input_ids": tokens_T, "labels": tokens_T}

    # 4-bit weights are quantized while they are loaded, so that random ones do not exist.
    trainer = synthetic_trainer(plan, arguments, engine, RandomTokens(), random_weights=job.method != "qlora")
    trainer.add_callback(clock)
    trainer.train()
    # A rank that exits while others communicate makes gloo abort them.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
