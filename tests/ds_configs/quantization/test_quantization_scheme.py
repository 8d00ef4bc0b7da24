"""Schemes: the presets are upstream's, changes are checked together, and layers match as compressed-tensors matches."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import requires, version
from typing import get_args

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization import QuantizationScheme as UpstreamScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme
from compressed_tensors.utils.match import match_named_modules
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from shardwright.ds_configs.quantization.layers import (
    LinearLayer,
    config_group,
    quantization_config,
    scheme_errors,
    scheme_warnings,
    selected_layers,
    unloadable_expert_errors,
    with_named_heads,
)
from shardwright.ds_configs.quantization.scheme import (
    NEWER_PRESETS,
    PRESETS,
    WeightStrategy,
    changed,
    combination_errors,
    scheme_named,
)
from shardwright.ds_configs.quantization.sizes import bits_per_weight
from shardwright.ds_configs.specs.errors import UsageError
from transformers import LlamaConfig, LlamaForCausalLM

COMPRESSED = [name for name, scheme in PRESETS.items() if scheme.storage == "compressed-tensors"]
OWN = {"W2A16_ASYM", "W3A16_ASYM", "W8A16_ASYM", "W8A8_STATIC", "NF4", "BNB_INT8"}
DOCUMENT = ROOT / "docs" / "explain" / "quantization.md"


with torch.device("meta"):
    MODEL = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=192, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4)
    )
LAYERS = [
    LinearLayer(name=name, out_features=module.out_features, in_features=module.in_features, is_head="head" in name)
    for name, module in MODEL.named_modules()
    if isinstance(module, torch.nn.Linear)
]


def test_every_upstream_preset_is_here_or_named_as_newer_and_only_ours_are_added():
    newer = set(NEWER_PRESETS) if version("compressed-tensors") >= "0.20" else set()
    assert set(PRESET_SCHEMES) - set(PRESETS) == {"UNQUANTIZED"} | newer
    assert set(PRESETS) - set(PRESET_SCHEMES) == OWN


@pytest.mark.parametrize("name", [name for name in PRESET_SCHEMES if name not in ("UNQUANTIZED", *NEWER_PRESETS)])
def test_presets_equal_upstreams_field_by_field(name):
    def fields(part):
        # Release 0.20.0 dumps fields by whether they were written down.
        if isinstance(part, QuantizationArgs):
            return dict(part) | ({"zp_dtype": None} if part.symmetric else {})
        return {key: fields(inner) if isinstance(inner, QuantizationArgs) else inner for key, inner in part}

    ours = UpstreamScheme.model_validate(config_group(PRESETS[name]) | {"format": None})
    assert fields(ours) == fields(preset_name_to_scheme(name, ["Linear"]))


@pytest.mark.needs("llmcompressor")
def test_llm_compressor_still_needs_the_older_release():
    """Fails when llm-compressor runs with compressed-tensors 0.20: the newer presets can be offered then."""
    needed = next(one for one in requires("llmcompressor") or () if one.startswith("compressed-tensors"))
    assert needed == "compressed-tensors==0.19.0"


@pytest.mark.parametrize("name", COMPRESSED)
def test_format_is_the_one_upstream_infers(name):
    upstream = UpstreamScheme.model_validate(config_group(PRESETS[name]) | {"format": None})
    assert PRESETS[name].format == infer_module_format(torch.nn.Linear, upstream).value


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W8A8_STATIC", "FP8_BLOCK", "NVFP4", "MXFP4"])
def test_quantization_config_is_what_upstream_writes(name, tmp_path):
    scheme = PRESETS[name]
    config = QuantizationConfig(
        config_groups={"group_0": UpstreamScheme.model_validate(config_group(scheme))},
        format=scheme.format,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    ModelCompressor(quantization_config=config).update_config(str(tmp_path))
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    ours = quantization_config(scheme)
    assert ours.pop("dequantize", False) == (name == "W4A16_ASYM")
    if version("compressed-tensors") >= "0.20":
        ours = as_newer_releases_write_it(ours)
    assert ours == written


def as_newer_releases_write_it(config):
    """Omit the keys that 0.20.0 omits, which are defaults of 0.19.0."""
    omitted = ("actorder", "block_structure", "scale_dtype", "observer_kwargs", "observer", "zp_dtype")
    group = config["config_groups"]["group_0"]
    for part in ("weights", "input_activations"):
        if group[part] is not None:
            group[part] = {key: value for key, value in group[part].items() if key not in omitted or value}
    return config | {"version": version("compressed-tensors"), "moe_sparsity_config": None}


@pytest.mark.parametrize(
    ("name", "changes", "fields"),
    [
        ("W4A16", {"group_size": 0, "ranges": "kl"}, {"group_size", "ranges"}),
        ("W8A8", {"ranges": "l2", "percentile": 99.0}, {"ranges", "percentile"}),
        ("FP8", {"symmetric": False, "ranges": "l2"}, {"symmetric", "ranges"}),
        ("NVFP4", {"group_size": 32}, {"strategy"}),
        ("NF4", {"group_size": 128}, {"scheme"}),
        ("W4A16", {"targets": [], "ignore": ["re:("]}, {"targets", "ignore"}),
    ],
)
def test_illegal_schemes_are_rejected_with_all_errors(name, changes, fields):
    with pytest.raises(UsageError) as error:
        changed(PRESETS[name], **changes)
    assert {config_error.where for config_error in error.value.errors} == fields


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(COMPRESSED),
    weights=st.fixed_dictionaries(
        {},
        optional={
            "bits": st.integers(1, 9),
            "symmetric": st.booleans(),
            "strategy": st.sampled_from(get_args(WeightStrategy)),
            "group_size": st.sampled_from([None, 0, 16, 32, 48, 128]),
            "block_shape": st.sampled_from([None, (128, 128)]),
        },
    ),
)
def test_accepted_schemes_are_accepted_upstream(name, weights):
    scheme = replace(PRESETS[name], weights=replace(PRESETS[name].weights, **weights))
    if combination_errors(scheme):
        return
    upstream = UpstreamScheme.model_validate(config_group(scheme) | {"format": None})
    assert infer_module_format(torch.nn.Linear, upstream).value == scheme.format


PARTS = ["model", "layers", "0", "1", "self_attn", "q_proj", "down_proj", "mlp", "lm_head", "Linear", "Module"]
PATTERNS = st.one_of(
    st.sampled_from([layer.name for layer in LAYERS] + ["Linear", "Module", "LlamaMLP", "model.layers.0"]),
    st.lists(st.sampled_from([*PARTS, ".*", r"\.", ".", "$", "^", r"\d", "proj"]), max_size=4).map(
        lambda parts: "re:" + "".join(parts)
    ),
    st.sampled_from(PARTS),
)


@settings(max_examples=60, deadline=None)
@given(targets=st.lists(PATTERNS, min_size=1, max_size=3), ignore=st.lists(PATTERNS, max_size=3))
def test_layers_are_selected_as_upstream_selects_modules(targets, ignore):
    scheme = changed(PRESETS["W4A16"], targets=targets, ignore=ignore)
    matched = match_named_modules(MODEL, targets, ignore)
    expected = [name for name, module in matched if isinstance(module, torch.nn.Linear)]
    assert [layer.name for layer in selected_layers(scheme, LAYERS)] == expected


def layer_errors(scheme, layers):
    return scheme_errors(scheme, layers, selected_layers(scheme, layers))


def test_a_group_size_that_does_not_divide_lists_layers_and_legal_sizes():
    errors = layer_errors(PRESETS["W4A16"], LAYERS)
    assert [config_error.where for config_error in errors] == ["group_size"]
    assert "model.layers.0.self_attn.q_proj (192)" in errors[0].rule
    assert "16, 32, 64" in errors[0].fix
    assert layer_errors(changed(PRESETS["W4A16"], group_size=64), LAYERS) == []
    assert layer_errors(changed(PRESETS["W4A16"], group_size=-1), LAYERS) == []


def test_tied_head_is_rejected_and_untied_head_warned_about():
    body = LinearLayer(name="model.layers.0.up_proj", out_features=128, in_features=128)
    head = LinearLayer(name="lm_head", out_features=128, in_features=128, is_head=True, is_tied=True)
    everything = changed(PRESETS["W4A16"], ignore=[])
    (config_error,) = layer_errors(everything, [body, head])
    assert config_error.value == "lm_head"
    assert layer_errors(PRESETS["W4A16"], [body, head]) == []
    untied = LinearLayer(name="lm_head", out_features=128, in_features=128, is_head=True)
    assert layer_errors(everything, [body, untied]) == []
    assert any("lm_head" in warning for warning in scheme_warnings(everything, [body, untied]))


@pytest.mark.parametrize(
    ("changes", "field", "fix"),
    [
        ({"ignore": ["q_proj"]}, "ignore", "re:.*q_proj"),
        ({"ignore": ["model.layers.0"]}, "ignore", r"re:model\.layers\.0\."),
        ({"targets": ["Liner"]}, "targets", "did you mean Linear"),
    ],
)
def test_unmatched_patterns_suggest_matching_ones(changes, field, fix):
    errors = layer_errors(changed(PRESETS["W4A16"], group_size=64, **changes), LAYERS)
    assert [config_error.where for config_error in errors] == [field]
    assert fix in errors[0].fix


def test_warnings_cover_wasted_bytes_and_missing_kernels():
    def warnings(scheme):
        return scheme_warnings(scheme, selected_layers(scheme, LAYERS))

    assert any("one byte" in warning for warning in warnings(PRESETS["W4A8"]))
    assert any("3 bits" in warning for warning in warnings(PRESETS["W3A16"]))
    assert any("groups of 32, 64" in warning for warning in warnings(changed(PRESETS["W4A16"], group_size=16)))
    assert warnings(PRESETS["W4A16"]) == []


def test_document_names_every_preset_with_its_format():
    rows = {
        line.split("|")[1].strip(" `"): line
        for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `") and line.count("|") == 7
    }
    assert set(rows) == set(PRESETS)
    assert all(f"`{PRESETS[name].format}`" in row for name, row in rows.items())
    matrix = [LinearLayer(name="x", out_features=4096, in_features=4096)]
    for name, row in rows.items():
        assert float(row.split("|")[4]) == pytest.approx(bits_per_weight(PRESETS[name], matrix), abs=5e-4)


def test_heads_matched_by_class_are_also_named():
    head = LinearLayer(name="lm_head", out_features=64, in_features=64, is_head=True)
    body = LinearLayer(name="model.layers.0.up_proj", out_features=64, in_features=64)
    scheme = scheme_named("W4A16")
    for targets, expected in (
        (("Linear",), ("Linear", "lm_head")),
        (("lm_head",), ("lm_head",)),
        (("Linear", "re:.*head"), ("Linear", "re:.*head")),
    ):
        found = with_named_heads(replace(scheme, targets=targets), [head, body])
        assert found.targets == expected
        assert selected_layers(found, [head, body]) == selected_layers(replace(scheme, targets=targets), [head, body])
    assert with_named_heads(scheme, [body]) is scheme
    stated = quantization_config(scheme, [head, body])["config_groups"]["group_0"]
    assert stated["targets"] == ["Linear", "lm_head"]


@pytest.mark.parametrize(("name", "refused"), [("W4A16", True), ("W8A8", True), ("FP8_DYNAMIC", False)])
def test_experts_may_stay_dense_only_with_fp8(name, refused):
    """What transformers 5.17.0 finds of dense experts beside each format, seen by `quantize` with its reload."""
    body = LinearLayer(name="model.layers.0.self_attn.q_proj", out_features=8, in_features=8)
    expert = LinearLayer(name="model.layers.0.mlp.experts.0.up_proj", out_features=8, in_features=8, is_expert=True)
    scheme = changed(PRESETS[name], ignore=["re:.*experts"])
    errors = unloadable_expert_errors(scheme, [body], [body, expert])
    assert [(config_error.where, config_error.value) for config_error in errors] == [
        ("ignore", "re:.*experts")
    ] * refused
    assert unloadable_expert_errors(scheme, [], [body, expert]) == []
