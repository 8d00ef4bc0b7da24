"""`W ≈ L·R + Q + S` against singular value decompositions of its own, and its place in a checkpoint."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.quantization.scheme import scheme_named
from shardwright.trainers.formats.spqr import LowRankOptions, load_spqr, low_rank_residual, weighted_error
from shardwright.trainers.quantization import quantize_to_small_format
from small_spqr import LAYERS, correlated, logits, samples, small_model

pytestmark = pytest.mark.slow


def error(weight_OI, hessian_II, **changes) -> float:
    matrix = low_rank_residual(weight_OI, hessian_II, LowRankOptions(**{"bits": 3, "group_size": 32, **changes}))
    return weighted_error(matrix.dequantize().float() - weight_OI.float(), hessian_II)


def test_one_correction_is_the_best_of_its_rank():
    """With codes at hand the correction is the singular value decomposition of what they leave, Hessian or not."""
    weight_OI, hessian_II = correlated(48, 64)
    root_II = torch.linalg.cholesky(hessian_II.double())
    options = {"bits": 3, "group_size": 32, "iterations": 1, "dampening": 0.0}
    quantized = low_rank_residual(weight_OI, hessian_II, LowRankOptions(**options, rank=0)).quantized()
    values = torch.linalg.svdvals((weight_OI.double() - quantized.double()) @ root_II)
    best = float(values[8:].square().sum())
    assert error(weight_OI, hessian_II, rank=8, iterations=1, dampening=0.0) <= 1.01 * best


def test_large_terms_of_low_rank_are_removed_before_rounding():
    """Rounded by hand after the best product of rank 2 was subtracted."""
    draw = torch.Generator().manual_seed(4)
    left_OK, right_KI, noise_OI = (torch.randn(*shape, generator=draw) for shape in ((48, 2), (2, 64), (48, 64)))
    weight_OI = (5 * left_OK @ right_KI + 0.1 * noise_OI).bfloat16()
    left, values, right = torch.linalg.svd(weight_OI.double(), full_matrices=False)
    rest = weight_OI.double() - left[:, :2] * values[:2] @ right[:2]
    scale = rest.view(48, 2, 32).abs().amax(-1, keepdim=True) / 3.5
    rounded = ((rest.view(48, 2, 32) / scale).round().clamp(-4, 3) * scale).view(48, 64)
    assert error(weight_OI, None, rank=2, iterations=1) <= 1.5 * float((rounded - rest).square().sum())


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 70),
    group_size=st.sampled_from([-1, 16, 100]),
    symmetric=st.booleans(),
    rank=st.integers(0, 9),
)
def test_never_worse_than_codes_alone(rows, columns, group_size, symmetric, rank):
    weight_OI, hessian_II = correlated(rows, columns)
    settings = {"bits": 3, "group_size": group_size, "symmetric": symmetric}
    alone = low_rank_residual(weight_OI, hessian_II, LowRankOptions(**settings, rank=0))
    options = LowRankOptions(**settings, rank=rank)
    matrix = low_rank_residual(weight_OI, hessian_II, options)
    errors = [weighted_error(found.dequantize().float() - weight_OI.float(), hessian_II) for found in (matrix, alone)]
    assert errors[0] <= errors[1]


def test_large_matrices_use_reproducible_random_projections():
    weight_OI, _ = correlated(520, 530)
    options = LowRankOptions(bits=3, group_size=128, rank=8, iterations=1)
    state = torch.random.get_rng_state()
    first, second = (low_rank_residual(weight_OI, None, options).dequantize() for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.needs("llmcompressor")
def test_dense_and_small_checkpoints_are_equal(tmp_path):
    from transformers import AutoModelForCausalLM

    quantized = quantize_to_small_format(
        small_model(),
        scheme_named("W3A16_ASYM"),
        method="low-rank",
        layers=LAYERS,
        calibration=samples(),
        batch_size=2,
        options={"rank": 4, "iterations": 1},
    )
    quantized.save(tmp_path)
    for model in (AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), load_spqr(tmp_path)):
        assert torch.equal(logits(model), logits(quantized.model))
    first = quantized.matrices["model.layers.0.mlp.up_proj"]
    assert (first.left.shape[1], first.symmetric, first.bits) == (4, False, 3)
