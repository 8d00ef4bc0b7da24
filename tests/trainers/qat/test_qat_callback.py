"""`QATCallback` in the Trainer of Transformers: rejected settings, resumed runs and bit schedules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import cpu_arguments
from peft import LoraConfig, get_peft_model
from shardwright.ds_configs.quantization.scheme import changed, scheme_named
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.trainers import QATCallback, QATConfig
from shardwright.trainers.qat.attach import attach
from shardwright.trainers.qat.callback import resume_errors
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

pytestmark = pytest.mark.slow

SCHEME = changed(scheme_named("W4A16"), group_size=16)
THREE_BITS = replace(SCHEME, weights=replace(SCHEME.weights, bits=3))


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **(sizes | changes)))


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(0, 64, (8,), generator=generator) for _ in range(8)]
    return [{"input_ids": row, "labels": row} for row in found]


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    return cpu_arguments(directory, 2, **({"max_steps": 4} | changes))


def trainer(model: Any, directory: Path, *callbacks: Any, **changes: Any) -> Trainer:
    return Trainer(model, arguments(directory, **changes), train_dataset=rows(), callbacks=list(callbacks))


class TestOptions:
    def test_steps_are_counted_once_rounding_starts(self, tmp_path: Path) -> None:
        callback = QATCallback("W4A16", group_size=16, start_step=1)
        assert callback.config.scheme.weights == SCHEME.weights
        trainer(tiny(), tmp_path, callback, gradient_accumulation_steps=2).train()
        assert callback.attachment.state.trained_steps == 3
        with pytest.raises(UsageError, match="training ends at step 4, before anything is rounded"):
            trainer(tiny(), tmp_path, QATCallback(SCHEME, start_step=4)).train()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"bit_schedule": ((0, 8), (2, 3))}, "train with the scheme's bits from --start-step on"),
            ({"weight_rule": "ternary"}, "use scheme W2A16"),
            ({"freeze_step": 2}, "ranges are observed during training"),
            ({"calibration": []}, "ranges are observed during training"),
            ({"weight_rule": "lsq", "group_size": -2}, r"(?s)group_size = -2.*weight_rule = 'lsq': must be"),
            ({"ranges": "l2"}, "quantize --ranges searches"),
            ({"stored_dtype": "bf16"}, "use bfloat16"),
            ({"group_size": 0}, "group_size = 0: must be"),
            ({"symmetric": False, "bits": 3}, "bits: is not a setting; use scheme: W4A16"),
            (
                {"learning_rate": 1, "weight_rul": 1},
                "(?s)learning_rate: is not.*weight_rul: .*did you mean weight_rule?",
            ),
        ],
    )
    def test_contradictory_options_are_rejected(self, options: Any, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            QATCallback(SCHEME, **options)


class TestOptimizer:
    def test_optimizer_from_before_the_learned_scales_is_rejected(self, tmp_path: Path) -> None:
        model = tiny()
        mine = torch.optim.SGD(model.parameters(), lr=0.1)
        made = {"optimizers": (mine, None), "train_dataset": rows()}
        with pytest.raises(UsageError, match="was created before the learned scales"):
            Trainer(model, arguments(tmp_path), callbacks=[QATCallback(SCHEME, weight_rule="learned")], **made)
        Trainer(tiny(), arguments(tmp_path), callbacks=[QATCallback(SCHEME)], **made)

    def test_optimizer_with_learned_scales_trains_them(self, tmp_path: Path) -> None:
        model, settings = tiny(), arguments(tmp_path)
        callback = QATCallback(SCHEME, weight_rule="learned")
        scales = callback.prepare(settings, model).parameters
        # LSQ starts at 2 · mean |w| / √7, LSQ+ at the range of the weights, here in groups of 16.
        groups = model.model.layers[0].self_attn.q_proj.weight.detach().view(32, 2, 16)
        assert torch.allclose(scales[0], 2 * groups.abs().mean(-1) / 7**0.5)
        asymmetric = attach(tiny(), QATConfig(scheme=changed(SCHEME, symmetric=False), weight_rule="learned"))
        low, high = groups.amin(-1), groups.amax(-1)
        assert torch.allclose(asymmetric.parameters[0], (high - low) / 15)
        assert torch.equal(asymmetric.parameters[1], (-8 - low / ((high - low) / 15)).round().clamp(-8, 7))
        before = [scale.detach().clone() for scale in scales]
        mine = torch.optim.SGD(model.parameters(), lr=0.1)
        Trainer(model, settings, optimizers=(mine, None), train_dataset=rows(), callbacks=[callback]).train()
        assert len(scales) == 7
        assert all(not torch.equal(old, new) for old, new in zip(before, scales, strict=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qat-run")
    trainer(tiny(), directory, QATCallback(SCHEME), save_strategy="steps", save_steps=2, max_steps=2).train()
    return directory / "checkpoint-2"


class TestResume:
    @pytest.mark.parametrize("recreated", [False, True])
    def test_progress_is_restored(self, recreated: bool, checkpoint: Path, tmp_path: Path) -> None:
        callback = QATCallback(SCHEME)
        resumed = trainer(tiny(), tmp_path, callback, restore_callback_states_from_checkpoint=recreated)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert callback.attachment.state.trained_steps == 4

    def test_resuming_with_other_number_formats_is_rejected(self, checkpoint: Path, tmp_path: Path) -> None:
        other = QATCallback(THREE_BITS)
        with pytest.raises(UsageError, match=r"scheme.weights.bits = 3: differs from the checkpoint \(4\)"):
            trainer(tiny(), tmp_path, other).train(resume_from_checkpoint=str(checkpoint))
        for named, directory in ((str(checkpoint), tmp_path), (True, checkpoint.parent)):
            with pytest.raises(UsageError, match="resume with the checkpoint's value"):
                trainer(tiny(), directory, QATCallback(THREE_BITS), resume_from_checkpoint=named)

    def test_scales_are_compared_before_loading(self, checkpoint: Path) -> None:
        learned = attach(tiny(), QATConfig(scheme=SCHEME, weight_rule="learned"))
        assert [error.where for error in resume_errors(learned, checkpoint)] == ["settings.weight_rule"]
        assert resume_errors(attach(tiny(), QATConfig(scheme=SCHEME)), checkpoint) == []

    def test_dense_training_resumes_with_rounding(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        saving = {"save_strategy": "steps", "save_steps": 2}
        trainer(tiny(), tmp_path, max_steps=2, **saving).train()
        dense = tmp_path / "checkpoint-2"
        callback = QATCallback(SCHEME)
        trainer(tiny(), tmp_path, callback, **saving).train(resume_from_checkpoint=str(dense))
        assert "trained without rounding" in capsys.readouterr().err
        assert callback.attachment.state.trained_steps == 2
        (error,) = resume_errors(callback.attachment, dense, demands_record=True)
        assert "was trained without rounding" in error.rule

    def test_upstream_still_fails_on_callbacks_missing_in_a_checkpoint(self, tmp_path: Path) -> None:
        """transformers 5.17.0 `_save_checkpoint`; when it no longer does, `setdefault` in `on_train_begin` can go."""

        class Other(TrainerCallback, ExportableState):
            def state(self) -> dict[str, Any]:
                return {"args": {}, "attributes": {}}

        saving = {"save_strategy": "steps", "save_steps": 2}
        trainer(tiny(), tmp_path, max_steps=2, **saving).train()
        with pytest.raises(KeyError, match="Other"):
            trainer(tiny(), tmp_path, Other(), **saving).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


class TestTrainingArguments:
    @pytest.mark.parametrize(
        ("options", "changes", "message"),
        [
            (
                {"start_step": 1},
                {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
                "may restore weights of a step whose number formats differ",
            ),
            ({}, {"bf16_full_eval": True}, "changes the trained weights"),
        ],
    )
    def test_arguments_that_change_exported_codes_are_rejected(
        self, tmp_path: Path, options: Any, changes: Any, message: str
    ) -> None:
        made = {"train_dataset": rows(), "eval_dataset": rows(), "callbacks": [QATCallback(SCHEME, **options)]}
        with pytest.raises(UsageError, match=message):
            Trainer(tiny(), arguments(tmp_path, **changes), **made).train()


class TestAdapters:
    def test_models_with_adapters_are_rejected(self) -> None:
        model = get_peft_model(tiny(), LoraConfig(r=2, target_modules=["q_proj"]))
        with pytest.raises(UsageError, match=r"has PEFT adapters; merge them first"):
            attach(model, QATConfig(scheme=SCHEME))

    def test_adding_adapters_after_attaching_is_rejected(self, tmp_path: Path) -> None:
        model = tiny()
        QATCallback(SCHEME).prepare(arguments(tmp_path), model)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        with pytest.raises(UsageError, match="rounds already"):
            attach(adapted, QATConfig(scheme=SCHEME))
