"""Runs on every rank: trains a case of sequence parallelism, or one with what the Trainer has of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from fresh_process import forget_last_run
from sequence_cases import FOUR_RANKS, TWO_RANKS, Case, arguments, make_trainer, model, run, samples
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.trainers.data.samples import collate


def train(case: Case, output: Path) -> None:
    from safetensors.torch import save_file

    trainer, logs = run(case, output, configure_cpu_ranks(case.engine))
    if case.interrupted:
        forget_last_run()
        trainer = make_trainer(case, output, configure_cpu_ranks("deepspeed"))
        trainer.train(resume_from_checkpoint=str(output / case.name / "checkpoint-2"))
        logs = trainer.state.log_history
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.args.process_index == 0:
        weights = {name: value.float().clone().contiguous() for name, value in state.items()}
        save_file(weights, output / f"{case.name}.safetensors")
        (output / f"{case.name}.json").write_text(json.dumps(logs))


def stock(case: Case, output: Path) -> dict[str, str]:
    """Return how the Trainer's own sequence parallelism fails on these ranks, and what it leaves behind."""
    import torch
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from shardwright.trainers.parallel.sequence.callback import parallelism_config
    from transformers import Trainer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def of_twelve(rows: Any) -> dict[str, Any]:
        batch = collate([{name: (values * 12)[:12] for name, values in row.items()} for row in rows])
        positions = torch.arange(12).expand(len(rows), -1).contiguous()
        return {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": positions}

    built = arguments(case, output, configure_cpu_ranks("deepspeed"))
    built.parallelism_config = parallelism_config(2, built.world_size, attention="sdpa")
    found = {"failure": "", "second run": ""}
    try:
        Trainer(model=model(case), args=built, train_dataset=samples(36, 3), data_collator=of_twelve).train()
    except Exception as error:
        found["failure"] = f"{type(error).__name__}: {error}"
    found["attention"] = ALL_ATTENTION_FUNCTIONS["sdpa"].__module__
    try:
        parallel_state_sp.initialize_sequence_parallel(2)
    except AssertionError as error:
        found["second run"] = str(error)
    forget_last_run()
    found["attention afterwards"] = ALL_ATTENTION_FUNCTIONS["sdpa"].__module__
    return found


def main(output: Path, name: str) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    if name != "stock":
        train(next(case for case in (TWO_RANKS if ranks == 2 else FOUR_RANKS) if case.name == name), output)
        return
    found = stock(Case(name="stock", ranks=ranks, micro_step_samples=2), output)
    (output / f"stock-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
