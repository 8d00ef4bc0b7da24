"""`ByteMeter` against bytes counted by hand, a ledger, torch's own tracker and a walk over the live objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.plugins import metering
from shardwright.plugins.metering import AcceleratorMeter, ByteMeter
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}


class Layer(nn.Module):
    """Attention and MLP of width 32 with 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.query_key_value = nn.Linear(32, 96)
        self.output = nn.Linear(32, 32)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x_BTD.shape
        heads = self.query_key_value(self.norm(x_BTD)).view(batch, tokens, 3, 4, width // 4)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x_BTD + self.down(F.gelu(self.up(x_BTD)))


class Decoder(nn.Module):
    """A language model small enough to trace in milliseconds; it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(32, 100)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        logits_BTV = self.head(self.layers(self.embedding(tokens_BT)))
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten())


@contextmanager
def two_rank_mesh() -> Iterator[Any]:
    """A mesh of two ranks whose collectives allocate and move nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        torch.distributed.destroy_process_group()


def live(meter: ByteMeter) -> int:
    return meter.reading().current_bytes


def peak(meter: ByteMeter, phase: metering.MeterPhase = "init") -> int:
    return meter.reading().peaks[phase]


def test_storage_resized_to_nothing_and_back():
    """FSDP2 frees gathered parameters so (torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""
    with ByteMeter() as meter:
        gathered = torch.zeros(100)
        view = gathered[:10]
        gathered.untyped_storage().resize_(0)
        assert live(meter) == 0
        kept = torch.zeros(10)
        gathered.untyped_storage().resize_(400)
        assert live(meter) == 440
        assert peak(meter) == 440
        gathered.untyped_storage().resize_(0)
        del gathered, view
        assert live(meter) == 40, "what was freed by resizing is not freed again"
        del kept
        assert live(meter) == 0


def test_dtensor_counts_by_its_shard():
    from torch.distributed.tensor import DTensor, Replicate, Shard

    with two_rank_mesh() as mesh, ByteMeter() as meter:
        shard = torch.zeros(100)
        sharded = DTensor.from_local(shard, mesh, [Shard(0)])
        assert sharded.shape == (200,)
        assert live(meter) == 400
        meter.label([sharded], "weights")
        doubled = sharded * 2
        assert live(meter) == 800
        whole = doubled.redistribute(mesh, [Replicate()])
        assert live(meter) == 800 + 800
        del whole, doubled
        meter.reset_peaks()
        assert meter.reading().roles["init"]["weights"] == live(meter) == 400


def test_operators_inside_of_one_of_a_dtensor_count():
    from torch.distributed.tensor import DTensor, Partial

    with two_rank_mesh() as mesh, ByteMeter() as meter:
        partial = DTensor.from_local(torch.zeros(100), mesh, [Partial()])
        meter.enter("forward")
        # It reduces first.
        positive = torch.relu(partial)
        assert peak(meter, "forward") == 1200
        assert live(meter) == 800
        del positive


def test_outputs_of_zero3_linear_layers_are_activations():
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    with ByteMeter() as meter:
        weight, inputs = torch.zeros(8, 4), torch.zeros(2, 4)
        meter.enter("forward")
        output = zero3_linear_wrap(inputs, weight)
        roles = meter.reading().roles["forward"]
        assert (roles["activations"], roles["buckets"]) == (output.nbytes, 0)


def test_phases_keep_peaks_of_their_own():
    with ByteMeter() as meter:
        meter.enter("forward")
        x = torch.zeros(100)
        meter.enter("backward")
        assert peak(meter, "backward") == 400, "what lives already counts"
        y = torch.zeros(50)
        del y
        meter.enter("step")
        assert meter.reading().peaks == {"init": 0, "forward": 400, "backward": 600, "step": 400}
        assert meter.reading().peak_bytes == 600
        meter.reset_peaks()
        assert meter.reading().peaks == {"step": 400}
        del x


def test_roles_sum_to_the_peak_and_follow_labels():
    with ByteMeter() as meter:
        weights = torch.zeros(100)
        meter.label([weights, weights[:3]], "weights")
        meter.enter("forward")
        kept = torch.zeros(50)
        meter.enter("step")
        state = torch.zeros(25)
        reading = meter.reading()
        assert reading.roles["step"] == {
            "weights": 400,
            "gradients": 0,
            "optimizer": 100,
            "activations": 200,
            "buckets": 0,
            "other": 0,
        }
        assert {phase: sum(roles.values()) for phase, roles in reading.roles.items()} == reading.peaks
        del weights, kept, state


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_exit_restores_the_storage_and_counts_nothing_more(error):
    original = torch.UntypedStorage.resize_
    inner = ByteMeter()
    try:
        with ByteMeter() as outer:
            with inner, inner:
                kept = torch.zeros(100)
                kept.untyped_storage().resize_(800)
                assert live(inner) == live(outer) == 800
            assert torch.UntypedStorage.resize_ is not original
            kept.untyped_storage().resize_(80)
            more = torch.zeros(100)
            assert live(outer) == 480
            assert live(inner) == 800, "nothing reaches it any more"
            if error is not None:
                raise error
    except RuntimeError:
        assert error is RuntimeError
    assert torch.UntypedStorage.resize_ is original
    later = torch.zeros(100)
    more.add_(1)
    kept.untyped_storage().resize_(8000)
    assert live(outer) == 480
    assert peak(outer) == 800
    del later


ACTIONS = st.tuples(
    st.sampled_from(["allocate", "view", "free", "resize", "in place", "temporary"]),
    st.integers(0, 50),
    st.integers(0, 1000),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=25))
def test_current_and_peak_equal_a_ledger(actions):
    """Handles are tensors that share storages; the ledger frees a storage with its last handle."""
    sizes: dict[int, int] = {}
    handles: list[tuple[int, torch.Tensor]] = []
    highest = 0
    with ByteMeter() as meter:
        for number, (action, count, choice) in enumerate(actions):
            if action == "allocate" or not handles:
                handles.append((number, torch.empty(count, dtype=torch.int16)))
                sizes[number] = 2 * count
            else:
                storage, tensor = handles[choice % len(handles)]
                if action == "view":
                    handles.append((storage, tensor.detach()))
                elif action == "free":
                    handles.pop(choice % len(handles))
                elif action == "resize":
                    tensor.untyped_storage().resize_(2 * count)
                    sizes[storage] = 2 * count
                elif action == "in place" and sizes[storage] >= 2 * tensor.numel():
                    tensor.add_(1)
                elif action == "temporary":
                    torch.empty(count, dtype=torch.int32)
                    highest = max(highest, sum(sizes.values()) + 4 * count)
                del tensor
            sizes = {key: size for key, size in sizes.items() if any(key == used for used, _ in handles)}
            highest = max(highest, sum(sizes.values()))
            assert live(meter) == sum(sizes.values())
        assert peak(meter) == highest
        handles.clear()
        assert live(meter) == 0


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_training_step_equals_the_tracker_of_torch_on_fake_tensors(optimizer_name):
    """Real kernels allocate what fake ones state, so every total and every peak agrees to the byte.

    `MemTracker` keeps one peak for the whole step, so peaks are compared as the largest up to each phase's end.
    """
    make_optimizer = OPTIMIZERS[optimizer_name]
    with ByteMeter() as meter:
        model, tokens = Decoder(), torch.zeros(2, 16, dtype=torch.long)
        optimizer = make_optimizer(model.parameters())
        totals = [live(meter)]
        meter.enter("forward")
        meter.reset_peaks()
        loss = model(tokens)
        totals.append(live(meter))
        meter.enter("backward")
        loss.backward()
        totals.append(live(meter))
        meter.enter("step")
        optimizer.step()
        totals.append(live(meter))
        optimizer.zero_grad()
        totals.append(live(meter))
    peaks = meter.reading().peaks
    assert [totals, _running_maximum(peaks["forward"], peaks["backward"], peaks["step"])] == _tracked(make_optimizer)


def _tracked(make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> list[list[int]]:
    with FakeTensorMode():
        model, tokens = Decoder(), torch.zeros(2, 16, dtype=torch.long)
        optimizer = make_optimizer(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer, tokens)

        def total(kind: str = "current") -> int:
            return int(tracker.get_tracker_snapshot(kind)[torch.device("cpu")]["Total"])

        totals, peaks = [total()], []
        with tracker:
            loss = model(tokens)
            totals.append(total())
            peaks.append(total("peak"))
            loss.backward()
            totals.append(total())
            peaks.append(total("peak"))
            optimizer.step()
            totals.append(total())
            peaks.append(total("peak"))
            optimizer.zero_grad()
            totals.append(total())
    return [totals, peaks]


def _running_maximum(*values: int) -> list[int]:
    return [max(values[: end + 1]) for end in range(len(values))]


def test_accelerator_meter_reads_the_allocator_by_phase(monkeypatch):
    statistics = {"allocated": 10, "max_allocated": 10, "max_reserved": 64}

    def reset() -> None:
        statistics["max_allocated"] = statistics["allocated"]

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: statistics["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: statistics["max_allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: statistics["max_reserved"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with metering.start_meter() as meter:
        assert isinstance(meter, AcceleratorMeter)
        statistics.update(allocated=20, max_allocated=100)
        meter.enter("forward")
        statistics.update(allocated=30, max_allocated=50, max_reserved=128)
        meter.enter("step")
    reading = meter.reading()
    assert reading.peaks == {"init": 100, "forward": 50, "step": 30}
    assert (reading.current_bytes, reading.peak_bytes, reading.reserved_peak_bytes) == (30, 50, 128)
    assert reading.roles == {}
    meter.reset_peaks()
    statistics["max_reserved"] = 70
    assert meter.reading().peaks == {"step": 30}
    assert meter.reading().reserved_peak_bytes == 70
