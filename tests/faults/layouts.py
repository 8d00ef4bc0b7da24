"""Engines into which faults are injected: `train` on two ranks, with a model that trains in a second."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_settings import fsdp2_settings
from shardwright.ds_configs.specs.job import TrainingJob
from train_jobs import train_job
from warm_ranks import run_ranks

ENGINES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "pipeline")
STEPS, SAVE_STEPS = 6, 2
_RANK = Path(__file__).with_name("rank.py")


class Workshop:
    """A directory with a small model, a text and the arguments of every engine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = directory / "model"
        self._text = directory / "text.txt"
        directory.mkdir(parents=True, exist_ok=True)
        if not self.model.exists():
            from small_models import llama

            llama(hidden_size=32, vocab_size=260).save_pretrained(self.model)
            self._text.write_text("\n\n".join(f"{number} squared is {number * number}." for number in range(600)))

    def command(
        self, engine: str, output: Path, *, ranks: int, flags: tuple[str, ...] = (), **changes: Any
    ) -> list[str | Path]:
        """Return the arguments of `run_ranks`: flags of `train`; `changes` are keys of `TrainingArguments`."""
        shutil.rmtree(output / "job", ignore_errors=True)
        data = ("--dataset", self._text, "--evaluation-samples", "2")
        words = [self.model, "--plan", self._plan(engine), *data, "--output-dir", output, *flags]
        job = train_job(words, output / "job", self._arguments(engine) | changes, ranks=ranks)
        return [_RANK, job, output / "losses.json"]

    def run(
        self,
        engine: str,
        output: Path,
        *,
        ranks: int = 2,
        timeout_seconds: float = 120.0,
        environment: Mapping[str, str] | None = None,
        **command: Any,
    ) -> str:
        """Train on warm ranks and return what they printed; raises `RanksFailedError`."""
        arguments = self.command(engine, output, ranks=ranks, **command)
        return run_ranks(arguments, ranks=ranks, timeout_seconds=timeout_seconds, environment=environment)

    def whole(self, engine: str, *, ranks: int = 2) -> Path:
        output = self.directory / "whole" / f"{engine}-{ranks}"
        if not (output / "losses.json").exists():
            self.run(engine, output, ranks=ranks, **({} if engine == "pipeline" else self.batch(ranks)))
        return output

    @staticmethod
    def batch(ranks: int) -> dict[str, int]:
        """Return the argument with which so many ranks train on four samples a step."""
        return {"per_device_train_batch_size": 4 // ranks}

    def _arguments(self, engine: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "per_device_train_batch_size": 4 if engine == "pipeline" else 2,
            "max_steps": STEPS,
            "save_steps": SAVE_STEPS,
            "save_strategy": "steps",
            "learning_rate": 5e-3,
            "weight_decay": 0.1,
            "optim": "adamw_torch",
            "seed": 5,
            "disable_tqdm": True,
        }
        if engine == "fsdp2":
            return arguments | fsdp2_settings()
        if engine == "ddp":
            return arguments
        plan = self._plan(engine)
        planned = json.loads((plan / "training_arguments.json").read_text())
        return planned | arguments | {"deepspeed": str(plan / "ds_config.json")}

    def _plan(self, engine: str) -> Path:
        from shardwright.plugins.planning import plan

        directory = self.directory / "plans" / engine
        if not directory.exists():
            pipeline = engine == "pipeline"
            job = TrainingJob(
                seq_len_tokens=32,
                global_batch_size=4,
                micro_batch_size=4 if pipeline else 2,
                precision="fp32",
                optimizer="adamw_torch",
                strategy="zero1" if pipeline else engine,
                pipeline_parallel_size=2 if pipeline else 1,
            )
            plan(str(self.model), "2xCPU", job).write(directory)
        return directory


def losses_of(output: Path) -> list[float]:
    losses: list[float] = json.loads((output / "losses.json").read_text())["losses"]
    return losses
