"""Plans of the gallery of ready-made configurations, by name."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable

from .. import ds_configs
from ..ds_configs.plan.plan import Plan
from ..ds_configs.specs.errors import ConfigError, UsageError


def entry_names() -> list[str]:
    """Return the names of all gallery entries."""
    return sorted(entry.name for entry in _gallery().iterdir() if entry.joinpath("plan.json").is_file())


def load_entry(name: str) -> Plan:
    """Return the plan of a gallery entry.

    Raises:
        UsageError: there is no such entry; lists the nearest names.
    """
    names = entry_names()
    if name not in names:
        from ..ds_configs.quantization.recipe import recipe_names

        near = get_close_matches(name, [*names, *recipe_names()], n=3, cutoff=0.3)
        raise UsageError(
            ConfigError(
                where="name",
                value=name,
                rule="is not in the gallery",
                fix=f"nearest names: {', '.join(near) or 'none'}",
            )
        )
    with as_file(_gallery().joinpath(name, "plan.json")) as path:
        return Plan.load(path)


def _gallery() -> Traversable:
    return files(ds_configs).joinpath("gallery")
