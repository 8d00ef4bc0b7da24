"""The command line in this process: bad input, precedence, output shapes and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Shell, every_command
from paths import CONFIGS

LLAMA = str(CONFIGS / "meta-llama--Llama-3.1-8B")
CONFIG: dict[str, Any] = json.loads((CONFIGS / "meta-llama--Llama-3.1-8B" / "config.json").read_text())
GPU = ("--hardware", "8xA100-80GB")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return every_command(capsys, monkeypatch)


def model_directory(tmp_path: Path, text: str | None = None, **changes: Any) -> str:
    directory = tmp_path / "model"
    directory.mkdir(exist_ok=True)
    kept = {name: value for name, value in (CONFIG | changes).items() if value != "MISSING"}
    (directory / "config.json").write_text(json.dumps(kept) if text is None else text)
    return str(directory)


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            {"num_hidden_layers": -1, "num_key_value_heads": 5, "vocab_size": True},
            ["num_hidden_layers = -1", "(32 % 5 = 2); nearest legal values: 2, 4", "vocab_size = True"],
        ),
        ({"num_hidden_layers": "MISSING", "hidden_size": None}, ["num_hidden_layers: is missing", "hidden_size"]),
        ({"hidden_size": float("nan")}, ["is not valid JSON (a number is NaN)"]),
        ({"hidden_size": 4095}, ["must be divisible by num_attention_heads (4095 % 32 = 31); add head_dim"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings = 'false': must be true or false"]),
        ({"model_type": "bart", "encoder_layers": 10**9}, ["encoder_layers = 1000000000: must be at most 1,000"]),
        ({"model_type": "MISSING", "peft_type": "LORA"}, ["this is an adapter"]),
        ({"model_type": "unheard_of"}, ["model_type = 'unheard_of': is unknown to transformers"]),
        ({"text_config": {"num_hidden_layers": 0}}, ["text_config: num_hidden_layers = 0"]),
    ],
)
def test_an_impossible_config_is_rejected_with_all_its_errors(
    shell: Shell, tmp_path: Path, changes: dict[str, Any], messages: list[str]
) -> None:
    head_dim = {"head_dim": None} if "hidden_size" in changes else {}
    result = shell("plan", model_directory(tmp_path, **{**head_dim, **changes}), *GPU)
    assert (result.code, result.out) == (4, "")
    assert len(result.errors) == len(messages)
    assert all(message in result.err for message in messages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", LLAMA], "hardware: is missing; pass --hardware"),
        (["plan", LLAMA, *GPU, "--revision", "main"], "only a Hub model has revisions"),
        (["plan", LLAMA, *GPU, "--num-processes", "4"], "must equal the 8 accelerators"),
        (["plan", "/no/such/model", *GPU], "no such file or directory"),
        (["plan"], "model: is missing; pass it after the command"),
        (["explain", "gathered_parametres"], "did you mean gathered_parameters"),
        (["explain", LLAMA], "has no plan.json"),
        (["configs", "cp", "../secret", "out"], "is not in the gallery"),
        (["schema", "nothing"], "subject = 'nothing': must be one of settings, hardware, plan-answer, check-answer"),
        (["schema", "plan"], "read a plan.json with Plan.load"),
        (["check", "ds_config.json", "--num-processes", "0"], "num_processes = 0"),
    ],
)
def test_bad_usage_is_one_line_with_a_fix(shell: Shell, arguments: list[str], message: str) -> None:
    result = shell(*arguments)
    assert (result.code, result.out) == (2, "")
    assert len(result.errors) == 1
    assert message in result.errors[0]


def test_json_of_a_failure_is_one_object(shell: Shell) -> None:
    misfit = shell("plan", LLAMA, "--hardware", "1xA10", "--strategy", "single", "--format", "json")
    answer = json.loads(misfit.out)
    assert misfit.code == answer["error"]["exit_code"] == 3
    assert misfit.errors[0] == answer["error"]["message"]
    assert answer["chosen"] is None and answer["rejected"]
    assert answer["would_fit"][0].keys() == {"change", "layout", "high_bytes", "capacity_bytes"}
    human = shell("plan", LLAMA, "--hardware", "1xA10", "--strategy", "single")
    assert (human.code, human.out, human.errors) == (3, "", misfit.errors)
    for arguments, code in ((["--hardware", "8xA100"], 2), (["--nope"], 2), ([], 2)):
        result = shell("plan", LLAMA, *arguments, "--format", "json")
        answer = json.loads(result.out)
        assert answer.keys() == {"schema_version", "error"}
        assert answer["error"].keys() == {"exit_code", "message", "errors"}
        assert result.code == answer["error"]["exit_code"] == code
        assert all(error.keys() == {"where", "value", "rule", "fix"} for error in answer["error"]["errors"])


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_an_existing_directory_is_replaced_only_by_force(shell: Shell, tmp_path: Path) -> None:
    output = tmp_path / "päth with [spaces] and 'quotes'"
    command = ["plan", LLAMA, *GPU, "--output-dir", str(output)]
    assert shell(*command).code == 0
    (output / "mine.txt").write_text("kept")
    before = contents(output)
    refused = shell(*command, "--seq-len", "512")
    assert refused.code == 2 and "--force" in refused.errors[0]
    assert contents(output) == before
    assert shell(*command, "--seq-len", "512", "--force").code == 0
    after = contents(output)
    assert after.keys() == before.keys() and after["plan.json"] != before["plan.json"]
    assert after["mine.txt"] == b"kept"
    assert shell("explain", str(output)).code == 0
