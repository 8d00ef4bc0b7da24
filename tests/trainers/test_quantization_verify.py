"""A fresh process verifies a written checkpoint; every defect is reported."""

from __future__ import annotations

import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from safetensors.torch import load_file, save_file
from shardwright.ds_configs.quantization.layers import selected_layers
from shardwright.ds_configs.quantization.scheme import scheme_named
from shardwright.plugins.transformers.meta_model import open_source
from shardwright.trainers import verify
from shardwright.trainers.qat.callback import QATCallback
from shardwright.trainers.verify import (
    TOLERANCE,
    Verification,
    discard_failed,
    fail_output,
    reference_logits,
)
from small_models import llama
from transformers import Trainer, TrainingArguments

pytestmark = pytest.mark.slow

SCHEME = scheme_named("W4A16")
TOKENS = [[5, 9, 300, 7, 1], [1, 2, 3]]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a checkpoint of a two-layer Llama, its quantized layers, and the logits of the model in memory."""
    place = tmp_path_factory.mktemp("written")
    model = llama(hidden_size=128, vocab_size=384, max_position_embeddings=64)
    model.save_pretrained(place / "source")
    source = open_source(str(place / "source"))
    # The export requires a training step; this one changes nothing.
    arguments = TrainingArguments(
        str(place / "run"), max_steps=1, learning_rate=0.0, report_to="none", save_strategy="no", use_cpu=True
    )
    rounding = QATCallback(SCHEME)
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS[:1]]
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[rounding])
    trainer.train()
    rounding.export(trainer, place / "checkpoint", verify=False)
    reference = reference_logits(model.eval(), TOKENS)
    return place / "checkpoint", selected_layers(SCHEME, source.layers), reference


def verified(written, directory, **changes):
    _, layers, reference = written
    return reference.verify(directory, **{"layers": layers, "scheme": SCHEME} | changes)


def damaged(written, tmp_path, change):
    """Return a copy of the checkpoint whose tensors went through `change`."""
    copy = tmp_path / "copy"
    shutil.copytree(written[0], copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_intact_checkpoint_passes_and_a_flipped_bit_fails(written, tmp_path):
    sound = verified(written, written[0])
    assert sound.passed and sound.packed_layers == 14 and sound.compared_tokens == 8
    assert sound.largest_logit_difference <= TOLERANCE
    assert dict(sound.facts())["matrices stored as in the scheme"] == "14"

    def flip(tensors):
        tensors["model.layers.1.mlp.down_proj.weight_packed"][3, 2] ^= 1 << 7

    found = verified(written, damaged(written, tmp_path, flip))
    assert not found.passed and found.packed_layers == 14
    assert "reloaded logits differ" in found.reason


def test_missing_tensor_is_reported(written, tmp_path):
    """Transformers only warns about missing tensors, and initializes them randomly."""
    found = verified(
        written, damaged(written, tmp_path, lambda tensors: tensors.pop("model.layers.0.input_layernorm.weight"))
    )
    assert "1 missing keys when reloaded: model.layers.0.input_layernorm.weight" in found.reason


def test_loading_error_is_reported(written, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(written[0], copy)
    (copy / "config.json").write_text("{}")
    found = verified(written, copy)
    assert "it cannot be loaded and run" in found.reason
    assert found.largest_logit_difference is None


def test_nan_logits_fail(written, monkeypatch):
    """Python's `max` ignores NaN unless it comes first."""

    directory, _, reference = written
    answers = {str(row): logits.clone() for row, logits in enumerate(reference.logits)}

    def reload(command, **_):
        work = Path(command[4])
        (work / verify.FACTS).write_text("{}")
        save_file(answers, work / verify.LOGITS)
        return CompletedProcess(command, 0)

    monkeypatch.setattr(verify.subprocess, "run", reload)
    assert verified(written, directory).largest_logit_difference == 0
    answers["1"][2, 5] = float("nan")
    assert not verified(written, directory).passed


def test_failed_checkpoint_replaces_only_an_earlier_one(tmp_path):
    output, users = tmp_path / "q", tmp_path / "other.failed"
    users.mkdir()
    (users / "kept").write_text("")
    verification = Verification(
        errors=("first", "second"), largest_logit_difference=None, compared_tokens=0, packed_layers=0
    )

    def failed(output):
        output.mkdir(exist_ok=True)
        staging = output / "staging" if output.name == "other" else tmp_path / "staging"
        staging.mkdir()
        return fail_output(staging, output, verification)

    for _ in range(2):
        assert failed(output) == tmp_path / "q.failed"
        assert (tmp_path / "q.failed" / "FAILED.txt").read_text() == "first\nsecond\n"
    assert failed(tmp_path / "other") == tmp_path / "other" / "failed" and (users / "kept").exists()
    (tmp_path / "absent.failed" / "kept").mkdir(parents=True)
    (staging := tmp_path / "staging").mkdir()
    assert fail_output(staging, tmp_path / "absent", verification) == tmp_path / "absent" / "failed"
    discard_failed(output)
    assert not (tmp_path / "q.failed").exists()
