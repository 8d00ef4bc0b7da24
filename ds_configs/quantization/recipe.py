"""`QuantizeSettings`: all that `shardwright quantize` can be told, and the recipes that state it as YAML."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import Field

from ..specs.errors import Fault, UsageError
from ..specs.settings import NamedValues, Names, Settings, settings_of
from ..specs.yaml_file import read_small_file, settings_mapping
from .combinations import changed
from .methods import (
    METHODS,
    MethodName,
    combination_with_method_faults,
    default_method,
    needs_calibration,
)
from .resolved import ResolvedQuantization
from .scheme import QuantizationScheme, RangeMethod, scheme_named


class SchemeSettings(Settings):
    """Numbers that a checkpoint holds, and the layers that hold them."""

    group = "Quantization"

    scheme: str = Field("W4A16", description="Named scheme, such as W4A16, W8A8, W8A8_STATIC, FP8_DYNAMIC or NF4")
    group_size: int | None = Field(
        None,
        ge=-1,
        description="Input channels that share a scale; -1 for a whole output channel. Default: by the scheme",
    )
    symmetric: bool | None = Field(
        None, description="Without zero points. Default: by the scheme", json_schema_extra={"negative": "asymmetric"}
    )
    targets: Names | None = Field(
        None, description="Layers to quantize: Linear, names, or re: patterns. Default: Linear"
    )
    ignore: Names | None = Field(None, description="Layers that stay dense, likewise. Default: output head and routers")


class QuantizeSettings(SchemeSettings):
    """Every setting of `shardwright quantize` and of its recipes."""

    group = "Quantization"

    method: MethodName | None = Field(
        None, description="How codes are found. Default: by the scheme, and told with its reason"
    )
    ranges: RangeMethod | None = Field(None, description="How static ranges of activations are found. Default: minmax")
    percentile: float | None = Field(
        None, description="Share of values inside the range, in percent, with ranges percentile. Default: 99.9"
    )
    method_options: NamedValues = Field(
        default_factory=dict,
        alias="method_option",
        description="NAME=VALUE for the method, such as dampening_frac=0.05; several are a flag that is repeated, or a "
        "mapping",
    )
    dataset: str | None = Field(
        None,
        description="Calibration text: ID[:config][#N] of the Hub, a .jsonl, .json, .parquet or .txt file, or "
        "python-help",
    )
    num_samples: int = Field(512, ge=1, description="Calibration samples")
    seq_len: int = Field(2048, ge=2, description="Tokens of a sample, at most")
    batch_size: int = Field(1, ge=1, description="Samples of one forward pass")
    seed: int = Field(0, ge=0, description="Of the choice of calibration rows")

    def resolved(self) -> ResolvedQuantization:
        """Return the scheme and the method that these settings ask for.

        Raises:
            UsageError: the scheme is unknown or cannot be changed so, or the method does not fit it; all together.
        """
        scheme = scheme_named(self.scheme)
        faults: list[Fault] = []
        try:
            scheme = changed(
                scheme,
                group_size=self.group_size,
                symmetric=self.symmetric,
                ranges=self.ranges,
                percentile=self.percentile,
                ignore=self.ignore,
                targets=self.targets,
            )
        except UsageError as error:
            faults += error.faults
        method, reason = self.method, "named"
        if method is None:
            method, reason = default_method(scheme, has_dataset=self.dataset is not None)
        faults += method_faults(self, scheme=scheme, method=method)
        if faults:
            raise UsageError(faults)
        return ResolvedQuantization(scheme=scheme, method=method, method_reason=reason)


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


def quantize_settings(stated: Mapping[str, Any], *, recipe: Recipe | None = None) -> QuantizeSettings:
    """Return a recipe's settings with what is stated beside it, which wins.

    Args:
        stated: Values by name.
        recipe: A recipe from `read_recipe`.

    Raises:
        UsageError: unknown keys and values that are not allowed, all together.
    """
    return settings_of(QuantizeSettings, {**({} if recipe is None else recipe.values), **stated})


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
    content = read_small_file(path, what="config")
    try:
        return parse_recipe(text, content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(Fault(where="config", value=text, rule=f"cannot be read ({error})")) from None


def parse_recipe(name: str, text: str) -> Recipe:
    """Return the recipe in a YAML text; keys may be written with hyphens.

    Raises:
        UsageError: it is not YAML, holds no mapping, or states a key twice.
    """
    first = text.lstrip().splitlines()[0] if text.strip() else ""
    purpose = first.removeprefix("#").strip() if first.startswith("#") else ""
    return Recipe(name=name, purpose=purpose, text=text, values=settings_mapping(text, name=name))


def _gallery() -> Traversable:
    return files(__package__).joinpath("recipes")
