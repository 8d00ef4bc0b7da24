"""Quantization-aware training under every layout: models, and the layouts that must agree.

One process sees the micro-batches of both ranks one after the other. Forward passes are therefore equal bit for bit,
so that no code is rounded to the other side. Ranks run this file.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cases import RANKS, deepspeed_configuration
from distillation_cases import SAMPLES, VOCAB, collate, samples
from engine_settings import engine_settings
from fresh_process import forget_last_run
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from small_models import llama, mixtral

LEARNING_RATE, ADAM_LEARNING_RATE = 1.0, 1e-3
GROUP = 32
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "w4": ("W4A16", {}),
    "w8a8": ("W8A8", {}),
    "w2-learned": ("W2A16", {"weight_rule": "learned"}),
    "w8a8-calibrated": ("W8A8_STATIC", {}),
    "w4-asym-learned": ("W4A16_ASYM", {"weight_rule": "learned"}),
    "w4-channel": ("W4A16", {}),
    # The first step shows ranges alone, and its learning rate is 0.
    "w8a8-static": ("W8A8_STATIC", {"ranges": "moving_average", "start_step": 1}),
}
"""Scheme and options of the callback by a short name."""

FP32_SCHEMES = ("w4", "w8a8", "w2-learned", "w8a8-static")


@dataclass(frozen=True, kw_only=True)
class Case:
    engine: Literal["single", "ddp", "deepspeed", "fsdp2"] = "single"
    zero_stage: int = 0
    zero_init: bool = False
    """Whether weights are divided while they are loaded."""
    scheme: str = "w4"
    checkpointing: bool = False
    lora: bool = False
    mixture: bool = False
    bf16: bool = False
    offload: bool = False
    """Whether the optimizer, AdamW, steps on the CPU beside the model."""
    axis: Literal["", "tp", "pp", "ep"] = ""
    """What the two ranks divide besides or in place of samples."""
    verify: bool = False
    """Whether the export is loaded again in a process of its own."""

    @property
    def name(self) -> str:
        engine = f"zero{self.zero_stage}" if self.engine == "deepspeed" else self.engine
        engine += f"-{self.axis}2" if self.axis else ""
        extra = "-init" * self.zero_init + "-checkpointed" * self.checkpointing + "-lora" * self.lora
        extra += "-mixture" * self.mixture + "-bf16" * self.bf16 + "-offload" * self.offload + "-verified" * self.verify
        return f"{engine}-{self.scheme}{extra}"

    @property
    def reference(self) -> Case:
        return Case(scheme=self.scheme, lora=self.lora, mixture=self.mixture, offload=self.offload)

    @property
    def steps(self) -> int:
        """Optimizer steps; all but the last have a learning rate of 0."""
        return 1 + SCHEMES[self.scheme][1].get("start_step", 0)

    @property
    def strategy(self) -> Layout:
        """The layout of two ranks, as far as trainers are chosen by it."""
        axes: dict[str, Any] = {self.axis: RANKS} if self.axis else {}
        return Layout(engine=self.engine, zero_stage=self.zero_stage if self.engine == "deepspeed" else None, **axes)

    def arguments(self) -> dict[str, Any]:
        """Return keywords of TrainingArguments with plain SGD, so that a step shows the gradient."""
        read_together = self.engine == "single" or self.axis in ("tp", "pp")
        is_deepspeed = self.engine == "deepspeed"
        return engine_settings(
            self.engine,
            SAMPLES // RANKS,
            deepspeed_configuration(self.zero_stage, offload_optimizer=self.offload) if is_deepspeed else None,
            layer="Mixtral" if self.mixture else "Llama",
            gradient_accumulation_steps=RANKS if read_together else 1,
            gradient_checkpointing=self.checkpointing,
            bf16=self.bf16,
            optim="adamw_torch" if self.offload else "sgd",
            learning_rate=ADAM_LEARNING_RATE if self.offload or self.bf16 else LEARNING_RATE,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=self.steps - 1,
            weight_decay=0.0,
            max_grad_norm=0.0,
            max_steps=self.steps,
            train_sampling_strategy="sequential",
        )


DDP: dict[str, Any] = {"engine": "ddp"}
ZERO3: dict[str, Any] = {"engine": "deepspeed", "zero_stage": 3}
FSDP2: dict[str, Any] = {"engine": "fsdp2"}
ZERO1: dict[str, Any] = {"engine": "deepspeed", "zero_stage": 1}
CASES = [Case(**engine, scheme=scheme) for engine in (ZERO3, FSDP2) for scheme in ("w4", "w2-learned")]
CASES += [
    Case(**engine, scheme=scheme)
    for engine in (ZERO1, {"engine": "deepspeed", "zero_stage": 2})
    for scheme in ("w8a8", "w8a8-static")
]
CASES += [Case(**engine, scheme="w8a8") for engine in (DDP, FSDP2)]
CASES += [Case(**ZERO3, zero_init=True, scheme="w2-learned")]
CASES += [Case(**engine, scheme="w8a8-static", checkpointing=True) for engine in (DDP, ZERO3, FSDP2)]
CASES += [Case(**engine, scheme="w8a8-calibrated") for engine in (ZERO3, FSDP2)]
CASES += [Case(**engine, lora=True) for engine in (ZERO3, FSDP2)]
CASES += [Case(**engine, mixture=True) for engine in (DDP, ZERO3, FSDP2)]
CASES += [
    Case(**ZERO3, scheme="w8a8", verify=True),
    Case(**ZERO1, axis="tp"),
    Case(**ZERO1, axis="tp", scheme="w4-channel"),
    Case(**ZERO1, axis="ep", mixture=True),
    Case(engine="deepspeed", scheme="w8a8"),
    Case(engine="deepspeed", axis="pp", scheme="w8a8", verify=True),
]
IN_BF16 = [Case(**engine, scheme="w4-asym-learned", bf16=True) for engine in (DDP, ZERO3, FSDP2)]
OFFLOADED = [Case(**ZERO3, scheme="w2-learned", offload=True)]
RESUMED = Case(**ZERO3, scheme="w8a8-static", lora=True)
RESUMED_STEPS, SAVED_STEP = 4, 2
REFERENCES = list(dict.fromkeys(case.reference for case in (*CASES, *OFFLOADED)))


def model_directory(directory: Path, case: Case) -> Path:
    return directory / ("mixture" if case.mixture else "llama")


def save_models(directory: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.1}
    llama(seed=1, **sizes).save_pretrained(directory / "llama")
    mixtral(seed=1, **sizes).save_pretrained(directory / "mixture")


def callback_settings(case: Case) -> tuple[Any, dict[str, Any]]:
    """Return the scheme and the options of the callback; groups are small enough for the models."""
    from shardwright.ds_configs.quantization.scheme import changed, scheme_named

    name, options = SCHEMES[case.scheme]
    scheme = scheme_named(name)
    if case.scheme == "w4-channel":
        scheme = changed(scheme, group_size=-1)
    elif scheme.weights.strategy == "group":
        scheme = replace(scheme, weights=replace(scheme.weights, group_size=GROUP))
    return scheme, options


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
    calibration = [collate(samples())] if case.scheme == "w8a8-calibrated" else None
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
