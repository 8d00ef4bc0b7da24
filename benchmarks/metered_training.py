"""Trains a planned layout for a few steps through the stock Trainer, with a meter on."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from safetensors.torch import save_model
from shardwright.ds_configs.memory.estimate import estimate_memory
from shardwright.ds_configs.memory.rank_parameters import pipeline_stages
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.plan.rendering import deepspeed_config, planned_training_arguments
from shardwright.ds_configs.search.search import Evaluated
from shardwright.ds_configs.specs.hardware import HardwareSpec
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.step_time.estimate import estimate_step_time
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.bitsandbytes import is_divided, on_host, place_for_division
from shardwright.plugins.deepspeed_pipeline.engine import meter_pipeline_trainer
from shardwright.plugins.metering import WARM_UP_STEPS, Meter, MeterReading, meter_trainer
from shardwright.plugins.peft import add_lora, four_bit_loading
from shardwright.plugins.transformers.gradient_checkpointing import (
    partial_checkpointing_callback,
    selective_checkpointing_callback,
)
from shardwright.plugins.transformers.optimizers import prepare_optimizer
from shardwright.plugins.transformers.training_arguments import training_arguments, weights_dtype
from shardwright.trainers.parallel.long_sequences import long_sequence_callback
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    Trainer,
    TrainerCallback,
    default_data_collator,
    set_seed,
)
from transformers.modeling_utils import set_zero3_state

STEPS = WARM_UP_STEPS + 1


def plan_of(strategy: Layout, spec: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> Plan:
    """Return the plan of a strategy that no search chose."""
    memory = estimate_memory(strategy, spec, hardware, job)
    time = estimate_step_time(strategy, spec, hardware, job)
    chosen = Evaluated(strategy=strategy, memory=memory, time=time, reason="")
    return Plan(model=spec, hardware=hardware, job=job, chosen=chosen, rejected=())


def train_metered(
    plan: Plan, config: dict[str, Any], meter: Meter, *, callbacks: Sequence[TrainerCallback] = ()
) -> MeterReading:
    """Train random weights of a model configuration, and return what lived on this rank in the last step."""
    strategy, job = plan.chosen.strategy, plan.job
    deepspeed = strategy.engine == "deepspeed"
    arguments = training_arguments(run_settings(plan), configure_cpu_ranks(strategy.engine))  # type: ignore[arg-type]
    set_seed(1)
    model_config = AutoConfig.for_model(**config)
    dtype = weights_dtype(arguments, method=job.method, trained=job.weights_dtype)
    # Images and sound of a whole run are the data set's, not the step's.
    samples = _samples(plan, model_config)
    with meter:
        if job.method == "qlora":
            model = _four_bit_model(model_config, dtype, strategy.engine)
        else:
            auto_class = _auto_class(plan.model.architecture, model_config)
            if strategy.zero_stage == 3 and hasattr(model_config, "vision_config"):
                model = _read_model(auto_class, model_config, dtype)
            else:
                with torch.device(arguments.device):
                    model = auto_class.from_config(model_config, dtype=dtype, trust_remote_code=False)
                model = _without_zeros(model)
        if job.method != "full":
            model = add_lora(model, rank=job.lora_rank, targets="all-linear", fp32_adapters=not deepspeed)
        trainer = _trainer(plan, arguments, model, samples)
        del model
        for callback in callbacks:
            trainer.add_callback(callback)
        if (long := long_sequence_callback(strategy, job, trainer.model)) is not None:
            long.attach(trainer)
        if strategy.checkpointed_layers is not None:
            trainer.add_callback(partial_checkpointing_callback(strategy.checkpointed_layers))
        if strategy.keeps_products:
            trainer.add_callback(selective_checkpointing_callback())
        prepare_optimizer(trainer)
        (meter_pipeline_trainer if strategy.pp > 1 else meter_trainer)(trainer, meter)
        trainer.train()
        reading = meter.reading()
    return reading


def _read_model(auto_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Random weights that are divided while they are read.

    `from_config` fails on towers under ZeRO-3: `initialize_weights_zero3` (transformers 5.17) gathers a module's own
    parameters, and SigLIP's modules draw those of their children ("Fan in and fan out can not be computed").
    """
    with tempfile.TemporaryDirectory() as directory:
        config.to_json_file(f"{directory}/config.json")
        # Else the tower, which the model makes by `from_config`, would be divided here.
        with set_zero3_state():
            whole = _without_zeros(auto_class._model_mapping[type(config)](config).to(dtype))
        save_model(whole, f"{directory}/model.safetensors", metadata={"format": "pt"})
        del whole
        return auto_class.from_pretrained(directory, dtype=dtype, trust_remote_code=False)


def _without_zeros(model: Any) -> Any:
    """The model without matrices of zeros: Gemma 3 draws its projection so, and gradients of image tokens are infinite.

    DeepSpeed's ZeRO-2 then steps over its optimizer, which makes no states.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.numel() and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def _four_bit_model(config: Any, dtype: torch.dtype, engine: str) -> Any:
    """Random weights that become 4-bit while they are read; `save_pretrained` would write on the first rank alone."""
    with tempfile.TemporaryDirectory() as directory:
        config.to_json_file(f"{directory}/config.json")
        # Under ZeRO-3 `from_config` would make partitions.
        whole = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(dtype)
        save_model(whole, f"{directory}/model.safetensors", metadata={"format": "pt"})
        del whole
        with on_host() if is_divided(engine) else nullcontext({}) as placement:
            model = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                quantization_config=four_bit_loading(dtype),
                trust_remote_code=False,
                **placement,
            )
        return place_for_division(model) if is_divided(engine) else model


def _auto_class(architecture: str, config: Any) -> Any:
    """Return the auto class that builds the architecture."""
    classes = (
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
        AutoModelForImageClassification,
        AutoModelForImageTextToText,
        AutoModel,
    )
    built = {auto: auto._model_mapping.get(type(config), None) for auto in classes}
    return next(auto for auto, made in built.items() if made is not None and made.__name__ == architecture)


def _trainer(plan: Plan, arguments: Any, model: Any, samples: list[dict[str, torch.Tensor]]) -> Trainer:
    collator = partial(_collated, contrastive=plan.model.task == "contrastive")
    inputs = {"train_dataset": samples, "data_collator": collator}
    strategy = plan.chosen.strategy
    if strategy.pp == 1:
        return Trainer(model=model, args=arguments, **inputs)
    from shardwright.trainers.parallel.pipeline.trainer import PipelineTrainer

    stages = pipeline_stages(plan.model, plan.job, strategy.pp)
    trainer: Trainer = PipelineTrainer(model=model, args=arguments, pipeline_stages=stages, **inputs)
    return trainer


def run_settings(plan: Plan, *, steps: int = STEPS) -> dict[str, Any]:
    """Return the settings of a few steps that write nothing, with those of the plan's engine."""
    strategy = plan.chosen.strategy
    settings = planned_training_arguments(plan) | {
        "output_dir": tempfile.gettempdir(),
        "max_steps": steps,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    if strategy.engine == "deepspeed":
        settings["deepspeed"] = deepspeed_config(plan)
    if strategy.engine == "fsdp2":
        settings["fsdp"] = True
        settings["fsdp_config"] = {
            "version": 2,
            "transformer_layer_cls_to_wrap": list(plan.model.layer_classes),
            "reshard_after_forward": True,
            "offload_params": strategy.offload_param == "cpu",
        }
    return settings


def _samples(plan: Plan, config: Any) -> list[dict[str, torch.Tensor]]:
    """Random text, images or sound, as the model reads them."""
    generator = torch.Generator().manual_seed(0)
    count = plan.chosen.strategy.global_batch_size * STEPS
    words = plan.model.dimensions.vocab_size
    # The last of the vocabulary may stand for an image.
    tokens = torch.randint(3, max(words - 1, 4), (count, plan.job.seq_len_tokens), generator=generator)
    vision = getattr(config, "vision_config", config)
    columns = {"input_ids": tokens, "labels": tokens}
    if plan.model.task == "seq2seq" and hasattr(config, "num_mel_bins"):
        frames = (count, config.num_mel_bins, 2 * config.max_source_positions)
        columns = {"input_features": torch.randn(frames, generator=generator), "labels": tokens}
    elif hasattr(vision, "image_size"):
        pixels = (count, vision.num_channels, vision.image_size, vision.image_size)
        columns["pixel_values"] = torch.randn(pixels, generator=generator)
        if hasattr(config, "mm_tokens_per_image"):
            # As the processor marks them: tokens of an image see each other.
            image = slice(config.mm_tokens_per_image)
            columns["token_type_ids"] = torch.zeros_like(tokens)
            columns["token_type_ids"][:, image], tokens[:, image] = 1, config.image_token_id
        if plan.model.task == "contrastive":
            del columns["labels"]
        elif not words:
            columns = {"pixel_values": columns["pixel_values"], "labels": torch.zeros(count, dtype=torch.int64)}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _collated(samples: list[dict[str, torch.Tensor]], *, contrastive: bool) -> dict[str, Any]:
    batch = default_data_collator(samples)
    return batch | {"return_loss": True} if contrastive else batch
