"""`shardwright serve`: command, JSON, start of an engine, and errors."""

from __future__ import annotations

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


def test_dry_run_prints_the_command_and_warns_of_a_missing_engine(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["serve", str(LLAMA), *ON_A_GPU, "--dry-run"]) == 0
    shown = capsys.readouterr()
    line = shlex.split(shown.out.splitlines()[-1])
    assert line[:3] == ["vllm", "serve", str(LLAMA)]
    assert line[line.index("--max-model-len") + 1] == "131072"
    assert "131,072 bytes per token in the bf16 cache" in shown.out
    assert "pip install vllm" in shown.err


@pytest.mark.slow
def test_the_process_becomes_the_engine(engine):
    command = [str(Path(sys.executable).parent / "shardwright"), "serve", str(LLAMA), *ON_A_GPU, "--port", "18431"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    printed = done.stdout.splitlines()
    assert done.returncode == 7
    at = printed.index("serve", 1)
    assert printed[at : at + 6] == ["serve", str(LLAMA), "--host", "127.0.0.1", "--port", "18431"]
