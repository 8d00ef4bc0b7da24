"""Checks of installed releases, on distributions that are written into directories of the Python path."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins import releases

TESTED = releases.tested_releases()
MODULES = {name: releases._MODULES.get(name, name) for name in TESTED}
OLDEST = {name: tested.oldest for name, tested in TESTED.items()}
NEWEST = {name: tested.newest for name, tested in TESTED.items()}


@dataclass(frozen=True, kw_only=True)
class Installed:
    metadata: Path
    module: Path


def install(directory: Path, name: str, version: str, code: str = "") -> Installed:
    """Write the metadata and the module of a distribution, as pip does."""
    module = directory / MODULES[name]
    module.mkdir(parents=True, exist_ok=True)
    (module / "__init__.py").write_text(code)
    metadata = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return Installed(metadata=metadata, module=module)


def forget() -> None:
    """Drop what was read of the path so far."""
    importlib.invalidate_caches()
    releases.installed_version.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = tmp_path / "site"
    directory.mkdir()
    standard = [entry for entry in sys.path if "site-packages" not in entry and "dist-packages" not in entry]
    monkeypatch.setattr(sys, "path", [str(directory), *standard])
    loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in MODULES.values()}
    for name in loaded:
        del sys.modules[name]
    forget()
    yield directory
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES.values()]:
        del sys.modules[name]
    sys.modules.update(loaded)
    forget()


@pytest.fixture
def complete(site: Path) -> dict[str, Installed]:
    return {name: install(site, name, NEWEST[name]) for name in releases.REQUIRED}


def errors() -> list[str]:
    forget()
    return [str(config_error) for config_error in releases.release_errors()]


@pytest.mark.parametrize(
    ("version", "is_error"),
    [
        ("4.57.0", True),
        ("4.57.0+local", True),
        (OLDEST["transformers"], False),
        (f"{OLDEST['transformers']}+local", False),
        # Images of NVIDIA have such a torch.
        (f"{OLDEST['transformers']}a0+nv26.10", False),
        ("own-build", False),
    ],
)
def test_releases_below_the_window_are_rejected(
    version: str, is_error: bool, complete: dict[str, Installed], site: Path
) -> None:
    shutil.rmtree(complete["transformers"].metadata)
    install(site, "transformers", version)
    rule = f"is older than {OLDEST['transformers']}, the oldest release that Shardwright supports"
    fix = f"pip install 'transformers{TESTED['transformers'].specifier}'"
    assert errors() == ([f"transformers {version}: {rule}; {fix}"] if is_error else [])
    assert releases.release_warnings() == []


@pytest.mark.parametrize(
    ("suffix", "is_newer"), [("+cpu", False), (".post1", False), (".1", True), (".1.dev20261101+cu130", True)]
)
def test_releases_above_the_window_are_a_warning(
    suffix: str, is_newer: bool, complete: dict[str, Installed], site: Path
) -> None:
    version = NEWEST["torch"] + suffix
    shutil.rmtree(complete["torch"].metadata)
    install(site, "torch", version)
    assert errors() == []
    line = f"newer than the releases that Shardwright is tested with: torch {version} (tested: {TESTED['torch']})"
    assert releases.release_warnings() == ([line] if is_newer else [])


@pytest.mark.parametrize("part", ["metadata", "module"])
def test_an_incomplete_installation_is_rejected(part: str, complete: dict[str, Installed]) -> None:
    peft = complete["peft"]
    (peft.metadata / "METADATA" if part == "metadata" else peft.module / "__init__.py").unlink()
    (config_error,) = errors()
    what = "version in its metadata" if part == "metadata" else "module"
    assert f"is installed incompletely: it has no {what}; pip install --force-reinstall 'peft" in config_error


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('libcudart.so.13: cannot open\\nmore')", "libcudart.so.13: cannot open"),
        ("", "module 'torch' has no attribute 'zeros'"),
    ],
)
def test_torch_that_cannot_compute_is_one_line(code: str, reason: str, site: Path) -> None:
    install(site, "torch", "2.13.0+cu130", code)
    forget()
    with pytest.raises(UsageError) as error:
        releases.check_torch()
    assert str(error.value) == (
        f"torch 2.13.0+cu130: cannot compute on the CPU: {reason}; pip install --force-reinstall torch, "
        "in a build for this machine (https://pytorch.org/get-started)"
    )


def test_missing_packages_are_one_line_with_the_extra(site: Path) -> None:
    for name in (*releases.LIGHT, "torch", "peft"):
        install(site, name, NEWEST[name])
    (line,) = errors()
    assert line.startswith("accelerate, bitsandbytes, ") and "torch" not in line
    assert line.endswith("are not installed; pip install 'shardwright[train]'")
    assert releases.release_errors(releases.LIGHT) == []


def test_two_versions_in_one_directory_are_rejected(complete: dict[str, Installed], site: Path) -> None:
    install(site, "transformers", OLDEST["transformers"])
    (line,) = errors()
    assert "is also installed as" in line and "pip install --force-reinstall 'transformers" in line
