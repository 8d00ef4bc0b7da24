"""Runs on every rank: quantization-aware training under each layout; writes weights that came out, and the export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from distillation_cases import VOCAB, collate, samples
from qat_cases import CASES, Case, callback_settings, model_directory
from shardwright.plugins.accelerate import configure_cpu_ranks, forget_last_run


def trained(case: Case, directory: Path, output: Path) -> None:
    """Train, write the whole weights from rank 0, and export."""
    from safetensors.torch import save_file
    from shardwright.plugins.transformers import byte_tokenizer
    from shardwright.trainers.qat.callback import QATCallback
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    overrides: dict[str, Any] = configure_cpu_ranks("ddp" if case.engine == "single" else case.engine)
    path, where = model_directory(directory, case), output / case.name
    if case.zero_init:
        arguments = TrainingArguments(str(where / "run"), **case.arguments(), **overrides)
        model = AutoModelForCausalLM.from_pretrained(path)
    else:
        model = AutoModelForCausalLM.from_pretrained(path)
        arguments = TrainingArguments(str(where / "run"), **case.arguments(), **overrides)
    if case.lora:
        model = adapted(model)
    scheme, options = callback_settings(case)
    callback = QATCallback(scheme, **options)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=samples(), data_collator=collate, callbacks=[callback]
    )
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if arguments.process_index == 0:
        save_file({name: value.float().contiguous() for name, value in state.items()}, where / "trained.safetensors")
    how: dict[str, Any] = {"source": str(path)}
    callback.export(trainer, where / "export", tokenizer=byte_tokenizer(VOCAB), verify=case.verify, **how)


def adapted(model: Any) -> Any:
    """Return the model with adapters whose product is not zero, so that both matrices have a gradient at once."""
    import torch
    from shardwright.plugins.peft import add_lora

    model = add_lora(model, rank=4, targets=None, fp32_adapters=True)
    draw = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model


def main(directory: Path, output: Path, names: list[str]) -> None:
    for case in CASES:
        if not names or case.name in names:
            trained(case, directory, output)
            forget_last_run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
