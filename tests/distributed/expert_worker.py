"""Runs on every rank: trains a case with divided experts, saves it, and writes what it logged and computes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from equivalence.records import logged
from expert_cases import CASES, ROWS, SAVED_AT, Case, collate, model, own_loss_trainer, samples
from fresh_process import forget_last_run
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.deepspeed import auto_ep
from shardwright.plugins.transformers.training_arguments import save_model_directory
from shardwright.trainers.parallel.expert import ExpertParallelCallback


def made_trainer(case: Case, output: Path) -> Any:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    overrides = configure_cpu_ranks("deepspeed")
    arguments = TrainingArguments(str(output / case.name), **case.arguments(int(os.environ["WORLD_SIZE"])), **overrides)
    if case.from_pretrained:
        made = AutoModelForCausalLM.from_pretrained(output / f"{case.name}-start")
        assert all(hasattr(parameter, "ds_id") for parameter in made.parameters())
    else:
        made = model(case)
    callback = ExpertParallelCallback(2)
    callback.prepare(arguments, made)
    kind = own_loss_trainer() if case.own_loss else Trainer
    trainer = kind(made, arguments, train_dataset=samples(), eval_dataset=samples(2 * ROWS), data_collator=collate)
    callback.attach(trainer)
    return trainer


def run(case: Case, output: Path) -> None:
    trainer = made_trainer(case, output)
    trainer.train()
    if case.resumed:
        before = logged(trainer)
        del trainer
        forget_last_run()
        trainer = made_trainer(case, output)
        trainer.train(resume_from_checkpoint=str(output / case.name / f"checkpoint-{SAVED_AT}"))
        assert logged(trainer) == before
    if case.zero_stage == 3:
        layers = auto_ep.moe_layers(trainer.model)
        assert all(layer._z3_leaf for layer in layers.values())
    save_model_directory(trainer, str(output / f"{case.name}-saved"))
    trainer.model_wrapped.eval()
    with torch.no_grad():
        outputs = trainer.model_wrapped(input_ids=torch.arange(24)[None])
    if trainer.args.process_index == 0:
        torch.save(outputs.logits, output / f"{case.name}.logits.pt")
        torch.save(getattr(outputs, "router_logits", None), output / f"{case.name}.router_logits.pt")
        (output / f"{case.name}.json").write_text(json.dumps(trainer.state.log_history))


def without_workarounds(case: Case, output: Path) -> None:
    """Train without the marks of expert groups, and without ZeRO with the engine's own clipping."""
    wanted = {"mark_expert_groups": 2, "clip_by_the_whole_norm": 0}
    for name, stage in wanted.items():
        changed = Case(family=case.family, zero_stage=stage)
        told = ""
        with patch.object(auto_ep, name):
            trainer = made_trainer(changed, output)
            try:
                trainer.train()
            except AssertionError as error:
                told = str(error)
            weight = trainer.model.get_input_embeddings().weight.detach()
        if os.environ["RANK"] == "0":
            (output / f"without_{name}.json").write_text(
                json.dumps({"told": told, "norms": logged(trainer, "grad_norm")})
            )
            torch.save(weight, output / f"without_{name}.pt")
        del trainer
        forget_last_run()


if __name__ == "__main__":
    results, name = Path(sys.argv[1]), sys.argv[2]
    if name == "without-workarounds":
        without_workarounds(CASES[0], results)
    else:
        run(next(case for case in CASES if case.name == name), results)
