"""`shardwright evaluate` in this process: what it prints and writes, and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import Shell, shell_in
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def halved_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama rounded to multiples of 1/64."""
    directory = tmp_path_factory.mktemp("halved")
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.copy_((parameter * 64).round() / 64)
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return shell_in(tmp_path, "evaluate", capsys, monkeypatch)


def test_report_of_a_comparison(shell, tiny_llama, halved_llama, tmp_path):
    output = tmp_path / "report"
    result = shell(
        halved_llama, "--baseline", tiny_llama, "--seq-len", 64, "--num-samples", 6,
        "--output-dir", output, "--format", "json",
    )  # fmt: skip
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert {path.name for path in output.iterdir()} == {"REPORT.md", "evaluation.json", "report.html"}
    written = json.loads((output / "evaluation.json").read_text())
    assert written.pop("command").startswith("shardwright evaluate ")
    assert written == {key: value for key, value in found.items() if key != "output_dir"}
    assert found["text"]["predicted_tokens"] == 6 * 63 and found["text"]["source"] == "python-help"
    report = (output / "REPORT.md").read_text()
    assert f"{found['model']['perplexity']['value']:.5g} ±" in report

    again = shell(halved_llama, "--seq-len", 64, "--output-dir", output)
    assert again.code == 2 and "use --force to write into it" in again.err
    forced = shell(halved_llama, "--seq-len", 64, "--num-samples", 2, "--output-dir", output, "--force")
    assert forced.code == 0, forced.err
    assert json.loads((output / "evaluation.json").read_text())["baseline"] is None
    assert "perplexity" in forced.out and "KL(" not in forced.out


def test_flags_that_do_not_go_together(shell, tiny_llama, tmp_path):
    (tmp_path / "file").write_text("x")
    result = shell(
        tiny_llama, "--chat-template", "alpaca", "--output-dir", tmp_path / "file", "--format", "json",
    )  # fmt: skip
    assert result.code == 2
    wrong = [error["where"] for error in json.loads(result.out)["error"]["errors"]]
    assert wrong == ["--chat-template", "output_dir"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("{empty}",), 2, "has no config.json"),
        (("{model}", "--seq-len", "129"), 2, "has 128 positions; pass at most 128"),
        (("{model}", "--dataset", "{empty_text}"), 2, "rows has text"),
        (("{model}", "--baseline", "{empty}/none"), 2, "baseline"),
        (("{model}", "--tasks", "hellaswag"), 2, "run lm_eval --model hf --model_args pretrained="),
        (("{pickled}",), 4, "weights are read only from safetensors"),
    ],
)
def test_exit_codes(shell, tiny_llama, tmp_path, arguments, code, message):
    places = {"model": tiny_llama}
    for name in ("empty", "pickled"):
        places[name] = tmp_path / name
        places[name].mkdir()
    shutil.copy(tiny_llama / "config.json", places["pickled"])
    (places["pickled"] / "pytorch_model.bin").write_bytes(b"x")
    places["empty_text"] = tmp_path / "empty.txt"
    places["empty_text"].write_text("")
    result = shell(*(argument.format(**places) for argument in arguments))
    assert result.code == code, result.err
    assert message in result.err
    assert result.err.splitlines()[-1].startswith("error: ")
