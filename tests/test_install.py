"""Wheel and sdist in fresh environments: only `shardwright` lands, and it works from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from shardwright.plugins import releases

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "ds_configs" / "data" / "models" / "meta-llama--Llama-3.1-8B" / "config.json"

LAYERS = ("cli", "ds_configs", "plugins", "trainers")

pytestmark = pytest.mark.install


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A wheel and an sdist, built from a copy so that no build directory touches the checkout."""
    copy = tmp_path_factory.mktemp("source") / "project"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, tracked):
        source, target = ROOT / name, copy / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    target = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(copy)],
        check=True,
        capture_output=True,
    )
    return next(target.glob("*.whl")), next(target.glob("*.tar.gz"))


def fresh_environment(directory: Path) -> Path:
    """A new virtual environment whose only extra is a path to this environment's dependencies.

    A plain path line in a `.pth` file adds the directory without running the `.pth` files in it, so an editable
    install of the package there is not seen.
    """
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def install(python: Path, *arguments: str) -> None:
    # This environment's pip works on the other one, which has none of its own: to make one takes seconds.
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--no-build-isolation", *arguments], check=True, capture_output=True)


def assert_works(python: Path, home: Path, directory: Path) -> None:
    """The command plans, lists the gallery and checks files, from the installed package."""
    # Nothing but the installation leads to the package.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output(*command: str) -> str:
        return subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, check=True
        ).stdout

    def run(*arguments: str) -> str:
        return output(str(python.parent / "shardwright"), *arguments)

    file = output(str(python), "-c", "import shardwright; print(shardwright.__file__)").strip()
    assert Path(file).is_relative_to(home), file
    plan = json.loads(run("plan", str(CONFIG), "--hardware", "8xA100-80GB", "--format", "json", "--output-dir", "out"))
    assert plan["model"]["parameters"] == 8_030_261_248
    assert (directory / "out" / "ds_config.json").is_file()
    run("check", "out/ds_config.json", "out/accelerate.yaml")
    assert "llama-3.1-8b_8xA100-80GB" in run("configs", "ls")
    run("configs", "cp", "llama-3.1-8b_8xA100-80GB", "copied")
    assert (directory / "copied" / "launch.sh").stat().st_mode & 0o111


def test_wheel(distributions, tmp_path):
    wheel, _ = distributions
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"shardwright"}
    assert not [name for name in names if "/tests/" in name or name.startswith("tests/")]
    needed_files = [
        path for layer in LAYERS for pattern in ("*.py", "templates/*") for path in (ROOT / layer).rglob(pattern)
    ]
    assert not {f"shardwright/{path.relative_to(ROOT).as_posix()}" for path in needed_files} - set(names)
    for needed in ("gpus.toml", "activations.json", "deepspeed_keys.json", "accelerate_keys.json", "trl_keys.json"):
        assert f"shardwright/ds_configs/data/{needed}" in names
    python = fresh_environment(tmp_path / "environment")
    install(python, str(wheel))
    assert_works(python, tmp_path / "environment", tmp_path)


def test_sdist_builds_the_same_wheel(distributions, tmp_path):
    wheel, sdist = distributions
    shutil.unpack_archive(sdist, tmp_path)
    source = next(path for path in tmp_path.iterdir() if path.is_dir())
    rebuilt = tmp_path / "rebuilt"
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(rebuilt), str(source)],
        check=True,
        capture_output=True,
    )
    again = next(rebuilt.glob("*.whl"))
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_gpu_users_get_no_cpu_pins(distributions):
    wheel, _ = distributions
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert any(line.startswith("Requires-Dist: torch<3,>=2.13") for line in required)
    assert not [line for line in required if "==" in line.split(";")[0] or "cpu" in line.lower()]


def test_bounds_of_requirements_follow_the_tested_releases():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    bounds = {(each := Requirement(line)).name: each.specifier for line in lines}
    for name, tested in releases.tested_releases().items():
        next_major = Version(tested.newest).major + 1
        assert bounds[name].contains(tested.newest) and not bounds[name].contains(str(next_major))
        lowest = next(Version(each.version) for each in bounds[name] if each.operator == ">=")
        assert lowest == Version(tested.oldest)


@pytest.mark.parametrize("name, column", [("constraints-newest.txt", "newest"), ("constraints-oldest.txt", "oldest")])
def test_environments_have_the_ends_of_the_tested_window(name, column):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    for package, tested in releases.tested_releases().items():
        if package in pinned:
            assert pinned[package] == getattr(tested, column)
    # llm-compressor holds transformers down, so that only the pinned environment has it and what comes with it.
    assert releases.tested_releases().keys() - pinned.keys() == {"llmcompressor"}
