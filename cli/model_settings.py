"""Settings of one command from defaults, a YAML file, the environment and flags, in that order of precedence."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..trainers.runs.settings import Settings, validated
from .settings import ENVIRONMENT_PREFIX


def resolve_model(
    kind: type[Settings],
    flags: Mapping[str, Any],
    *,
    file: Path | None = None,
    environment: Sequence[str] = (),
) -> Settings:
    """Merge the sources of a command's settings; a flag of `None` was not given.

    Args:
        kind: Pydantic model of the settings, with their defaults.
        flags: Values by name; names that are no settings are passed over.
        file: YAML file with settings by name.
        environment: Settings that a variable `SHARDWRIGHT_<NAME>` may state, for the commands that have them. What it
            alone states counts as a default: it is not among `model_fields_set`.

    Raises:
        UsageError: unknown keys or values that are not allowed, all together.
    """
    merged: dict[str, Any] = {}
    everywhere: set[str] = set()
    if file is not None:
        from ..plugins.planning.from_names import read_yaml_mapping

        merged |= {key.replace("-", "_"): value for key, value in read_yaml_mapping(file, what="config").items()}
    for name in environment:
        text = os.environ.get(f"{ENVIRONMENT_PREFIX}{name.upper()}")
        if text is not None and name in kind.model_fields:
            everywhere |= {name} - merged.keys()
            merged[name] = int(text) if name == "seed" and text.isdecimal() else text
    stated = {name: flags[name] for name in kind.model_fields if flags.get(name) is not None}
    found = validated(kind, merged | stated)
    found.model_fields_set.difference_update(everywhere - stated.keys())
    return found
