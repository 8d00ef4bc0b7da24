"""`QATCallback` in the Trainer of Transformers: what it refuses, what a resumed run must share, schedules of bits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from shardwright.ds_configs.quantization.combinations import changed
from shardwright.ds_configs.quantization.scheme import scheme_named
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError
from shardwright.plugins.peft.lora import add_lora
from shardwright.trainers import QATCallback, QATConfig
from shardwright.trainers.checkpoints.record import RECORD
from shardwright.trainers.qat.callback import _newest
from shardwright.trainers.qat.checkpoint_record import resume_faults
from shardwright.trainers.qat.rounding.attach import attach
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

pytestmark = pytest.mark.slow

SCHEME = changed(scheme_named("W4A16"), group_size=16)


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **(sizes | changes)))


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(0, 64, (8,), generator=generator) for _ in range(8)]
    return [{"input_ids": row, "labels": row} for row in found]


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(str(directory), **(settings | changes))


def trainer(model: Any, directory: Path, *callbacks: Any, **changes: Any) -> Trainer:
    return Trainer(model, arguments(directory, **changes), train_dataset=rows(), callbacks=list(callbacks))


class TestSchedule:
    def test_bits_fall_and_only_steps_at_the_last_ones_count(self, tmp_path: Path) -> None:
        callback = QATCallback(SCHEME, start_step=1, bit_schedule=((0, 8), (3, 4)))
        seen = []

        class Look(TrainerCallback):
            def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                current = callback.attachment.state
                seen.append((state.global_step, current.enabled, current.bits))

        trainer(tiny(), tmp_path, callback, Look(), gradient_accumulation_steps=2).train()
        assert seen == [(0, False, 8), (1, True, 8), (2, True, 8), (3, True, 4)]
        assert callback.attachment.state.trained_steps == 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"start_step": 4}, "training ends at step 4, before anything is rounded"),
            ({"bit_schedule": ((0, 8), (4, 4))}, "before it reaches the 4 bits"),
        ],
    )
    def test_a_training_that_ends_too_early_does_not_begin(self, tmp_path: Path, options: Any, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            trainer(tiny(), tmp_path, QATCallback(SCHEME, **options)).train()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"bit_schedule": ((0, 8), (2, 3))}, "must end at the 4 bits"),
            ({"bit_schedule": ((3, 8), (2, 4))}, "rising order"),
            ({"bit_schedule": ((0, 4),), "weight_rule": "learned"}, "which learned scales do not follow"),
            ({"weight_rule": "ternary"}, "use scheme W2A16"),
            ({"freeze_step": 2}, "belongs to ranges that are observed"),
            ({"ranges": "percentile"}, "needs stored ranges"),
            ({"weight_rule": "lsq", "kv_cache": "FP8"}, r"(?s)weight_rule = 'lsq': is not known.*kv_cache = 'FP8'"),
            ({"stored_dtype": "bf16"}, "did you mean bfloat16?"),
            ({"lora": "merge"}, "did you mean merged?"),
        ],
    )
    def test_options_that_contradict_each_other(self, options: Any, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            QATCallback(SCHEME, **options)


class TestModels:
    def test_a_head_that_is_tied_stays_dense(self) -> None:
        everything = changed(SCHEME, ignore=())
        with pytest.raises(UsageError, match=r"lm_head.*shares its weight"):
            attach(tiny(tie_word_embeddings=True), QATConfig(scheme=everything))

    def test_groups_must_divide_every_layer(self) -> None:
        with pytest.raises(UsageError, match="must divide the inputs of every layer"):
            attach(tiny(), QATConfig(scheme=scheme_named("W4A16")))

    def test_a_model_rounds_once(self) -> None:
        model = tiny()
        attach(model, QATConfig(scheme=SCHEME))
        with pytest.raises(UsageError, match="rounds already"):
            attach(model, QATConfig(scheme=SCHEME))

    def test_what_writes_the_checkpoint_must_be_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == "compressed_tensors" else find(name)
        )
        with pytest.raises(UsageError, match="compressed-tensors: is not installed"):
            attach(tiny(), QATConfig(scheme=SCHEME))

    @pytest.mark.parametrize(
        ("options", "message"), [({"lora_dropout": 0.1}, "lora_dropout=0.1"), ({"use_dora": True}, "only plain LoRA")]
    )
    def test_adapters_that_cannot_be_merged(self, options: Any, message: str) -> None:
        model = get_peft_model(tiny(), LoraConfig(r=2, target_modules="all-linear", **options))
        with pytest.raises(UsageError, match=message):
            attach(model, QATConfig(scheme=SCHEME))
        attach(model, QATConfig(scheme=SCHEME, lora="on_quantized_base"))

    def test_a_trained_copy_of_the_head_stays_dense(self) -> None:
        adapters = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        found = attach(get_peft_model(tiny(), adapters), QATConfig(scheme=SCHEME))
        assert sorted(layer.name.rpartition(".")[2] for layer in found.layers) == [
            *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
        ]

    def test_adapters_that_fit_no_layer_are_named(self) -> None:
        with pytest.raises(UsageError, match=r"lora_targets = 'query'.*linear layers are .*q_proj"):
            add_lora(tiny(), rank=2, targets="query", fp32_adapters=True)


class TestOptimizer:
    def test_one_that_was_made_before_the_learned_scales(self, tmp_path: Path) -> None:
        model = tiny()
        mine = torch.optim.SGD(model.parameters(), lr=0.1)
        made = {"optimizers": (mine, None), "train_dataset": rows()}
        with pytest.raises(UsageError, match="was made before the learned scales"):
            Trainer(model, arguments(tmp_path), callbacks=[QATCallback(SCHEME, weight_rule="learned")], **made)
        Trainer(tiny(), arguments(tmp_path), callbacks=[QATCallback(SCHEME)], **made)

    def test_one_that_knows_them_steps_them(self, tmp_path: Path) -> None:
        model, settings = tiny(), arguments(tmp_path)
        callback = QATCallback(SCHEME, weight_rule="learned")
        scales = callback.prepare(settings, model).parameters
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
    def test_progress_is_taken_up(self, checkpoint: Path, tmp_path: Path) -> None:
        callback = QATCallback(SCHEME)
        trainer(tiny(), tmp_path, callback).train(resume_from_checkpoint=str(checkpoint))
        assert callback.attachment.state.trained_steps == 4

    def test_it_is_taken_up_where_the_trainer_makes_callbacks_anew(self, checkpoint: Path, tmp_path: Path) -> None:
        callback = QATCallback(SCHEME)
        resumed = trainer(tiny(), tmp_path, callback, restore_callback_states_from_checkpoint=True)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert callback.attachment.state.trained_steps == 4

    def test_other_numbers_are_refused(self, checkpoint: Path, tmp_path: Path) -> None:
        other = QATCallback(changed(SCHEME, bits=3))
        with pytest.raises(
            UsageError, match=r"scheme.weights.bits = 3: is not what the checkpoint was trained with \(4\)"
        ):
            trainer(tiny(), tmp_path, other).train(resume_from_checkpoint=str(checkpoint))
        with pytest.raises(UsageError, match="resume with the same"):
            trainer(tiny(), tmp_path, QATCallback(changed(SCHEME, bits=3)), resume_from_checkpoint=str(checkpoint))

    def test_scales_and_adapters_are_compared_before_anything_is_loaded(self, checkpoint: Path) -> None:
        learned = attach(tiny(), QATConfig(scheme=SCHEME, weight_rule="learned"))
        assert [fault.where for fault in resume_faults(learned, checkpoint)] == ["settings.weight_rule"]
        adapted = attach(add_lora(tiny(), rank=2, targets=None, fp32_adapters=True), QATConfig(scheme=SCHEME))
        assert [fault.where for fault in resume_faults(adapted, checkpoint)] == ["settings.lora_rank"]
        assert resume_faults(attach(tiny(), QATConfig(scheme=SCHEME)), checkpoint) == []

    def test_a_dense_training_goes_on_rounded(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        saving = {"save_strategy": "steps", "save_steps": 2}
        trainer(tiny(), tmp_path, max_steps=2, **saving).train()
        dense = tmp_path / "checkpoint-2"
        callback = QATCallback(SCHEME)
        trainer(tiny(), tmp_path, callback, **saving).train(resume_from_checkpoint=str(dense))
        assert "trained without rounding" in capsys.readouterr().err
        assert callback.attachment.state.trained_steps == 2
        (fault,) = resume_faults(callback.attachment, dense, demands_record=True)
        assert "was trained without rounding" in fault.rule

    def test_upstream_still_forgets_callbacks_that_a_checkpoint_did_not_know(self, tmp_path: Path) -> None:
        """transformers 5.17.0 `_save_checkpoint`; when it no longer does, `setdefault` in `_take_up` can go."""

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
                "may bring back weights of a step with other numbers",
            ),
            ({}, {"bf16_full_eval": True}, "changes the trained weights"),
        ],
    )
    def test_those_that_would_export_other_codes(
        self, tmp_path: Path, options: Any, changes: Any, message: str
    ) -> None:
        made = {"train_dataset": rows(), "eval_dataset": rows(), "callbacks": [QATCallback(SCHEME, **options)]}
        with pytest.raises(UsageError, match=message):
            Trainer(tiny(), arguments(tmp_path, **changes), **made).train()

    def test_the_last_checkpoint_is_looked_for(self, checkpoint: Path) -> None:
        other = QATCallback(changed(SCHEME, bits=3))
        with pytest.raises(UsageError, match="is not what the checkpoint was trained with"):
            trainer(tiny(), checkpoint.parent, other, resume_from_checkpoint=True)


class TestAttachedBefore:
    def test_another_callback_is_not_obeyed_silently(self, tmp_path: Path) -> None:
        model = tiny()
        QATCallback(SCHEME).prepare(arguments(tmp_path), model)
        with pytest.raises(UsageError, match="rounds as W4A16 already, with other settings"):
            QATCallback(SCHEME, weight_rule="learned").prepare(arguments(tmp_path), model)

    def test_adapters_come_first(self, tmp_path: Path) -> None:
        model = tiny()
        QATCallback(SCHEME).prepare(arguments(tmp_path), model)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        with pytest.raises(UsageError, match="rounds already"):
            attach(adapted, QATConfig(scheme=SCHEME))

    def test_a_failed_calibration_can_be_repeated(self, tmp_path: Path) -> None:
        model = tiny()
        with pytest.raises(UsageError, match="at least one batch"):
            QATCallback("W8A8_STATIC", calibration=[]).prepare(arguments(tmp_path), model)
        batches = [{"input_ids": rows()[0]["input_ids"][None]}]
        found = QATCallback("W8A8_STATIC", calibration=batches).prepare(arguments(tmp_path), model)
        assert all(one.scale is not None for one in found.ranges.values())

    def test_calibration_is_a_start_for_observers(self, tmp_path: Path) -> None:
        batches = [{"input_ids": rows()[0]["input_ids"][None]}]
        callback = QATCallback("W8A8_STATIC", calibration=batches, ranges="moving_average")
        found = callback.prepare(arguments(tmp_path), tiny())
        assert all(one.scale is not None for one in found.ranges.values())

    def test_ranks_without_weights_cannot_calibrate(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
        batches = [{"input_ids": rows()[0]["input_ids"][None]}]
        with pytest.raises(UsageError, match="fsdp_cpu_ram_efficient_loading fills them later"):
            QATCallback("W8A8_STATIC", calibration=batches).prepare(arguments(tmp_path), tiny())

    def test_calibration_without_ranges_is_refused(self) -> None:
        with pytest.raises(UsageError, match="finds stored ranges of activations, and W4A16 has none"):
            QATCallback("W4A16", calibration=[])


class TestAdapters:
    def test_learned_scales_would_be_lost_with_them(self) -> None:
        model = add_lora(tiny(), rank=2, targets=None, fp32_adapters=True)
        with pytest.raises(UsageError, match="a resumed run would lose learned scales"):
            attach(model, QATConfig(scheme=SCHEME, weight_rule="learned"))

    @pytest.mark.parametrize(
        "options", [{"modules_to_save": ["embed_tokens"]}, {"target_modules": ["q_proj", "lm_head"]}]
    )
    def test_a_tied_head_is_not_adapted(self, options: Any) -> None:
        model = get_peft_model(
            tiny(tie_word_embeddings=True), LoraConfig(r=2, **{"target_modules": ["q_proj"], **options})
        )
        with pytest.raises(UsageError, match="the output head shares its weight with the token embedding"):
            attach(model, QATConfig(scheme=SCHEME))


def test_a_resumed_run_is_compared_with_the_checkpoint_that_is_chosen(tmp_path: Path) -> None:
    """Marked checkpoints are chosen by whether they are whole; without marks the Trainer takes the newest."""
    assert _newest(tmp_path) is None
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert _newest(tmp_path) == str(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-2" / RECORD).write_text("{")
    with pytest.raises(RefusedInputError, match="checkpoint-4"):
        _newest(tmp_path)
