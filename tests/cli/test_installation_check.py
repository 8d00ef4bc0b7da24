"""Commands in environments whose upstream packages are missing, damaged, too old or newer than tested."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / "ds_configs" / "data" / "models" / "meta-llama--Llama-3.1-8B" / "config.json"
PLAN = ("plan", str(CONFIG), "--hardware", "8xA100-80GB", "--output-dir", "out")


@pytest.fixture
def site(tmp_path) -> Path:
    """A directory of links to every installed package, in which a test replaces some."""
    directory = tmp_path / "site"
    directory.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if entry.suffix != ".pth" and not entry.name.lower().startswith(("shardwright", "__editable__")):
            (directory / entry.name).symlink_to(entry)
    (directory / "shardwright").symlink_to(ROOT)
    return directory


def metadata_of(site: Path, package: str) -> Path:
    (found,) = (each for each in site.glob("*.dist-info") if each.name.lower().startswith(f"{package}-"))
    return found


def write_metadata(directory: Path, package: str, version: str) -> None:
    folder = directory / f"{package}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def shardwright(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that sees only the given directories."""
    work = site.parent / "work"
    work.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-S", "-m", "shardwright", *arguments]
    return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)


def remove(site: Path) -> None:
    metadata_of(site, "deepspeed").unlink()
    (site / "deepspeed").unlink()


def remove_metadata(site: Path) -> None:
    metadata_of(site, "accelerate").unlink()


def make_older(site: Path) -> None:
    metadata_of(site, "transformers").unlink()
    write_metadata(site, "transformers", "4.40.0")


@pytest.mark.parametrize(
    "damage, lines",
    [
        (remove, ["error: deepspeed: is not installed; pip install 'deepspeed"]),
        (remove_metadata, ["error: accelerate: is installed incompletely"]),
        (make_older, ["error: transformers 4.40.0: is older than ", "pip install 'transformers>="]),
    ],
)
def test_damaged_installation_is_rejected_before_anything_is_written(
    site: Path, damage: Callable[[Path], None], lines: list[str]
):
    damage(site)
    result = shardwright(site, *PLAN)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    for part in lines:
        assert part in line
    assert not list((site.parent / "work").iterdir())


def test_newer_release_runs_with_one_warning(site: Path):
    for package in ("transformers", "accelerate"):
        metadata_of(site, package).unlink()
        write_metadata(site, package, "99.0.0")
    result = shardwright(site, *PLAN)
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("warning: "))
    assert "accelerate 99.0.0 (tested: " in line and "transformers 99.0.0 (tested: " in line
    assert (site.parent / "work" / "out" / "ds_config.json").is_file()


def test_environment_report_works_without_torch(site: Path):
    (site / "torch").unlink()
    metadata_of(site, "torch").unlink()
    result = shardwright(site, "env")
    assert result.returncode == 0, result.stderr
    assert "torch: is not installed" in result.stdout
