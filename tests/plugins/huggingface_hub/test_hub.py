"""Models from a Hub that lives on the loopback interface, with everything that can go wrong there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from readable_hub import COMMIT, FILES, PARAMETERS, Hub, readable_hub
from shardwright.plugins.transformers.training_arguments import byte_tokenizer

pytestmark = pytest.mark.slow

TOKEN = "hf_" + "NeverShowThisToken" * 2

DRIVER = """
import contextlib, io, json, socket, sys

outside = []
connect = socket.socket.connect

def local_only(self, address):
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1"):
        outside.append(repr(address))
        raise OSError("outside")
    return connect(self, address)

socket.socket.connect = local_only

from shardwright.cli.main import run

results = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run(arguments)
        except BaseException as error:
            code = repr(error)
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps({"results": results, "outside": outside}))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with readable_hub() as address:
        yield address


def drive(endpoint: str, home: Path, cases: list[list[str]], **environment: str) -> list[list[Any]]:
    """Run commands in one fresh process whose only Hub is `endpoint`; nothing may reach elsewhere or show a token."""
    cleared = ("HF_", "HUGGING", "SHARDWRIGHT_", "TRANSFORMERS")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(cleared)}
    clean |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    clean |= {"SHARDWRIGHT_DATA_DIR": os.environ["SHARDWRIGHT_DATA_DIR"]}
    finished = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(cases),
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    assert answer["outside"] == []
    for text in (finished.stdout, finished.stderr):
        assert TOKEN not in text and "Traceback" not in text
    written = [path for path in home.parent.rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    results: list[list[Any]] = answer["results"]
    return results


def plan(model: str, *flags: str) -> list[str]:
    return ["plan", model, "--hardware", "8xA100-80GB", "--seq-len", "128", *flags]


@pytest.mark.once
def test_a_branch_is_pinned_to_its_commit_and_headers_are_compared(hub: str, tmp_path: Path) -> None:
    output = tmp_path / "plan"
    models = ("plain", "agrees", "differs", "sharded")
    cases = [plan(f"org/{name}", "--format", "json") for name in models]
    cases.append(plan("org/plain", "--revision", COMMIT, "--output-dir", str(output), "--format", "json"))
    results = drive(hub, tmp_path / "home", cases)
    for code, out, err in results:
        assert code == 0, err
        model = json.loads(out)["model"]
        assert (model["revision"], model["parameters"]) == (COMMIT, PARAMETERS)
    notes = {name: result[2] for name, result in zip(models, results, strict=False)}
    doubled = f"note: the checkpoint has {2 * PARAMETERS:,} parameters, but LlamaForCausalLM has {PARAMETERS:,}"
    assert doubled in notes["differs"]
    assert "note:" not in notes["plain"] + notes["agrees"] + notes["sharded"]
    assert f"--revision {COMMIT}" in (output / "launch.sh").read_text()
    assert json.loads((output / "plan.json").read_text())["model"]["revision"] == COMMIT


@pytest.mark.once
def test_every_error_of_the_hub_is_one_line_with_its_exit_code(hub: str, tmp_path: Path) -> None:
    expected = {
        ("org/gated",): (1, "the repository is gated; accept its terms on the Hub"),
        ("org/gated401",): (1, "the repository is gated"),
        ("org/private",): (2, "no such local path or Hub repository"),
        ("org/missing",): (2, "no such local path or Hub repository"),
        ("org/plain", "--revision", "nowhere"): (2, "revision = 'nowhere': does not exist in org/plain"),
        ("org/adapter",): (2, "the repository has no config.json"),
        ("org/denied",): (1, "the Hub denies access (403); accept the terms of a gated repository on its page"),
        ("org/bad-token",): (1, "the Hub does not accept the token (401); `hf auth login` with a valid one"),
        ("org/broken",): (1, "the Hub answered 500; try again later"),
        ("org/busy",): (1, "the Hub answered 429"),
        ("org/junk-config",): (4, "num_hidden_layers = -1"),
        ("org/junk-header",): (4, "has a corrupt safetensors header"),
        ("org/odd-header",): (4, "has a corrupt safetensors header"),
        ("org/junk-index",): (4, "has a corrupt safetensors header"),
    }
    asked = [plan(*arguments, *flags) for arguments in expected for flags in ((), ("--format", "json"))]
    results = drive(hub, tmp_path / "home", asked)
    for (arguments, (code, message)), plain, as_json in zip(expected.items(), results[::2], results[1::2], strict=True):
        for result in (plain, as_json):
            assert result[0] == code, (arguments, result)
            assert message in result[2], (arguments, result)
            lines = result[2].splitlines()
            assert all(line.startswith("error: ") for line in lines), (arguments, lines)
        assert plain[1] == ""
        answer = json.loads(as_json[1])
        assert (answer["schema_version"], answer["error"]["exit_code"]) == (2, code)


@pytest.mark.once
def test_offline_mode_uses_the_cache_alone(hub: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    ((code, _, err),) = drive(hub, home, [plan("org/plain")], HF_HUB_OFFLINE="1")
    assert code == 1 and "offline mode is on (HF_HUB_OFFLINE) and config.json is not cached" in err
    drive(hub, home, [plan("org/plain")])
    results = drive(
        hub,
        home,
        [plan("org/plain", "--revision", COMMIT, "--format", "json"), plan("org/plain", "--format", "json")],
        TRANSFORMERS_OFFLINE="1",
    )
    for code, out, err in results:
        assert code == 0, err
        assert json.loads(out)["model"]["revision"] == COMMIT


def test_weights_are_fetched_once_at_the_commit_of_a_branch(hub: str, tmp_path: Path, whole_repository: str) -> None:
    (tmp_path / "notes.txt").write_text("A sentence to read. " * 40)
    home = tmp_path / "home"
    arguments = ["evaluate", whole_repository, "--dataset", str(tmp_path / "notes.txt")]
    ((code, _, err),) = drive(hub, home, [arguments])
    assert code == 0, err
    weights = [path for _, path in Hub.asked if path.startswith("GET") and path.endswith("/model.safetensors")]
    assert [path for path in weights if whole_repository in path] == [
        f"GET /{whole_repository}/resolve/{COMMIT}/model.safetensors"
    ]
    assert not list(home.rglob("pytorch_model.bin"))


@pytest.fixture
def whole_repository(tiny_llama: Path, tmp_path: Path) -> Iterator[str]:
    """Publish a small model with its tokenizer, and a pickle that must never be fetched."""
    byte_tokenizer(512).save_pretrained(tmp_path / "tokenizer")
    files = [*tiny_llama.iterdir(), *(tmp_path / "tokenizer").iterdir()]
    FILES["org/whole"] = {file.name: file.read_bytes() for file in files} | {"pytorch_model.bin": b"pickle"}
    yield "org/whole"
    del FILES["org/whole"]
