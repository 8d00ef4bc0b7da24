"""Planning commands with the packages of the extra `train` and the modules of POSIX hidden, as on Windows and macOS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import CONFIGS

HIDDEN = """
import importlib.metadata, sys
import huggingface_hub.utils, psutil  # Both import what each system has.
LIBRARIES = {"accelerate", "bitsandbytes", "compressed-tensors", "datasets", "deepspeed", "gradio", "jinja2",
    "matplotlib", "numpy", "pandas", "peft", "pillow", "pyarrow", "tokenizers", "torch",
    "transformers", "trl", "xxhash"}
MODULES = {name.replace("-", "_") for name in LIBRARIES} | {"PIL", "fcntl", "grp", "pwd", "resource", "termios"}
class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hider())
for name in MODULES & set(sys.modules):
    del sys.modules[name]
find = importlib.metadata.distribution
def distribution(name):
    if name.lower() in LIBRARIES:
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)
importlib.metadata.distribution = distribution
list_all = importlib.metadata.distributions
importlib.metadata.distributions = lambda **how: [] if how.get("name") in LIBRARIES else list_all(**how)
import importlib.util
find_module = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in MODULES else find_module(name, package)
from shardwright.cli.main import main
sys.argv[0] = "shardwright"
main()
"""
LLAMA = str(CONFIGS / "meta-llama--Llama-3.1-8B")
UNSTORED = {"model_type": "xlstm", "architectures": ["xLSTMForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}


def light(*arguments: str, work: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDDEN, *arguments]
    environment = os.environ | {"SHARDWRIGHT_DATA_DIR": str(work / "data"), "HF_HUB_OFFLINE": "1"} | variables
    return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("light")
    result = light("plan", LLAMA, "--hardware", "8xA100-80GB", "--output-dir", "plan", work=directory)
    assert result.returncode == 0, result.stderr
    return directory


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "plan"),
        ("check", "plan", "--format", "github"),
        ("explain", "plan"),
        ("explain", "gathered_parameters"),
        ("configs", "ls"),
        ("configs", "cp", "llama-3.1-8b_8xA100-80GB", "copied"),
        ("report", "plan"),
        ("serve", LLAMA, "--hardware", "1xL40S", "--dry-run"),
        ("calibrate", "--list"),
        ("schema",),
        ("env",),
        ("plan", "meta-llama/Llama-3.1-8B", "--hardware", "8xA100-80GB", "--dry-run"),
        ("train", "--help"),
    ],
    ids=" ".join,
)
def test_planning_commands_need_no_library_that_trains(arguments: tuple[str, ...], work: Path) -> None:
    result = light(*arguments, work=work)
    assert result.returncode == 0, result.stderr


def test_commands_that_train_state_the_extra_first(work: Path) -> None:
    result = light("train", "no-such-model", "--dataset", "none.jsonl", "--output-dir", "tuned", work=work)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert result.stderr.endswith("are not installed; pip install 'shardwright[train]'\n")
    assert not (work / "tuned").exists()


def test_classes_that_transformers_counts_and_local_hardware_state_the_extra(work: Path) -> None:
    (work / "config.json").write_text(json.dumps(UNSTORED | {"num_heads": 4, "vocab_size": 100}))
    for arguments in (("config.json", "--hardware", "1xL40S"), (LLAMA, "--hardware", "local")):
        result = light("plan", *arguments, work=work)
        assert result.returncode == 2 and "pip install 'shardwright[train]'" in result.stderr, result.stderr


def test_a_comment_in_a_pasted_config_is_named(work: Path) -> None:
    (work / "pasted.json").write_text('{\n  // from the model page\n  "model_type": "llama"\n}')
    result = light("plan", "pasted.json", "--hardware", "1xL40S", work=work)
    assert result.returncode == 4 and "remove the comment: JSON has none" in result.stderr, result.stderr


def test_plans_without_a_home_directory(work: Path) -> None:
    home = work / "home"
    home.write_text("a file, so that nothing below can be created")
    arguments = ("plan", LLAMA, "--hardware", "8xA100-80GB", "--dry-run")
    result = light(*arguments, work=work, HOME=str(home), SHARDWRIGHT_DATA_DIR="", XDG_DATA_HOME="")
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr


def test_an_unknown_model_without_connection_or_cache_is_one_line(work: Path) -> None:
    result = light("plan", "some/model", "--hardware", "8xA100-80GB", work=work, HF_HOME=str(work / "empty"))
    assert result.returncode == 1 and "offline mode is on" in result.stderr, result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error")]) == 1


def test_annotations_have_file_line_and_title(work: Path) -> None:
    (work / "ds_config.json").write_text('{\n"bf16": {"enabled": true},\n"gradient_cliping": 1.0}')
    result = light("check", "ds_config.json", "--format", "github", work=work)
    assert result.returncode == 2
    assert (
        "::error file=ds_config.json,line=3,title=Shardwright%3A gradient_cliping::ds_config.json:3 " in result.stdout
    )
    assert all(line.startswith(("::error ", "::warning ")) for line in result.stdout.splitlines())
