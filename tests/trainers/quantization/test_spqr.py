"""SpQR: against plain rounding written out by hand, against its own small format, and against rounding of its size."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.quantization.scheme import scheme_named
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError
from shardwright.trainers.formats.spqr import (
    SMALL_DIRECTORY,
    ErrorFeedback,
    SpQROptions,
    inverse_factor,
    load_spqr,
    pack_bits,
    read_weight,
    save_small_format,
    spqr_quantize,
    stored_columns,
    unpack_bits,
    weighted_error,
)
from shardwright.trainers.quantization import quantize_to_small_format
from small_spqr import LAYERS, correlated, logits, samples, small_model


@given(st.integers(2, 8), st.lists(st.integers(0, 255), max_size=70))
def test_packed_codes_are_a_stream_of_bits(bits, numbers):
    """Against one large integer with code i at bit i·bits."""
    codes = [number % 2**bits for number in numbers]
    packed = pack_bits(torch.tensor(codes, dtype=torch.uint8), bits)
    stream = sum(code << (index * bits) for index, code in enumerate(codes))
    assert bytes(packed.tolist()) == stream.to_bytes((len(codes) * bits + 7) // 8, "little")
    assert unpack_bits(packed, bits, len(codes)).tolist() == codes


def test_wide_sparse_matrices_keep_their_columns():
    """40,000 has no place in a signed 16-bit number, 70,000 in none of 16 bits."""
    for width, dtype in ((50_000, torch.int16), (80_000, torch.int32)):
        columns = stored_columns(torch.tensor([3, 40_000, width - 1]), width)
        assert columns.dtype == dtype
        matrix = spqr_quantize(torch.eye(2), None)
        outliers = {"outlier_offsets": torch.tensor([0, 0, 3]), "outlier_columns": columns}
        wide = replace(matrix, shape=(2, width), outlier_values=torch.ones(3), **outliers)
        assert [part.tolist() for part in wide.outlier_positions()] == [[1, 1, 1], [3, 40_000, width - 1]]


@pytest.mark.parametrize("group_size", [16, 48])
def test_error_feedback_equals_gptq(group_size: int) -> None:
    """Against solving, after every column, for the best values of the columns that are still free."""
    weight_OI, hessian_II = correlated(3, 150)
    hessian_II = hessian_II.double()
    upper_II = inverse_factor(hessian_II, 0.0)
    feedback = ErrorFeedback(weight_OI, upper_II, group_size=group_size)
    expected_OI = weight_OI.double().clone()
    for column in feedback.columns():
        if column % group_size == 0:
            seen_CO = feedback.weight_IO[column : column + group_size]
            assert torch.allclose(seen_CO.t().double(), expected_OI[:, column : column + group_size], atol=2e-3)
        stored_O = feedback.weight_IO[column].round()
        error_O = expected_OI[:, column] - stored_O.double()
        rest = slice(column + 1, None)
        if column + 1 < 150:
            # Minimum over δ of the error when the settled column is off by e: H_rr δ = H_rc e.
            change_RO = torch.linalg.solve(hessian_II[rest, rest], hessian_II[rest, column : column + 1]) * error_O
            expected_OI[:, rest] += change_RO.t()
        expected_OI[:, column] = stored_O.double()
        feedback.settle(column, stored_O)


def second_level(values: torch.Tensor) -> torch.Tensor:
    """Scales or zeros of one block of rows, in 3 bits."""
    lowest, step = values.min().bfloat16().double(), ((values.max() - values.min()) / 7).bfloat16().double()
    return lowest + step * ((values - lowest) / step).round().clamp(0, 7)


def rounded_in_range(values: torch.Tensor, range_of: torch.Tensor) -> torch.Tensor:
    low, high = range_of.min().clamp(max=0), range_of.max().clamp(min=0)
    scale = (high - low).clamp(min=1e-30) / 7
    return scale * ((values / scale - low / scale).round().clamp(0, 7) + low / scale)


def spqr_by_loops(weight_OI: torch.Tensor, hessian_II: torch.Tensor | None, threshold: float | None) -> torch.Tensor:
    """Algorithm 1 of the paper (arXiv 2306.03078) in fp64: 3 bits, groups of 16, one block of rows."""
    rows, size = weight_OI.shape
    free, stored = weight_OI.double(), torch.empty(rows, size, dtype=torch.float64)
    upper_II = torch.eye(size, dtype=torch.float64)
    if hessian_II is not None:
        damped_II, dead_I = hessian_II.double().clone(), hessian_II.diagonal() <= 0
        free[:, dead_I] = 0
        damped_II[dead_I, dead_I] = 1
        damped_II += 0.01 * damped_II.diagonal().mean() * torch.eye(size)
        upper_II = torch.linalg.cholesky(torch.linalg.inv(damped_II), upper=True)
    cost_I = 1 / upper_II.diagonal() ** 2
    limit = math.inf if threshold is None else threshold * float((free.var(dim=0, correction=0) * cost_I).mean())
    for column in range(size):
        group = range(column, min(column + 16, size))
        if column % 16 == 0:
            kept = free[:, group].clone()
            for row in range(rows if threshold is not None else 0):
                own, cost = free[row, group], cost_I[group]
                every = float(((rounded_in_range(own, own) - own) ** 2 * cost).sum())
                for index in range(len(own)):
                    others = torch.cat([own[:index], own[index + 1 :]])
                    error = (rounded_in_range(others, torch.cat([others, torch.zeros(1)])) - others) ** 2
                    if every - float((error * torch.cat([cost[:index], cost[index + 1 :]])).sum()) > limit:
                        kept[row, index] = 0
            low, high = kept.amin(1).clamp(max=0), kept.amax(1).clamp(min=0)
            scale = second_level((high - low) / 7)
            zero = second_level((-low / scale).clamp(0, 7))
        value = free[:, column]
        settled = (scale * ((value / scale + zero).round().clamp(0, 7) - zero)).to(weight_OI.dtype).double()
        outlier = (value - settled) ** 2 * cost_I[column] > limit
        in_16_bit = value.to(torch.float16 if weight_OI.dtype == torch.float16 else torch.bfloat16).double()
        settled = torch.where(outlier, in_16_bit, settled)
        later = slice(column + 1, None)
        free[:, later] -= torch.outer((value - settled) / upper_II[column, column], upper_II[column, later])
        stored[:, column] = settled
    return stored


@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_those_of_the_paper(dtype: torch.dtype, threshold: float | None) -> None:
    """Without and with a Hessian, which has two inputs that are always zero."""
    weight_OI, hessian_II = correlated(16, 40)
    weight_OI = (weight_OI.float() * 1.37).to(dtype)
    hessian_II[[5, 33]] = 0
    hessian_II[:, [5, 33]] = 0
    for hessian in (None, hessian_II):
        matrix = spqr_quantize(weight_OI, hessian, SpQROptions(outlier_threshold=threshold))
        wanted_OI, found_OI = spqr_by_loops(weight_OI, hessian, threshold), matrix.dequantize().double()
        # A value at a border, which fp32 puts on the other side of it, would differ by a step, at least 2^-11 of it.
        assert (found_OI - wanted_OI).abs().max() <= 1e-5 * wanted_OI.abs().max()
        rows, columns = matrix.outlier_positions()
        assert (len(rows) > 0) == (threshold is not None) and len(rows) < 0.1 * weight_OI.numel()
        assert torch.equal(matrix.outlier_values.to(dtype), matrix.dequantize()[rows, columns])


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 150),
    bits=st.integers(2, 5),
    group_size=st.sampled_from([1, 3, 16, 200]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_any_shape_is_read_back(rows, columns, bits, group_size, dtype):
    """The numbers stay near the weights, and outliers outside of the matrix are rejected."""
    weight_OI, hessian_II = correlated(rows, columns)
    options = SpQROptions(bits=bits, group_size=group_size, scale_group_size=7)
    matrix = spqr_quantize(weight_OI.to(dtype), hessian_II, options)
    dense_OI = matrix.dequantize()
    assert dense_OI.shape == (rows, columns)
    assert dense_OI.dtype == dtype
    assert bool(dense_OI.isfinite().all())
    stored = matrix.tensors()
    stated, tensors = json.loads(json.dumps(matrix.settings())), {f"a.{name}": each for name, each in stored.items()}
    assert torch.equal(read_weight("a", stated, dict(tensors), where="file"), dense_OI)
    outliers = tensors["a.spqr_outlier_columns"]
    with pytest.raises(RefusedInputError, match=r"file: a.*do not match") if len(outliers) else nullcontext():
        read_weight("a", stated, tensors | {"a.spqr_outlier_columns": outliers + columns}, where="file")
    assert weighted_error(dense_OI.float() - weight_OI.float(), hessian_II) <= weighted_error(weight_OI, hessian_II)


def test_zero_weights_and_few_samples_give_finite_numbers():
    """Fewer samples than channels make a singular Hessian."""
    weight_OI, hessian_II = correlated(20, 64)
    assert not spqr_quantize(torch.zeros(20, 64), hessian_II).dequantize().any()
    inputs_TI = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    matrix = spqr_quantize(weight_OI, inputs_TI.t() @ inputs_TI, SpQROptions(dampening=0.0))
    assert bool(matrix.dequantize().isfinite().all())


def test_unusable_input_is_rejected():
    weight_OI, hessian_II = correlated(8, 16)
    with pytest.raises(RefusedInputError, match="NaN"):
        spqr_quantize(weight_OI.index_fill(0, torch.tensor([2]), float("nan")), hessian_II)
    with pytest.raises(RefusedInputError, match="Hessian"):
        spqr_quantize(weight_OI, hessian_II[:8, :8])


def quantized_small_model(**changes):
    arguments = {"method": "spqr", "layers": LAYERS, "calibration": samples(), "batch_size": 4, "options": {}}
    return quantize_to_small_format(small_model(tied=True), scheme_named("W3A16"), **arguments | changes)


@pytest.fixture(scope="module")
def quantized():
    return quantized_small_model()


@pytest.mark.needs("llmcompressor")
def test_dense_and_small_checkpoints_are_equal(quantized, tmp_path):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    assert len(quantized.quantized_layers) == 14
    quantized.save(tmp_path)
    small = tmp_path / SMALL_DIRECTORY
    dense, found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = quantized.model.state_dict()
    for model in (dense, load_spqr(tmp_path), load_spqr(small)):
        assert {name: torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items()} == (
            dict.fromkeys(expected, True)
        )
        assert torch.equal(logits(model), logits(quantized.model))
    with safe_open(small / "small.safetensors", framework="pt") as stored:
        names = set(stored.keys())
    assert "model.layers.0.mlp.up_proj.spqr_codes" in names
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names, "one tensor is stored once"
    assert not any(f"{layer}.weight" in names for layer in quantized.quantized_layers)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(small)


@pytest.mark.needs("llmcompressor")
def test_shards_are_read_and_damaged_files_are_rejected(quantized, tmp_path):
    save_small_format(quantized.model, quantized.matrices, tmp_path, shard_bytes=20_000)
    assert len(list(tmp_path.glob("small-*.safetensors"))) > 2
    assert torch.equal(logits(load_spqr(tmp_path)), logits(quantized.model))
    config = tmp_path / "config.json"
    stated = json.loads(config.read_text())
    small = stated["quantization_config"]
    layer = small["layers"]["model.layers.0.mlp.up_proj"]
    for change in ({"bits": 4}, {"shape": [64, 96]}, {"dtype": "int8"}, {"group_size": 0}):
        layers = small["layers"] | {"model.layers.0.mlp.up_proj": layer | change}
        config.write_text(json.dumps(stated | {"quantization_config": small | {"layers": layers}}))
        with pytest.raises(RefusedInputError, match=r"layers\.0\.mlp\.up_proj"):
            load_spqr(tmp_path)
    for change, named in (
        ({"schema_version": 1}, "reads 2"),
        ({"layers": [1]}, "no settings of layers"),
        ({"quant_method": "x"}, "no quant"),
    ):
        config.write_text(json.dumps(stated | {"quantization_config": small | change}))
        with pytest.raises(RefusedInputError, match=named):
            load_spqr(tmp_path)
    config.write_text(json.dumps(stated))
    index = tmp_path / "small.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(RefusedInputError, match="must name a file of the same directory"):
        load_spqr(tmp_path)
    index.write_text(json.dumps(content))
    next(tmp_path.glob("small-00001*.safetensors")).write_bytes(b"cut")
    with pytest.raises(RefusedInputError, match="is not a complete safetensors file"):
        load_spqr(tmp_path)


def test_wrong_options_and_missing_samples_are_rejected():
    with pytest.raises(UsageError) as caught:
        quantized_small_model(options={"outlier_treshold": 0.1, "bits": 4, "dampening": "much"})
    text = str(caught.value)
    assert "outlier_threshold" in text
    assert "--scheme" in text
    assert "dampening" in text and "must be a valid number" in text
    with pytest.raises(UsageError, match="calibration"):
        quantized_small_model(calibration=())
