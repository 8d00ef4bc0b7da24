"""Rules of parallel axes, called with the facts of a model and of a layout by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from shardwright.ds_configs.specs.errors import ConfigError
from shardwright.ds_configs.specs.layout import Layout, ZeroOptions
from shardwright.ds_configs.specs.model import ModelTraits


def rule_errors(rule: Callable[..., list[ConfigError]], **facts: Any) -> list[ConfigError]:
    """Return the errors of a rule; what belongs to neither the model nor the layout are arguments of the rule."""

    def taken(kind: type) -> dict[str, Any]:
        return {field.name: facts.pop(field.name) for field in fields(kind) if field.name in facts}

    model, options, layout = taken(ModelTraits), taken(ZeroOptions), taken(Layout)
    return rule(ModelTraits(**model), Layout(**{"engine": "deepspeed", **layout}, zero=ZeroOptions(**options)), **facts)
