"""`shardwright env create`: a real environment with pip, from wheels that are made here."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from shardwright.cli.main import run
from shardwright.plugins import releases
from shardwright.plugins.llm_compressor.environment import (
    CEILINGS,
    create_environment,
    llm_compressor_release,
    planned_environment,
)

PROGRAM = "import sys\n\n\ndef main():\n    print('0.1.0')\n"


def wheel(directory: Path, name: str, version: str, *requirements: str, program: str = "") -> None:
    """Write a wheel that declares requirements, with a command of its name where it has a program."""
    place = f"{name}-{version}.dist-info"
    extra = ["Provides-Extra: quantize"] if program else []
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *extra]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    files = {
        f"{name}/__init__.py": program,
        f"{place}/METADATA": "\n".join(lines) + "\n",
        f"{place}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{place}/RECORD": "",
    }
    if program:
        files[f"{place}/entry_points.txt"] = f"[console_scripts]\n{name} = {name}:main\n"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wheels of every tested release, of newer and of older ones, as pip's only source."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    for name in ("torch", "transformers", "peft"):
        for version in (
            "0.1",
            *{releases.tested_releases()[name].oldest, releases.tested_releases()[name].newest},
            "99.0",
        ):
            wheel(directory, name, version)
    limits = [f"{name}<={version}" for name, version in CEILINGS.items()]
    wheel(directory, "llmcompressor", llm_compressor_release(), *limits)
    wheel(directory, "llmcompressor", "99.0")
    wheel(directory, "shardwright", "0.1.0", "llmcompressor; extra == 'quantize'", "torch", "peft", program=PROGRAM)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.chdir(tmp_path)
    return directory


def test_it_is_made_said_and_not_made_twice(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["env", "create", "quantize", "--path", "own", "--source", "shardwright", "--format", "json"]
    assert run(asked) == 0
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    tested = releases.tested_releases()
    assert found["versions"] == {
        "shardwright": "0.1.0",
        "llmcompressor": llm_compressor_release(),
        "torch": tested["torch"].newest,
        "transformers": CEILINGS["transformers"],
    }
    assert list(Path("own").glob(f"lib/python*/site-packages/peft-{tested['peft'].newest}.dist-info"))
    before, _, after = printed.err.partition("note: creating an environment")
    assert "llmcompressor==" in before
    assert "GB are free" in before
    assert "Successfully installed" in after

    # What lies there stays, and what cannot be finished is taken away again.
    assert run(asked) == 2
    assert "own': already exists; use --force" in capfd.readouterr().err
    (index / "keep").mkdir()
    assert run(["env", "create", "--path", str(index), "--force"]) == 2
    assert (index / "keep").is_dir()
    capfd.readouterr()
    for llm_compressor in index.glob("llmcompressor*"):
        llm_compressor.unlink()
    assert run(["env", "create", "--path", "other", "--source", "shardwright"]) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "No matching distribution found for llmcompressor" in said[0]
    assert not Path("other").exists()


def test_a_source_tree_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.plugins.llm_compressor import environment

    tree = tmp_path / "tree"
    (tree / "mine.egg-info").mkdir(parents=True)

    def build(arguments: list[str], advice: str) -> None:
        if "venv" in arguments:
            Path(arguments[-1]).mkdir()
        elif "pip" in arguments:
            (tree / "build" / "lib").mkdir(parents=True)
            (tree / "shardwright.egg-info").mkdir()

    monkeypatch.setattr(environment, "_run", build)
    planned = planned_environment(tmp_path / "own", source=str(tree))
    assert create_environment(planned, notify=print) == {}
    assert [path.name for path in tree.iterdir()] == ["mine.egg-info"]


@pytest.mark.parametrize(
    ("source", "requirement"),
    [
        ("shardwright==0.1.0", "shardwright[quantize]==0.1.0"),
        ("git+https://host/shardwright", "shardwright[quantize] @ git+https://host/shardwright"),
        ("tree", "{}/tree[quantize]"),
    ],
)
def test_every_kind_of_source_gets_the_extra(
    source: str, requirement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree").mkdir()
    planned = planned_environment(Path("own"), source=source)
    assert planned.requirements[0] == requirement.format(tmp_path)
    assert planned.pip_arguments(Path("constraints.txt"))[1:4] == ["-I", "-m", "pip"]


def test_a_missing_engine_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.trainers.quantization import inputs

    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    (error,) = inputs.missing_engine_errors("gptq")
    assert "shardwright env create quantize" in error.fix
