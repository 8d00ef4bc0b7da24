"""Move the newest tested releases to those that pip resolves today: `make newest`.

Creates the environment of `make test-newest` again without constraints, writes its versions to `constraints-newest.txt`
and those of the support window to `ds_configs/data/releases.toml`, and prints what changed. Run `make test-newest`
afterwards.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = ROOT / "build" / "newest-environment"
CONSTRAINTS = ROOT / "constraints-newest.txt"
WINDOW = ROOT / "ds_configs" / "data" / "releases.toml"
_HEADER = """\
# Exact versions of the environment of `make test-newest`: what `pip install '.[dev]'` resolved to when this file was
# written by `make newest`. torch is the exception: it stays at the version of constraints.txt.
"""


def read_versions(path: Path) -> dict[str, str]:
    """Return the versions of a constraints file by name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def freeze(python: Path) -> dict[str, str]:
    """Return the versions that are installed in an environment, without local labels such as `+cpu`."""
    listed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True
    ).stdout
    versions = {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in json.loads(listed)}
    return {name: version.partition("+")[0] for name, version in versions.items() if name not in ("pip", "shardwright")}


def write_versions(path: Path, versions: dict[str, str], header: str) -> None:
    """Write a constraints file."""
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    path.write_text(header + lines, encoding="utf-8")


def move_window(versions: dict[str, str]) -> None:
    """Raise the newest release of each package in the support window to the installed one."""

    def moved(match: re.Match[str]) -> str:
        return f'{match[1]} = ["{match[2]}", "{versions.get(match[1], match[3])}"]'

    text = re.sub(r'(?m)^(\S+) = \["(\S+)", "(\S+)"\]$', moved, WINDOW.read_text(encoding="utf-8"))
    WINDOW.write_text(text, encoding="utf-8")


def main() -> int:
    """Make the environment, write both files and print the differences."""
    python = ENVIRONMENT / "bin" / "python"
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    torch = f"torch=={read_versions(ROOT / 'constraints.txt')['torch']}"
    for arguments in (["--upgrade", "pip"], [torch], ["--editable", ".[dev]"]):
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *arguments], check=True, cwd=ROOT)
    before, after = read_versions(CONSTRAINTS), freeze(python)
    write_versions(CONSTRAINTS, after, _HEADER)
    move_window(after)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            print(f"{name}: {before.get(name, 'not installed')} -> {after.get(name, 'not installed')}")
    held = subprocess.run(
        [str(python), "-m", "pip", "list", "--outdated", "--format=json"], check=True, capture_output=True, text=True
    ).stdout
    for each in json.loads(held):
        print(f"{each['name']}: {each['latest_version']} exists, but a requirement holds it at {each['version']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
