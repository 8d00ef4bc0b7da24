"""Strict parsers of JSON and YAML: no duplicate keys, finite numbers only, small files; words of command lines."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from .errors import ConfigError, UsageError


def strict_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, or raise `ValueError`.
    >>> strict_json('{"save_steps": NaN}')
    Traceback (most recent call last):
    ValueError: NaN is not a finite number
    """

    def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is duplicated")
        return mapping

    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_number, parse_float=_number)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def json_line(text: bytes, keys: Sequence[str | int]) -> int | None:
    """Return the line of a value in a JSON text, or of the last of its keys that exists; `None` for other texts.

    >>> json_line(b'{"job":\\n {"seq_len": 1}}', ("job", "seq_len")), json_line(b"{", ())
    (2, None)
    """
    try:
        node = yaml.compose(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return None
    line = 1
    for key in keys:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        marked: dict[Any, Any] = {name.value: (name, value) for name, value in pairs}
        if isinstance(node, yaml.SequenceNode):
            marked = dict(enumerate((item, item) for item in node.value))
        if key not in marked:
            break
        name, node = marked[key]
        line = name.start_mark.line + 1
    return line


def control_text(value: object) -> str | None:
    """Return the first key or string of a JSON value with control or format characters, such as ESC; `None` without.

    >>> control_text({"name": ["plain", "\\x1b[2J"]})
    '\\x1b[2J'
    """
    if isinstance(value, str):
        is_control = any(unicodedata.category(character) in ("Cc", "Cf") and character != "\n" for character in value)
        return value if is_control else None
    items = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((text for item in items if (text := control_text(item)) is not None), None)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


LARGEST_YAML_BYTES = 2**16
"""PyYAML parses the slowest texts at about 30 kB/s in Python."""
_MERGE = "tag:yaml.org,2002:merge"


class _Strict(yaml.SafeLoader):
    """Loader that rejects numbers that are not finite, and duplicate keys, of which PyYAML keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.YAMLError(f"the key {twice!r} is duplicated")
        return node

    def construct_yaml_float(self, node: Any) -> float:
        value: float = super().construct_yaml_float(node)
        if not math.isfinite(value):
            raise yaml.YAMLError(f"{node.value} is not a finite number")
        return value


_Strict.add_constructor("tag:yaml.org,2002:float", _Strict.construct_yaml_float)


class _PlainText(_Strict):
    """Loader that keeps scalars as text, as flags do.

    YAML 1.1 parses `on` as true, `0123` as 83 and `1e-5` as a string.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        # Nested aliases of lists can expand beyond any memory.
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)


for _kind in ("bool", "int", "float", "timestamp", "binary"):
    _PlainText.add_constructor(f"tag:yaml.org,2002:{_kind}", lambda _, node: str(node.value))


def near_path(text: str) -> str:
    """Return the path with nearly this name in the same directory; empty if there is none."""
    # A `~` without a home directory and characters that no path contains raise RuntimeError or ValueError.
    with suppress(OSError, ValueError, RuntimeError):
        path = Path(text).expanduser()
        names = {entry.name.lower(): entry.name for entry in path.parent.iterdir()}
        if near := get_close_matches(path.name.lower(), names, n=1, cutoff=0.8):
            return str(Path(text).with_name(names[near[0]]))
    return ""


def read_small_file(path: Path, *, what: str) -> bytes:
    """Return the content of a small file, or raise `UsageError`."""
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST_YAML_BYTES + 1)
    except (OSError, ValueError) as error:
        detail = getattr(error, "strerror", None) or str(error)
        raise UsageError(ConfigError(where=what, value=str(path), rule=f"cannot be read ({detail})")) from None
    if len(content) > LARGEST_YAML_BYTES:
        raise UsageError(ConfigError(where=what, value=str(path), rule=f"must be at most {LARGEST_YAML_BYTES} bytes"))
    return content


def yaml_value(content: bytes | str, *, as_text: bool = False) -> Any:
    """Return the value of a YAML text, or raise `ValueError`."""
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
    """Return a YAML mapping with its keys as text, or raise `UsageError`."""
    try:
        data = yaml_value(content, as_text=as_text)
    except ValueError as error:
        raise UsageError(ConfigError(where=what, value=name, rule=f"is not valid YAML ({error})")) from None
    if not isinstance(data, dict):
        raise UsageError(ConfigError(where=what, value=name, rule="must be a mapping of keys to values"))
    return {str(key): value for key, value in data.items()}


def settings_mapping(content: bytes | str, *, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the settings of a YAML text by name, and the line of each; keys may have hyphens.

    Scalars stay text; mappings are parsed as YAML, as the value of a flag `NAME=VALUE` is.

    Raises:
        UsageError: The text is not valid YAML, not a mapping, or has a duplicate key.
    """
    written = yaml_mapping(content, name=name, what="config", as_text=True)
    has_mappings = any(isinstance(value, dict) for value in written.values())
    read = yaml_mapping(content, name=name, what="config") if has_mappings else {}
    root = yaml.compose(content, _PlainText)
    assert isinstance(root, yaml.MappingNode), "yaml_mapping has checked it"
    lines = {str(key.value): key.start_mark.line + 1 for key, _ in root.value}
    values: dict[str, Any] = {}
    errors = []
    for key, text in written.items():
        plain = key.replace("-", "_")
        if plain in values:
            rule, fix = "is set twice, with a hyphen and with an underscore", "remove one of them"
            errors.append(ConfigError(where=f"{plain} (from {name}:{lines[key]})", rule=rule, fix=fix))
        values[plain] = read[key] if isinstance(text, dict) else text
    if errors:
        raise UsageError(errors)
    return values, {key.replace("-", "_"): line for key, line in lines.items()}


NAMES_COMMA = re.compile(r",(?![^(){}\[\]]*[)}\]])")
"""A comma between names, but not inside the brackets of a pattern."""


def flag_words(options: Mapping[str, Any]) -> list[str]:
    """Return options of a command line by name as its words: switches for booleans, `null` for no value.

    >>> flag_words({"seq_len": 16, "torch_compile": False, "optim_args": "-x"})
    ['--seq-len', '16', '--no-torch-compile', '--optim-args=-x']
    """
    words: list[str] = []
    for name, value in options.items():
        option, text = name.replace("_", "-"), "null" if value is None else str(value)
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}={text}"] if text.startswith("-") else [f"--{option}", text]
    return words
