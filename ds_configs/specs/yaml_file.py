"""YAML files that people write: small, a mapping, and without what could run or swell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from .errors import Fault, UsageError

LARGEST_YAML_BYTES = 2**20


class _PlainText(yaml.SafeLoader):
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
    loader = None
    try:
        loader = (_PlainText if as_text else yaml.SafeLoader)(content)
        data = loader.get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise UsageError(Fault(where=what, value=name, rule=f"is not valid YAML ({detail})")) from None
    finally:
        if loader is not None:
            loader.dispose()
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
    read = yaml_mapping(content, name=name, what="config")
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
