"""Configuration keys as plain JSON nodes: a mapping has `keys`, a value has `types` and constraints."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

Node = dict[str, Any]

_JSON_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
    list: "list",
    dict: "object",
    type(None): "null",
}


def leaf(*kinds: str, **constraints: Any) -> Node:
    """Describe one value: the JSON types it may have and its constraints."""
    return {"types": list(kinds), **constraints}


def section(keys: dict[str, Node], *, strict: bool, **extra: Any) -> Node:
    """Describe a mapping; `strict` says whether upstream itself rejects unknown keys."""
    return {"keys": dict(sorted(keys.items())), "strict": strict, **extra}


def booleans(*names: str) -> dict[str, Node]:
    """Return a leaf that takes true or false for each name."""
    return {name: leaf("boolean") for name in names}


def from_values(values: dict[str, Any]) -> dict[str, Node]:
    """Describe plain-dictionary keys by the type of their default; `None` allows anything."""
    return {
        name: leaf(*(["any"] if value is None else ["boolean"] if isinstance(value, bool) else [_kind_of(value)]))
        for name, value in values.items()
    }


def _kind_of(value: object) -> str:
    return "number" if isinstance(value, float) else _JSON_TYPES.get(type(value), "any")


def _from_annotation(annotation: Any) -> Node:
    import pydantic

    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        parts = [_from_annotation(argument) for argument in arguments]
        nested = [part for part in parts if "keys" in part]
        if nested:
            return {**nested[0], "nullable": True}
        merged: Node = {"types": sorted({kind for part in parts for kind in part["types"]})}
        if choices := [choice for part in parts for choice in part.get("choices", [])]:
            merged["choices"] = choices
        if items := [part["items"] for part in parts if "items" in part]:
            merged["items"] = items[0]
        return merged
    if origin is Literal:
        return leaf("string", choices=list(arguments))
    if origin is list and arguments:
        return leaf("list", items=_from_annotation(arguments[0]))
    if origin in (list, tuple) or annotation in (list, tuple):
        return leaf("list")
    if origin is dict or annotation is dict:
        return leaf("object")
    if annotation in _JSON_TYPES:
        return leaf(_JSON_TYPES[annotation])
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return from_pydantic(annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        choices = sorted({member.value for member in annotation})
        return leaf("string" if issubclass(annotation, str) else "integer", choices=choices)
    return leaf("unsettable")


def from_pydantic(model: Any) -> Node:
    """Describe a pydantic model as a section, including aliases, bounds and deprecated names."""
    keys: dict[str, Node] = {}
    for name, field in model.model_fields.items():
        node = _from_annotation(field.annotation)
        for bound in field.metadata:
            for attribute, label in (("ge", "min"), ("gt", "above"), ("le", "max"), ("lt", "below")):
                if getattr(bound, attribute, None) is not None:
                    node[label] = getattr(bound, attribute)
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        if extra.get("deprecated"):
            node["deprecated"] = extra.get("new_param", "")
        if field.default == "auto" and "choices" not in node:
            node["auto"] = True
        keys[name] = node
        if field.alias:
            keys[field.alias] = {**node, "alias_of": name}
    return section(keys, strict=True)


def from_dataclass(model: Any) -> dict[str, Node]:
    """Return a node for each public field of a dataclass, from its annotations."""
    hints = typing.get_type_hints(model)
    keys: dict[str, Node] = {}
    for field in dataclasses.fields(model):
        if field.name.startswith("_"):
            continue
        node = _from_annotation(hints[field.name])
        if "unsettable" in node["types"] or hints[field.name] is object:
            node = leaf("any")
        if field.default == "auto":
            node["auto"] = True
        keys[field.name] = node
    return keys
