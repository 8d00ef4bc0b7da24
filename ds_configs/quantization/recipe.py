"""`QuantizeSettings`: all that `shardwright quantize` can be told, and the recipes that state it as YAML."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..specs.errors import Fault, UsageError
from .combinations import changed
from .methods import (
    METHOD_NAMES,
    METHODS,
    MethodName,
    combination_with_method_faults,
    default_method,
    needs_calibration,
)
from .scheme import QuantizationScheme, RangeMethod, scheme_named

_LARGEST_RECIPE_BYTES = 1 << 20
_ENVIRONMENT_PREFIX = "SHARDWRIGHT_"


def _names(value: object) -> object:
    """Turn what a file or flag holds into a tuple of names; a text is split at its commas."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class QuantizeSettings(BaseModel):
    """Every setting of `shardwright quantize`, as its YAML file may state them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    scheme: str = Field("W4A16", description="named scheme, such as W4A16, W8A8 or FP8_DYNAMIC")
    method: MethodName | None = Field(None, description="how codes are found; default: by the scheme")
    dataset: str | None = Field(None, description="calibration text: ID[:config][#N], a file, or python-help")
    num_samples: int = Field(512, ge=1, description="calibration samples")
    seq_len: int = Field(2048, ge=2, description="tokens of one calibration sample, at most")
    batch_size: int = Field(1, ge=1, description="calibration samples of one forward pass")
    group_size: int | None = Field(None, ge=-1, description="inputs that share a scale; -1: an output channel")
    symmetric: bool | None = Field(None, description="without a zero point; default: by the scheme")
    ranges: RangeMethod | None = Field(None, description="how static ranges of activations are found")
    percentile: float | None = Field(None, description="share of values in range, in percent, with ranges percentile")
    targets: Names | None = Field(None, description="layers to quantize: class, names, or re: patterns")
    ignore: Names | None = Field(None, description="layers that stay dense: names or re: patterns")
    method_options: dict[str, Any] = Field(default_factory=dict, description="options of the method by name")
    seed: int = Field(0, ge=0, description="of the order of calibration samples")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A YAML file of settings."""

    name: str
    """Name in the gallery, or the path of a file."""
    purpose: str
    """The first line of its header."""
    text: str
    """The file."""
    values: Mapping[str, Any]
    """Settings by name, not yet checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedQuantization:
    """Settings that fit together."""

    settings: QuantizeSettings
    """As merged from all sources."""
    scheme: QuantizationScheme
    """The named scheme with what the settings change."""
    method: MethodName
    """The method, named or chosen."""
    method_reason: str
    """Why this method; `named` when the user named it."""


def quantize_settings(
    flags: Mapping[str, Any], *, recipe: Recipe | None = None, environment: Mapping[str, str] | None = None
) -> QuantizeSettings:
    """Merge defaults, a recipe, the environment and flags, the later ones first in rank.

    Args:
        flags: Values by name; `None` was not given, and names that are no settings are passed over.
        recipe: A recipe from `read_recipe`.
        environment: Variables; those that start with `SHARDWRIGHT_QUANTIZE_` state settings.

    Raises:
        UsageError: unknown keys and values that are not allowed, all together.
    """
    merged: dict[str, Any] = dict(recipe.values) if recipe is not None else {}
    prefix = f"{_ENVIRONMENT_PREFIX}QUANTIZE_"
    for variable, text in sorted((environment or {}).items()):
        if variable.startswith(prefix):
            merged[variable.removeprefix(prefix).lower()] = yaml.safe_load(text) if text else text
    merged |= {name: flags[name] for name in QuantizeSettings.model_fields if flags.get(name) is not None}
    try:
        return QuantizeSettings.model_validate(merged)
    except ValidationError as error:
        faults = {str(detail["loc"][0]): _fault(detail) for detail in error.errors()}
        raise UsageError(list(faults.values())) from None


def _fault(detail: Mapping[str, Any]) -> Fault:
    name = str(detail["loc"][0])
    known: Sequence[str] = list(QuantizeSettings.model_fields)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        return Fault(where=name, rule="is not a setting", fix=fix)
    if name == "method" and isinstance(detail["input"], str):
        near = difflib.get_close_matches(detail["input"].lower(), METHOD_NAMES, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}?" if near else f"known are {', '.join(METHOD_NAMES)}"
        return Fault(where=name, value=detail["input"], rule="names no method", fix=fix)
    return Fault(where=name, value=detail["input"], rule=str(detail["msg"]).lower())


def resolve_quantization(settings: QuantizeSettings) -> ResolvedQuantization:
    """Return the scheme and the method that settings ask for.

    Raises:
        UsageError: the scheme is unknown or cannot be changed so, or the method does not fit it; all together.
    """
    scheme = scheme_named(settings.scheme)
    faults: list[Fault] = []
    try:
        scheme = changed(
            scheme,
            group_size=settings.group_size,
            symmetric=settings.symmetric,
            ranges=settings.ranges,
            percentile=settings.percentile,
            ignore=settings.ignore,
            targets=settings.targets,
        )
    except UsageError as error:
        faults += error.faults
    method, reason = settings.method, "named"
    if method is None:
        method, reason = default_method(scheme, has_dataset=settings.dataset is not None)
    faults += method_faults(settings, scheme=scheme, method=method)
    if faults:
        raise UsageError(faults)
    return ResolvedQuantization(settings=settings, scheme=scheme, method=method, method_reason=reason)


def method_faults(settings: QuantizeSettings, *, scheme: QuantizationScheme, method: MethodName) -> list[Fault]:
    """Return why a method cannot run with these settings; empty when it can."""
    faults = combination_with_method_faults(method, scheme, settings.method_options)
    if settings.dataset is None and not faults and needs_calibration(method, scheme):
        needed = method if METHODS[method].needs_calibration else f"{scheme.name}, whose ranges are stored,"
        fix = "name one, such as --dataset python-help, or use --method rtn with a scheme of dynamic activations"
        faults.append(Fault(where="dataset", rule=f"{needed} needs calibration text", fix=fix))
    return faults


def recipe_names() -> list[str]:
    """Return the names of all recipes of the gallery."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _gallery().iterdir() if entry.name.endswith(".yaml"))


def read_recipe(name: str | Path) -> Recipe:
    """Return a recipe of the gallery by name, or from a YAML file by path.

    Raises:
        UsageError: there is no such recipe or file, or it is no mapping of settings.
    """
    text = str(name)
    if text in recipe_names():
        return parse_recipe(text, _gallery().joinpath(f"{text}.yaml").read_text(encoding="utf-8"))
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(text, recipe_names(), n=3, cutoff=0.3)
        fix = f"nearest: {', '.join(near)}" if near else f"recipes are {', '.join(recipe_names())}"
        raise UsageError(Fault(where="config", value=text, rule="is neither a recipe nor a file", fix=fix))
    try:
        with path.open("rb") as stream:
            content = stream.read(_LARGEST_RECIPE_BYTES + 1)
        if len(content) > _LARGEST_RECIPE_BYTES:
            raise UsageError(Fault(where="config", value=text, rule=f"is over {_LARGEST_RECIPE_BYTES} bytes"))
        return parse_recipe(text, content.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        detail = getattr(error, "strerror", None) or str(error)
        raise UsageError(Fault(where="config", value=text, rule=f"cannot be read ({detail})")) from None


def parse_recipe(name: str, text: str) -> Recipe:
    """Return the recipe in a YAML text; keys may be written with hyphens.

    Raises:
        UsageError: it is not YAML, holds no mapping, or states a key twice.
    """
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise UsageError(Fault(where="config", value=name, rule=f"is not valid YAML ({detail})")) from None
    if not isinstance(data, dict):
        raise UsageError(Fault(where="config", value=name, rule="must hold a mapping of settings"))
    values: dict[str, Any] = {}
    for key, value in data.items():
        plain = str(key).replace("-", "_")
        if plain in values:
            rule, fix = "is stated twice, with a hyphen and an underscore", "keep one"
            raise UsageError(Fault(where=plain, rule=rule, fix=fix))
        values[plain] = value
    first = text.lstrip().splitlines()[0] if text.strip() else ""
    purpose = first.removeprefix("#").strip() if first.startswith("#") else ""
    return Recipe(name=name, purpose=purpose, text=text, values=values)


def _gallery() -> Traversable:
    return files(__package__).joinpath("recipes")
