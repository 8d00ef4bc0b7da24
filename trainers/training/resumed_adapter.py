"""`train --resume-adapter`: the settings of an adapter that is trained further, and their checks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.model import ModelSpec, lora_parameter_count, targeted_linears
from ...plugins.huggingface_hub.hub import model_directory, split_revision
from ...plugins.peft import ALL_LINEAR, LoraAdapter, check_adapter_fits, read_adapter
from ...plugins.planning.models import LoadedModel
from ...plugins.transformers.meta_model import build_meta_model
from ..formats.merge import trained_as_qlora
from ..runs.inputs import is_without
from .settings import TrainSettings

logger = logging.getLogger(__name__)


def read_resumed_adapter(name: str) -> LoraAdapter:
    """Read the adapter of `--resume-adapter`.

    Raises:
        UsageError: nothing of that name exists, or it is not a LoRA adapter.
        RefusedInputError: its files are missing, truncated or damaged.
        ShardwrightError: the Hub cannot be reached.
    """
    try:
        name, revision = split_revision(name)
        directory = model_directory(name, revision=revision)
    except UsageError as error:
        raise UsageError([replace(each, where="resume_adapter") for each in error.errors]) from None
    return read_adapter(directory)


def with_resumed_adapter(settings: TrainSettings, adapter: LoraAdapter, loaded: LoadedModel) -> TrainSettings:
    """Return the settings with method, rank, alpha, dropout and targets of the adapter.

    A dropout that the user set replaces the adapter's, because stored weights do not depend on it.

    Raises:
        UsageError: other values were set or planned, all errors together; or the adapter has parameters that plans do
            not count.
        RefusedInputError: the adapter is of another model, or tensors are missing.
    """
    model = loaded.spec
    if is_without(Path(model.name), ["*.safetensors"]):
        rule, fix = "has no weights, but the adapter was trained on some", "pass the adapter's base model"
        raise UsageError(ConfigError(where="model", value=model.name, rule=rule, fix=fix))
    meta = build_meta_model(loaded.config, source=model.name)
    check_adapter_fits(adapter, meta, model.name, fix=f"pass it instead of {model.name}")
    targets = _planned_targets(adapter, model)
    own: dict[str, Any] = {
        "lora_rank": int(adapter.settings["r"]),
        "lora_alpha": float(adapter.settings["lora_alpha"]),
        "lora_targets": targets,
    }
    base = adapter.base or model.name
    is_local = Path(base).exists() and Path(model.name).exists()
    if base != model.name and not (is_local and Path(base).samefile(model.name)):
        logger.info(f"the adapter records the base model {base}; it is trained further on {model.name}")
    errors = []
    values = settings.stated()
    if values.get("method") == "full":
        rule, fix = "does not train the adapter of --resume-adapter", "use lora or qlora, or omit --resume-adapter"
        errors.append(ConfigError(where="method", value="full", rule=rule, fix=fix))
    for name, value in own.items():
        stated = values.get(name)
        if stated is None or stated == value:
            continue
        if name == "lora_targets" and _modules(stated, model) == _modules(targets, model):
            continue
        stated, value = (",".join(item) if isinstance(item, tuple) else item for item in (stated, value))
        rule = f"is {value} in the adapter of --resume-adapter"
        fix = f"omit it; with --plan, plan with --{name.replace('_', '-')} {value}"
        errors.append(ConfigError(where=name, value=stated, rule=rule, fix=fix))
    if errors:
        raise UsageError(errors)
    own |= {
        "method": values.get("method", "qlora" if trained_as_qlora(adapter) else "lora"),
        "lora_dropout": values.get("lora_dropout", float(adapter.settings.get("lora_dropout") or 0.0)),
    }
    return settings.model_copy(update=own)


def _planned_targets(adapter: LoraAdapter, model: ModelSpec) -> tuple[str, ...]:
    """Return the targets of an adapter as a plan names them.

    PEFT stores `all-linear` as the names of all modules.
    """
    elements = sum(prod(tensor.shape) for tensor in adapter.tensors.values())
    stored = adapter.settings.get("target_modules")
    names = sorted(stored) if isinstance(stored, list) else [str(stored)]
    endings = sorted({name.rpartition(".")[2] for name in names})
    for targets in ([ALL_LINEAR], endings, names):
        if lora_parameter_count(model, rank=adapter.settings["r"], targets=targets) == elements:
            return tuple(targets)
    rule = f"has {elements:,} parameters, which are not those of rank {adapter.settings['r']} for its target_modules"
    fix = "train it further with PEFT itself: plans count no modules_to_save, rank_pattern, DoRA or biases"
    raise UsageError(ConfigError(where="resume_adapter", value=str(adapter.directory), rule=rule, fix=fix))


def _modules(targets: Sequence[str], model: ModelSpec) -> set[str]:
    return {linear.module for linear in targeted_linears(model, targets)}
