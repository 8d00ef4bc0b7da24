"""Weights that are not finite are found by name, in every type of number."""

from __future__ import annotations

import pytest
import torch
from shardwright.plugins.transformers.sound_model import is_finite, nonfinite_weights


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.second = torch.nn.Linear(4, 5, bias=False)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("mask", torch.full((2,), float("-inf")), persistent=False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
def test_one_bad_element_is_found(bad, dtype):
    tensor = torch.ones(7, 5).to(dtype)
    assert is_finite(tensor)
    tensor.view(-1)[17] = bad
    assert not is_finite(tensor)


def test_parameters_and_saved_buffers_are_named_and_masks_are_not():
    model = Model()
    assert nonfinite_weights(model) == []
    model.first.bias.data[1] = float("nan")
    model.kept[0] = float("inf")
    assert nonfinite_weights(model) == ["first.bias", "kept"]
