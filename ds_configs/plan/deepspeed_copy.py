"""The DeepSpeed configuration that `accelerate.yaml` holds as text, beside the same in `ds_config.json`."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path

from ..specs.errors import Fault
from ..specs.json_text import strict_json
from ..specs.yaml_file import read_small_file, yaml_mapping

DEEPSPEED_FILE = "ds_config.json"
HEADER = "_shardwright"
"""Key under which `ds_config.json` says what it is for; DeepSpeed leaves it alone."""


def copied_configuration(value: str) -> str | None:
    """Return the JSON that stands where Accelerate also takes a path, as text or in base64; `None` for a path.

    As `HfDeepSpeedConfig` of accelerate 1.15.0 tells them apart (utils/deepspeed.py).

    >>> copied_configuration('{"bf16": {"enabled": true}}')
    '{"bf16": {"enabled": true}}'
    >>> copied_configuration("plan/ds_config.json")
    """
    # Not of pathlib: a text is too long for a name, which os.path calls no file.
    if os.path.exists(value):  # noqa: PTH110
        return None
    if value.lstrip().startswith("{"):
        return value
    try:
        decoded = base64.urlsafe_b64decode(value).decode("utf-8")
        return decoded if isinstance(json.loads(decoded), dict) else None
    except (ValueError, RecursionError):
        return None


def differing_keys(copy: str, directory: Path) -> list[str]:
    """Return the top-level keys in which a copy is not a directory's `ds_config.json`; none where either is no JSON.

    Headers do not count, and a file that is not there differs in nothing.
    """
    try:
        found, other = strict_json(copy), strict_json((directory / DEEPSPEED_FILE).read_bytes())
    except (OSError, ValueError):
        return []
    if not isinstance(found, dict) or not isinstance(other, dict):
        return []
    keys = [key for key in (*found, *other) if key != HEADER and found.get(key) != other.get(key)]
    return list(dict.fromkeys(keys))


def copy_faults(directory: Path) -> list[Fault]:
    """Return a fault where the two DeepSpeed configurations of a plan differ, of which every launcher reads one."""
    try:
        content = read_small_file(directory / "accelerate.yaml", what="plan")
        section = yaml_mapping(content, name="accelerate.yaml", what="plan").get("deepspeed_config")
    except ValueError:
        return []
    named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    copy = copied_configuration(named) if isinstance(named, str) else None
    keys = [] if copy is None else differing_keys(copy, directory)
    return [copy_fault(directory, keys)] if keys else []


def copy_fault(directory: Path, keys: Sequence[str]) -> Fault:
    """Return what is wrong where an edit reached one of the two files alone."""
    return Fault(
        where=f"{directory / 'accelerate.yaml'}: deepspeed_config.deepspeed_config_file",
        rule=f"differs from {directory / DEEPSPEED_FILE} in {', '.join(keys)}, and Accelerate alone reads this copy",
        fix="change both alike, or write the path of ds_config.json here",
    )
