"""Faults of a model in memory, of a DeepSpeed section and of a Trainer under tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....ds_configs.specs.errors import Fault
from ....plugins.transformers.training_arguments import deepspeed_configuration

_SECTION_KEYS = frozenset({"autotp_size", "vocab_parallel_lm_head", "partition_config", "dtype", "keep_module_on_host"})


def layout_faults(model: Any, parallelism: Any, training_arguments: Any, size: int) -> list[Fault]:
    """Return why a model in memory, or what it is to be trained with, cannot be divided."""
    faults = []
    if getattr(parallelism, "tp_size", 1) > 1:
        rule = "divides the model with Transformers' own tensor parallelism, not with AutoTP"
        faults.append(
            Fault(where="parallelism_config.tp_size", value=parallelism.tp_size, rule=rule, fix="leave it out")
        )
    if (getattr(model, "_tp_size", None) or 1) > 1:
        rule, fix = "was divided by Transformers when it was loaded", "load it without distributed_config"
        faults.append(Fault(where="model", value=type(model).__name__, rule=rule, fix=fix))
    if getattr(model, "hf_quantizer", None) is not None:
        rule, fix = "is quantized, and AutoTP would cut packed weights", "load it in its own precision"
        faults.append(Fault(where="model", value=type(model).__name__, rule=rule, fix=fix))
    if getattr(model, "ds_autotp_parsed", False):
        rule, fix = f"was divided in an earlier run, perhaps not by {size}", "load the model again"
        faults.append(Fault(where="model", value=type(model).__name__, rule=rule, fix=fix))
    split = training_arguments.accelerator_config.split_batches
    if split:
        rule = "would divide a batch over all ranks, and ranks of a group need the same"
        faults.append(Fault(where="accelerator_config.split_batches", value=split, rule=rule, fix="set it to false"))
    if training_arguments.accelerator_config.dispatch_batches:
        rule = "gives every group the batches of the first rank"
        fix = "leave it out: groups then read for themselves"
        faults.append(Fault(where="accelerator_config.dispatch_batches", value=True, rule=rule, fix=fix))
    configuration = deepspeed_configuration(training_arguments) or {}
    for section in ("bf16", "fp16"):
        if getattr(training_arguments, section) and section not in configuration:
            rule = "is missing from the DeepSpeed configuration, and AutoTP would divide the model in another precision"
            faults.append(Fault(where=section, rule=rule, fix=f'write "{section}": {{"enabled": "auto"}}'))
    return faults


def section_faults(given: Mapping[str, Any], written: Mapping[str, Any]) -> list[Fault]:
    """Return where a `tensor_parallel` section that the user wrote contradicts the one that is needed."""
    faults = []
    for key, value in given.items():
        where = f"tensor_parallel.{key}"
        if key in ("tp", "tensor_parallel"):
            named = value.get("tp_size", written["autotp_size"]) if isinstance(value, Mapping) else value
            if named not in (1, written["autotp_size"]):
                rule = f"contradicts TensorParallelCallback({written['autotp_size']})"
                faults.append(Fault(where=f"{where}.tp_size", value=named, rule=rule, fix="name the same size twice"))
        elif key not in _SECTION_KEYS:
            rule = "changes how AutoTP divides layers, which was not shown to train equally"
            faults.append(Fault(where=where, value=value, rule=rule, fix="leave it out"))
        elif key in written or key == "partition_config":
            # AutoTP takes a missing switch and null for its own choice.
            needed = written.get(key)
            if value not in (needed, None):
                rule = f"contradicts the callback, which needs {needed!r}"
                faults.append(
                    Fault(where=where, value=value, rule=rule, fix="change one of them, or leave the key out")
                )
    return faults


def tensor_trainer_faults(trainer: Any, *, vocabulary_parallel_head: bool) -> list[Fault]:
    """Return what a Trainer does with logits that a vocabulary-parallel head does not give it."""
    from transformers import Trainer

    if not vocabulary_parallel_head:
        return []
    uses = {
        "compute_loss_func": trainer.compute_loss_func is not None,
        "label_smoothing_factor": trainer.args.label_smoothing_factor > 0,
        f"{type(trainer).__name__}.compute_loss": type(trainer).compute_loss is not Trainer.compute_loss,
    }
    rule = "computes a loss from logits, of which each rank holds a part of the vocabulary"
    fix = "use vocabulary_parallel_head=False"
    return [Fault(where=name, rule=rule, fix=fix) for name, used in uses.items() if used]
