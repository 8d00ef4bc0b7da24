"""Newest torch and transformers that llm-compressor supports: `pip install '.[quantize]'` downgrades newer ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from ... import __version__
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ..launching.messages import Notify
from ..releases import tested_releases

CEILINGS = {"torch": "2.14.0", "transformers": "5.17.0"}
"""From the metadata of `llm_compressor_release`, which pip reads only when it installs that release."""


def llm_compressor_release() -> str:
    """Return the release of llm-compressor that the test suite runs with."""
    return tested_releases()["llmcompressor"].newest


def downgrades(installed: Mapping[str, str] | None = None) -> list[str]:
    """Return which installed libraries `pip install '.[quantize]'` downgrades, each as `NAME OLD to NEW`.

    Args:
        installed: Versions by name; by default those of this environment.
    """
    versions = _versions() if installed is None else installed
    return [
        f"{name} {versions[name]} to {ceiling}"
        for name, ceiling in CEILINGS.items()
        if name in versions and Version(Version(versions[name]).public) > Version(ceiling)
    ]


def installation_of_quantize(installed: Mapping[str, str] | None = None) -> str:
    """Return what the extra `quantize` requires of torch and transformers, and what installing it would downgrade.

    Args:
        installed: Versions by name; by default those of this environment.
    """
    versions = _versions() if installed is None else installed
    required = " and ".join(f"{name} <= {version}" for name, version in CEILINGS.items())
    if "llmcompressor" in versions:
        return f"installed; llmcompressor requires {required}"
    changes = f"would downgrade {' and '.join(downgrades(versions))}" if downgrades(versions) else "downgrades neither"
    release = llm_compressor_release()
    return f"not installed; llmcompressor {release} requires {required}: pip install '.[quantize]' {changes}"


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("llmcompressor", *CEILINGS):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


EXTRA = "quantize"
INSTALLED_BYTES = 6_200_000_000
"""Disk that it takes: measured on x86-64 Linux with torch 2.14.0 for CUDA, whose libraries are most of it."""
_DISTRIBUTION = "shardwright"
_REPORTED = (_DISTRIBUTION, "llmcompressor", *CEILINGS)
_REASON_LINES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnEnvironment:
    """A virtual environment and what pip is asked to put into it."""

    directory: Path
    """Where it lies."""
    requirements: tuple[str, ...]
    """As pip reads them: Shardwright with its extra, and llm-compressor."""
    constraints: tuple[str, ...]
    """The releases that the test suite runs with, for the dependencies of the requirements."""

    source_tree: Path | None = None
    """Directory that Shardwright is built from, where it is one."""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    @property
    def command(self) -> Path:
        """Its `shardwright`."""
        return self.directory / "bin" / "shardwright"

    def pip_arguments(self, constraints: Path) -> list[str]:
        """Return the installation as an argument list; `-I` keeps this process's PYTHONPATH out of it.

        Args:
            constraints: File that `constraints` were written to.
        """
        pip = [str(self.python), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
        return [*pip, "install", "--constraint", str(constraints), *self.requirements]

    def versions(self) -> dict[str, str]:
        """Return what was installed of the libraries that matter, by name."""
        places = [str(place) for place in self.directory.glob("lib/python*/site-packages")]
        found = {one.metadata["Name"].lower(): one.version for one in metadata.distributions(path=places)}
        return {name: found[name] for name in _REPORTED if name in found}


def planned_environment(directory: Path, *, source: str | None = None, force: bool = False) -> OwnEnvironment:
    """Return the environment that would be created; write nothing.

    Args:
        directory: Its directory.
        source: Shardwright as a directory, URL or requirement. `None`: the source of this installation.
        force: Replace an existing environment.

    Raises:
        UsageError: the directory exists, or pip does not accept the source.
    """
    errors = []
    if directory.is_symlink() or directory.exists():
        is_environment = (directory / "pyvenv.cfg").is_file()
        if not is_environment:
            # `clear` of venv would empty any directory: --force is not enough to lose one's files.
            rule, fix = "exists, but is not a virtual environment", "pass another --path"
            errors.append(ConfigError(where="path", value=str(directory), rule=rule, fix=fix))
        elif not force:
            rule, fix = "already exists", "use --force to create it again, or pass another --path"
            errors.append(ConfigError(where="path", value=str(directory), rule=rule, fix=fix))
    try:
        requirement = _with_extra(source or _own_source())
    except InvalidRequirement:
        rule = "is not a directory, URL or requirement that pip accepts"
        fix = f"use for example {_DISTRIBUTION}=={__version__}"
        errors.append(ConfigError(where="source", value=source, rule=rule, fix=fix))
    if errors:
        raise UsageError(errors)
    tree = Path(source or _own_source())
    return OwnEnvironment(
        directory=directory,
        requirements=(requirement, f"llmcompressor=={llm_compressor_release()}"),
        constraints=tuple(
            f"{name}{tested.specifier}" for name, tested in tested_releases().items() if name != "llmcompressor"
        ),
        source_tree=tree.resolve() if tree.is_dir() else None,
    )


def create_environment(planned: OwnEnvironment, *, notify: Notify) -> dict[str, str]:
    """Create an environment with pip, whose output goes to stderr, and return the installed versions.

    If this fails, the directory is removed; pip keeps its downloads.

    Raises:
        ShardwrightError: Python cannot create the environment, or pip cannot install; with the reason.
    """
    place = planned.directory.absolute()
    try:
        notify(f"creating an environment in {planned.directory}")
        _run([sys.executable, "-I", "-m", "venv", "--clear", str(place)], "install python3-venv if it is missing")
        notify("pip downloads and installs the packages, which takes a few minutes")
        constraints = place / "constraints.txt"
        constraints.write_text("".join(f"{line}\n" for line in planned.constraints), encoding="utf-8")
        with _unchanged(planned.source_tree):
            _run(planned.pip_arguments(constraints), "pip's own settings, such as PIP_INDEX_URL, are kept")
        _run([str(planned.python), "-I", str(planned.command), "--version"], "the installed command does not start")
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return planned.versions()


@contextmanager
def _unchanged(tree: Path | None) -> Iterator[None]:
    """Remove the files that a setuptools build adds to a source tree."""

    def built() -> set[Path]:
        return set() if tree is None else {tree / "build", *tree.glob("*.egg-info")}

    before = {place for place in built() if place.exists()}
    try:
        yield
    finally:
        for place in built() - before:
            shutil.rmtree(place, ignore_errors=True)


def _run(arguments: Sequence[str], advice: str) -> None:
    """Run a program with its output on stderr.

    Raises:
        ShardwrightError: it fails; the last lines of its errors are given.
    """
    with subprocess.Popen(arguments, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None, "it was asked for"
        said = []
        try:
            for line in process.stderr:
                sys.stderr.write(line)
                said.append(line.strip())
        except BaseException:
            # Otherwise pip would continue after a signal that only this process receives.
            process.terminate()
            raise
    if process.returncode:
        reasons = [line for line in said if "error" in line.lower()] or [line for line in said if line]
        detail = "; ".join(reasons[-_REASON_LINES:]) or f"exit code {process.returncode}"
        raise ShardwrightError(f"{' '.join(arguments[:5])} failed: {detail} ({advice})")


def _own_source() -> str:
    """Return where this Shardwright came from: its source tree, what pip recorded, or its release."""
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return str(root)
    try:
        recorded = metadata.distribution(_DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        recorded = None
    origin = json.loads(recorded) if recorded else {}
    if url := origin.get("url"):
        version_control = origin.get("vcs_info")
        return f"{version_control['vcs']}+{url}@{version_control['commit_id']}" if version_control else str(url)
    return f"{_DISTRIBUTION}=={__version__}"


def _with_extra(source: str) -> str:
    """Return a directory, URL or requirement as pip reads it with the extra.

    >>> _with_extra("shardwright==0.1.0")
    'shardwright[quantize]==0.1.0'
    """
    if "://" in source:
        return f"{_DISTRIBUTION}[{EXTRA}] @ {source}"
    if Path(source).exists():
        return f"{Path(source).resolve()}[{EXTRA}]"
    wanted = Requirement(source)
    wanted.extras.add(EXTRA)
    return str(wanted)
