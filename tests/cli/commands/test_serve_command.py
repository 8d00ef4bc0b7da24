"""`shardwright serve`: command, JSON, start of an engine, and errors."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from paths import CONFIGS
from shardwright.cli.main import run

LLAMA = CONFIGS / "meta-llama--Llama-3.1-8B"
ON_A_GPU = ("--hardware", "1xA100-80GB")


@pytest.fixture
def no_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """A program named vllm that prints what it was given, in an environment whose Python is a warm one."""
    binaries, packages = tmp_path / "bin", tmp_path / "lib" / "python3.11" / "site-packages"
    binaries.mkdir()
    for name, version in (("vllm", "0.32.0"), ("compressed_tensors", "0.17.0")):
        place = packages / f"{name}-{version}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    for name, program in {
        "vllm": 'printf "%s\\n" "$@"\nexit 7',
        "python": f'exec {os.environ["PYTHON_EXEC"]} "$@"',
    }.items():
        (binaries / name).write_text(f"#!/bin/sh\n{program}\n")
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    return binaries


def test_dry_run_prints_the_command_and_warns_of_a_missing_engine(no_engine, capsys):
    assert run(["serve", str(LLAMA), *ON_A_GPU, "--dry-run"]) == 0
    shown = capsys.readouterr()
    line = shlex.split(shown.out.splitlines()[-1])
    assert line[:3] == ["vllm", "serve", str(LLAMA)]
    assert line[line.index("--max-model-len") + 1] == "131072"
    assert "131,072 bytes per token in the bf16 cache" in shown.out
    assert "pip install vllm" in shown.err


def test_json_matches_its_schema(no_engine, capsys):
    assert run(["serve", str(LLAMA), *ON_A_GPU, "--dry-run", "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert run(["schema", "serving"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(printed) == set(schema["properties"]) == set(schema["required"])
    assert printed["blocks"] * printed["block_bytes"] <= printed["memory"]["cache"]


@pytest.mark.slow
def test_the_process_becomes_the_engine(engine):
    command = [str(Path(sys.executable).parent / "shardwright"), "serve", str(LLAMA), *ON_A_GPU, "--port", "18431"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    printed = done.stdout.splitlines()
    assert done.returncode == 7
    at = printed.index("serve", 1)
    assert printed[at : at + 6] == ["serve", str(LLAMA), "--host", "127.0.0.1", "--port", "18431"]


def save_adapter(root: Path, **settings) -> Path:
    """Write a model and a LoRA adapter of it with a tokenizer, and return the adapter's directory."""
    from peft import LoraConfig, get_peft_model
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer
    from small_models import llama
    from transformers import AutoModelForCausalLM

    llama().save_pretrained(root / "model")
    base = AutoModelForCausalLM.from_pretrained(root / "model")
    get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": ["q_proj"]} | settings)).save_pretrained(
        root / "tuned"
    )
    byte_tokenizer(512).save_pretrained(root / "tuned")
    return root / "tuned"


@pytest.mark.slow
def test_the_engine_adds_an_adapter_to_its_base_model(no_engine, tmp_path, capsys):
    adapter = save_adapter(tmp_path, rank_pattern={"layers.0.self_attn.q_proj": 20})
    capsys.readouterr()
    assert run(["serve", str(adapter), *ON_A_GPU, "--dry-run", "--format", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    words = plan["line"]
    assert words[:3] == ["vllm", "serve", str(tmp_path / "model")]
    assert plan["adapter"] == "tuned"
    for flag, value in (
        ("--max-lora-rank", "32"),
        ("--lora-modules", f"tuned={adapter}"),
        ("--tokenizer", str(adapter)),
    ):
        assert words[words.index(flag) + 1] == value
    assert "--enable-lora" in words
    assert run(["serve", str(tmp_path / "model"), *ON_A_GPU, "--dry-run", "--format", "json"]) == 0
    base = json.loads(capsys.readouterr().out)
    assert base["adapter"] is None and "--enable-lora" not in base["line"] and "adapter" not in base["memory"]
    assert base["memory"]["cache"] - plan["memory"]["cache"] == plan["memory"]["adapter"] > 0
    assert run(["serve", str(adapter), *ON_A_GPU, "--dry-run"]) == 0
    assert "tuned, an adapter of" in capsys.readouterr().out


@pytest.mark.slow
def test_the_engine_reads_the_chat_template_of_an_adapter(no_engine, tmp_path, capsys):
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer

    adapter = save_adapter(tmp_path)
    byte_tokenizer(512).save_pretrained(tmp_path / "model")

    def words() -> list[str]:
        capsys.readouterr()
        assert run(["serve", str(adapter), *ON_A_GPU, "--dry-run", "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)["line"]

    assert not {"--tokenizer", "--chat-template"} & set(words())
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}")
    line = words()
    assert line[line.index("--chat-template") + 1] == str(adapter / "chat_template.jinja")
    assert "--tokenizer" not in line
    (adapter / "chat_template.jinja").unlink()
    stored = json.loads((adapter / "tokenizer_config.json").read_text())
    (adapter / "tokenizer_config.json").write_text(json.dumps(stored | {"chat_template": "{{ messages[0].content }}"}))
    line = words()
    assert line[line.index("--tokenizer") + 1] == str(adapter) and "--chat-template" not in line


@pytest.mark.slow
def test_the_engine_ends_an_answer_where_the_adapter_was_trained_to(no_engine, tmp_path, capsys):
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer

    adapter, flag = save_adapter(tmp_path), "--generation-config"
    byte_tokenizer(512).save_pretrained(tmp_path / "model")
    serving = ["serve", str(adapter), *ON_A_GPU, "--dry-run", "--format", "json"]
    for ends in (False, True):
        if ends:
            (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
        capsys.readouterr()
        assert run(serving) == 0
        line = json.loads(capsys.readouterr().out)["line"]
        assert (flag in line and line[line.index(flag) + 1] == str(adapter)) == ends


@pytest.mark.slow
def test_a_damaged_adapter_or_another_base_starts_nothing(engine, tmp_path, capsys):
    import shutil

    from small_models import llama

    adapter = save_adapter(tmp_path)
    weights = adapter / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:200])
    assert run(["serve", str(adapter), *ON_A_GPU]) == 4
    assert "is not a complete safetensors file" in capsys.readouterr().err
    weights.write_bytes(content)
    shutil.rmtree(tmp_path / "model")
    assert run(["serve", str(adapter), *ON_A_GPU]) == 2
    error = capsys.readouterr().err
    assert "which does not exist here" in error and f"run shardwright merge {adapter} --base MODEL" in error
    llama(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    assert run(["serve", str(adapter), *ON_A_GPU]) == 4
    assert "does not belong to" in capsys.readouterr().err
