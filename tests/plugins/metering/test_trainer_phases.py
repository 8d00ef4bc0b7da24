"""`meter_trainer` on small Trainer runs of one process: phases in order, roles by parameter arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_settings import cpu_arguments
from shardwright.plugins.metering import WARM_UP_STEPS, ByteMeter, MeterPhase, MeterReading, meter_trainer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, default_data_collator, set_seed

pytestmark = pytest.mark.slow

SEQ_LEN = 16
STEPS = WARM_UP_STEPS + 1


class RecordingMeter(ByteMeter):
    """Keeps the names of the phases, and the phases at whose end peaks were forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[MeterPhase] = []
        self.resets: list[int] = []

    def enter(self, phase: MeterPhase) -> None:
        super().enter(phase)
        self.entered.append(phase)

    def reset_peaks(self) -> None:
        super().reset_peaks()
        self.resets.append(len(self.entered))


def train(directory: Any, **settings: Any) -> tuple[RecordingMeter, MeterReading, list[torch.nn.Parameter]]:
    """Return the meter, what it read at the end, and the parameters of the model."""
    settings = {"optim": "adamw_torch_fused", "max_steps": STEPS, "logging_strategy": "no"} | settings
    arguments = cpu_arguments(directory, 2, **settings)
    set_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        tie_word_embeddings=False,
    )
    tokens = torch.randint(0, config.vocab_size, (arguments.gradient_accumulation_steps * 2 * STEPS, SEQ_LEN))
    with RecordingMeter() as meter:
        model: Any = LlamaForCausalLM(config)
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": sample, "labels": sample} for sample in tokens],
            data_collator=default_data_collator,
        )
        meter_trainer(trainer, meter)
        trainer.train()
        reading = meter.reading()
    return meter, reading, list(model.parameters())


def count(parameters: list[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def test_phases_follow_each_other_and_roles_are_arithmetic(tmp_path):
    """Weights, gradients and optimizer states in fp32, by arithmetic."""
    meter, reading, parameters = train(tmp_path)
    assert meter.entered == ["forward", "loss", "backward", "step", "other"] * STEPS
    assert meter.resets == [5 * WARM_UP_STEPS], "what the first steps needed is forgotten"
    for phase, roles in reading.roles.items():
        assert sum(roles.values()) == reading.peaks[phase], phase
        assert roles["buckets"] == 0, "one process shards nothing"
        assert roles["weights"] == 4 * count(parameters), phase
    step = reading.roles["step"]
    assert step["gradients"] == 4 * count(parameters)
    # Adam's moments, and a step count of 4 bytes for each parameter.
    states = 8 * count(parameters) + 4 * len(parameters)
    # The Trainer keeps the norm of the last gradients, made in the step phase.
    assert reading.roles["forward"]["optimizer"] == states + 4
    assert reading.roles["loss"]["gradients"] == 0, "gradients are forgotten after each step"
    # Clipping adds one norm of 4 bytes for each parameter, stacks them and takes a few scalars.
    assert states <= step["optimizer"] <= states + 16 * len(parameters) + 64
    assert reading.peak_bytes == max(reading.peaks[name] for name in ("forward", "loss", "backward", "step"))
    # The logits of 2 sequences, in the model's precision and for the loss in fp32.
    logits_bytes = 4 * 2 * SEQ_LEN * 256
    assert reading.roles["loss"]["activations"] - reading.roles["forward"]["activations"] >= 2 * logits_bytes


def test_accumulation_steps_once(tmp_path):
    meter, reading, parameters = train(tmp_path, gradient_accumulation_steps=2)
    micro_batch = ["forward", "loss", "backward"]
    assert meter.entered == [*micro_batch, "other", *micro_batch, "step", "other"] * STEPS
    roles = reading.roles["forward"]
    assert roles["gradients"] in (0, 4 * count(parameters))
    assert reading.roles["step"]["gradients"] == 4 * count(parameters)
    for phase, found in reading.roles.items():
        assert sum(found.values()) == reading.peaks[phase]
