"""Zeros in weights while a model trains: exactly as many as the schedule says, and they stay."""

from __future__ import annotations

import copy
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_settings import cpu_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError
from shardwright.plugins.deepspeed.parameters import edit_errors
from shardwright.trainers.sparsity.l1_sparsity_callback import L1SparsityCallback
from shardwright.trainers.sparsity.magnitude_pruning_callback import MagnitudePruningCallback
from shardwright.trainers.sparsity.masks import (
    FILE_NAME,
    PruningSchedule,
    chosen,
    magnitudes,
    save_masks,
    smallest,
    target_layers,
)
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


# the schedule


def test_schedule_equals_zhu_and_gupta() -> None:
    schedule = PruningSchedule(final_sparsity=0.8, initial_sparsity=0.2, start_step=10, end_step=110, every=20)
    assert [step for step in range(200) if schedule.is_update(step)] == [10, 30, 50, 70, 90, 110]
    for step in range(200):
        reached = min(max(step, 10), 110) - 10
        reached -= reached % 20
        share = Fraction(8, 10) - Fraction(6, 10) * (1 - Fraction(reached, 100)) ** 3
        expected = float(share) if step >= 10 else 0.0
        assert schedule.sparsity_at(step) == pytest.approx(expected, abs=1e-12)


def test_contradictory_values_are_rejected_together() -> None:
    with pytest.raises(UsageError) as caught:
        MagnitudePruningCallback(50, end_step=3, start_step=-1, every=0, initial_sparsity=-0.1, pattern="1:4")  # type: ignore[arg-type]
    places = [error.where for error in caught.value.errors]
    assert places == ["final_sparsity", "initial_sparsity", "start_step", "every", "pattern"]
    assert "write 0.5 for 50 %" in str(caught.value)
    with pytest.raises(UsageError, match="must not be before start_step = 5"):
        MagnitudePruningCallback(0.5, end_step=4, start_step=5)
    with pytest.raises(UsageError, match=r"two zeros among four; write 0\.5"):
        MagnitudePruningCallback(0.75, end_step=4, pattern="2:4")
    for share in (1.0, float("nan"), -0.5):
        with pytest.raises(UsageError, match="final_sparsity"):
            MagnitudePruningCallback(share, end_step=4)
    for strength in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="strength"):
            L1SparsityCallback(strength)


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
    numbers = magnitudes(weight)
    mask = chosen(numbers, *smallest(lambda: [numbers], count))
    order = sorted(range(weight.numel()), key=lambda index: (abs(values[index]), index))
    assert mask.nonzero().flatten().tolist() == sorted(order[:count])


@given(st.data())
@settings(deadline=None)
def test_one_threshold_for_several_matrices(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    weights = [torch.randint(-3, 4, (size, 4)).float() * 0.25 for size in sizes]
    count = data.draw(st.integers(0, 4 * sum(sizes)))
    numbers = [magnitudes(weight) for weight in weights]
    last, equal = smallest(lambda: iter(numbers), count)
    taken = []
    for vector in numbers:
        taken.append(chosen(vector, last, max(equal, 0)))
        equal -= int((vector == last).sum())
    together = torch.cat([weight.flatten().abs() for weight in weights])
    mask = torch.cat(taken)
    assert int(mask.sum()) == count
    assert torch.equal(together[mask].sort().values, together.sort().values[:count])


# training


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
@pytest.mark.parametrize("scope", ["matrix", "global"])
def test_the_schedule_is_reached_exactly_and_zeros_stay(pattern: Any, scope: Any, tmp_path: Path) -> None:
    callback = MagnitudePruningCallback(
        0.5, start_step=2, end_step=8, every=3, initial_sparsity=0.1, pattern=pattern, scope=scope
    )
    recorder = Recorder()
    trained = trainer(tmp_path, tiny_llama(), callback, recorder)
    trained.train()
    sizes = {name: module.weight.numel() for name, module in target_layers(trained.model).items()}
    assert len(sizes) == LINEAR
    for step, found in enumerate(recorder.zeros, start=1):
        share = callback.schedule.sparsity_at(step)
        if scope == "matrix":
            assert found == {name: round(share * size) for name, size in sizes.items()}
        assert sum(found.values()) == pytest.approx(share * sum(sizes.values()), abs=LINEAR)
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
    callback = MagnitudePruningCallback(0.6, start_step=0, end_step=4, every=2, initial_sparsity=0.3)
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
                share = 0.6 - 0.3 * (1 - step / 4) ** 3
                flat = module.weight.detach().clone().masked_fill(masks.get(name, torch.tensor(False)), 0).flatten()
                order = flat.abs().argsort(stable=True)[: round(share * flat.numel())]
                masks[name] = torch.zeros_like(flat, dtype=torch.bool).index_fill(0, order, True).view_as(module.weight)
            module.weight.data.masked_fill_(masks[name], 0)
    assert moved > 0
    for (name, value), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(value, other), name


def test_l1_is_the_proximal_step_of_sgd(tmp_path: Path) -> None:
    """w' = argmin ½‖w' - (w - lr·g)‖² + lr·λ‖w'‖₁, with the learning rate of each step."""
    model = tiny_llama()
    reference = copy.deepcopy(model).double()
    sgd: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "weight_decay": 0.0}
    sgd |= {"max_steps": 6, "lr_scheduler_type": "linear"}
    batches = list(trainer(tmp_path, model, **sgd).get_train_dataloader())
    trainer(tmp_path, model, L1SparsityCallback(0.02), **sgd).train()
    targets = {id(module.weight) for module in target_layers(reference).values()}
    for step in range(6):
        rate = 0.5 * (1 - step / 6)
        reference(**batches[step]).loss.backward()
        for weight in reference.parameters():
            moved = weight.detach() - rate * weight.grad
            shrunk = moved.sign() * (moved.abs() - rate * 0.02).clamp(min=0)
            weight.data = shrunk if id(weight) in targets else moved
            weight.grad = None
    for (name, value), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(value.double(), other, atol=2e-6), name
    assert sum(zeros(model).values()) > 1000
    assert float((model.lm_head.weight == 0).float().mean()) == 0


def test_resumed_run_restores_masks(tmp_path: Path) -> None:
    how: dict[str, Any] = {"end_step": 8, "every": 2, "initial_sparsity": 0.2}
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10}
    whole = tiny_llama()
    trainer(tmp_path / "whole", whole, MagnitudePruningCallback(0.6, **how), **saving).train()
    resumed = tiny_llama()
    callback = MagnitudePruningCallback(0.6, **how)
    checkpoint = tmp_path / "whole" / "checkpoint-5"
    assert (checkpoint / FILE_NAME).stat().st_size < 12_000, "28,672 weights take one bit each"
    trainer(tmp_path / "whole", resumed, callback, **saving).train(resume_from_checkpoint=str(checkpoint))
    for (name, value), other in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(value, other), name
    assert callback.sparsity == pytest.approx(0.6, abs=1e-3)


def test_resuming_with_other_settings_or_damaged_masks_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    how: dict[str, Any] = {"end_step": 4, "every": 1}
    mlp, rest = ["re:.*mlp"], ["re:.*self_attn"]
    both = (MagnitudePruningCallback(0.6, targets=mlp, **how), MagnitudePruningCallback(0.2, targets=rest, **how))
    trainer(tmp_path, tiny_llama(), *both, **saving).train()
    checkpoint = str(tmp_path / "checkpoint-2")
    again = (MagnitudePruningCallback(0.6, targets=mlp, **how), MagnitudePruningCallback(0.2, targets=rest, **how))
    trainer(tmp_path, tiny_llama(), *again, **saving).train(resume_from_checkpoint=checkpoint)
    assert [each.sparsity for each in again] == pytest.approx([0.6, 0.2], abs=1e-3)
    with pytest.raises(UsageError) as caught:
        other = MagnitudePruningCallback(0.7, targets=mlp, pattern="unstructured", scope="global", **how)
        trainer(tmp_path, tiny_llama(), other, **saving).train(resume_from_checkpoint=checkpoint)
    assert "final_sparsity = 0.7: differs from the checkpoint (0.6)" in str(caught.value)
    assert [error.where for error in caught.value.errors] == ["final_sparsity", "scope"]
    path = tmp_path / "checkpoint-2" / FILE_NAME
    part = MagnitudePruningCallback(0.6, targets=mlp, **how)
    save_masks(path.with_name("part.safetensors"), {}, {}, {})
    path.with_name("part.safetensors").replace(path)
    with pytest.raises(UsageError, match=r"mlp.*has no mask in the checkpoint"):
        trainer(tmp_path, tiny_llama(), part, **saving).train(resume_from_checkpoint=checkpoint)
    path.write_bytes(b"no masks")
    with pytest.raises(RefusedInputError, match="is not a complete safetensors file"):
        trainer(tmp_path, tiny_llama(), part, **saving).train(resume_from_checkpoint=checkpoint)
    path.unlink()
    anew = MagnitudePruningCallback(0.6, end_step=4, every=1)
    trainer(tmp_path, tiny_llama(), anew, **saving).train(resume_from_checkpoint=checkpoint)
    assert anew.sparsity == pytest.approx(0.6, abs=1e-3) and "existing zeros first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_steps": 3}, "training ends at step 3, before the last update of zeros; use end_step 2"),
        ({"load_best_model_at_end": True}, "may restore a checkpoint from before step 4"),
    ],
)
def test_runs_that_cannot_end_sparse_are_rejected(arguments: dict[str, Any], match: str, tmp_path: Path) -> None:
    callback = MagnitudePruningCallback(0.5, end_step=4, every=1)
    made = trainer(
        tmp_path, tiny_llama(), callback, **arguments | {"eval_strategy": "no", "load_best_model_at_end": False}
    )
    for name, value in arguments.items():
        setattr(made.args, name, value)
    with pytest.raises(UsageError, match=match):
        made.train()


def test_unknown_or_unsuitable_layers_are_rejected(tmp_path: Path) -> None:
    model = tiny_llama()
    with pytest.raises(UsageError) as caught:
        trainer(tmp_path, model, L1SparsityCallback(1.0, targets=["q_prj"], ignore=["re:.*routr"]))
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
    with pytest.raises(UsageError, match=r"trained in 16 bit without an fp32 copy"):
        trainer(tmp_path, tiny_llama().bfloat16(), L1SparsityCallback(1.0)).train()


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
    from shardwright.trainers.qat.rounding.rounding import round_weight

    for options in ({}, {"weight_rule": "ternary"}, {"scheme": "W4A16_ASYM"}):
        model = tiny_llama()
        from shardwright.ds_configs.quantization.scheme import changed, scheme_named

        name = options.pop("scheme", "W2A16")
        qat = QATCallback(changed(scheme_named(name), group_size=16), **options)
        pruning = MagnitudePruningCallback(0.5, end_step=3, every=1, pattern="2:4")
        trainer(tmp_path, model, qat, pruning, max_steps=4).train()
        for module in qat.attachment.modules.values():
            rounding = module.quantizer.rounding().weight
            value = round_weight(module.weight.detach(), rounding).value(rounding)
            assert (module.weight == 0).reshape(-1, 4).sum(1).eq(2).all()
            assert (value[module.weight == 0] == 0).all()
    binary = QATCallback(changed(scheme_named("W2A16"), group_size=16), weight_rule="binary")
    with pytest.raises(UsageError, match="no zero; use ternary"):
        trainer(tmp_path, tiny_llama(), binary, MagnitudePruningCallback(0.5, end_step=3)).train()


def test_masks_of_another_run_are_rejected(tmp_path: Path) -> None:
    """Runs of one directory have checkpoints of the same steps; weights tell whose masks these are."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    for name, scale in (("one", 1.0), ("other", -3.0)):
        model = tiny_llama()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.flatten().roll(int(7 * scale)).view_as(parameter))
        trainer(tmp_path / name, model, MagnitudePruningCallback(0.5, end_step=1, every=1), **saving).train()
    checkpoint, foreign = (tmp_path / name / "checkpoint-2" for name in ("one", "other"))
    (checkpoint / "pruning_masks.safetensors").write_bytes((foreign / "pruning_masks.safetensors").read_bytes())
    with pytest.raises(UsageError, match="belongs to another run"):
        trainer(tmp_path / "one", tiny_llama(), MagnitudePruningCallback(0.5, end_step=1, every=1), **saving).train(
            resume_from_checkpoint=str(checkpoint)
        )
