"""Runs on every rank: quantization-aware training under a layout; writes weights that came out, and the export."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from distillation_cases import VOCAB, collate, samples
from fresh_process import forget_last_run
from qat_cases import (
    ADAM_LEARNING_RATE,
    CASES,
    IN_BF16,
    OFFLOADED,
    RESUMED,
    RESUMED_STEPS,
    SAVED_STEP,
    Case,
    callback_settings,
    model_directory,
)
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks


def trained(case: Case, directory: Path, output: Path) -> None:
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer

    where = output / case.name
    trainer, callback = trainer_of(case, directory, where / "run")
    if case.engine == "single":
        save(trainer, where / "start.safetensors")
    trainer.train()
    save(trainer, where / "trained.safetensors")
    source = str(model_directory(directory, case))
    callback.export(trainer, where / "export", tokenizer=byte_tokenizer(VOCAB), source=source, verify=case.verify)


def resumed(directory: Path, output: Path) -> None:
    """Train to the end, once in one go and once from a checkpoint of that run in the middle; export both."""
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer

    training = {"max_steps": RESUMED_STEPS, "save_strategy": "steps", "save_steps": SAVED_STEP, "optim": "adamw_torch"}
    training |= {"learning_rate": ADAM_LEARNING_RATE, "warmup_steps": 0}
    checkpoint = str(output / "whole" / "run" / f"checkpoint-{SAVED_STEP}")
    for name, resume in (("whole", None), ("resumed", checkpoint)):
        where = output / name
        trainer, callback = trainer_of(RESUMED, directory, where / "run", **training)
        trainer.train(resume_from_checkpoint=resume)
        save(trainer, where / "trained.safetensors")
        source = str(model_directory(directory, RESUMED))
        callback.export(trainer, where / "export", tokenizer=byte_tokenizer(VOCAB), source=source, verify=False)
        if trainer.args.process_index == 0:
            (where / "history.json").write_text(json.dumps(trainer.state.log_history))
        forget_last_run()


def trainer_of(case: Case, directory: Path, run: Path, **changes: Any) -> tuple[Any, Any]:
    from shardwright.trainers.parallel.trainer_for import parallelism_of
    from shardwright.trainers.qat.callback import QATCallback
    from transformers import AutoModelForCausalLM, TrainingArguments

    overrides: dict[str, Any] = configure_cpu_ranks("ddp" if case.engine == "single" else case.engine)
    settings = case.arguments() | changes | overrides
    path = model_directory(directory, case)
    if case.zero_init:
        arguments = TrainingArguments(str(run), **settings)
        model = AutoModelForCausalLM.from_pretrained(path)
        assert all(parameter.numel() == 0 for parameter in model.parameters())
    else:
        model = AutoModelForCausalLM.from_pretrained(path)
        arguments = TrainingArguments(str(run), **settings)
    if case.lora:
        model = adapted(model)
    scheme, options = callback_settings(case)
    calibration = [collate(samples())] if options.get("ranges") == "learned" else None
    callback = QATCallback(scheme, calibration=calibration, **options)
    trainer = parallelism_of(case.strategy).make_trainer(
        model=model, args=arguments, train_dataset=samples(), data_collator=collate, callbacks=[callback]
    )
    if case.bf16:
        between_codes(callback)
    return trainer, callback


def between_codes(callback: Any) -> None:
    """Move learned zero points close below halves: in bf16 they are halves."""
    for parameter in callback.attachment.parameters:
        if parameter.detach().min() < 0:
            parameter.data += 0.4999


def save(trainer: Any, path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from shardwright.plugins.deepspeed.engine import stages_of

    if stages_of(trainer.model) is None:
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    else:
        trainer.save_model(str(path.parent / "stages"))
        files = sorted((path.parent / "stages").glob("*.safetensors"))
        state = {name: value for file in files for name, value in load_file(file).items()}
    if trainer.args.process_index == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.float().contiguous() for name, value in state.items()}, path)


def adapted(model: Any) -> Any:
    """Return the model with adapters whose product is not zero, so that both matrices have a gradient."""
    import torch
    from shardwright.plugins.peft import add_lora

    model = add_lora(model, rank=4, targets=None, fp32_adapters=True)
    draw = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model


if __name__ == "__main__":
    models, results, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if name == "resumed":
        resumed(models, results)
    else:
        trained(next(case for case in (*CASES, *IN_BF16, *OFFLOADED) if case.name == name), models, results)
