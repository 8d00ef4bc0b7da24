"""The page: plans equal the command line's, nothing of this machine is read, and requests are limited."""

from __future__ import annotations

import http.client
import importlib.util
import io
import json
import shlex
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from paths import CONFIGS
from shardwright import plan
from shardwright.cli.main import run
from shardwright.cli.page.app import (
    EXAMPLE,
    LARGEST_BODY_BYTES,
    PageSettings,
    archive,
    checked,
    command_of,
    planned,
    settings_from,
    texts_of,
)
from shardwright.ds_configs.plan.plan import render_files
from shardwright.ds_configs.specs.errors import ShardwrightError, UsageError

LLAMA, GPT2 = (CONFIGS / name / "config.json" for name in ("meta-llama--Llama-3.1-8B", "openai-community--gpt2"))


def test_a_known_model_is_planned_as_the_command_line_plans_it():
    found, _ = planned(settings_from(EXAMPLE))
    own = plan(str(LLAMA), "8xA100-80GB")
    assert found.chosen == own.chosen and found.rejected == own.rejected and found.versions == own.versions
    content = archive(render_files(found))
    assert content == archive(render_files(found))
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        assert {entry.filename[5:]: packed.read(entry).decode() for entry in packed.infolist()} == render_files(found)
        modes = {entry.filename: entry.external_attr >> 16 for entry in packed.infolist()}
    assert modes["plan/launch.sh"] & 0o100 and not modes["plan/plan.json"] & 0o100


def test_the_shown_command_makes_the_plan_of_an_upload(capsys, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_bytes(GPT2.read_bytes())
    monkeypatch.chdir(tmp_path)
    settings = settings_from(
        {"hardware": "1xRTX3090", "method": "lora", "seq_len": "512", "zero_quantized_weights": False}
    )
    words = shlex.split(command_of(settings))
    assert run([*words[1:], "--dry-run", "--format", "json"]) == 0
    shown, (found, _) = json.loads(capsys.readouterr().out), planned(settings, GPT2.read_text())
    assert shown["chosen"]["layout"] == found.to_dict()["chosen"]["layout"]
    assert settings_from(texts_of(settings)) == settings
    hostile = shlex.split(command_of(PageSettings(model="a; rm -rf ~", hardware="8xT4")))
    assert hostile[2] == "a; rm -rf ~"


MODELS = ["/etc/passwd", "../model", "~", "a/b/c", "x.json ", "<b>", "a\nb", "", "é/x"]
CLUSTERS = ["local", "/etc/hosts.yaml", "cluster.yaml", "8xA100-80GB+8xT4", "0xT4", "-1xT4"]


@pytest.mark.parametrize(("model", "hardware"), list(zip(MODELS, [*CLUSTERS, *CLUSTERS[:3]], strict=True)))
def test_no_path_of_this_machine_is_read(model, hardware, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yaml").write_text("gpu: A100-80GB\n")
    with pytest.raises(UsageError) as caught:
        planned(PageSettings(model=model, hardware=hardware))
    assert {error.where.partition(":")[0] for error in caught.value.errors} >= {"model"}
    assert len(caught.value.errors) >= 2 and all(line.isprintable() for line in str(caught.value).splitlines())


def impossible(**changes: object) -> str:
    return json.dumps(json.loads(GPT2.read_text()) | changes)


@pytest.mark.parametrize(
    ("values", "config"),
    [
        ({"metod": "lora"}, ""),
        ({"precision": "bf17", "seq_len": "many"}, ""),
        ({"model": "a" * 100_000}, ""),
        ({"hardware": "8xT4"}, impossible(n_layer=10**6)),
        ({"hardware": "8xT4"}, " " * 10_000_000),
        ({"hardware": "8xT4"}, "[" * 100_000),
    ],
)
def test_absurd_inputs_have_short_errors(values, config):
    with pytest.raises(ShardwrightError) as caught:
        planned(settings_from(values), config)
    assert all(len(line) < 600 for line in str(caught.value).splitlines())


@pytest.mark.parametrize("text", ["", "[" * 100_000, "\0", "{" * 10, "x" * 10_000_000, "a: &a [*a]"])
def test_any_pasted_text_has_a_short_answer(text):
    found = checked(text, {})
    assert found.errors and len(str(found.findings)) < 20_000


def test_without_gradio_one_line_names_the_extra(capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gradio" else found(name))
    assert run(["ui", "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("pip install 'shardwright[ui]'")


def test_an_address_that_cannot_be_used_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as held:
        assert run(["ui", "--port", str(held.getsockname()[1])]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot listen" in line and "--port 0" in line
    assert run(["ui", "--port", "70000"]) == 2


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Run the command, and return the address that it prints."""
    command = [sys.executable, "-m", "shardwright", "ui", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()


def status(address: str, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    try:
        connection.request(method, path, body=body, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/", "/gradio_api/info", "/gradio_api/queue/join", "/gradio_api/upload"])
def test_other_sites_and_large_bodies_are_rejected(address, path):
    own = {"Origin": address.rstrip("/"), "Content-Type": "application/json"}
    for origin in (
        "http://localhost:1234",
        address.replace("127.0.0.1", "localhost").rstrip("/"),
        "null",
        "http://a.b",
    ):
        for method in ("GET", "POST", "OPTIONS"):
            assert status(address, method, path, own | {"Origin": origin}) == 403
    assert status(address, "POST", path, {}, b"{}") == 403, "browsers send the origin of each POST"
    assert status(address, "POST", path, own | {"Content-Length": str(80 * 2**20)}) == 413
    assert status(address, "POST", path, own | {"Transfer-Encoding": "chunked"}) == 411
    assert status(address, "GET", path, {"Host": "example.com"}) == 400
    assert LARGEST_BODY_BYTES < 10 * 2**20


def test_the_page_answers_itself(address):
    own = {"Origin": address.rstrip("/"), "Content-Type": "application/json"}
    assert status(address, "GET", "/", {}) == 200 and status(address, "GET", "/config", own) == 200
    assert status(address, "POST", "/gradio_api/queue/join", own, b"{}") == 422, "Gradio's own answer"
