"""Plans from Python with the words of users: numbers as text, paths, and names without a Hub."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shardwright
from paths import CONFIGS
from shardwright.cli.main import run
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.planning import load_model_spec

QWEN = CONFIGS / "Qwen--Qwen2.5-0.5B"
GPU = "8xA100-80GB"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"seq_len": "2k"}, "seq_len = '2k': must be an integer from 1 to 100,000,000; write 2048"),
        ({"micro_batch_size": "4"}, "micro_batch_size = '4': must be an integer"),
        ({"zero_quantized_weights": "yes"}, "zero_quantized_weights = 'yes': must be True or False"),
        ({"host_memory": 512}, "host_memory = 512: must be text"),
        ({"num_processes": "8"}, "num_processes = '8'"),
    ],
)
def test_a_plan_rejects_numbers_as_text(words: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        shardwright.plan(str(QWEN), GPU, **words)
    assert said in str(raised.value)


@pytest.fixture(params=["offline", "unreachable"])
def no_hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", request.param == "offline")
    if request.param == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        return "offline mode is on (HF_HUB_OFFLINE)"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return "the Hub cannot be reached (ConnectError)"


def test_a_packaged_model_is_planned_without_a_hub(no_hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "meta-llama/Llama-3.1-8B", "--hardware", GPU]) == 0
    shown = capsys.readouterr()
    assert "8.03 B parameters" in shown.out
    (note,) = (line for line in shown.err.splitlines() if "from its configuration in this package" in line)
    assert no_hub.partition(" (")[0] in note


def test_a_packaged_model_is_served_without_a_hub(no_hub: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, config = "meta-llama/Llama-3.1-8B", CONFIGS / "meta-llama--Llama-3.1-8B" / "config.json"
    answers = []
    for model in (name, str(config)):
        assert run(["serve", model, "--hardware", GPU, "--dry-run", "--format", "json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    packaged, local = answers
    assert "from its configuration in this package" in packaged["notes"][0]
    differing = {"model", "line", "notes"}
    assert {key for key in local if packaged[key] != local[key]} == differing
    assert packaged["notes"][1:] == local["notes"]
    loaded = load_model_spec(name, packaged=True)
    assert loaded.config == load_model_spec(str(config)).config
    assert replace(loaded.spec, name="") == replace(load_model_spec(str(config)).spec, name="")


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [
        ("acme/none", "pass a local directory or config.json"),
        ("meta-llama/Llama-3.1-8B --revision main", "pass a local directory or config.json"),
    ],
)
def test_another_model_is_one_line_without_a_hub(
    no_hub: str, arguments: str, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *arguments.split(), "--hardware", GPU]) == 1
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert not shown.out and line.startswith("error: model = ")
    assert no_hub in line and line.endswith(ending)
