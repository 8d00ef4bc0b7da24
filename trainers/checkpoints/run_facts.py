"""Facts of the run that saved a checkpoint, told by the Trainer that saves or is about to resume, or by its plan."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...plugins.accelerate.cpu_ranks import engine_from_environment
from ...plugins.transformers.training_arguments import deepspeed_configuration

_SAMPLES_READ = 16
"""Samples, evenly spread, by which a data set is told from another."""
_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Keys of a model's configuration that may change without another parameter."""


def run_facts(trainer: Any) -> dict[str, Any]:
    """Return the facts that `resume_rules.RULES` compares; a fact that cannot be told is left out.

    Every rank must call it, though only the first one's are kept.
    """
    args = trainer.args
    deepspeed = deepspeed_configuration(args)
    engine = "deepspeed" if deepspeed else "fsdp2" if args.fsdp else engine_from_environment()
    facts: dict[str, Any] = {
        "engine": engine,
        "zero_stage": deepspeed["zero_optimization"].get("stage", 0) if deepspeed else None,
        "axes": _axes(trainer, deepspeed or {}),
        "world_size": args.world_size,
        "global_batch_size": trainer.get_total_train_batch_size(args),
        "precision": args.mixed_precision,
        **_argument_facts(args),
        "model": _model(trainer.model),
        "trained": trained_tensors(trainer.model),
        "data": _data(trainer.train_dataset),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }
    return _as_recorded(facts)


def planned_facts(plan: Plan, arguments: Mapping[str, Any], samples: Any) -> dict[str, Any]:
    """Return those of the same facts that are known before a rank starts.

    Args:
        plan: What is launched.
        arguments: Keys of `TrainingArguments`, as the ranks get them.
        samples: What is trained on; `None` where only the ranks know their order.
    """
    strategy = plan.chosen.strategy
    facts = {
        "engine": "ddp" if strategy.engine == "single" else strategy.engine,
        "zero_stage": strategy.zero_stage,
        # Where axes are in use, who divides names them, and counts the ranks that read other samples.
        "axes": None if strategy.axes or (strategy.engine == "fsdp2" and strategy.dp_replicate > 1) else {},
        "world_size": plan.hardware.world_size,
        "global_batch_size": None if strategy.axes else strategy.global_batch_size,
        "precision": {"fp32": "no"}.get(plan.job.precision, plan.job.precision),
        **stated_facts(arguments),
        "data": _data(samples),
    }
    return _as_recorded(facts)


def stated_facts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that keys of `TrainingArguments` tell alone."""
    from transformers import TrainingArguments

    defaults = {one.name: one.default for one in dataclasses.fields(TrainingArguments)}
    return _as_recorded(_argument_facts(SimpleNamespace(**defaults | dict(arguments))))


def _argument_facts(args: Any) -> dict[str, Any]:
    """Return the facts that training arguments tell alone."""
    return {
        "micro_batch_size": args.per_device_train_batch_size,
        "seed": args.seed if args.data_seed is None else [args.seed, args.data_seed],
        "optimizer": [
            str(getattr(args.optim, "value", args.optim)),
            args.adam_beta1,
            args.adam_beta2,
            args.adam_epsilon,
        ],
        "learning_rate": args.learning_rate,
        "schedule": [str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)), args.warmup_steps],
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm,
        "max_steps": args.max_steps if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs",
    }


def _as_recorded(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in json.loads(json.dumps(facts)).items() if value is not None}


def _axes(trainer: Any, deepspeed: dict[str, Any]) -> dict[str, Any]:
    """Return the axes beyond data parallelism, by which states are divided."""
    found: dict[str, Any] = {}
    for name, attribute in (("pipeline_stages", "_stages"), ("tensor_parallel_size", "_tensor_ranks")):
        if isinstance(size := getattr(trainer, attribute, None), int) and size > 1:
            found[name] = size
    config = getattr(trainer.accelerator, "parallelism_config", None)
    for name in ("tp_size", "sp_size", "cp_size", "dp_replicate_size"):
        if (getattr(config, name, 1) or 1) > 1:
            found[name] = getattr(config, name)
    for section, key in (("tensor_parallel", "autotp_size"), ("expert_parallel", "autoep_size")):
        size = (deepspeed.get(section) or {}).get(key)
        if isinstance(size, int) and size > 1:
            found[key] = size
    return found


def _model(model: Any) -> str | None:
    config = getattr(model, "config", None)
    if config is None:
        return None
    known = config if isinstance(config, dict) else config.to_dict()
    # The Trainer takes special tokens over from the tokenizer when it trains.
    kept = {name: value for name, value in known.items() if name not in _VOLATILE and not name.endswith("token_id")}
    return f"{known.get('model_type', type(model).__name__)} {_digest(kept)}"


def trained_tensors(model: Any) -> str:
    """Return how many tensors are trained and a digest of their names, without the prefixes of wrappers."""
    names = sorted(
        name.replace("_orig_mod.", "").removeprefix("module.")
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )
    return f"{len(names)} tensors {_digest(names)}"


def _data(dataset: Any) -> str | None:
    """Return the number of samples and a digest of some; `None` for a stream, which is read only once.

    Of samples that are divided among machines those of the first are told.
    """
    dataset = getattr(dataset, "own_samples", dataset)
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    count = len(dataset)
    if not count:
        return "0 samples"
    chosen = sorted({index * (count - 1) // max(1, _SAMPLES_READ - 1) for index in range(_SAMPLES_READ)})
    return f"{count} samples {_digest([_content(dataset[index]) for index in chosen])}"


def _content(sample: Any) -> Any:
    """Return what a sample is told by: its tokens where it has some, which are the same before and after collation."""
    found = sample.get("input_ids", sample) if isinstance(sample, dict) else sample
    if isinstance(found, dict):
        return {str(name): _content(value) for name, value in sorted(found.items())}
    return found.tolist() if hasattr(found, "tolist") else str(found) if not isinstance(found, list) else found


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
