"""YAML that people write: small, without what could run or swell, no key twice, no number that is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from .errors import Fault, UsageError

LARGEST_YAML_BYTES = 2**16
"""PyYAML reads about 30 kB a second of the slowest text, in Python."""
_MERGE = "tag:yaml.org,2002:merge"


class _Strict(yaml.SafeLoader):
    """Loader that refuses a key that stands twice, of which PyYAML keeps the last, and numbers that are not finite."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.YAMLError(f"the key {twice!r} stands twice")
        return node

    def construct_yaml_float(self, node: Any) -> float:
        value: float = super().construct_yaml_float(node)
        if not math.isfinite(value):
            raise yaml.YAMLError(f"{node.value} is not a finite number")
        return value


_Strict.add_constructor("tag:yaml.org,2002:float", _Strict.construct_yaml_float)


class _PlainText(_Strict):
    """Loader that leaves scalars the text that a flag would hold.

    YAML 1.1 reads `on` as true, `0123` as 83 and `1e-5` as a word.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        # Aliases of lists can nest beyond any memory.
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)


for _kind in ("bool", "int", "float", "timestamp", "binary"):
    _PlainText.add_constructor(f"tag:yaml.org,2002:{_kind}", lambda _, node: str(node.value))


def read_small_file(path: Path, *, what: str) -> bytes:
    """Return the content of a small file.

    Raises:
        UsageError: it cannot be read or is too large; `what` names it.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST_YAML_BYTES + 1)
    except (OSError, ValueError) as error:
        detail = getattr(error, "strerror", None) or str(error)
        raise UsageError(Fault(where=what, value=str(path), rule=f"cannot be read ({detail})")) from None
    if len(content) > LARGEST_YAML_BYTES:
        raise UsageError(Fault(where=what, value=str(path), rule=f"is over {LARGEST_YAML_BYTES} bytes"))
    return content


def yaml_value(content: bytes | str, *, as_text: bool = False) -> Any:
    """Return what YAML reads in a text.

    Raises:
        ValueError: it is no YAML, holds tags, states a key twice, or a number that is not finite.
    """
    loader = None
    try:
        loader = (_PlainText if as_text else _Strict)(content)
        return loader.get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    finally:
        if loader is not None:
            loader.dispose()


def yaml_mapping(content: bytes | str, *, name: str, what: str, as_text: bool = False) -> dict[str, Any]:
    """Return the mapping in a YAML text, its keys as text.

    Args:
        content: The text.
        name: Path or name of it, for faults.
        what: What it is, for faults.
        as_text: Leave scalars as they are written, and refuse aliases.

    Raises:
        UsageError: it is not YAML, or holds no mapping.
    """
    try:
        data = yaml_value(content, as_text=as_text)
    except ValueError as error:
        raise UsageError(Fault(where=what, value=name, rule=f"is not valid YAML ({error})")) from None
    if not isinstance(data, dict):
        raise UsageError(Fault(where=what, value=name, rule="must hold a mapping of keys and values"))
    return {str(key): value for key, value in data.items()}


def settings_mapping(content: bytes | str, *, name: str) -> dict[str, Any]:
    """Return the settings in a YAML text by name; keys may be written with hyphens.

    Values are text, or what YAML reads where they are mappings, as behind `NAME=` of a flag.

    Raises:
        UsageError: it is not YAML, holds no mapping, or states a key twice.
    """
    values: dict[str, Any] = {}
    faults = []
    written = yaml_mapping(content, name=name, what="config", as_text=True)
    has_mappings = any(isinstance(value, dict) for value in written.values())
    read = yaml_mapping(content, name=name, what="config") if has_mappings else {}
    for key, text in written.items():
        value = read[key] if isinstance(text, dict) else text
        plain = key.replace("-", "_")
        if plain in values:
            rule, fix = "is stated twice, with a hyphen and an underscore", "keep one"
            faults.append(Fault(where=f"{plain} (from file)", rule=rule, fix=fix))
        values[plain] = value
    if faults:
        raise UsageError(faults)
    return values
