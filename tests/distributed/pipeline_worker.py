"""Runs on every rank: trains a case in pipeline stages, interrupts and resumes one, or measures what DeepSpeed does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from equivalence.records import logged
from fresh_process import forget_last_run
from pipeline_cases import FOUR_RANKS, RESUMED, TWO_RANKS, Case, collate, data_of, samples, untrained_model
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.deepspeed_pipeline.engine import whole_logits
from shardwright.plugins.transformers.training_arguments import save_model_directory
from shardwright.trainers.parallel.pipeline.trainer import PipelineTrainer
from transformers import TrainerCallback, TrainingArguments


def trainer_of(case: Case, output: Path, *, model: Any = None, callbacks: Any = None, **more: Any) -> PipelineTrainer:
    overrides = configure_cpu_ranks("deepspeed")
    arguments = TrainingArguments(**case.arguments(output, pipeline=True, **more), **overrides)
    model = untrained_model(case.family) if model is None else model
    return PipelineTrainer(
        model,
        arguments,
        pipeline_stages=case.stages,
        tensor_parallel_size=case.tensor_ranks,
        dual_pipe=case.dual_pipe,
        callbacks=callbacks,
        **data_of(case),
    )


def run(case: Case, output: Path) -> dict[str, Any]:
    trainer = trainer_of(case, output)
    trainer.train()
    evaluation = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(output / "model"))
    return {"losses": logged(trainer, "loss"), "norms": logged(trainer, "grad_norm"), "evaluation": evaluation}


class Events(TrainerCallback):
    """Counts the events of a training and what they carry."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.complete = True

    def _count(self, name: str, kwargs: dict[str, Any]) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        if "step_begin" in self.counts:
            self.complete &= all(kwargs.get(key) is not None for key in ("model", "optimizer", "lr_scheduler"))
            self.complete &= kwargs["model"].config.vocab_size > 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("step_begin", kwargs)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("substep_end", kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("step_end", kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count("evaluate", kwargs)


def interrupted(output: Path) -> dict[str, Any]:
    """Train, evaluate before and in between, and train the second half again from a checkpoint of the first."""
    events = Events()
    more = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    more |= {"include_num_input_tokens_seen": "non_padding", "max_steps": 4, "lr_scheduler_type": "cosine"}
    whole = trainer_of(RESUMED, output, callbacks=[events], **more)
    before = whole.evaluate()["eval_loss"]
    whole.train()
    found = {"before": before, "whole": logged(whole, "loss"), "events": events.counts, "complete": events.complete}
    found |= {"evaluations": logged(whole, "eval_loss"), "tokens": whole.state.num_input_tokens_seen}
    probe = collate(samples(2, ragged=True, seed=5))
    logits = whole_logits(whole.model_wrapped, (probe["input_ids"], probe["attention_mask"]), probe["labels"])
    save_model_directory(whole, str(output / "model"))
    if os.environ["RANK"] == "0":
        torch.save(logits, output / "logits.pt")
    forget_last_run()
    resumed = trainer_of(RESUMED, output / "resumed", model=str(output / "model"), **more)
    found["from directory"] = resumed.evaluate()["eval_loss"]
    resumed.train(resume_from_checkpoint=str(output / "checkpoint-2"))
    return {**found, "resumed": logged(resumed, "loss"), "resumed from": resumed.state.global_step}


def upstream_norm() -> float:
    """Return the norm that DeepSpeed computes over two stages with one gradient of 3 and one of 4."""
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
    from deepspeed.runtime.utils import clip_grad_norm_
    from deepspeed.utils import groups

    configure_cpu_ranks("deepspeed")
    grid = PipelineParallelGrid(topology=PipeDataParallelTopology(num_pp=2, num_dp=1))
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([3.0 + grid.get_stage_id()])
    groups.mpu = grid
    return float(clip_grad_norm_([parameter], max_norm=1e9, mpu=grid))


def main(output: Path, name: str) -> None:
    others: dict[str, Callable[[Path], Any]] = {"interrupted": interrupted, "upstream-norm": lambda _: upstream_norm()}
    if name in others:
        record = others[name](output / name)
    else:
        cases = TWO_RANKS if os.environ["WORLD_SIZE"] == "2" else FOUR_RANKS
        record = run(next(case for case in cases if case.name == name), output / name)
    if os.environ["RANK"] == "0":
        (output / f"{name}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
