"""Settings of one command from defaults, a YAML file, the environment and flags, in that order of precedence."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..ds_configs.specs.errors import Fault, UsageError
from .settings import ENVIRONMENT_PREFIX

if TYPE_CHECKING:
    from pydantic import BaseModel

Settings = TypeVar("Settings", bound="BaseModel")


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
    from pydantic import ValidationError

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
    try:
        found = kind.model_validate(merged | stated)
    except ValidationError as error:
        # A field that takes a number or a word fails once for each kind.
        faults = {detail["loc"][0]: _fault(kind, detail) for detail in reversed(error.errors())}
        raise UsageError(list(reversed(faults.values()))) from None
    found.model_fields_set.difference_update(everywhere - stated.keys())
    return found


def _fault(kind: type[BaseModel], detail: Mapping[str, Any]) -> Fault:
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        near = get_close_matches(name, list(kind.model_fields), n=1, cutoff=0.5)
        return Fault(where=name, rule="is not a setting", fix=f"did you mean {near[0]}?" if near else "")
    return Fault(where=name, value=detail["input"], rule=str(detail["msg"]).lower())
