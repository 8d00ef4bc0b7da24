"""Ranges of activations under quantization-aware training: what observers find, on one rank and on several."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_tensors import saved_storages
from shardwright.ds_configs.quantization.layers import quantization_config
from shardwright.ds_configs.quantization.scheme import ActivationQuantization, scheme_named
from shardwright.trainers.qat.attach import attach
from shardwright.trainers.qat.layers import InputRange, synchronise
from shardwright.trainers.qat.settings import QATConfig
from small_models import scaled_llama, token_ids
from torch.utils.checkpoint import checkpoint

SYMMETRIC = ActivationQuantization(dynamic=False)
STATIC = scheme_named("W8A8_STATIC")


def new_range():
    return InputRange(SYMMETRIC, stored_dtype=torch.float32, name="layer")


def values_of(seed, count=4000, spread=1.0):
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(count, 8, generator=draw) * spread + 0.3).to(torch.bfloat16)


def stepped(found, steps):
    for batches in steps:
        for batch in batches:
            found.observe(batch)
        synchronise([found])
    return found


def test_moving_average_weighs_each_step_by_one_percent():
    steps = [[values_of(3 * step, spread=1 + step), values_of(3 * step + 1)] for step in range(5)]
    found = stepped(new_range(), steps)
    low = high = None
    for batches in steps:
        step_low = min(float(batch.double().min()) for batch in batches)
        step_high = max(float(batch.double().max()) for batch in batches)
        low = step_low if low is None else 0.99 * low + 0.01 * step_low
        high = step_high if high is None else 0.99 * high + 0.01 * step_high
    assert found.bounds == pytest.approx((low, high), rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 299), max_size=5),
    seed=st.integers(0, 99),
    spread=st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_neither_micro_batches_nor_their_order_change_a_range(cuts, seed, spread):
    values = values_of(seed, count=300, spread=spread)
    whole = stepped(new_range(), [[values]])
    order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
    parts = list(torch.tensor_split(values[order], sorted(cuts)))
    assert stepped(new_range(), [parts]).bounds == whole.bounds


class FakeRanks:
    """A reduction over threads, which stand for ranks."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=30)
        self.parts, self.calls = {}, 0

    def reduction(self, rank):
        def reduce(tensor):
            self.parts[rank] = tensor
            self.barrier.wait()
            together = torch.stack([self.parts[each] for each in sorted(self.parts)])
            self.calls += rank == 0
            self.barrier.wait()
            return together.amin(0)

        return reduce

    def run(self, work):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.barrier.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_ranges_of_two_ranks_equal_one_process():
    """Layer 0 sees text on both, layer 1 on one rank alone, layer 2 zeros on one rank, layer 3 nothing at all."""
    data = [[[values_of(9 * step + rank, 200, 10.0**rank)] for rank in range(2)] for step in range(4)]
    ranges = [[new_range() for _ in range(4)] for _ in range(2)]
    ranks = FakeRanks(2)

    def work(rank):
        for step in data:
            ranges[rank][0].observe(step[rank][0])
            if rank == 1:
                ranges[rank][1].observe(step[rank][0])
            ranges[rank][2].observe(step[rank][0] * rank)
            # A batch that overflowed moves no range.
            ranges[rank][0].observe(step[rank][0] * float("inf" if rank else "nan"))
            synchronise(ranges[rank], reduction=ranks.reduction(rank))

    ranks.run(work)
    alone = [new_range() for _ in range(3)]
    for step in data:
        for rank in range(2):
            alone[0].observe(step[rank][0])
            alone[2].observe(step[rank][0] * rank)
        alone[1].observe(step[1][0])
        synchronise(alone)
    for rank in range(2):
        assert [one.bounds for one in ranges[rank][:3]] == [one.bounds for one in alone]
        assert ranges[rank][3].bounds is None
    assert ranks.calls == len(data), "one collective for all layers"


def test_first_forward_pass_uses_its_own_range():
    found = new_range()
    found.observe(torch.tensor([[0.5, -1.5]]))
    scale, zero_point = found.on(torch.device("cpu"))
    assert scale.shape == (1,) and zero_point is None
    found.observe(torch.tensor([[40.0, 2.0]]))
    assert found.scale is scale, "a step rounds alike from its first forward pass to its last backward pass"
    assert found.bounds is None
    synchronise([found])
    assert float(found.scale) == pytest.approx(40 / 127.5)


def test_autocast_observes_what_it_rounds():
    """1.001 is 1 in bf16."""
    found = new_range()
    with torch.autocast("cpu", torch.bfloat16):
        found.observe(torch.tensor([[1.001, -0.5]]))
    synchronise([found])
    assert found.bounds == (-0.5, 1.0)


def test_updated_range_does_not_change_saved_tensors():
    """Also a range whose values come from an evaluation in inference mode."""
    found = new_range()
    with torch.inference_mode():
        found = stepped(found, [[torch.tensor([[1.0]])]])
        found.on(torch.device("cpu"))
    before = found.scale
    weight = torch.ones(1, requires_grad=True)
    product = weight * before
    stepped(found, [[torch.tensor([[100.0]])]])
    product.backward()
    assert float(weight.grad) == pytest.approx(1 / 127.5) and float(found.scale) == pytest.approx(
        (0.99 + 0.01 * 100) / 127.5
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_repeated_forward_passes_are_not_counted(reentrant):
    found = new_range()
    layer = torch.nn.Linear(8, 8)

    passes = []

    def forward(inputs):
        found.observe(inputs * (1 + len(passes)))
        passes.append(found.open_step.tolist())
        return torch.relu(layer(inputs))

    inputs = torch.randn(10, 8, requires_grad=True)
    checkpoint(forward, inputs, use_reentrant=reentrant).sum().backward()
    assert len(passes) == 2 and passes[0] == passes[1]
    assert layer.weight.grad is not None


def test_resumed_ranges_equal_uninterrupted_run():
    steps = [[values_of(step, 200, 1.5**step) + 2] for step in range(6)]
    whole = stepped(new_range(), steps)
    first = stepped(new_range(), steps[:3])
    resumed = new_range()
    resumed.set_bounds(*json.loads(json.dumps(first.bounds)))
    assert resumed.bounds == first.bounds and torch.equal(resumed.scale, first.scale)
    assert stepped(resumed, steps[3:]).bounds == whole.bounds


def static_model():
    model = scaled_llama(4)
    attachment = attach(model, QATConfig(scheme=STATIC))
    attachment.state.observing = True
    return model, attachment


def test_forward_passes_equal_those_of_compressed_tensors():
    """Upstream's own fake quantization of a model with the same weights, fed with the scales of ours."""
    model, attachment = static_model()
    model.eval()(token_ids(1)[0])
    synchronise(attachment.ranges.values())
    assert {each.bounds for each in attachment.ranges.values()} == {None}, "an evaluation moved a range"
    for batch in token_ids(3):
        model.train()(batch)
    synchronise(attachment.ranges.values())
    attachment.state.enabled = True
    upstream = scaled_llama(4)
    stated = quantization_config(attachment.scheme, ignore=["lm_head"]) | {"quantization_status": "frozen"}
    apply_quantization_config(upstream, QuantizationConfig.model_validate(stated), show_progress=False)
    for name, module in attachment.modules.items():
        stored = module.stored_layers(dict(module.named_parameters()))[""]
        other = upstream.get_submodule(name)
        other.weight_scale.data.copy_(stored.scale)
        other.input_scale.data.copy_(stored.input_scale)
        other.quantization_status = QuantizationStatus.FROZEN
    with torch.no_grad():
        ours, theirs = (each.eval()(token_ids(3)[0]).logits for each in (model, upstream))
        dense = scaled_llama(4).eval()(token_ids(3)[0]).logits
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, dense)


def test_observing_saves_nothing_for_the_backward_pass():
    sizes = []
    for observing in (False, True):
        model, attachment = static_model()
        batch = token_ids(3)[0]
        model.train()(batch)
        synchronise(attachment.ranges.values())
        attachment.state.enabled, attachment.state.observing = True, observing
        with saved_storages([*model.parameters(), *model.buffers(), batch]) as saved:
            model(batch, labels=batch, use_cache=False).loss.backward()
        sizes.append(dict(saved))
    assert sizes[0] == sizes[1]
