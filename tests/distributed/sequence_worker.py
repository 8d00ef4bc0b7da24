"""Runs on every rank: trains the cases of sequence parallelism, and asks for what must be refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sequence_cases import FOUR_RANKS, TWO_RANKS, Case, arguments, make_trainer, model, padded, run, samples
from shardwright.ds_configs.errors import UsageError
from shardwright.plugins.accelerate import configure_cpu_ranks, forget_last_run


def train(case: Case, output: Path) -> None:
    """Train one case; rank 0 writes weights and logs."""
    from safetensors.torch import save_file

    trainer, logs = run(case, output, configure_cpu_ranks("deepspeed"))
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
    forget_last_run()


def refusal(work: Callable[[], Any]) -> str:
    """Return what a piece of work says when it refuses."""
    try:
        work()
    except UsageError as error:
        return str(error)
    finally:
        forget_last_run()
    return "not refused"


def refusals(output: Path) -> dict[str, str]:
    """Ask for what must be refused on ranks."""
    from shardwright.trainers.sequence_parallel.sequence_parallel_callback import SequenceParallelCallback
    from transformers import Trainer

    case = Case(name="refused")

    def on_batches(change: Callable[[dict[str, Any]], None]) -> Callable[[], Any]:
        def collate(rows: Any) -> dict[str, Any]:
            batch = padded(rows)
            change(batch)
            return batch

        def work() -> None:
            trainer = make_trainer(case, output, configure_cpu_ranks("deepspeed"))
            trainer.data_collator = collate
            trainer.train()

        return work

    def not_attached() -> None:
        built, made = arguments(case, output, configure_cpu_ranks("deepspeed")), model(case)
        callback = SequenceParallelCallback(2)
        callback.prepare(built, made)
        Trainer(
            model=made, args=built, train_dataset=samples(8, 1), eval_dataset=samples(8, 1), callbacks=[callback]
        ).train()

    def left_padded(batch: dict[str, Any]) -> None:
        batch.update({name: value.flip(1) for name, value in batch.items()})

    def packed(batch: dict[str, Any]) -> None:
        import torch

        del batch["attention_mask"]
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).remainder(3).expand_as(batch["input_ids"])

    def four_dimensional(batch: dict[str, Any]) -> None:
        batch["attention_mask"] = batch["attention_mask"][:, None, None, :]

    def without_labels(batch: dict[str, Any]) -> None:
        del batch["labels"]

    return {
        "left padded": refusal(on_batches(left_padded)),
        "packed": refusal(on_batches(packed)),
        "4-D mask": refusal(on_batches(four_dimensional)),
        "no labels": refusal(on_batches(without_labels)),
        "not attached": refusal(not_attached),
    }


def stock(case: Case, output: Path) -> str:
    """Return how the Trainer's own sequence parallelism fails on these ranks; empty when it does not."""
    import torch
    from shardwright.trainers.sequence_parallel.sequence_parallel_callback import parallelism_config
    from transformers import Trainer

    def collate(rows: Any) -> dict[str, Any]:
        batch = padded([{name: (values * 12)[:12] for name, values in row.items()} for row in rows])
        positions = torch.arange(12).expand(len(rows), -1).contiguous()
        return {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": positions}

    built = arguments(case, output, configure_cpu_ranks("deepspeed"))
    built.parallelism_config = parallelism_config(2, built.world_size, attention="sdpa")
    built.eval_strategy = "no"
    try:
        Trainer(model=model(case), args=built, train_dataset=samples(36, 3), data_collator=collate).train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        forget_last_run()
    return ""


def main(output: Path) -> None:
    two = int(os.environ["WORLD_SIZE"]) == 2
    for case in TWO_RANKS if two else FOUR_RANKS:
        train(case, output)
    found = refusals(output) if two else {}
    found["stock"] = stock(Case(name="stock", ranks=2 if two else 4, micro_step_samples=2), output)
    (output / f"messages-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
