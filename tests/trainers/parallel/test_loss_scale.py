"""How Transformers scales losses under tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from shardwright.plugins.releases import installed_version
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

TP, RANKS = 2, 4
TOKENS = 10
BATCH = {
    "input_ids": torch.ones(1, TOKENS + 1, dtype=torch.long),
    "labels": torch.ones(1, TOKENS + 1, dtype=torch.long),
}
DIVIDES = Version(installed_version("transformers") or "0") >= Version("5.19.0")
"""Whether Transformers divides tokens and factor by the tensor-parallel size under DeepSpeed."""


class Ranks:
    """Stands in for an Accelerator of several ranks that counted the same batch."""

    num_processes = RANKS
    parallelism_config = None

    def gather(self, count: torch.Tensor) -> torch.Tensor:
        return count.repeat(RANKS)


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=3)
    made = Trainer(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32)), arguments)
    made.accelerator = Ranks()
    made.model._tp_size = TP
    return made


def tokens_and_factor(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Return the tokens of a step over all ranks, and by what the Trainer multiplies a loss."""
    monkeypatch.setattr(type(trainer.args), "world_size", RANKS)
    tokens = trainer._get_num_items_in_batch([BATCH], torch.device("cpu"))
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: torch.ones(())
    factor = trainer.compute_loss(trainer.model, dict(BATCH), num_items_in_batch=tokens)
    return float(tokens), float(factor)


def test_transformers_divides_by_tensor_parallel_size(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that Transformers changed its scaling: check `ExactTrainer.get_tp_size`."""
    ranks = RANKS // TP if DIVIDES else RANKS
    assert tokens_and_factor(trainer, monkeypatch) == (TOKENS * ranks, ranks)
    assert trainer.get_total_train_batch_size(trainer.args) == 3 * RANKS // TP
