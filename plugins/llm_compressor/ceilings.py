"""Newest releases of other libraries that llm-compressor takes: `pip install '.[quantize]'` moves newer ones down."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

from packaging.version import Version

SEEN_IN = "0.14.0.1"
CEILINGS = {"torch": "2.14.0", "transformers": "5.17.0"}
"""By that release's own metadata, which pip reads only when it installs it."""


def installation_of_quantize(installed: Mapping[str, str] | None = None) -> str:
    """Return what `pip install '.[quantize]'` does, or did, to the libraries that are installed.

    Args:
        installed: Versions by name; by default those of this environment.
    """
    names = ("llmcompressor", *CEILINGS)
    found = {name: version for name in names if (version := _version(name))} if installed is None else installed
    held = " and ".join(f"{name} at {version} or older" for name, version in CEILINGS.items())
    if "llmcompressor" in found:
        return f"installed; llmcompressor holds {held}"
    moved = [
        f"{name} from {found[name]} to {ceiling}"
        for name, ceiling in CEILINGS.items()
        if name in found and Version(Version(found[name]).public) > Version(ceiling)
    ]
    would = f"would move {' and '.join(moved)}" if moved else "would move neither"
    return f"not installed; llmcompressor {SEEN_IN} holds {held}: pip install '.[quantize]' {would}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
