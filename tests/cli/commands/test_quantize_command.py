"""`shardwright quantize` as a user meets it: through the entry point, with real files and bad ones."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from session import warm_command
from shardwright.cli.main import run
from small_models import llama

pytestmark = pytest.mark.slow

BRIEF = ("--dataset", "python-help", "--seq-len", "32", "--num-samples", "8", "--no-evaluate")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    import torch
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer

    directory = tmp_path_factory.mktemp("models") / "small"
    llama(hidden_size=128, num_hidden_layers=3, vocab_size=384, max_position_embeddings=64).to(
        torch.bfloat16
    ).save_pretrained(directory)
    byte_tokenizer(384).save_pretrained(directory)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def quantize(model: Path, output: Path, *more: str) -> int:
    return run(["quantize", str(model), "--output-dir", str(output), *more])


@pytest.mark.needs("llmcompressor")
def test_a_checkpoint_loads_and_describes_its_quantization(model, tmp_path, capsys):
    before = contents(model)
    output = tmp_path / "q"
    assert quantize(model, output, "--scheme", "W4A16", *BRIEF, "--format", "json") == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["method"] == "gptq"
    assert outcome["verification"]["largest_logit_difference"] <= 1e-3
    assert len(outcome["quantized_layers"]) == 21
    assert outcome["calibration"]["samples"] == 8
    stored = json.loads((output / "config.json").read_text())["quantization_config"]
    assert stored["format"] == "pack-quantized"
    assert stored["quant_method"] == "compressed-tensors"
    for name in ("model.safetensors", "tokenizer.json", "REPORT.md", "quantization.json"):
        assert (output / name).is_file()
    written = b"".join(contents(output).values())
    assert str(tmp_path).encode() not in written.replace(str(model).encode(), b""), "machine paths in the checkpoint"
    assert contents(model) == before
    assert {path.name for path in tmp_path.iterdir()} == {"q"}


def refused(model: Path, tmp_path: Path, capsys, code: int, *more: str, output: str = "q") -> str:
    """Run a command that must fail with a code, one line for each error, and nothing written."""
    before = contents(model) if model.is_dir() else {}
    there = {path.name for path in tmp_path.iterdir()}
    assert quantize(model, tmp_path / output, *more) == code
    captured = capsys.readouterr()
    assert not captured.out
    assert {path.name for path in tmp_path.iterdir()} == there
    assert (contents(model) if model.is_dir() else {}) == before
    return "\n".join(line for line in captured.err.splitlines() if line.startswith("error: "))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--group-size", "96", *BRIEF),
            ("group_size = 96", "model.layers.0.self_attn.q_proj (128)", "16, 32, 64, 128"),
        ),
        (("--method", "smoothquant", *BRIEF), ("moves outliers out of quantized activations", "W8A8")),
        (("--scheme", "NF4", "--method", "gptq", *BRIEF), ("cannot write NF4", "bitsandbytes")),
        (("--ignore", "modle.layers.0", *BRIEF), ("modle.layers.0", "matches no linear layer")),
        pytest.param(
            ("--method-option", "dampenig_frac=0.1", *BRIEF),
            ("dampenig_frac", "did you mean dampening_frac?"),
            marks=pytest.mark.needs("llmcompressor"),
        ),
        (("--resume", *BRIEF), ("--resume", "starts from the beginning")),
        (("--method", "autoround", *BRIEF), ("method", "autoround", "use gptq, which needs an eighth of the time")),
        (("--scheme", "AutoRound", *BRIEF), ("AutoRound", "use --method gptq --scheme W4A16")),
    ],
)
def test_flags_that_cannot_work(model, tmp_path, capsys, flags, words):
    message = refused(model, tmp_path, capsys, 2, *flags)
    for word in words:
        assert word in message


def test_what_is_quantized_already(model, tmp_path, capsys):
    changed = tmp_path / "changed"
    changed.mkdir()
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (changed / "config.json").write_text(json.dumps(config))
    assert "already quantized (gptq)" in refused(changed, tmp_path, capsys, 4, *BRIEF)


def test_what_does_not_fit(model, tmp_path, capsys, monkeypatch):
    import collections

    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: collections.namedtuple("M", "available total")(10**6, 10**6))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    message = refused(model, tmp_path, capsys, 3, "--scheme", "NF4", *BRIEF)
    assert "host memory: needs" in message and "output_dir" in message and " GB free" in message


@pytest.mark.needs("llmcompressor")
def test_a_checkpoint_that_does_not_pass_is_kept_apart(model, tmp_path, capsys, monkeypatch):
    from safetensors.torch import load_file, save_file
    from shardwright.trainers import quantization as quantization_run

    copy = quantization_run.copy_companions

    def damage(source: Path, target: Path) -> None:
        copy(source, target)
        tensors = load_file(target / "model.safetensors")
        tensors["model.layers.0.mlp.down_proj.weight_scale"] *= 1.5
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(quantization_run, "copy_companions", damage)
    assert quantize(model, tmp_path / "q", "--scheme", "W4A16", "--method", "rtn", "--no-evaluate") == 1
    message = capsys.readouterr().err
    assert "reloaded logits differ" in message and "q.failed" in message
    assert {path.name for path in tmp_path.iterdir()} == {"q.failed"}
    assert "reloaded logits differ" in (tmp_path / "q.failed" / "FAILED.txt").read_text()


@pytest.mark.needs("llmcompressor")
def test_an_interrupted_run_leaves_nothing(model, tmp_path):
    """Ctrl-C in the middle: exit code 130, and no output."""
    flags = ("--scheme", "W4A16", "--dataset", "python-help", "--seq-len", "32", "--num-samples", "64", "--no-evaluate")
    command = [*warm_command("shardwright"), "quantize", str(model), *flags, "--output-dir", str(tmp_path / "q")]
    # What a shell starts in the background ignores Ctrl-C, and so does all that it starts.
    heed_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts)
    for line in process.stderr:
        # The plan names the phase of the peak, before anything runs.
        if ("calibrating" in line or "quantizing" in line) and "peak host memory" not in line:
            process.send_signal(signal.SIGINT)
            break
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130, errors
    assert not list(tmp_path.iterdir())
