"""Weights of three and of two values: the papers' formulas, codes that fit in two bits, and training that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import cpu_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.quantization.scheme import WeightQuantization, changed, scheme_named
from shardwright.trainers.qat.callback import QATCallback
from shardwright.trainers.qat.rounding.rounding import Rounding, round_weight, weight_gradients
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, set_seed

STRATEGIES = {"tensor": None, "channel": None, "group": 16}
RULES = ("ternary", "binary")
VOCAB_SIZE, SEQ_LEN = 64, 24


def rounding(rule: str, strategy: str, dtype: torch.dtype = torch.float32) -> Rounding:
    quantization = WeightQuantization(bits=2, strategy=strategy, group_size=STRATEGIES[strategy])  # type: ignore[arg-type]
    return Rounding(quantization=quantization, rule=rule, stored_dtype=dtype)  # type: ignore[arg-type]


def parts(weight: torch.Tensor, strategy: str) -> list[torch.Tensor]:
    if strategy == "tensor":
        return [weight.flatten()]
    rows = list(weight)
    return rows if strategy == "channel" else [part for row in rows for part in row.split(16)]


@given(seed=st.integers(0, 10**6), strategy=st.sampled_from(list(STRATEGIES)), zeros=st.booleans())
@settings(deadline=None)
def test_ternary_weights_equal_bitnet(seed: int, strategy: str, zeros: bool) -> None:
    """γ = mean |W|, W' = max(-1, min(1, round(W / (γ + ε)))) (arXiv 2402.17764, eq. 1-3), in fp64."""
    weight = torch.randn(6, 48, generator=torch.Generator().manual_seed(seed))
    if zeros:
        weight[1] = 0
    found = round_weight(weight, rounding("ternary", strategy))
    scales = found.scale.flatten().double()
    for scale, vector, levels in zip(
        scales, parts(weight.double(), strategy), parts(found.codes, strategy), strict=True
    ):
        mean = vector.abs().mean()
        ratio = vector / (mean + 1e-300)
        expected = torch.clamp(torch.round(ratio), -1, 1)
        # Between two codes fp32 may decide otherwise than fp64.
        clear = ((ratio.abs() - 0.5).abs() > 1e-5) | (vector == 0)
        assert torch.equal(levels.double()[clear], expected[clear])
        assert float(scale) == pytest.approx(max(float(mean), torch.finfo(torch.float32).tiny), rel=1e-6)
    assert found.zero_point is None and set(found.codes.unique().tolist()) <= {-1.0, 0.0, 1.0}


@given(seed=st.integers(0, 10**6), strategy=st.sampled_from(list(STRATEGIES)))
@settings(deadline=None)
def test_binary_weights_minimize_the_error(seed: int, strategy: str) -> None:
    """B = sign(W), α = ‖W‖₁ / n minimise ‖W - αB‖² (arXiv 1603.05279, eq. 2-6): no other scale is nearer, in fp64."""
    weight = torch.randn(6, 48, generator=torch.Generator().manual_seed(seed))
    found = round_weight(weight, rounding("binary", strategy))
    for scale, vector, levels in zip(
        found.scale.flatten().double(), parts(weight.double(), strategy), parts(found.codes, strategy), strict=True
    ):
        assert torch.equal(levels.double(), torch.where(vector >= 0, 1.0, -1.0).double())
        assert float(scale) == pytest.approx(float(vector.abs().sum() / vector.numel()), rel=1e-6)
        least = float((vector - scale * levels).square().sum())
        for factor in (0.99, 1.01):
            assert float((vector - scale * factor * levels).square().sum()) > least


@pytest.mark.parametrize("rule", RULES)
def test_gradients_pass_every_weight(rule: str) -> None:
    gradient, weight = torch.randn(2, 6, 48, generator=torch.Generator().manual_seed(2))
    by_weight, by_scale, by_zero = weight_gradients(gradient, weight, rounding(rule, "group"), None, None)
    assert torch.equal(by_weight, gradient) and by_scale is None and by_zero is None


@pytest.mark.parametrize("rule", RULES)
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
