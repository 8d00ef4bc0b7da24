"""Ranges of activations under quantization-aware training: what observers find, on one rank and on several."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import partial

import numpy
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from saved_tensors import saved_storages
from shardwright.ds_configs.quantization.layers import quantization_config
from shardwright.ds_configs.quantization.scheme import ActivationQuantization, changed, scheme_named
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError
from shardwright.trainers.qat.rounding.attach import attach
from shardwright.trainers.qat.rounding.attachment import calibrate_inputs, load_ranges, save_ranges
from shardwright.trainers.qat.rounding.config import QATConfig
from shardwright.trainers.qat.rounding.observers import METHODS, InputRange, synchronise
from small_models import scaled_llama, token_ids
from torch.utils.checkpoint import checkpoint

SYMMETRIC = ActivationQuantization(dynamic=False, percentile=99.0)
ASYMMETRIC = replace(SYMMETRIC, symmetric=False)
STATIC = scheme_named("W8A8_STATIC")


def range_of(method, quantization=SYMMETRIC, stored_dtype=torch.float32):
    return InputRange(quantization, method=method, stored_dtype=stored_dtype, name="layer")


def values_of(seed, count=4000, spread=1.0):
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(count, 8, generator=draw) * spread + 0.3).to(torch.bfloat16)


def stepped(found, steps):
    for batches in steps:
        for batch in batches:
            found.observe(batch)
        synchronise([found])
    return found


tiny_llama = partial(scaled_llama, 4)


def token_batches(count=3):
    return token_ids(count)


def static_model(scheme=STATIC, **settings):
    model = tiny_llama()
    return model, attach(model, QATConfig(scheme=scheme, **settings))


# --- what observers find ---------------------------------------------------------------------------------------------


def test_minmax_covers_all_steps_and_zero():
    found = stepped(range_of("minmax"), [[values_of(0) + 9, values_of(1) + 7], [values_of(2) + 8]])
    everything = torch.cat([values_of(0) + 9, values_of(1) + 7, values_of(2) + 8]).double()
    assert found.bounds == (min(float(everything.min()), 0.0), float(everything.max()))


def test_moving_average_weighs_each_step_by_one_percent():
    steps = [[values_of(3 * step, spread=1 + step), values_of(3 * step + 1)] for step in range(5)]
    found = stepped(range_of("moving_average"), steps)
    low = high = None
    for batches in steps:
        step_low = min(float(batch.double().min()) for batch in batches)
        step_high = max(float(batch.double().max()) for batch in batches)
        low = step_low if low is None else 0.99 * low + 0.01 * step_low
        high = step_high if high is None else 0.99 * high + 0.01 * step_high
    assert found.bounds == pytest.approx((low, high), rel=1e-6)


@pytest.mark.parametrize("quantization", [SYMMETRIC, ASYMMETRIC], ids=["symmetric", "asymmetric"])
def test_percentiles_are_those_of_the_values(quantization):
    batches = [values_of(seed) for seed in range(3)]
    found = stepped(range_of("percentile", quantization), [batches])
    everything = torch.cat(batches).double().numpy().reshape(-1)
    bin_width = float(numpy.abs(everything).max()) / 2048
    if quantization.symmetric:
        bound = numpy.percentile(numpy.abs(everything), 99.0)
        wanted = (-bound, bound)
    else:
        wanted = (numpy.percentile(everything, 0.5), numpy.percentile(everything, 99.5))
    assert found.bounds == pytest.approx(wanted, abs=bin_width)


@settings(max_examples=30, deadline=None)
@given(
    method=st.sampled_from(METHODS),
    cuts=st.lists(st.integers(1, 299), max_size=5),
    seed=st.integers(0, 99),
    spread=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_neither_micro_batches_nor_their_order_change_a_range(method, cuts, seed, spread):
    values = values_of(seed, count=300, spread=spread)
    whole = stepped(range_of(method), [[values]])
    order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
    parts = list(torch.tensor_split(values[order], sorted(cuts)))
    assert stepped(range_of(method), [parts]).bounds == whole.bounds


# --- ranks -----------------------------------------------------------------------------------------------------------


class FakeRanks:
    """A reduction over threads, which stand for ranks."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=30)
        self.parts, self.calls = {}, 0

    def reduction(self, rank):
        def reduce(tensor, operation):
            self.parts[rank] = tensor
            self.barrier.wait()
            together = torch.stack([self.parts[each] for each in sorted(self.parts)])
            self.calls += rank == 0
            self.barrier.wait()
            return together.amin(0) if operation == "min" else together.sum(0)

        return reduce

    def run(self, work):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.barrier.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("method", METHODS)
def test_ranges_of_two_ranks_equal_one_process(method):
    """Layer 0 sees text on both, layer 1 on one rank alone, layer 2 zeros on one rank, layer 3 nothing at all."""
    data = [[[values_of(9 * step + rank, 200, 10.0**rank)] for rank in range(2)] for step in range(4)]
    ranges = [[range_of(method) for _ in range(4)] for _ in range(2)]
    ranks = FakeRanks(2)

    def work(rank):
        for step in data:
            ranges[rank][0].observe(step[rank][0])
            if rank == 1:
                ranges[rank][1].observe(step[rank][0])
            ranges[rank][2].observe(step[rank][0] * rank)
            synchronise(ranges[rank], reduction=ranks.reduction(rank))

    ranks.run(work)
    alone = [range_of(method) for _ in range(3)]
    for step in data:
        for rank in range(2):
            alone[0].observe(step[rank][0])
            alone[2].observe(step[rank][0] * rank)
        alone[1].observe(step[1][0])
        synchronise(alone)
    for rank in range(2):
        assert [one.bounds for one in ranges[rank][:3]] == [one.bounds for one in alone]
        assert ranges[rank][3].bounds is None
    assert ranks.calls == (2 if method == "percentile" else 1) * len(data), "collectives, not per layer"


def test_overflowed_batch_is_ignored_on_every_rank():
    ranges = [range_of("minmax") for _ in range(2)]
    ranks = FakeRanks(2)

    def work(rank):
        batch = torch.tensor([[1.0, -2.0]])
        ranges[rank].observe(batch if rank else batch * float("inf"))
        synchronise([ranges[rank]], reduction=ranks.reduction(rank))
        ranges[rank].observe(batch * float("nan"))
        synchronise([ranges[rank]], reduction=ranks.reduction(rank))

    ranks.run(work)
    assert [one.bounds for one in ranges] == [(-2.0, 1.0)] * 2
    assert [one.refused for one in ranges] == [2, 1]


# --- scales ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_first_forward_pass_uses_its_own_range(method):
    found = range_of(method)
    found.observe(torch.tensor([[0.5, -1.5]]))
    scale, zero_point = found.on(torch.device("cpu"))
    assert scale.shape == (1,) and zero_point is None
    found.observe(torch.tensor([[40.0, 2.0]]))
    assert found.scale is scale, "a step rounds alike from its first forward pass to its last backward pass"
    assert found.bounds is None
    synchronise([found])
    assert float(found.scale) > 5 * float(scale)


@pytest.mark.parametrize("quantization", [SYMMETRIC, ASYMMETRIC], ids=["symmetric", "asymmetric"])
def test_scales_are_rounded_to_the_stored_type_first(quantization):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    found = range_of(None, quantization, torch.bfloat16)
    found.set_bounds(-3.3, 7.77)
    low, high = torch.tensor([-3.3]), torch.tensor([7.77])
    arguments = QuantizationArgs(num_bits=8, symmetric=quantization.symmetric, strategy="tensor")
    wanted, _ = calculate_qparams(low, high, arguments)
    assert found.scale.dtype == torch.bfloat16 and torch.equal(found.scale, wanted.bfloat16())
    if quantization.symmetric:
        assert found.zero_point is None
    else:
        zero_point = round(-128 - float(low) / float(found.scale))
        assert found.zero_point.dtype == torch.int8 and int(found.zero_point) == zero_point


def test_updated_range_does_not_change_saved_tensors():
    found = stepped(range_of("minmax"), [[torch.tensor([[1.0]])]])
    before = found.scale
    weight = torch.ones(1, requires_grad=True)
    product = weight * before
    stepped(found, [[torch.tensor([[100.0]])]])
    product.backward()
    assert float(weight.grad) == pytest.approx(1 / 127.5) and float(found.scale) > 0.7


def test_ranges_from_inference_mode_can_be_trained():
    found = range_of("minmax")
    with torch.inference_mode():
        found.observe(torch.tensor([[1.0]]))
        synchronise([found])
        found.on(torch.device("cpu"))
    weight = torch.ones(1, requires_grad=True)
    (weight * found.scale).backward()
    assert float(weight.grad) == pytest.approx(1 / 127.5)


# --- gradient checkpointing, records ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_repeated_forward_passes_are_not_counted(reentrant):
    found = range_of("minmax")
    layer = torch.nn.Linear(8, 8)

    passes = []

    def forward(inputs):
        found.observe(inputs * (1 + len(passes)))
        passes.append(found.open_step().tolist())
        return torch.relu(layer(inputs))

    inputs = torch.randn(10, 8, requires_grad=True)
    checkpoint(forward, inputs, use_reentrant=reentrant).sum().backward()
    assert len(passes) == 2 and passes[0] == passes[1]
    assert layer.weight.grad is not None


@pytest.mark.parametrize("method", METHODS)
def test_resumed_ranges_equal_uninterrupted_run(method):
    steps = [[values_of(step, 200, 1.5**step) + 2] for step in range(6)]
    whole = stepped(range_of(method), steps)
    first = stepped(range_of(method), steps[:3])
    resumed = range_of(method)
    resumed.set_bounds(*json.loads(json.dumps(first.bounds)))
    assert resumed.bounds == first.bounds and torch.equal(resumed.scale, first.scale)
    assert stepped(resumed, steps[3:]).bounds == whole.bounds


# --- calibration -----------------------------------------------------------------------------------------------------


def inputs_by_layer(model, batches):
    """Least and largest number that comes into each linear layer of a plain model."""
    seen = {}

    def look(name):
        def hook(module, arguments):
            low, high = seen.get(name, (0.0, 0.0))
            seen[name] = min(low, float(arguments[0].min())), max(high, float(arguments[0].max()))

        return hook

    handles = [
        module.register_forward_pre_hook(look(name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return seen


def test_calibration_uses_full_precision_and_restores_state():
    wanted = inputs_by_layer(tiny_llama().eval(), token_batches())
    model, attachment = static_model(ranges="moving_average")
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    batches = [{"input_ids": batch, "labels": batch} for batch in token_batches()]
    assert calibrate_inputs(model, attachment, batches) == 3
    assert {name: one.bounds for name, one in attachment.ranges.items()} == wanted
    assert [module.training for module in model.modules()] == modes
    assert not attachment.state.enabled and not attachment.state.observing
    assert not attachment.state.calibrating
    assert all(parameter.grad is None for parameter in model.parameters())
    one = next(iter(attachment.ranges.values()))
    one.observe(torch.full((1, 64), 1e3))
    synchronise([one])
    assert one.bounds[1] == pytest.approx(0.99 * wanted[next(iter(wanted))][1] + 10, rel=1e-4)


def test_forward_passes_equal_those_of_compressed_tensors():
    """Upstream's own fake quantization of a model with the same weights, fed with the scales of ours."""
    model, attachment = static_model(changed(STATIC, ranges="percentile", percentile=99.0))
    calibrate_inputs(model, attachment, token_batches())
    attachment.state.enabled = True
    upstream = tiny_llama()
    stated = quantization_config(attachment.scheme, ignore=["lm_head"]) | {"quantization_status": "frozen"}
    apply_quantization_config(upstream, QuantizationConfig.model_validate(stated), show_progress=False)
    for name, module in attachment.modules.items():
        stored = module.stored_layers(dict(module.named_parameters()))[""]
        other = upstream.get_submodule(name)
        other.weight_scale.data.copy_(stored.scale)
        other.input_scale.data.copy_(stored.input_scale)
        other.quantization_status = QuantizationStatus.FROZEN
    with torch.no_grad():
        ours, theirs = (each.eval()(token_batches()[0]).logits for each in (model, upstream))
        dense = tiny_llama().eval()(token_batches()[0]).logits
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, dense)


def test_observing_saves_nothing_for_the_backward_pass():
    sizes = []
    for observing in (False, True):
        model, attachment = static_model(ranges="minmax")
        calibrate_inputs(model, attachment, token_batches(1))
        attachment.state.enabled, attachment.state.observing = True, observing
        batch = token_batches()[0]
        with saved_storages([*model.parameters(), *model.buffers(), batch]) as saved:
            model(batch, labels=batch, use_cache=False).loss.backward()
        sizes.append(dict(saved))
    assert sizes[0] == sizes[1]


def test_models_that_cannot_be_calibrated_are_rejected():
    model, attachment = static_model()
    with pytest.raises(UsageError, match="calibration = 0: there must be at least one batch"):
        calibrate_inputs(model, attachment, [])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(float("inf"))
    with pytest.raises(UsageError) as caught:
        calibrate_inputs(model, attachment, token_batches(1))
    assert len(caught.value.errors) == 8, "down_proj of the first layer, and all of the second"
    assert "layers.0.mlp.down_proj contain infinities or NaN" in str(caught.value)
    model.lm_head.weight.ds_id = 0
    with pytest.raises(UsageError, match=r"ZeRO-3 has partitioned.*save_ranges.*QATCallback\(calibration=file\)"):
        calibrate_inputs(model, attachment, token_batches(1))


# --- files -----------------------------------------------------------------------------------------------------------


def test_ranges_are_saved_and_loaded(tmp_path):
    model, attachment = static_model()
    file = tmp_path / "ranges.safetensors"
    with pytest.raises(UsageError, match=r"no range is known for model\.layers\.0"):
        save_ranges(file, attachment)
    calibrate_inputs(model, attachment, token_batches())
    save_ranges(file, attachment)
    _, other = static_model(stored_dtype="float32")
    load_ranges(file, other)
    for name, one in attachment.ranges.items():
        assert other.ranges[name].bounds == one.bounds
        assert torch.equal(other.ranges[name].scale.bfloat16(), one.scale)
    assert [path.name for path in tmp_path.iterdir()] == ["ranges.safetensors"]


def test_files_of_other_models_and_formats_are_rejected(tmp_path):
    model, attachment = static_model()
    file = tmp_path / "ranges.safetensors"
    save_file({"model.norm.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(RefusedInputError, match="was not written by save_ranges"):
        load_ranges(file, attachment)
    calibrate_inputs(model, attachment, token_batches(1))
    save_ranges(file, attachment)
    asymmetric = replace(STATIC, activations=replace(STATIC.activations, symmetric=False), name="other")
    other = attach(tiny_llama(num_hidden_layers=1), QATConfig(scheme=asymmetric))
    other.ranges["extra"] = other.ranges.pop(next(iter(other.ranges)))
    with pytest.raises(UsageError) as caught:
        load_ranges(file, other)
    rules = [error.rule for error in caught.value.errors]
    assert len(rules) == 3 and "'symmetric': False" in rules[0] and rules[1] == "contains no range for extra"
    assert "layers that are not rounded: model.layers.0.self_attn.q_proj, model.layers.1." in rules[2]
    assert all(each.bounds is None for each in other.ranges.values())
