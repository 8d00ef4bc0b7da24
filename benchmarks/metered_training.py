"""Trains a planned layout for a few steps through the stock Trainer, with a meter on."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from shardwright.ds_configs.memory.estimate import estimate_memory
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.plan.rendering import deepspeed_config, planned_training_arguments
from shardwright.ds_configs.search.search import Evaluated
from shardwright.ds_configs.specs.hardware import HardwareSpec
from shardwright.ds_configs.specs.images import IMAGE_PARTS
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.step_time.estimate import estimate_step_time
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.metering import WARM_UP_STEPS, Meter, MeterReading, meter_trainer
from shardwright.plugins.peft import add_lora, four_bit_loading
from shardwright.plugins.transformers.gradient_checkpointing import (
    checkpoint_first_layers,
)
from shardwright.plugins.transformers.loading import auto_class
from shardwright.plugins.transformers.optimizers import prepare_optimizer
from shardwright.plugins.transformers.training_arguments import training_arguments, weights_dtype
from shardwright.tools.activations.linear_attention import linear_attention_kernels
from shardwright.trainers.parallel.planned import attach_long_sequences
from shardwright.trainers.runs.ranks import freeze, frozen_parts
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    default_data_collator,
    set_seed,
)
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

STEPS = WARM_UP_STEPS + 1


def plan_of(layout: Layout, spec: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> Plan:
    """Return the plan of a layout that no search chose."""
    memory = estimate_memory(layout, spec, hardware, job)
    time = estimate_step_time(layout, spec, hardware, job)
    chosen = Evaluated(layout=layout, memory=memory, time=time, reason="")
    return Plan(model=spec, hardware=hardware, job=job, chosen=chosen, rejected=())


def train_metered(
    plan: Plan,
    config: dict[str, Any],
    meter: Meter,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    batch: dict[str, torch.Tensor] | None = None,
) -> MeterReading:
    """Train random weights of a model configuration, and return what lived on this rank in the last step.

    `batch` is a micro-batch for every step, by default one of random tokens.
    """
    layout, job = plan.chosen.layout, plan.job
    deepspeed = layout.engine == "deepspeed"
    arguments = training_arguments(run_settings(plan), configure_cpu_ranks(layout.engine))  # type: ignore[arg-type]
    set_seed(1)
    model_config = AutoConfig.for_model(**config)
    dtype = weights_dtype(arguments, method=job.method, trained=job.weights_dtype)
    # Samples of a complete run are the data set's, not the step's.
    samples = random_samples(plan)
    collate = default_data_collator if batch is None else lambda rows: batch
    with meter, ExitStack() as kernels:
        if job.method == "qlora":
            model = _four_bit_model(model_config, dtype)
        else:
            # Some towers initialise weights from shapes that ZeRO-3 would have divided; it then shards the built model.
            if batch is not None:
                unset_hf_deepspeed_config()
            with torch.device(arguments.device):
                model = auto_class(model_config).from_config(model_config, dtype=dtype, trust_remote_code=False)
        if arguments.device.type == "cpu":
            # Kernels of linear attention require a GPU.
            kernels.enter_context(linear_attention_kernels(model))
        if batch is not None and deepspeed:
            set_hf_deepspeed_config(arguments.hf_deepspeed_config)
        if plan.model.reads_images:
            freeze(model, frozen_parts(job))
            if layout.engine == "fsdp2":
                _as_stored(model)
        if job.method != "full":
            model = add_lora(
                model,
                rank=job.lora_rank,
                targets=",".join(job.lora_targets),
                variant=job.lora_variant,
                fp32_adapters=not deepspeed,
                frozen=frozen_parts(job),
                whole={part for part in IMAGE_PARTS if getattr(job, part) == "full"},
            )
        trainer = Trainer(model=model, args=arguments, train_dataset=samples, data_collator=collate)
        del model
        for callback in callbacks:
            trainer.add_callback(callback)
        attach_long_sequences(trainer, layout, job)
        if layout.checkpointed_layers is not None:
            trainer.add_callback(_FirstLayers(layout.checkpointed_layers))
        prepare_optimizer(trainer)
        meter_trainer(trainer, meter)
        trainer.train()
        reading = meter.reading()
    return reading


def _as_stored(model: Any) -> None:
    """Convert frozen weights to the 16 bit of a checkpoint, in which FSDP2 keeps them."""
    for weight in model.parameters():
        if not weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)


class _FirstLayers(TrainerCallback):
    """Recomputes only the first layers, after the Trainer has enabled checkpointing of all."""

    def __init__(self, count: int) -> None:
        self.count = count

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        checkpoint_first_layers(kwargs["model"], self.count)


def _four_bit_model(config: Any, dtype: torch.dtype) -> Any:
    """Return random weights that become 4-bit while they are read."""
    with tempfile.TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).save_pretrained(directory)
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, quantization_config=four_bit_loading(dtype), trust_remote_code=False
        )


def run_settings(plan: Plan, *, steps: int = STEPS) -> dict[str, Any]:
    """Return the settings of a few steps that write nothing, with those of the plan's engine."""
    layout = plan.chosen.layout
    settings = planned_training_arguments(plan) | {
        "output_dir": tempfile.gettempdir(),
        "max_steps": steps,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    if layout.engine == "deepspeed":
        settings["deepspeed"] = deepspeed_config(plan)
    if layout.engine == "fsdp2":
        settings["fsdp"] = True
        settings["fsdp_config"] = {
            "version": 2,
            "transformer_layer_cls_to_wrap": list(plan.model.layer_classes),
            "reshard_after_forward": True,
            "offload_params": layout.offload_param == "cpu",
        }
    return settings


def random_samples(plan: Plan) -> list[dict[str, torch.Tensor]]:
    """Return the random tokens of all steps and data-parallel ranks."""
    generator = torch.Generator().manual_seed(0)
    shape = (plan.chosen.layout.global_batch_size * STEPS, plan.job.seq_len_tokens)
    tokens = torch.randint(0, plan.model.dimensions.vocab_size, shape, generator=generator)
    return [{"input_ids": sample, "labels": sample} for sample in tokens]
