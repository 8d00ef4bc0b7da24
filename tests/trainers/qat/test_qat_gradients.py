"""Gradients of rounded layers against references in fp64, written from the papers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding_reference import EXACT, assert_same, drawn, ours, reference, weights_of
from shardwright.ds_configs.quantization.scheme import ActivationQuantization
from shardwright.trainers.qat.rounding import Rounding, round_weight, stored_scale, weight_gradients

ACTIVATIONS = [
    None,
    ActivationQuantization(),
    ActivationQuantization(symmetric=False),
    ActivationQuantization(bits=4),
    ActivationQuantization(dynamic=False),
    ActivationQuantization(dynamic=False, symmetric=False),
]
RULES = [
    ("minmax", True),
    ("minmax", False),
    ("learned", True),
    ("learned", False),
    ("ternary", True),
    ("binary", True),
]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bits=st.integers(2, 8),
    rule=st.sampled_from(RULES),
    strategy=st.sampled_from(["tensor", "channel", "group"]),
    activations=st.sampled_from(ACTIVATIONS),
    batch=st.sampled_from([(3,), (1, 1), (2, 3), (2, 2, 2)]),
    rows=st.integers(1, 6),
    groups=st.integers(1, 3),
    biased=st.booleans(),
)
def test_gradients_are_those_of_the_papers(seed, bits, rule, strategy, activations, batch, rows, groups, biased):
    name, symmetric = rule
    # Upstream finds one dynamic range for each place of a third dimension, and tokens have only two before theirs.
    batch = batch[:2] if activations is not None and activations.dynamic else batch
    bits = 2 if name in ("ternary", "binary") else bits
    formats = {"bits": bits, "symmetric": symmetric, "strategy": strategy, "rule": name, "activations": activations}
    case = drawn(seed=seed, batch=batch, rows=rows, groups=groups, biased=biased, **formats)
    assert_same(case.gradients(ours), case.gradients(reference))


def test_values_outside_a_learned_range_get_no_gradient():
    """Worked out by hand: s = 0.5, 4 bits, so that codes end at -8 and 7 and gradients at -4.25 and 3.75."""
    weight = torch.tensor([[3.5, 3.74, 3.76, 9.0, -4.24, -4.26, 0.3, -0.2]], dtype=EXACT)
    how = Rounding(quantization=weights_of(4, True, "group"), rule="learned", stored_dtype=EXACT)
    scale = torch.tensor([[0.5]], dtype=EXACT)
    assert round_weight(weight, how, scale).codes.tolist() == [[7, 7, 7, 7, -8, -8, 1, 0]]
    by_weight, by_scale, by_zero = weight_gradients(torch.ones_like(weight), weight, how, scale, None)
    assert by_weight.tolist() == [[1, 1, 0, 0, 1, 0, 1, 1]]
    inside = (7 - 7) + (7 - 7.48) + (-8 + 8.48) + (1 - 0.6) + (0 + 0.4)
    assert by_scale.item() == pytest.approx((inside + 7 + 7 - 8) / math.sqrt(8 * 7), rel=1e-12)
    assert by_zero is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_learned_scales_are_not_changed(dtype):
    """Never replaced by a type's epsilon: that of bf16, 0.0078, is more than most scales of 8 bits."""
    small = torch.tensor([3e-4, 1e-3, 0.5])
    assert torch.equal(stored_scale(small, dtype), small.to(dtype))
    least = stored_scale(torch.tensor([0.0, -1.0]), dtype)
    assert (least == torch.finfo(dtype).tiny).all()
    assert stored_scale(torch.tensor([math.nan]), dtype).isnan().all()
