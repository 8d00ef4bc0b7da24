"""Upstream releases that the test suite runs with, against those that are installed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from importlib.util import find_spec

from packaging.version import InvalidVersion, Version

from ..ds_configs.specs.errors import ConfigError, UsageError
from ..ds_configs.specs.model import newest_tested_release

LIGHT = ("cyclopts", "huggingface-hub")
"""Packages that Shardwright itself depends on."""
REQUIRED = (
    *LIGHT,
    *("accelerate", "bitsandbytes", "compressed-tensors", "datasets", "deepspeed", "peft", "torch", "transformers"),
)
"""Packages of the extra `train` too. The others of the table belong to other extras and to users' own trainers."""
INSTALL_TRAIN = "pip install 'shardwright[train]'"
_MODULES = {"huggingface-hub": "huggingface_hub", "compressed-tensors": "compressed_tensors"}


@dataclass(frozen=True, kw_only=True)
class TestedRange:
    """Oldest and newest release of a package that the test suite runs with."""

    oldest: str
    newest: str

    def __str__(self) -> str:
        return self.newest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"

    @property
    def specifier(self) -> str:
        """The range as pip reads it behind the name of a package."""
        return f"=={self.newest}" if self.oldest == self.newest else f">={self.oldest},<={self.newest}"


@cache
def tested_releases() -> dict[str, TestedRange]:
    """Return the support window of each upstream package, by distribution name (`ds_configs/data/releases.toml`)."""
    table = resources.files(__package__.rpartition(".")[0]).joinpath("ds_configs", "data", "releases.toml")
    window = tomllib.loads(table.read_text(encoding="utf-8"))
    return {name: TestedRange(oldest=oldest, newest=newest) for name, (oldest, newest) in window.items()}


@cache
def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution, or `None` where its metadata is missing."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    # `distribution.metadata` would parse the complete description as well, which takes planning 5 % longer. A
    # half-removed distribution has metadata without a version.
    headers = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
    version = re.search(r"^Version:[ \t]*(\S.*?)[ \t]*$", headers, re.MULTILINE | re.IGNORECASE)
    return version and version[1]


def transformers_release() -> str:
    """Return the release of Transformers that planning assumes: the installed one, else the newest tested one."""
    return installed_version("transformers") or newest_tested_release()


def release_errors(packages: Iterable[str] | None = None) -> list[ConfigError]:
    """Return what is wrong with the installed releases: missing, incomplete or older than the window.

    Args:
        packages: Distributions that must be there; by default `REQUIRED`. Others are checked where they are installed.
    """
    required = tuple(REQUIRED if packages is None else packages)
    errors, absent = [], []
    for package, tested in tested_releases().items():
        version = installed_version(package)
        if package not in required and version is None:
            continue
        spec = find_spec(_MODULES.get(package, package))
        # A directory without `__init__.py`, which has no origin, is what an interrupted installation leaves.
        has_module = spec is not None and spec.origin is not None
        bounds = f"'{package}{tested.specifier}'"
        install, reinstall = f"pip install {bounds}", f"pip install --force-reinstall {bounds}"
        where = f"{package} {version}" if version else package
        installed = [*metadata.distributions(name=package)]
        # Another directory is only hidden.
        if others := [each.version for each in installed[1:] if each.locate_file("") == installed[0].locate_file("")]:
            rule = f"is also installed as {', '.join(others)} in the same directory, and files of each may be missing"
            errors.append(ConfigError(where=where, rule=rule, fix=reinstall))
        elif version is None and not has_module:
            absent.append(package)
        elif version is None or not has_module:
            missing = "version in its metadata" if version is None else "module"
            errors.append(
                ConfigError(where=where, rule=f"is installed incompletely: it has no {missing}", fix=reinstall)
            )
        elif _is_older(version, tested.oldest):
            rule = f"is older than {tested.oldest}, the oldest release that Shardwright supports"
            errors.append(ConfigError(where=where, rule=rule, fix=install))
    if absent:
        rule = "is not installed" if len(absent) == 1 else "are not installed"
        errors.insert(0, ConfigError(where=", ".join(absent), rule=rule, fix=INSTALL_TRAIN))
    return errors


def check_releases(packages: Iterable[str] | None = None) -> None:
    """Raise `UsageError` with every error of `release_errors`."""
    if errors := release_errors(packages):
        raise UsageError(errors)


def release_warnings() -> list[str]:
    """Return a line about the installed releases above the tested window; empty without any."""
    newer = [
        f"{package} {version} (tested: {tested})"
        for package, tested in tested_releases().items()
        if (version := installed_version(package)) is not None and _is_older(tested.newest, version)
    ]
    return [f"newer than the releases that Shardwright is tested with: {', '.join(newer)}"] if newer else []


def check_torch() -> None:
    """Check that torch can be imported and compute on the CPU, which loads and saves checkpoints everywhere.

    Raises:
        UsageError: it cannot; torch's own first line is in the message.
    """
    try:
        import torch

        torch.zeros(1).add_(1)
    except Exception as error:
        # An incomplete build raises ImportError, OSError, AttributeError or NotImplementedError.
        where = f"torch {installed_version('torch') or ''}".strip()
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = "pip install --force-reinstall torch, in a build for this machine (https://pytorch.org/get-started)"
        raise UsageError(ConfigError(where=where, rule=f"cannot compute on the CPU: {first_line}", fix=fix)) from error


def _is_older(version: str, than: str) -> bool:
    """Compare releases; vendors build theirs from pre-releases, such as torch 2.13.0a0+nv26.10 in NVIDIA's images."""
    try:
        return Version(Version(version).base_version) < Version(Version(than).base_version)
    except InvalidVersion:
        # Builds of one's own have versions of their own; nothing is known of them.
        return False
