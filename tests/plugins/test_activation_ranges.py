"""Static activation ranges against answers that are known, and against plain fp64 references."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.quantization.scheme import ActivationQuantization, scheme_named
from shardwright.plugins.activation_ranges import (
    ActivationHistogram,
    activation_range,
    kl_range,
    l2_range,
    minmax_range,
    percentile_range,
)


def histogram_of(values, *, bins=8192) -> ActivationHistogram:
    histogram = ActivationHistogram(bins=bins)
    histogram.add(torch.as_tensor(values))
    return histogram


def static(bits: int, **changes) -> ActivationQuantization:
    return ActivationQuantization(**({"bits": bits, "dynamic": False} | changes))


def reference_rounding(values, low, high, bits, symmetric):
    """compressed-tensors' rule, written again in numpy."""
    smallest, largest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = max(-low, high) / ((2**bits - 1) / 2) if symmetric else (high - low) / (2**bits - 1)
    zero = 0.0 if symmetric else numpy.round(numpy.clip(smallest - low / scale, smallest, largest))
    return (numpy.clip(numpy.round(values / scale + zero), smallest, largest) - zero) * scale


def reference_kl(counts, centres, low, high, bits, symmetric):
    """The divergence of one range, with loops and in fp64."""
    if not symmetric:
        scale = (high - low) / (2**bits - 1)
        low = -numpy.round(numpy.clip(-low / scale, 0, 2**bits - 1)) * scale
        high = low + (2**bits - 1) * scale
    inside = [low <= centre <= high for centre in centres]
    first, last = inside.index(True), len(inside) - 1 - inside[::-1].index(True)
    clipped = [float(count) if kept else 0.0 for count, kept in zip(counts, inside, strict=True)]
    clipped[first] += sum(counts[:first])
    clipped[last] += sum(counts[last + 1 :])
    codes = reference_rounding(numpy.array(centres), low, high, bits, symmetric)
    spread = [0.0] * len(counts)
    for code in set(codes.tolist()):
        members = [k for k in range(first, last + 1) if codes[k] == code and counts[k]]
        for k in members:
            spread[k] = sum(counts[m] for m in members) / len(members)
    total, kept_total = sum(counts), sum(counts[first : last + 1])
    return sum(
        p / total * math.log((p / total) / (max(q, 0.5) / kept_total))
        for p, q in zip(clipped, spread, strict=True)
        if p > 0
    )


@pytest.fixture(scope="module")
def heavy_tailed() -> torch.Tensor:
    """Student's t with 3 degrees of freedom: most values small, few large."""
    return torch.from_numpy(numpy.random.default_rng(0).standard_t(3, size=200_000)).float()


@given(st.permutations(range(6)), st.integers(1, 5), st.sampled_from([8, 64, 8192]))
@settings(max_examples=30, deadline=None)
def test_counts_do_not_depend_on_batches_or_their_order(order, cut, bins):
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(7, 5, generator=draw) * 10.0 ** (index - 3) for index in range(6)]
    batches[2].zero_()
    once, piecewise = ActivationHistogram(bins=bins), ActivationHistogram(bins=bins)
    once.add(torch.cat(batches))
    for index in order:
        for part in batches[index].split(cut):
            piecewise.add(part)
    together = torch.cat(batches)
    assert (once.low, once.high) == (piecewise.low, piecewise.high) == (together.min().item(), together.max().item())
    assert once.bin_width == piecewise.bin_width
    for left, right in zip(once.occupied(), piecewise.occupied(), strict=True):
        assert torch.equal(left, right)
    assert int(once.occupied()[2].sum()) == 42 * 5


def test_what_cannot_be_a_range_is_rejected():
    with pytest.raises(ValueError, match="finite"):
        ActivationHistogram().add(torch.tensor([1.0, float("nan")]))
    with pytest.raises(ValueError, match="finite"):
        ActivationHistogram().add(torch.tensor([1.0, float("inf")]))
    with pytest.raises(ValueError, match="no activations"):
        minmax_range(ActivationHistogram())
    with pytest.raises(ValueError, match="percentile = 0"):
        percentile_range(histogram_of([1.0]), percentile=0, symmetric=True)
    with pytest.raises(ValueError, match="multiple of 4"):
        ActivationHistogram(bins=6)


@pytest.mark.parametrize("method", ["minmax", "percentile", "l2", "kl"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_and_one_sided_values_have_ranges(method, symmetric):
    quantization = static(8, symmetric=symmetric, range_method=method, percentile=100.0)
    assert activation_range(histogram_of(torch.zeros(8)), quantization) == (0.0, 0.0)
    low, high = activation_range(histogram_of(torch.linspace(1.0, 3.0, 4001)), quantization)
    assert high == pytest.approx(3.0, rel=1e-2)
    assert low == (-high if symmetric and method != "minmax" else 0.0)
    low, high = activation_range(histogram_of(torch.linspace(-3.0, -1.0, 4001)), quantization)
    assert low == pytest.approx(-3.0, rel=1e-2)
    assert high == (-low if symmetric and method != "minmax" else 0.0)


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9, 100.0])
def test_percentiles_are_those_of_numpy(heavy_tailed, percentile):
    histogram, values = histogram_of(heavy_tailed), heavy_tailed.double().numpy()
    low, high = percentile_range(histogram, percentile=percentile, symmetric=True)
    assert -low == high
    assert abs(high - numpy.percentile(numpy.abs(values), percentile)) <= histogram.bin_width
    low, high = percentile_range(histogram, percentile=percentile, symmetric=False)
    outside = (100 - percentile) / 2
    assert abs(low - numpy.percentile(values, outside)) <= histogram.bin_width
    assert abs(high - numpy.percentile(values, 100 - outside)) <= histogram.bin_width


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_l2_finds_the_smallest_error_of_the_values_themselves(heavy_tailed, bits):
    """Every threshold in steps of 0.5 % is tried on the values; the histogram's answer is as good within 0.5 %."""
    values = heavy_tailed.double().numpy()

    def error(bound):
        return numpy.mean((reference_rounding(values, -bound, bound, bits, symmetric=True) - values) ** 2)

    whole = numpy.abs(values).max()
    best = min(error(whole * 0.995**step) for step in range(0, 900, 5))
    low, high = l2_range(histogram_of(heavy_tailed), static(bits))
    assert low == -high
    assert error(high) <= best * 1.005


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_kl_is_the_best_of_all_ranges_by_brute_force(seed, symmetric):
    """On 64 bins and 2 bits every pair of bin edges is tried with loops in fp64."""
    draw = numpy.random.default_rng(seed)
    values = numpy.concatenate([draw.normal(size=2000), draw.normal(scale=4, size=40)])
    histogram = histogram_of(values, bins=64)
    _, centres, counts = histogram.occupied()
    width = histogram.bin_width
    edges = [width * step for step in range(2, 33)]
    pairs = [(-edge, edge) for edge in edges] if symmetric else [(-low, high) for low in edges for high in edges]
    measured = {pair: reference_kl(counts.tolist(), centres.tolist(), *pair, 2, symmetric) for pair in pairs}
    found = kl_range(histogram, static(2, symmetric=symmetric))
    divergence = reference_kl(counts.tolist(), centres.tolist(), *found, 2, symmetric)
    # Without symmetry both ends are searched in turn, which need not end at the best pair.
    assert divergence <= min(measured.values()) * (1.0 + 1e-9 if symmetric else 1.05)


@pytest.mark.needs("llmcompressor")
@pytest.mark.parametrize("method", ["minmax", "percentile", "l2", "kl"])
def test_the_engine_stores_the_range_of_what_the_layer_saw(method, tmp_path):
    """Of a random Llama with static 8-bit inputs."""
    import json

    from llmcompressor.observers import Observer
    from safetensors.torch import load_file
    from shardwright.plugins.llm_compressor import quantize_with_llm_compressor
    from small_models import llama
    from transformers import AutoModelForCausalLM

    model = llama(hidden_size=32, vocab_size=64, num_hidden_layers=1, num_attention_heads=2).eval()
    rows_NS = torch.randint(64, (6, 16), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        inputs = model.model.layers[0].input_layernorm(model.model.embed_tokens(rows_NS)).clone()
    activations = static(8, range_method=method, percentile=95.0)
    made = quantize_with_llm_compressor(
        model=model,
        scheme=replace(scheme_named("W8A8_STATIC"), activations=activations),
        method="rtn",
        calibration=[{"input_ids": row.tolist()} for row in rows_NS],
        batch_size=2,
    )
    with torch.no_grad():
        logits = made.model(input_ids=rows_NS).logits
    made.save(tmp_path)
    _, high = activation_range(histogram_of(inputs), activations)
    stored = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.input_scale"]
    bound = float(inputs.abs().max()) if method == "minmax" else high
    assert float(stored) == pytest.approx(bound / 127.5, rel=1e-6)
    if method == "percentile":
        assert high == pytest.approx(numpy.percentile(inputs.abs().double().numpy(), 95.0), rel=5e-3)
    # A stock loader computes the same, and llm-compressor knows every name in the config.
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    observer = saved["config_groups"]["group_0"]["input_activations"]["observer"]
    assert Observer.get_value_from_registry(observer).__module__.startswith("llmcompressor.")
    with torch.no_grad():
        own = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(input_ids=rows_NS).logits
    assert torch.allclose(own, logits, atol=1e-5)
