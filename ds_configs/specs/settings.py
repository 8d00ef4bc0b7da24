"""Base classes of command options. Each option is declared once and parses the same text from every source.

Flags, environment variables, files and list items have text, which the fields convert to values. `errors_of` turns
pydantic's errors into errors of this project.
"""

# Without `from __future__ import annotations`: pydantic and cyclopts would evaluate every annotation as text.
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import ArgsKwargs, core_schema

from .errors import ConfigError, UsageError, count_fix
from .synonyms import removals, suggested
from .texts import NAMES_COMMA, yaml_value

Kind = TypeVar("Kind", bound="Settings")
NONFINITE_STEPS, HANG_SECONDS = 3, 1800.0
_NULL = "null"

_SHORT_NUMBER = re.compile(r"-?[1-9]?[0-9]{1,18}(\.[0-9]{1,18})?")


class _Absent:
    def __get__(self, instance: object, owner: object) -> Any:
        raise AttributeError


class Settings(BaseModel):
    """Options of a command, with their defaults, choices and descriptions.

    A subclass that inherits groups of fields from dataclasses is none: Cyclopts would not read its other fields.
    """

    __dataclass_fields__: ClassVar[Any] = _Absent()

    # Only classes of a command that runs are built.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True, defer_build=True)
    group: ClassVar[str] = "Options"
    """The heading of this class's options in `--help`."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _read_null(cls, stated: Any) -> Any:
        if not isinstance(stated, dict):
            return stated
        return {name: None if value == _NULL else value for name, value in stated.items()}

    def stated_by(self, origins: Mapping[str, str]) -> None:
        """Store the origin of each option: `flag`, `environment` or `file`."""
        self._origins.update({name: origin for name, origin in origins.items() if name in type(self).model_fields})

    def origins(self) -> dict[str, str]:
        """Return the origin of each value; `default` if the user did not set it."""
        return {name: self._origins.get(name, "default") for name in type(self).model_fields}

    def stated(self) -> dict[str, Any]:
        """Return the options that the user set, with their values."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    @classmethod
    def groups(cls) -> dict[str, str]:
        """Return the heading of each option, from the base class that declares it first."""
        owners = [(kind, get_annotations(kind)) for kind in reversed(cls.__mro__) if hasattr(kind, "group")]
        return {name: next(kind.group for kind, own in owners if name in own) for name in cls.model_fields}


def _items(value: object, split: Callable[[str], Iterable[str]]) -> object:
    """Return the items of a text or of a list of texts: `a,b`, `[a, b]` and a list are equivalent."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(value)
    elif isinstance(value, str):
        return tuple(split(value))
    if not isinstance(value, list | tuple):
        return value
    items: list[object] = []
    for item in value:
        part = _items(item, split) if isinstance(item, str | list | tuple) else item
        items += part if isinstance(part, tuple) else [part]
    return tuple(items)


def parsed(text: str) -> Any:
    """Return the value of a YAML text, or raise `ValueError`."""
    try:
        return yaml_value(text)
    except ValueError as error:
        raise ValueError(f"is not valid YAML ({getattr(error.__cause__, 'problem', None) or error})") from None


def _words(text: str) -> list[str]:
    return [word.strip() for word in NAMES_COMMA.split(text) if word.strip()]


def _named_values(value: object) -> object:
    """Return `NAME=VALUE` texts, or a mapping, as a mapping; values are parsed as YAML."""
    if isinstance(value, dict):
        return {str(name).replace("-", "_"): item for name, item in value.items()}
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word.find("=") > 0 for word in words):
        raise ValueError("must be NAME=VALUE")
    pairs = (word.partition("=") for word in words)
    return {name.strip().replace("-", "_"): parsed(text) if text else text for name, _, text in pairs}


Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: _items(value, _words))]
"""Names, separated by commas or as a list."""
Numbers = Annotated[tuple[int, ...], BeforeValidator(lambda value: _items(value, _words))]
"""Integers, separated by commas or as a list."""
Decimals = Annotated[tuple[float, ...], BeforeValidator(lambda value: _items(value, _words))]
"""Numbers, separated by commas or as a list."""
Paths = Annotated[tuple[Path, ...], BeforeValidator(lambda value: _items(value, lambda text: [text]))]
"""Paths: a list, or a flag that is repeated, because a path can contain commas."""
NamedValues = Annotated[dict[str, Any], BeforeValidator(_named_values)]
"""Values by name."""


@dataclass(frozen=True)
class Count:
    """Metadata of a field: an integer from `lowest` to `limit`; the text `auto` of an optional field is `None`."""

    limit: int
    lowest: int = 1

    def __get_pydantic_core_schema__(self, source: Any, handler: object) -> core_schema.CoreSchema:
        optional = type(None) in get_args(source)
        rule = f"must be an integer from {self.lowest} to {self.limit:,}" + (", or auto" if optional else "")
        schema: core_schema.CoreSchema = core_schema.int_schema(ge=self.lowest, le=self.limit)
        schema = core_schema.custom_error_schema(schema, custom_error_type="count", custom_error_message=rule)
        if not optional:
            return schema
        nullable = core_schema.nullable_schema(schema)
        return core_schema.no_info_before_validator_function(lambda value: None if value == "auto" else value, nullable)

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: Any) -> dict[str, Any]:
        described: dict[str, Any] = handler(schema)
        if "anyOf" in described:
            described["anyOf"].append({"const": "auto"})
        return described


class HardwareFields(Settings):
    """Options about the hardware of a run."""

    group = "Hardware"

    hardware: str | None = Field(None, description="[[NODESx]GPUSx]GPU (e.g. 4x8xH100-80GB), a YAML file, or local")
    host_memory: str | None = Field(None, description="Host memory per node (e.g. 1TB)")
    nvme: str | None = Field(None, description="NVMe per node as PATH:SIZE (e.g. /local_nvme:3.5TB)")


class RevisionFields(Settings):
    """The option of a command that reads a model."""

    group = "Hub"

    revision: str | None = Field(None, description="Branch, tag or commit of a Hub model")


Described = TypeVar("Described", bound=type)


def raises_all_errors(kind: Described) -> Described:
    """Let a Pydantic dataclass raise the errors of all its values as `UsageError`; numbers are not read from text."""

    def construct(self: Any, **values: object) -> None:
        try:
            kind.__pydantic_validator__.validate_python(ArgsKwargs((), values), self_instance=self, strict=True)  # type: ignore[attr-defined]
        except ValidationError as error:
            raise UsageError(errors_of(error, kind)) from None

    kind.__init__ = construct  # type: ignore[misc]
    return kind


def settings_of(kind: type[Kind], stated: Mapping[str, Any]) -> Kind:
    """Return settings of a class from values by name, or raise `UsageError`."""
    try:
        return kind.model_validate(dict(stated))
    except ValidationError as error:
        raise UsageError(errors_of(error, kind)) from None


def errors_of(error: ValidationError, kind: Any) -> list[ConfigError]:
    """Return one error for each option of a model or dataclass that pydantic rejected."""
    details: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        details.setdefault(str(detail["loc"][0]) if detail["loc"] else "", []).append(detail)
    known = kind.__pydantic_fields__
    errors = []
    for key, rejections in details.items():
        first, name = rejections[0], "seq_len" if key == "seq_len_tokens" else key
        value = first["input"]
        # A job rejects numbers as text, which settings read.
        if issubclass(kind, BaseModel) and isinstance(value, str) and _SHORT_NUMBER.fullmatch(value):
            value = parsed(value)
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            errors.append(unknown_error(name, [option.removesuffix("_tokens") for option in known]))
        elif first["type"] == "missing":
            fix = first.get("ctx", {}).get("fix") or f"pass --{name.replace('_', '-')}"
            errors.append(ConfigError(where=name, rule="is missing", fix=fix))
        elif value is None:
            errors.append(ConfigError(where=name, rule="must not be null", fix="omit it to use the default"))
        else:
            rule = " or ".join(dict.fromkeys(map(rule_of, rejections))).replace(" or must be ", " or ")
            choices = choices_of(known[key].annotation) if key in known else []
            near = get_close_matches(str(value).lower(), choices, n=1, cutoff=0.5)
            fix = removals().get(f"{name}={value}") or removals().get(str(value).lower(), "")
            fix = fix or (
                f"did you mean {near[0]}?" if near else count_fix(name, value) if "an integer" in rule else ""
            )
            errors.append(ConfigError(where=name, value=value, rule=rule, fix=fix))
    return errors


def rule_of(detail: Any) -> str:
    """Return the rule of an error of pydantic in the words of this project."""
    text = str(detail["msg"]).partition(", unable to")[0].removeprefix("Value error, ")
    for word, meaning in _MEANINGS.items():
        text = text.replace(word, meaning)
    return text


_MEANINGS = {
    "Unexpected keyword argument": "is not a key of this version",
    "Field required": "is missing",
    "Input should be": "must be",
    "a valid integer": "an integer",
    "a valid boolean": "True or False",
    "a valid tuple": "a list",
    "an instance of ModelSpec": "a model",
}
"""Words of pydantic's messages, and those of this project."""


def choices_of(annotation: Any) -> list[str]:
    """Return the words that an option of this type takes."""
    options = get_args(annotation)
    return [item for option in options for item in ([option] if isinstance(option, str) else choices_of(option))]


def unknown_error(name: str, known: Iterable[str], *, where: str | None = None) -> ConfigError:
    """Return the error of an unknown option, with the known one of its meaning or name."""
    names = list(known)
    fix = suggested(name, names) or f"known: {', '.join(names)}"
    return ConfigError(where=where or name, rule="is not a setting", fix=fix)
