"""Script of every rank: trains or resumes a case of tensor parallelism, or expects an error."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from fresh_process import forget_last_run
from safetensors.torch import save_file
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import save_model_directory
from shardwright.trainers.parallel.tensor import TensorParallelCallback
from tensor_parallel_cases import FOUR_RANKS, GLOBAL_BATCH_SIZE, RESUMED, RESUMED_AT, TP, TWO_RANKS, Case, probe


def prepared(case: Case, output: Path, **more: Any) -> tuple[Any, Any]:
    overrides = configure_cpu_ranks("deepspeed")
    groups = int(os.environ["WORLD_SIZE"]) // TP
    arguments = case.training_arguments(
        str(output),
        batch_size=GLOBAL_BATCH_SIZE // groups,
        deepspeed=case.deepspeed_configuration(),
        **overrides,
        **more,
    )
    model = case.model()
    callback = TensorParallelCallback(TP, vocabulary_parallel_head=case.vocabulary_parallel_head)
    callback.prepare(arguments, model)
    trainer = case.trainer(model, arguments)
    callback.attach(trainer)
    return trainer, model


def train(case: Case, output: Path) -> None:
    trainer, model = prepared(case, output)
    seen: list[int] = []
    step = trainer.training_step

    def training_step(model: Any, inputs: Any, *rest: Any) -> Any:
        seen.append(int((inputs["input_ids"] * torch.arange(1, inputs["input_ids"].shape[1] + 1)).sum()))
        return step(model, inputs, *rest)

    trainer.training_step = training_step
    # What one rank draws besides must not give it other dropout masks.
    torch.rand(1 + int(os.environ["RANK"]))
    random.seed(int(os.environ["RANK"]))
    numpy.random.seed(int(os.environ["RANK"]))
    trainer.train()
    record = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "grad_norms": [entry.get("grad_norm") for entry in trainer.state.log_history if "loss" in entry],
        "seen": seen,
        "whole_parameters_that_differ": differing_parameters(model),
        "local_elements": sum(parameter.numel() for parameter in model.parameters()),
        "evaluation": trainer.evaluate(),
    }
    model.eval()
    with torch.no_grad():
        logits = trainer.model_wrapped(input_ids=probe()).logits
    save_model_directory(trainer, str(output / "model"))
    rank = int(os.environ["RANK"])
    save_file({"logits": logits.contiguous()}, output / f"logits-{rank}.safetensors")
    (output / f"record-{rank}.json").write_text(json.dumps(record))


def differing_parameters(model: Any) -> list[str]:
    """Return the parameters that every rank holds whole and that are not the same on all ranks of the group."""
    from deepspeed.utils import groups

    found = []
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            continue
        first = parameter.detach().clone()
        source = groups.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast(first, src=source, group=groups.get_tensor_model_parallel_group())
        if not torch.equal(first, parameter):
            found.append(name)
    return found


def resume(output: Path) -> None:
    whole, _ = prepared(RESUMED, output / "whole", save_strategy="steps", save_steps=RESUMED_AT)
    whole.train()
    forget_last_run()
    rest, _ = prepared(RESUMED, output / "rest")
    rest.train(resume_from_checkpoint=str(output / "whole" / f"checkpoint-{RESUMED_AT}"))
    if os.environ["RANK"] == "0":
        runs = [
            [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and entry["step"] > RESUMED_AT]
            for trainer in (whole, rest)
        ]
        (output / "losses.json").write_text(json.dumps(runs))


def refuse(output: Path) -> None:
    """Write what a model with a layer that no rule divides, and a forgotten `attach`, are answered with."""
    answers = []
    case = Case(name="refused", steps=1)
    overrides = configure_cpu_ranks("deepspeed")
    settings = case.training_arguments(str(output), batch_size=2, deepspeed=case.deepspeed_configuration(), **overrides)
    model = case.model()
    model.model.layers[1].mlp.extra = torch.nn.Linear(4, 4)
    callback = TensorParallelCallback(TP)
    try:
        callback.prepare(settings, model)
    except UsageError as error:
        answers.append(str(error))
    model = case.model()
    callback.prepare(settings, model)
    trainer = case.trainer(model, settings)
    trainer.add_callback(callback)
    try:
        trainer.train()
    except UsageError as error:
        answers.append(str(error))
    if os.environ["RANK"] == "0":
        (output / "answers.json").write_text(json.dumps(answers))


def main(output: Path, name: str) -> None:
    directory = output / name
    directory.mkdir(exist_ok=True)
    others = {"resumed": resume, "refused": refuse}
    if name in others:
        others[name](directory)
    else:
        cases = TWO_RANKS if os.environ["WORLD_SIZE"] == "2" else FOUR_RANKS
        train(next(case for case in cases if case.name == name), directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
