"""Exports of quantization-aware training: the checkpoint is the trained model, to the bit, or there is none."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_settings import cpu_arguments
from safetensors import safe_open
from shardwright.ds_configs.specs.errors import RefusedInputError, ShardwrightError, UsageError
from shardwright.plugins.safetensors import save_checkpoint
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers import verify
from shardwright.trainers.qat import export as export_module
from shardwright.trainers.qat.callback import QATCallback
from shardwright.trainers.qat.rounding import round_weight
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    set_seed,
)

pytestmark = pytest.mark.slow

VOCAB_SIZE, SEQ_LEN = 300, 32
ROWS = [[(row * 37 + place * 11 + place * place) % VOCAB_SIZE for place in range(SEQ_LEN)] for row in range(12)]
PROBE = [ROWS[0], ROWS[5][:7]]
Q_PROJ = "model.layers.0.self_attn.q_proj"


def small_config(**changes) -> LlamaConfig:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaConfig(**(sizes | heads | {"initializer_range": 0.05, "bos_token_id": None} | changes))


def small_model(dtype=torch.float32, *, made_by=LlamaForCausalLM, **changes):
    set_seed(0)
    return made_by._from_config(small_config(**changes), dtype=dtype)


def trained(model, scheme, directory, *, labels=None, callback_options=None, **changes):
    settings = {"max_steps": 3, "learning_rate": 1e-2, "logging_strategy": "no"}
    arguments = cpu_arguments(directory / "training", 2, **settings, **changes)
    samples = [{"input_ids": row, "labels": row if labels is None else labels} for row in ROWS]
    callback = QATCallback(scheme, **(callback_options or {}))
    trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[callback])
    trainer.train()
    return trainer, callback


@pytest.fixture
def reload_here(monkeypatch):
    """Reload checkpoints in this process: a fresh one takes seconds to start."""

    def run(command, **_):
        verify.main(*command[3:])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(verify.subprocess, "run", run)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


@torch.inference_mode()
def logits(model, rows=PROBE):
    return [model.eval()(input_ids=torch.tensor([row])).logits[0].float() for row in rows]


def assert_is_trained_model(trainer, directory):
    """Loaded by Transformers as a user does, it answers as the live model does, with no tensor missing or left over."""
    model, found = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not any(found.values())
    for reloaded, live in zip(logits(model), logits(trainer.model), strict=True):
        assert torch.equal(reloaded, live)
    return model


CASES = {
    "W4A16": ("W4A16", torch.bfloat16, {}),
    "W8A8": ("W8A8", torch.bfloat16, {}),
    "learned": ("W4A16_ASYM", torch.float32, {"weight_rule": "learned"}),
    "ternary": ("W2A16", torch.float32, {"weight_rule": "ternary"}),
    "binary": ("W2A16", torch.bfloat16, {"weight_rule": "binary"}),
    "static": ("W8A8_STATIC", torch.bfloat16, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_checkpoint_is_the_trained_model(case, tmp_path, reload_here, monkeypatch):
    scheme, dtype, options = CASES[case]
    # A model without a name has no directory: nothing is copied from the one where the program runs.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("another model's")
    trainer, callback = trained(small_model(dtype), scheme, tmp_path, callback_options=options)
    result = callback.export(trainer, tmp_path / "out", probe=PROBE)
    assert result.largest_weight_difference == 0.0
    assert result.largest_logit_difference == 0.0
    assert result.quantized_layers == result.verification.packed_layers == 14
    model = assert_is_trained_model(trainer, tmp_path / "out")
    own = dict(trainer.model.named_modules())[Q_PROJ]
    rounding = own.quantizer.rounding()
    learned = [getattr(own, name, None) for name in ("learned_weight_scale", "learned_weight_zero_point")]
    seen = round_weight(own.weight.detach(), rounding, *learned).value(rounding.quantization)
    assert torch.equal(dict(model.named_modules())[Q_PROJ].weight.detach(), seen)
    assert not any("learned" in name for name in stored(tmp_path / "out"))
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    if case in ("ternary", "binary"):
        assert {len(row.unique()) for row in seen} == {3 if case == "ternary" else 2}


def test_fresh_process_verifies_the_checkpoint(tmp_path):
    """Weights of fp32 whose scales are rounded to bf16, as mixed precision trains them."""
    source = small_model()
    source.generation_config.max_new_tokens = 17
    source.save_pretrained(tmp_path / "source")
    byte_tokenizer(VOCAB_SIZE).save_pretrained(tmp_path / "source")
    options = {"stored_dtype": "bfloat16"}
    trainer, callback = trained(small_model(), "W8A8_STATIC", tmp_path, callback_options=options)
    with pytest.raises(UsageError, match="is the model that was trained itself"):
        callback.export(trainer, tmp_path / "source", source=tmp_path / "source", force=True)
    result = callback.export(trainer, tmp_path / "out", source=tmp_path / "source")
    assert (result.largest_weight_difference, result.largest_logit_difference) == (0.0, 0.0)
    report = json.loads((tmp_path / "out" / "qat_report.json").read_text())
    assert report["largest_weight_difference"] == report["verification"]["largest_logit_difference"] == 0.0
    assert report["trained_steps"] == 3
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["max_new_tokens"] == 17
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_tied_head_biases_and_shards(tmp_path, reload_here, monkeypatch):
    monkeypatch.setattr(export_module, "save_checkpoint", partial(save_checkpoint, shard_bytes=60_000))
    model = small_model(torch.bfloat16, tie_word_embeddings=True, attention_bias=True)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.bias.normal_()
    trainer, callback = trained(model, "W4A16", tmp_path)
    result = callback.export(trainer, tmp_path / "out")
    assert (result.largest_weight_difference, result.largest_logit_difference) == (0.0, 0.0)
    assert_is_trained_model(trainer, tmp_path / "out")
    tensors = stored(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert len(set(index["weight_map"].values())) > 2
    assert "lm_head.weight" not in tensors
    assert tensors[f"{Q_PROJ}.bias"].dtype == torch.bfloat16
    assert result.stored_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_tensors_that_loaders_keep_in_fp32_are_stored_so(tmp_path, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"input_layernorm"})
    trainer, callback = trained(small_model(), "W4A16", tmp_path, callback_options={"stored_dtype": "bfloat16"})
    callback.export(trainer, tmp_path / "out", verify=False)
    norms = {name: tensor.dtype for name, tensor in stored(tmp_path / "out").items() if "norm" in name}
    kept = {name: torch.float32 if "input_layernorm" in name else torch.bfloat16 for name in norms}
    assert norms == kept and len(norms) == 5


def test_classifier_is_verified_by_its_own_class(tmp_path, reload_here):
    model = small_model(made_by=LlamaForSequenceClassification, num_labels=3, pad_token_id=0)
    trainer, callback = trained(model, "W4A16", tmp_path, labels=1)
    result = callback.export(trainer, tmp_path / "out")
    assert (result.largest_weight_difference, result.largest_logit_difference) == (0.0, 0.0)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]


def test_models_with_other_inputs_are_compared_by_weights(tmp_path):
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    set_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB_SIZE, pad_token_id=0, **sizes))
    trainer, callback = trained(model, "W4A16", tmp_path)
    result = callback.export(trainer, tmp_path / "out")
    assert result.largest_weight_difference == 0.0
    assert result.largest_logit_difference is None
    assert result.verification.packed_layers == result.quantized_layers
    assert "only weights were compared" in result.notes[0]
    tensors = stored(tmp_path / "out")
    assert "shared.weight" in tensors
    assert not {"lm_head.weight", "encoder.embed_tokens.weight"} & set(tensors)


def test_checkpoint_that_differs_is_renamed_to_failed(tmp_path, reload_here, monkeypatch):
    trainer, callback = trained(small_model(), "W4A16", tmp_path)

    def write(tensors, directory):
        tensors = dict(tensors)
        tensors[f"{Q_PROJ}.weight_scale"] = tensors[f"{Q_PROJ}.weight_scale"] * 1.01
        save_checkpoint(tensors, directory)

    monkeypatch.setattr(export_module, "save_checkpoint", write)
    with pytest.raises(ShardwrightError, match=r"written matrices differ .* by .*; reloaded logits differ"):
        callback.export(trainer, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "differ" in (tmp_path / "out.failed" / "FAILED.txt").read_text()


def test_untrained_models_are_rejected(tmp_path):
    model = small_model()
    callback = QATCallback("W8A8_STATIC")
    attachment = callback.prepare(None, model)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError) as caught:
        export_module.export(model, attachment, tmp_path / "out", source="org/model")
    reported = str(caught.value)
    assert "was never trained with the 8 bits of W8A8_STATIC" in reported
    assert "14 of 14 have no value" in reported
    assert "source = 'org/model': is not a directory" in reported
    assert "exists and is not empty" in reported
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_tensors_with_nan_or_infinity_are_rejected_by_name(tmp_path):
    trainer, callback = trained(small_model(), "W4A16", tmp_path, callback_options={"stored_dtype": "float16"})
    layers = trainer.model.model.layers
    with torch.no_grad():
        layers[0].self_attn.q_proj.weight[0, 0] = float("nan")
        # Finite, but beyond the largest fp16 number.
        layers[1].mlp.up_proj.weight[0, 0] = 1e7
        layers[1].input_layernorm.weight[0] = 1e6
    with pytest.raises(RefusedInputError) as caught:
        callback.export(trainer, tmp_path / "out")
    reported = str(caught.value)
    assert "3 tensors with NaN or infinite numbers" in reported
    assert f"{Q_PROJ}.weight" in reported
    assert "model.layers.1.mlp.up_proj.weight_scale" in reported
    assert "model.layers.1.input_layernorm.weight" in reported
    assert not (tmp_path / "out").exists()
