"""Planning commands with the packages of the extra `train` and the modules of POSIX hidden, as on Windows and macOS.

Installed packages are read-only, as in an image or in the environment of another user.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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
import errno, os, sysconfig
import shardwright
roots = tuple(os.path.realpath(path) + os.sep for path in (sysconfig.get_path("purelib"), shardwright.__path__[0]))
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
def read_only(event, values):
    changes = event in {"os.mkdir", "os.rename", "os.remove"} or event == "open" and values[2] & WRITES
    if changes and isinstance(values[0], str) and os.path.realpath(values[0]).startswith(roots):
        attempts.append(values[0])
        raise OSError(errno.EROFS, "Read-only file system", values[0])
attempts = []
sys.addaudithook(read_only)
import contextlib, io, json
from shardwright.cli.main import main
found = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["shardwright", *words]
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    found.append([code, out.getvalue(), err.getvalue()])
attempts = [path for path in attempts if "__pycache__" not in path]
assert not attempts, attempts
print(json.dumps(found))
"""
LLAMA = str(CONFIGS / "meta-llama--Llama-3.1-8B")
UNSTORED = {"model_type": "xlstm", "architectures": ["xLSTMForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2}


COMMANDS = (
    ("check", "plan"),
    ("check", "plan", "--format", "github"),
    ("explain", "plan"),
    ("explain", "gathered_parameters"),
    ("configs", "ls"),
    ("configs", "cp", "llama-3.1-8b_8xA100-80GB", "copied"),
    ("report", "plan"),
    ("serve", LLAMA, "--hardware", "1xL40S", "--dry-run"),
    ("serve", "meta-llama/Llama-3.1-8B", "--hardware", "1xL40S", "--dry-run"),
    ("calibrate", "--list"),
    ("schema",),
    ("env",),
    ("plan", "meta-llama/Llama-3.1-8B", "--hardware", "8xA100-80GB", "--dry-run"),
    ("train", "--help"),
)


class Result(NamedTuple):
    returncode: int | None
    stdout: str
    stderr: str


def light(*commands: tuple[str, ...], work: Path, **variables: str) -> list[Result]:
    """Run commands one after the other in one process without these libraries."""
    environment = os.environ | {"SHARDWRIGHT_DATA_DIR": str(work / "data"), "HF_HUB_OFFLINE": "1"} | variables
    words = [sys.executable, "-c", HIDDEN, json.dumps(commands)]
    process = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return [Result(*result) for result in json.loads(process.stdout)]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("light")


def test_planning_commands_need_no_library_that_trains(work: Path) -> None:
    plan = ("plan", LLAMA, "--hardware", "8xA100-80GB", "--output-dir", "plan")
    for command, result in zip((plan, *COMMANDS), light(plan, *COMMANDS, work=work), strict=True):
        assert result.returncode == 0, (command, result.stderr)


def test_what_trains_or_counts_states_the_extra_and_other_errors_their_cause(work: Path) -> None:
    (work / "config.json").write_text(json.dumps(UNSTORED | {"num_heads": 4, "vocab_size": 100}))
    (work / "pasted.json").write_text('{\n  // from the model page\n  "model_type": "llama"\n}')
    (work / "ds_config.json").write_text('{\n"bf16": {"enabled": true},\n"gradient_cliping": 1.0}')
    train, without_output, unstored, local, pasted, check = light(
        ("train", "no-such-model", "--dataset", "none.jsonl", "--output-dir", "tuned"),
        ("train", "no-such-model", "--dataset", "none.jsonl"),
        ("plan", "config.json", "--hardware", "1xL40S"),
        ("plan", LLAMA, "--hardware", "local"),
        ("plan", "pasted.json", "--hardware", "1xL40S"),
        ("check", "ds_config.json", "--format", "github"),
        work=work,
    )
    assert (train.returncode, train.stdout, len(train.stderr.splitlines())) == (2, "", 1)
    assert train.stderr.endswith("are not installed; pip install 'shardwright[train]'\n")
    assert without_output == train
    assert not (work / "tuned").exists()
    for result in (unstored, local):
        assert result.returncode == 2 and "pip install 'shardwright[train]'" in result.stderr, result.stderr
    assert pasted.returncode == 4 and "remove the comment: JSON has none" in pasted.stderr, pasted.stderr
    assert check.returncode == 2
    assert "::error file=ds_config.json,line=3,title=Shardwright%3A gradient_cliping::ds_config.json:3 " in check.stdout
    assert all(line.startswith(("::error ", "::warning ")) for line in check.stdout.splitlines())


def test_plans_without_a_home_directory_a_cache_or_a_connection(work: Path) -> None:
    home = work / "home"
    home.write_text("a file, so that nothing below can be created")
    places = {"HOME": str(home), "SHARDWRIGHT_DATA_DIR": "", "XDG_DATA_HOME": "", "HF_HOME": str(work / "empty")}
    commands = (("plan", model, "--hardware", "8xA100-80GB", "--dry-run") for model in (LLAMA, "some/model"))
    known, unknown = light(*commands, work=work, **places)
    assert known.returncode == 0 and "Traceback" not in known.stderr, known.stderr
    assert unknown.returncode == 1 and "offline mode is on" in unknown.stderr, unknown.stderr
    assert len([line for line in unknown.stderr.splitlines() if line.startswith("error")]) == 1
