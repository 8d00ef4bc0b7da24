"""What the repository may hold: text that people wrote, small data, and the pictures of its pages."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LARGEST_BYTES = 500_000


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_is_large() -> None:
    large = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked()}
    assert not {name: size for name, size in large.items() if size > LARGEST_BYTES}


def test_nothing_is_binary_but_pictures_of_the_pages() -> None:
    binary = [path.relative_to(ROOT) for path in tracked() if b"\0" in path.read_bytes()]
    assert not [path for path in binary if path.suffix != ".png" or path.parts[0] != "docs"]


def test_the_license_is_stated_and_ships() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
