"""Commands in an environment whose upstream packages are missing; the other defects are those of `test_releases.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from paths import CONFIGS, ROOT

PLAN = ("plan", str(CONFIGS / "meta-llama--Llama-3.1-8B"), "--hardware", "8xA100-80GB", "--output-dir", "out")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory of links to every installed package, of which a test removes some."""
    directory = tmp_path / "site"
    directory.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if entry.suffix != ".pth" and not entry.name.lower().startswith(("shardwright", "__editable__")):
            (directory / entry.name).symlink_to(entry)
    (directory / "shardwright").symlink_to(ROOT)
    return directory


def without(site: Path, package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that sees only the given directory, without one package."""
    (site / package).unlink()
    (metadata,) = (each for each in site.glob("*.dist-info") if each.name.lower().startswith(f"{package}-"))
    metadata.unlink()
    work = site.parent / "work"
    work.mkdir()
    command = [sys.executable, "-S", "-m", "shardwright", *arguments]
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)


def test_missing_package_is_rejected_before_anything_is_written(site: Path) -> None:
    result = without(site, "deepspeed", "train", *PLAN[1:2], "--dataset", "chats.jsonl", "--output-dir", "out")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: deepspeed: is not installed; pip install 'shardwright[train]'\n"
    assert not list((site.parent / "work").iterdir())


def test_environment_report_works_without_torch(site: Path) -> None:
    result = without(site, "torch", "env")
    assert result.returncode == 0, result.stderr
    assert "torch: is not installed" in result.stdout
