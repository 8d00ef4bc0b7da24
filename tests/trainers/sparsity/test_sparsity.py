"""Zeros in weights while a model trains: exactly as many as the schedule says, and they stay."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_settings import cpu_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.deepspeed.parameters import edit_errors
from shardwright.trainers.sparsity import MagnitudePruningCallback, smallest_weights, target_layers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, set_seed

pytestmark = pytest.mark.slow

LINEAR = 14
"""Linear layers of the model but its head: seven in each of two layers."""


def tiny_llama(**changes: Any) -> Any:
    set_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **changes))


def samples(count: int = 64) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, 64, (count, 16), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(directory: Path, model: Any, *callbacks: Any, **arguments: Any) -> Trainer:
    wanted = {
        "max_steps": 12,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "lr_scheduler_type": "constant",
        "seed": 5,
    }
    made = cpu_arguments(directory, 4, **wanted | arguments)
    return Trainer(model, made, train_dataset=samples(), callbacks=list(callbacks))


def zeros(model: Any) -> dict[str, int]:
    return {name: int((module.weight == 0).sum()) for name, module in target_layers(model).items()}


class Recorder(TrainerCallback):
    """Keeps what the weights look like after every step."""

    def __init__(self) -> None:
        self.zeros: list[dict[str, int]] = []
        self.masks: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.zeros.append(zeros(model))
        self.masks.append({name: module.weight == 0 for name, module in target_layers(model).items()})


def test_contradictory_values_are_rejected_together() -> None:
    with pytest.raises(UsageError) as caught:
        MagnitudePruningCallback(50, end_step=3, start_step=-1, every=0, pattern="1:4")  # type: ignore[arg-type]
    places = [error.where for error in caught.value.errors]
    assert places == ["final_sparsity", "start_step", "every", "pattern"]
    assert "write 0.5 for 50 %" in str(caught.value)
    with pytest.raises(UsageError, match="must not be before start_step = 5") as caught:
        MagnitudePruningCallback(0.75, end_step=4, start_step=5, pattern="2:4")
    assert "two zeros among four; write 0.5" in str(caught.value)
    for share in (1.0, float("nan")):
        with pytest.raises(UsageError, match="final_sparsity"):
            MagnitudePruningCallback(share, end_step=4)


# which weights


@given(st.data())
@settings(deadline=None)
def test_exactly_the_smallest_weights_are_pruned(data: st.DataObject) -> None:
    rows, groups = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    values = data.draw(
        st.lists(
            st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from([0.0, -0.0, 0.5])),
            min_size=rows * groups * 4,
            max_size=rows * groups * 4,
        )
    )
    weight = torch.tensor(values).reshape(rows, groups * 4)
    count = data.draw(st.integers(0, weight.numel()))
    mask = smallest_weights(weight, count)
    order = sorted(range(weight.numel()), key=lambda index: (abs(values[index]), index))
    assert mask.nonzero().flatten().tolist() == sorted(order[:count])


# training


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_the_schedule_of_zhu_and_gupta_is_reached_exactly_and_zeros_stay(pattern: Any, tmp_path: Path) -> None:
    callback = MagnitudePruningCallback(0.5, start_step=2, end_step=8, every=4, pattern=pattern)
    recorder = Recorder()
    trained = trainer(tmp_path, tiny_llama(), callback, recorder)
    trained.train()
    sizes = {name: module.weight.numel() for name, module in target_layers(trained.model).items()}
    assert len(sizes) == LINEAR
    # Updates after 2 and 6 steps, and after 8, the last one: 0, two thirds and all of the schedule.
    shares = [0.0] * 5 + [0.5 * (1 - (1 / 3) ** 3)] * 2 + [0.5] * 5
    for share, found in zip(shares, recorder.zeros, strict=True):
        assert found == {name: round(share * size) for name, size in sizes.items()}
    for earlier, later in zip(recorder.masks[:-1], recorder.masks[1:], strict=True):
        assert all(not bool((earlier[name] & ~later[name]).any()) for name in sizes)
    assert all(torch.equal(recorder.masks[7][name], recorder.masks[-1][name]) for name in sizes)
    assert callback.sparsity == pytest.approx(0.5, abs=1e-3)
    assert float((trained.model.lm_head.weight == 0).float().mean()) == 0
    if pattern == "2:4":
        for module in target_layers(trained.model).values():
            assert (module.weight == 0).reshape(-1, 4).sum(1).eq(2).all()


def test_pruned_training_equals_masks_set_by_hand(tmp_path: Path) -> None:
    """The reference prunes with sorting and steps torch's AdamW itself; its momentum moves zeros at every step."""
    model = tiny_llama()
    reference = copy.deepcopy(model)
    callback = MagnitudePruningCallback(0.6, start_step=0, end_step=4, every=2)
    trained = trainer(tmp_path, model, callback, max_steps=6, max_grad_norm=0.0, weight_decay=0.0)
    batches = list(trained.get_train_dataloader())
    trained = trainer(tmp_path, model, callback, max_steps=6, max_grad_norm=0.0, weight_decay=0.0)
    trained.train()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
    layers = target_layers(reference)
    masks: dict[str, torch.Tensor] = {}
    moved = 0
    for step in range(7):
        if step:
            reference(**batches[step - 1]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            moved += sum(int((layers[name].weight[mask] != 0).sum()) for name, mask in masks.items())
        for name, module in layers.items():
            if step in (0, 2, 4):
                share = 0.6 - 0.6 * (1 - step / 4) ** 3
                flat = module.weight.detach().clone().masked_fill(masks.get(name, torch.tensor(False)), 0).flatten()
                order = flat.abs().argsort(stable=True)[: round(share * flat.numel())]
                masks[name] = torch.zeros_like(flat, dtype=torch.bool).index_fill(0, order, True).view_as(module.weight)
            module.weight.data.masked_fill_(masks[name], 0)
    assert moved > 0
    for (name, value), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(value, other), name


def test_resumed_run_selects_the_same_zeros(tmp_path: Path) -> None:
    how: dict[str, Any] = {"end_step": 8, "every": 2}
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10}
    whole = tiny_llama()
    trainer(tmp_path / "whole", whole, MagnitudePruningCallback(0.6, **how), **saving).train()
    resumed = tiny_llama()
    callback = MagnitudePruningCallback(0.6, **how)
    checkpoint = tmp_path / "whole" / "checkpoint-5"
    trainer(tmp_path / "whole", resumed, callback, **saving).train(resume_from_checkpoint=str(checkpoint))
    for (name, value), other in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(value, other), name
    assert callback.sparsity == pytest.approx(0.6, abs=1e-3)


def test_runs_that_cannot_end_sparse_are_rejected(tmp_path: Path) -> None:
    made = trainer(tmp_path, tiny_llama(), MagnitudePruningCallback(0.5, end_step=4, every=1), max_steps=3)
    made.args.load_best_model_at_end = True
    with pytest.raises(UsageError) as caught:
        made.train()
    short, best = map(str, caught.value.errors)
    assert "training ends at step 3, before the last update of zeros; use end_step 2" in short
    assert "may restore a checkpoint from before step 4" in best


def test_unknown_or_unsuitable_layers_are_rejected(tmp_path: Path) -> None:
    model = tiny_llama()
    with pytest.raises(UsageError) as caught:
        trainer(tmp_path, model, MagnitudePruningCallback(0.5, end_step=4, targets=["q_prj"], ignore=["re:.*routr"]))
    assert [error.where for error in caught.value.errors] == ["targets", "ignore"]
    with pytest.raises(UsageError, match="selects no linear layer"):
        target_layers(model, ["Linear"], ["Linear"])
    tied = tiny_llama(tie_word_embeddings=True)
    assert len(target_layers(tied, ["Linear"], [])) == LINEAR
    with pytest.raises(UsageError, match=r"lm_head.*shares its weight with the token embedding"):
        target_layers(tied, ["lm_head"], [])
    with pytest.raises(UsageError, match="must be a multiple of 4"):
        callback = MagnitudePruningCallback(0.5, end_step=4, pattern="2:4")
        trainer(tmp_path, torch.nn.Sequential(torch.nn.Linear(6, 4)), callback)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    with pytest.raises(UsageError, match=r"q_proj.*is frozen"):
        trainer(tmp_path, model, MagnitudePruningCallback(0.5, end_step=4)).train()


@pytest.mark.parametrize(
    ("zero", "match"),
    [
        ({"offload_optimizer": {"device": "nvme"}}, r"offload_optimizer = 'nvme'.*offload to cpu"),
        ({"offload_param": {"device": "nvme"}}, r"offload_param = 'nvme'"),
        ({"zenflow": {"topk_ratio": 0.1}}, "zenflow: runs the optimizer step during the next forward pass"),
        ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "super_offload"),
    ],
)
def test_engines_that_undo_changes_are_rejected(zero: dict[str, Any], match: str) -> None:
    weights = {"a": torch.nn.Parameter(torch.ones(4, 4))}
    arguments = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config={"zero_optimization": zero}))
    errors = edit_errors(weights, arguments, torch.optim.SGD(weights.values()))
    assert len(errors) == 1 and re.search(match, str(errors[0]))
    hidden = type("FP16_Optimizer", (), {})()
    (error,) = edit_errors(weights, SimpleNamespace(), SimpleNamespace(optimizer=hidden))
    assert "cannot be accessed" in str(error)
    (error,) = edit_errors({"flat": torch.nn.Parameter(torch.ones(16))}, SimpleNamespace(), None)
    assert "FSDP version 1" in str(error)


def test_pruned_weights_are_rounded_to_zero(tmp_path: Path) -> None:
    """Zero is a code of every grid but the binary one."""
    from shardwright.trainers.qat.callback import QATCallback
    from shardwright.trainers.qat.rounding import round_weight

    for options in ({}, {"weight_rule": "ternary"}, {"scheme": "W4A16_ASYM"}):
        model = tiny_llama()
        from shardwright.ds_configs.quantization.scheme import changed, scheme_named

        name = options.pop("scheme", "W2A16")
        qat = QATCallback(changed(scheme_named(name), group_size=16), **options)
        pruning = MagnitudePruningCallback(0.5, end_step=3, every=1, pattern="2:4")
        trainer(tmp_path, model, qat, pruning, max_steps=4).train()
        for module in qat.attachment.modules.values():
            rounding = module.quantizer.rounding()
            value = round_weight(module.weight.detach(), rounding).value(rounding.quantization)
            assert (module.weight == 0).reshape(-1, 4).sum(1).eq(2).all()
            assert (value[module.weight == 0] == 0).all()
    binary = QATCallback(changed(scheme_named("W2A16"), group_size=16), weight_rule="binary")
    with pytest.raises(UsageError, match="no zero; use ternary"):
        trainer(tmp_path, tiny_llama(), binary, MagnitudePruningCallback(0.5, end_step=3)).train()
