"""SpQR: against plain rounding written out by hand, against its own small format, and against rounding of its size."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.quantization.scheme import scheme_named
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError
from shardwright.trainers.formats.bit_packing import (
    ErrorFeedback,
    inverse_factor,
    pack_bits,
    unpack_bits,
    weighted_error,
)
from shardwright.trainers.formats.spqr import (
    SMALL_DIRECTORY,
    SpQROptions,
    load_spqr,
    save_small_format,
    spqr_quantize,
    stored_columns,
)
from shardwright.trainers.quantization.spqr import quantize_to_small_format
from small_spqr import LAYERS, correlated, logits, samples, small_model

NO_OUTLIERS = SpQROptions(outlier_threshold=None)


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
        assert wide.has_valid_outliers()
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


def test_without_outliers_and_hessian_it_is_plain_rounding():
    """Scales and zeros come from the second level, written out for one block of rows; then nearest code."""
    weight_OI, _ = correlated(16, 32)
    matrix = spqr_quantize(weight_OI, None, NO_OUTLIERS)
    for group in range(2):
        part = weight_OI[:, 16 * group : 16 * group + 16].float()
        low, high = part.amin(dim=1).clamp(max=0), part.amax(dim=1).clamp(min=0)

        def level(values):
            lowest = values.min().bfloat16().float()
            step = ((values.max() - values.min()) / 7).bfloat16().float()
            return lowest + step * ((values - lowest) / step).round().clamp(0, 7)

        scale = level((high - low) / 7)
        zero = level((-low / scale).clamp(0, 7))
        codes = (part / scale[:, None] + zero[:, None]).round().clamp(0, 7)
        expected = (scale[:, None] * (codes - zero[:, None])).bfloat16()
        assert torch.equal(matrix.dequantize()[:, 16 * group : 16 * group + 16], expected)
        assert torch.equal(matrix.weight_codes()[:, 16 * group : 16 * group + 16], codes.to(torch.uint8))
    assert matrix.outlier_values.numel() == 0


def test_outliers_are_the_weights_themselves():
    """Without correlation nothing corrects a weight before its turn."""
    weight_OI, _ = correlated(48, 64)
    matrix = spqr_quantize(weight_OI, None)
    rows, columns = matrix.outlier_positions()
    assert 0 < len(rows) < 0.1 * weight_OI.numel()
    assert torch.equal(matrix.outlier_values, weight_OI[rows, columns])
    assert torch.equal(matrix.dequantize()[rows, columns], weight_OI[rows, columns])


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 150),
    bits=st.integers(2, 5),
    group_size=st.sampled_from([1, 3, 16, 200]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_any_shape_is_read_back(rows, columns, bits, group_size, dtype):
    """Shapes are as announced, and the numbers stay near the weights."""
    weight_OI, hessian_II = correlated(rows, columns)
    options = SpQROptions(bits=bits, group_size=group_size, scale_group_size=7)
    matrix = spqr_quantize(weight_OI.to(dtype), hessian_II, options)
    dense_OI = matrix.dequantize()
    assert dense_OI.shape == (rows, columns)
    assert dense_OI.dtype == dtype
    assert bool(dense_OI.isfinite().all())
    stored = matrix.tensors()
    assert all(tuple(stored[name].shape) == shape for name, shape in matrix.expected_shapes().items())
    assert weighted_error(dense_OI.float() - weight_OI.float(), hessian_II) <= weighted_error(weight_OI, hessian_II)


def test_dead_columns_and_dead_weights():
    """Inputs that are always zero make a singular Hessian; their weights cost nothing and become zero."""
    weight_OI, hessian_II = correlated(20, 64)
    hessian_II[[5, 40]] = 0
    hessian_II[:, [5, 40]] = 0
    dense_OI = spqr_quantize(weight_OI, hessian_II).dequantize()
    assert bool(dense_OI.isfinite().all())
    assert weighted_error(dense_OI.float() - weight_OI.float(), hessian_II) < weighted_error(weight_OI, hessian_II) / 20
    assert not spqr_quantize(torch.zeros(20, 64), hessian_II).dequantize().any()
    # Few samples make a singular Hessian too.
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
