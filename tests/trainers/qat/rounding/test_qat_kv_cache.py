"""Keys and values of the cache in 8 bits while a model trains: the numbers, the gradients, and what a loader makes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from safetensors.torch import save_file
from saved_tensors import saved_storages
from shardwright.ds_configs.quantization.layers import quantization_config
from shardwright.ds_configs.quantization.scheme import scheme_named
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.compressed_tensors.codes import cached_attention_modules, pack_tensors
from shardwright.plugins.transformers.attention_capture import captured_attention
from shardwright.trainers.qat.rounding.attach import attach, kv_cache_errors, rounded_cache
from shardwright.trainers.qat.rounding.attachment import (
    cache_quantization,
    calibrate_inputs,
    kv_cache_scheme,
    kv_cache_tensors,
    load_ranges,
    save_ranges,
)
from shardwright.trainers.qat.rounding.config import QATConfig
from shardwright.trainers.qat.rounding.observers import InputRange, synchronise
from small_models import scaled_llama, token_ids
from transformers import AutoConfig, AutoModelForCausalLM

NUMBERS = ("fp8", "int8")
W4A16 = replace(scheme_named("W4A16"), weights=replace(scheme_named("W4A16").weights, group_size=32))


def arguments_of(numbers):
    return QuantizationArgs(num_bits=8, type="float" if numbers == "fp8" else "int", strategy="tensor")


def cache_range(numbers, values, stored_dtype):
    found = InputRange(cache_quantization(numbers), stored_dtype=stored_dtype)
    found.set_bounds(values.min(), values.max())
    return found


tiny_llama = partial(scaled_llama, 6)
token_batches = partial(token_ids, 2)


def cached_model(numbers="fp8", scheme=W4A16, dtype=torch.bfloat16, model_changes=None, **settings):
    model = tiny_llama(dtype, **(model_changes or {}))
    return model, attach(model, QATConfig(scheme=scheme, kv_cache=numbers, **settings))


# --- numbers and gradients -------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    numbers=st.sampled_from(NUMBERS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
    spread=st.sampled_from([0.0, 1e-5, 1.0, 300.0]),
)
def test_values_are_rounded_as_in_compressed_tensors(numbers, dtype, seed, spread):
    draw = torch.Generator().manual_seed(seed)
    values = (torch.randn(2, 2, 8, 16, generator=draw) * spread).to(dtype)
    found = cache_range(numbers, values, dtype)
    wanted_scale, _ = calculate_qparams(values.min(), values.max(), arguments_of(numbers))
    assert found.scale.dtype == dtype and torch.equal(found.scale, wanted_scale.to(dtype).reshape(1))
    wider = values * 1.5
    wanted = fake_quantize(wider, found.scale, None, arguments_of(numbers))
    assert torch.equal(rounded_cache(wider, found), wanted)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_gradients_pass_inside_the_range_and_stop_outside(numbers):
    found = InputRange(cache_quantization(numbers), stored_dtype=torch.float64)
    found.set_bounds(-448.0 if numbers == "fp8" else -127.5, 1.0)
    assert float(found.scale) == 1.0
    # E4M3 ends at 448 and steps by 32 there; int8 ends at -128 and 127.
    ends = (-464.0, 464.0) if numbers == "fp8" else (-128.5, 127.5)
    values = torch.tensor(
        [[ends[0] - 1, ends[0], -3.3, 0.0, 0.4, ends[1], ends[1] + 1]], dtype=torch.float64, requires_grad=True
    )
    weights = torch.arange(1.0, 8.0, dtype=torch.float64)
    rounded = rounded_cache(values, found)
    (rounded * weights).sum().backward()
    assert torch.equal(values.grad, weights[None] * torch.tensor([[0, 1, 1, 1, 1, 1, 0]]))
    assert torch.equal(rounded.detach(), rounded_cache(values.detach(), found)), "the same numbers with and without"


def test_backward_saves_one_byte_per_value():
    values = torch.randn(2, 2, 8, 16, requires_grad=True)
    found = cache_range("fp8", values.detach(), torch.float32)
    with saved_storages([values, found.scale]) as saved:
        rounded_cache(values * 1.0, found).sum()
    assert dict(saved) == {((2, 2, 8, 16), torch.bool): values.numel()}


# --- a model's attention ---------------------------------------------------------------------------------------------


@pytest.mark.needs("rounded-cache")
def test_attention_computes_with_rounded_keys_after_rotary_embedding():
    """Against keys and values of the same model without rounding, captured on their way into attention."""
    model, attachment = cached_model()
    model.eval()
    calibrate_inputs(model, attachment, token_batches())
    batch = token_batches()[0]
    with torch.no_grad():
        with captured_attention(model, [1, 2], with_graph=False) as plain:
            model(batch)
        attachment.state.enabled = True
        seen = []
        original = torch.nn.functional.scaled_dot_product_attention
        with pytest.MonkeyPatch.context() as patch:

            def looking(query, key, value, *arguments, **options):
                seen.append((key, value))
                return original(query, key, value, *arguments, **options)

            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", looking)
            with captured_attention(model, [1, 2], with_graph=False) as rounded:
                model(batch)
    kept = kv_cache_tensors(attachment)
    for layer in (1, 2):
        for place, part in enumerate(("k_scale", "v_scale")):
            name = ("key", "value")[place]
            scale = kept[f"model.layers.{layer - 1}.self_attn.{part}"]
            before = rounded[layer].tensor(name)
            wanted = fake_quantize(before, scale, None, arguments_of("fp8"))
            # SDPA repeats heads for grouped queries, or does so inside.
            found = seen[layer - 1][place]
            wanted = wanted.repeat_interleave(found.shape[1] // wanted.shape[1], dim=1)
            assert torch.equal(found, wanted) and not torch.equal(before, wanted[:, :: found.shape[1] // 2])
            bounds = attachment.ranges[f"model.layers.{layer - 1}.self_attn.{part}"].bounds
            assert bounds[0] <= float(plain[layer].tensor(name).min())
            assert bounds[1] >= float(plain[layer].tensor(name).max())


@pytest.mark.needs("rounded-cache")
def test_other_models_are_not_changed():
    model, attachment = cached_model()
    calibrate_inputs(model, attachment, token_batches())
    attachment.state.enabled = True
    batch = token_batches()[0]
    with torch.no_grad():
        beside = tiny_llama().eval()(batch).logits
        attachment.state.enabled = False
        assert torch.equal(model.eval()(batch).logits, beside)


@pytest.mark.needs("rounded-cache")
def test_calibration_disables_dropout_and_restores_modes():
    ranges = []
    for dropout in (0.0, 0.5):
        model, attachment = cached_model(model_changes={"attention_dropout": dropout})
        model.train()
        calibrate_inputs(model, attachment, token_batches())
        assert all(module.training for module in model.modules())
        ranges.append({name: one.bounds for name, one in attachment.ranges.items()})
    assert ranges[0] == ranges[1] and len(ranges[0]) == 4


@pytest.mark.needs("rounded-cache")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant):
    batch = token_batches()[0]
    gradients, ends = [], []
    for checkpointing in (False, True):
        model, attachment = cached_model(dtype=torch.float32, ranges="percentile")
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        attachment.state.enabled = attachment.state.observing = True
        model(batch, labels=batch, use_cache=False).loss.backward()
        tokens = [one.observer.open.tokens for one in attachment.ranges.values()]
        assert tokens == [2 * 2 * 16] * 4, "two samples, two heads, 16 positions, counted once"
        synchronise(attachment.ranges.values())
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        ends.append([one.bounds for one in attachment.ranges.values()])
    assert ends[0] == ends[1]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.needs("rounded-cache")
def test_keys_get_gradients_and_ranges_follow_training():
    model, attachment = cached_model(dtype=torch.float32, ranges="minmax")
    model.train()
    attachment.state.enabled = attachment.state.observing = True
    batch = token_batches()[0]
    model(batch, labels=batch).loss.backward()
    for layer in model.model.layers:
        assert float(layer.self_attn.k_proj.weight.grad.norm()) > 0
        assert float(layer.self_attn.v_proj.weight.grad.norm()) > 0
    synchronise(attachment.ranges.values())
    assert all(one.bounds is not None for one in attachment.ranges.values())


@pytest.mark.needs("rounded-cache")
def test_missing_range_is_reported_by_tensor_name():
    model, attachment = cached_model()
    attachment.state.enabled = True
    with pytest.raises(UsageError, match=r"input range of model\.layers\.0\.self_attn\.k_scale: has no values"):
        model.eval()(token_batches()[0])


@pytest.mark.needs("rounded-cache")
def test_cache_ranges_are_saved_and_loaded(tmp_path):
    model, attachment = cached_model("int8")
    calibrate_inputs(model, attachment, token_batches())
    file = save_ranges(tmp_path / "ranges.safetensors", attachment)
    _, other = cached_model("int8")
    load_ranges(file, other)
    assert {name: one.bounds for name, one in other.ranges.items()} == {
        name: one.bounds for name, one in attachment.ranges.items()
    }
    _, foreign = cached_model("fp8")
    with pytest.raises(UsageError, match=r"kv_cache = 'int8': W4A16 needs fp8"):
        load_ranges(file, foreign)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def write_checkpoint(model, attachment, directory, *, leave_out=()):
    """What the exporter writes, by hand: codes, the rest as it is, the cache's scales and the configuration."""
    tensors = dict(model.state_dict())
    for name, module in attachment.modules.items():
        stored = module.stored_layers(dict(module.named_parameters()))[""]
        del tensors[f"{name}.weight"]
        tensors |= pack_tensors(
            name,
            stored.codes,
            stored.scale,
            stored.zero_point,
            attachment.scheme,
            stored.input_scale,
            stored.input_zero_point,
        )
    kept = {name: tensor for name, tensor in kv_cache_tensors(attachment).items() if name not in leave_out}
    save_file(tensors | kept, directory / "model.safetensors", metadata={"format": "pt"})
    stated = quantization_config(attachment.scheme, ignore=["lm_head"])
    stated["kv_cache_scheme"] = kv_cache_scheme(attachment.config)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))


def reloaded(directory):
    model, reported = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, output_loading_info=True, trust_remote_code=False
    )
    return model.eval(), reported


@pytest.mark.needs("rounded-cache")
@pytest.mark.parametrize(("numbers", "scheme"), [("fp8", W4A16), ("int8", scheme_named("W8A8_STATIC"))])
def test_the_reloaded_checkpoint_computes_what_was_trained(numbers, scheme, tmp_path):
    model, attachment = cached_model(numbers, scheme)
    calibrate_inputs(model, attachment, token_batches())
    attachment.state.enabled = True
    model.eval()
    write_checkpoint(model, attachment, tmp_path)
    loaded, reported = reloaded(tmp_path)
    assert not reported["missing_keys"] and not reported["unexpected_keys"] and not reported["mismatched_keys"]
    batch = token_batches()[0]
    with torch.no_grad():
        trained = model(batch).logits
        for use_cache in (True, False):
            assert torch.equal(loaded(batch, use_cache=use_cache).logits, trained)
        attachment.state.enabled = False
        assert not torch.equal(model(batch).logits, trained)
        attachment.state.enabled = True
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(batch[:, :4])}
        written = [each.generate(batch[:, :4], **options, pad_token_id=0) for each in (model, loaded)]
    assert torch.equal(*written), "what was cached before is rounded as what comes"


@pytest.mark.needs("rounded-cache")
def test_a_checkpoint_without_the_scales_would_load_with_keys_missing(tmp_path):
    """Why every attention module needs both: transformers 5.17 fills in numbers that nobody wrote."""
    model, attachment = cached_model()
    calibrate_inputs(model, attachment, token_batches())
    gone = "model.layers.1.self_attn.k_scale"
    write_checkpoint(model, attachment, tmp_path, leave_out=(gone,))
    assert reloaded(tmp_path)[1]["missing_keys"] == {gone}


def test_the_scheme_is_what_compressed_tensors_writes():
    for numbers in NUMBERS:
        stated = kv_cache_scheme(QATConfig(scheme=W4A16, kv_cache=numbers))
        read = QuantizationArgs.model_validate(stated)
        assert (read.num_bits, read.type, read.strategy) == (8, "float" if numbers == "fp8" else "int", "tensor")
        assert read.symmetric and read.dynamic is False
        assert set(stated) == set(quantization_config(W4A16)["config_groups"]["group_0"]["weights"])
    assert kv_cache_scheme(QATConfig(scheme=W4A16)) is None


# --- models that cannot ----------------------------------------------------------------------------------------------


def meta_model(family, **changes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=1, **changes))


@pytest.mark.needs("rounded-cache")
@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("gpt2", "has no attention with separate projections and a cache"),
        ("deepseek_v3", "latent vectors"),
        ("falcon", "has no attention with separate projections and a cache"),
        ("xglm", "attn compute attention without AttentionInterface"),
        ("mistral", None),
        ("qwen3", None),
        ("gemma3_text", None),
    ],
)
def test_unsupported_families_are_rejected(family, rule):
    model = meta_model(family)
    reported = [error.rule for error in kv_cache_errors(model, QATConfig(scheme=W4A16, kv_cache="fp8"))]
    if rule is None:
        assert reported == [] and dict(cached_attention_modules(model))
    else:
        assert any(rule in each for each in reported), reported
    assert list(kv_cache_errors(model, QATConfig(scheme=W4A16))) == []


@pytest.mark.needs("rounded-cache")
def test_packed_zero_points_with_rounded_cache_are_rejected():
    config = QATConfig(scheme=scheme_named("W4A16_ASYM"), kv_cache="fp8")
    reported = [error.rule for error in kv_cache_errors(meta_model("mistral"), config)]
    assert len(reported) == (Version(version("transformers")) >= Version("5.23.0"))
    assert all("cannot load packed zero points together with a rounded cache" in each for each in reported)


@pytest.mark.skipif(
    Version(version("transformers")) < Version("5.24"), reason="needs a release that renamed the argument of the cache"
)
def test_cache_that_compressed_tensors_does_not_recognize_is_rejected_with_the_releases():
    errors = list(kv_cache_errors(meta_model("mistral"), QATConfig(scheme=W4A16, kv_cache="fp8")))
    # Ends when compressed-tensors recognizes `cache`: then raise its oldest release and remove the check.
    assert [error.fix for error in errors] == ["install 'transformers<5.24.0', or omit it"]
    assert version("transformers") in errors[0].rule and version("compressed-tensors") in errors[0].rule
