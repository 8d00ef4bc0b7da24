"""Input, errors and output of the entry point, without a launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from shardwright.plugins.launching.launch import Launch, launch_ranks
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.models import check_seq_len
from shardwright.trainers.data.sources import pack
from shardwright.trainers.train_causal_lm import main
from shardwright.trainers.training.plan_flags import PlanTrainingJob, parse_flags

TEXT = ["--text", "python-help"]
REQUIRED = ["--model", "model", "--output-dir", "out", *TEXT]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-rank", "8"], "requires --method lora"),
        (["--lora-alpha", "8"], "--lora-alpha = 8.0: requires --method lora"),
        (["--lora-dropout", "0"], "--lora-dropout = 0.0: requires --method lora"),
        (["--method", "lora", "--lora-alpha", "0"], "lora_alpha = 0: must be greater than 0"),
        (["--method", "lora", "--lora-dropout", "1"], "lora_dropout = 1: must be less than 1"),
        (["--seq-len", "1"], "at least 2 tokens"),
        (["--max-steps", "0"], "--max-steps = 0: must be at least 1"),
        (["--text", "missing.txt", "--training-arguments", "none.json"], "'none.json': no such file"),
    ],
)
def test_bad_flags_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REQUIRED, *flags]) == 2
    assert message in capsys.readouterr().err


def test_all_bad_flags_are_reported_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*REQUIRED, "--seq-len", "0", "--max-steps", "0", "--lora-targets", "q_proj"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_hyphens_and_underscores_are_the_same() -> None:
    def seq_len(*flags: str) -> int:
        return parse_flags([*REQUIRED, *flags], PlanTrainingJob).seq_len

    assert seq_len("--seq_len=32") == seq_len("--seq-len", "32") == 32


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps({"max_steps": 7, "logging_steps": 3, "seed": 5}))
    found = parse_flags(
        [*REQUIRED, "--training-arguments", str(path), "--max-steps", "2"], PlanTrainingJob
    ).read_settings()
    assert found == {
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 3,
        "max_steps": 2,
        "seed": 5,
        "output_dir": "out",
    }


def test_an_unknown_training_argument_names_the_nearest(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps({"lerning_rate": 1e-4, "fp16": True, "use_cpu": False}))
    arguments = ["--model", str(tiny_llama), "--output-dir", str(tmp_path), *TEXT, "--training-arguments", str(path)]
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert "did you mean 'learning_rate'?" in printed
    assert "fp16 needs an accelerator" in printed
    assert "need use_cpu = True" in printed


def test_a_sequence_beyond_learned_positions_is_rejected_and_beyond_rotary_ones_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, LlamaConfig

    learned = tmp_path / "learned"
    GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=128, vocab_size=512).save_pretrained(learned)
    assert main(["--model", str(learned), "--output-dir", str(tmp_path / "out"), *TEXT, "--seq-len", "129"]) == 2
    assert "the model has 128 learned positions" in capsys.readouterr().err
    check_seq_len(129, LlamaConfig(max_position_embeddings=128))
    assert "exceeds the 128 positions that the model was trained on" in capsys.readouterr().err


def test_weights_that_are_not_safetensors_are_rejected(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text((tiny_llama / "config.json").read_text())
    (model / "pytorch_model.bin").touch()
    assert main(["--model", str(model), "--output-dir", str(tmp_path / "out"), *TEXT, "--seq-len", "64"]) == 4
    assert "safetensors only" in capsys.readouterr().err


def test_a_configuration_alone_trains_from_random_weights(tiny_llama: Path, tmp_path: Path) -> None:
    """One process, no launcher: one optimizer step on Python's help topics."""
    losses, output = tmp_path / "losses.json", tmp_path / "trained"
    arguments = ["--model", str(tiny_llama / "config.json"), "--output-dir", str(output), "--seq-len", "64"]
    assert main([*arguments, *TEXT, "--max-steps", "1", "--losses-json", str(losses)]) == 0
    record = json.loads(losses.read_text())
    assert record["world_size"] == 1
    # Weights near zero predict all 512 tokens alike, which costs ln 512 = 6.24 nats.
    assert record["losses"] == [pytest.approx(6.24, abs=0.1)]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in output.iterdir()}


@given(text=st.text(), seq_len=st.integers(2, 9))
@settings(max_examples=50, deadline=None)
def test_packed_samples_are_the_text_without_its_rest(text: str, seq_len: int) -> None:
    tokenizer = byte_tokenizer(300)
    samples = pack([text, "end of the text"], tokenizer, seq_len)
    tokens = [token for sample in samples for token in sample["input_ids"].tolist()]
    whole = [*tokenizer(text)["input_ids"], 256, *tokenizer("end of the text")["input_ids"], 256]
    assert tokens == whole[: len(whole) // seq_len * seq_len]
    assert all(len(sample["labels"]) == seq_len for sample in samples)


@given(text=st.text())
@settings(max_examples=50, deadline=None)
def test_byte_ids_are_as_many_as_bytes_and_decode_to_the_text(text: str) -> None:
    tokenizer = byte_tokenizer(256)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert all(0 <= index < 256 for index in ids)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_qlora_trains_adapters_on_4_bit_weights(tiny_llama: Path, tmp_path: Path) -> None:
    arguments = tmp_path / "arguments.json"
    arguments.write_text(json.dumps({"bf16": True, "per_device_train_batch_size": 2, "learning_rate": 0.01}))
    losses = tmp_path / "losses.json"
    command = ["-m", "shardwright.trainers.train_causal_lm", "--model", str(tiny_llama), "--seq-len", "64"]
    method = ["--method", "qlora", "--lora-rank", "4", "--lora-alpha", "6", "--lora-dropout", "0.125"]
    method += ["--max-steps", "4", "--text", json.__file__]
    files = [
        "--training-arguments",
        str(arguments),
        "--losses-json",
        str(losses),
        "--output-dir",
        str(tmp_path / "out"),
    ]
    launch_ranks(Launch(arguments=(*command, *method, *files)), timeout_seconds=120)
    values = json.loads(losses.read_text())["losses"]
    assert values[-1] < values[0] - 0.05
    adapters = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0 for name, tensor in adapters.items() if "lora_B" in name)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert [config[name] for name in ("r", "lora_alpha", "lora_dropout")] == [4, 6, 0.125]


def test_qlora_needs_weights(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(tiny_llama / "config.json"), "--output-dir", str(tmp_path), "--seq-len", "64"]
    assert main([*flags, *TEXT, "--method", "qlora"]) == 2
    assert "quantizes loaded weights" in capsys.readouterr().err
