"""Weights of three and of two values: codes that fit in two bits, and training that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import cpu_arguments
from shardwright.ds_configs.quantization.scheme import changed, scheme_named
from shardwright.trainers.qat.callback import QATCallback
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, set_seed

VOCAB_SIZE, SEQ_LEN = 64, 24


@pytest.mark.parametrize("rule", ["ternary", "binary"])
def test_low_bit_model_learns_and_exports_bit_for_bit(rule: Any, tmp_path: Path) -> None:
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    rows = [[(7 * row + 5 * place) % VOCAB_SIZE for place in range(SEQ_LEN)] for row in range(32)]
    arguments = cpu_arguments(tmp_path / "training", 8, max_steps=40, learning_rate=1e-2, logging_steps=1)
    callback = QATCallback(changed(scheme_named("W2A16"), group_size=32), weight_rule=rule)
    samples = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[callback])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] > 3.9 and sum(losses[-5:]) / 5 < 0.5 * losses[0]
    callback.export(trainer, tmp_path / "out", verify=False)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    batch = torch.tensor(rows[:4])
    with torch.inference_mode():
        assert torch.equal(reloaded.eval()(batch).logits, trainer.model.eval()(batch).logits)
    weights = {name: module.weight for name, module in reloaded.named_modules() if name.endswith("proj")}
    assert len(weights) == 14
    for weight in weights.values():
        values = [len(part.unique()) for row in weight for part in row.split(32)]
        assert max(values) == (3 if rule == "ternary" else 2)
