"""The table of trainer parameters: each parameter of `Trainer.__init__`, and of TRL's trainers, under each layout.

A parameter is *honored*, with the test that trains it and compares it with one process, or *rejected*, with a reason
and a fix. `trainer_for` reads the table before training. It passes on parameters that the table does not have, with a
warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..specs.errors import ConfigError
from .combinations import COLUMNS, EQUIVALENT, TRAINED, Cell, cells

SINGLE = "single"
"""The layout of one process, which runs the unmodified Trainer."""
LAYOUTS = (SINGLE, *COLUMNS)


PREFERENCES = "tests/distributed/test_preferences.py"
_EVERY = " ".join(LAYOUTS)
_WHOLE = "single ddp zero0 zero1 zero2 zero3 fsdp2 zero_offload fsdp2_offload"

_HONORED: tuple[tuple[str, str, str], ...] = (
    (EQUIVALENT, "model args train_dataset data_collator callbacks", _EVERY),
    (EQUIVALENT, "processing_class eval_dataset", _EVERY),
    (EQUIVALENT, "optimizer_cls_and_kwargs", _EVERY),
    (EQUIVALENT, "optimizers", f"{_WHOLE} sp cp tp ep"),
    (EQUIVALENT, "compute_loss_func compute_metrics preprocess_logits_for_metrics", f"{_WHOLE} sp tp ep"),
    (EQUIVALENT, "model_init", _WHOLE),
    (TRAINED, "peft_config formatting_func", f"{_WHOLE} sp"),
    (TRAINED, "formatting_func", "tp ep"),
    (TRAINED, "ref_model", f"{_WHOLE} tp ep"),
    (TRAINED, "teacher_model", f"{_WHOLE} tp ep"),
    (PREFERENCES, "reward_funcs", _WHOLE),
    (EQUIVALENT, "quantization_config", SINGLE),
)
"""Tests, parameters and layouts."""

_ONE_STAGE = "it needs logits, which only the last stage of a pipeline has"
_PARTS = "it needs full sequences, but a rank of context parallelism has parts that are not adjacent"
_STAGES = "it belongs to TRL's trainers, whose losses pipeline stages do not compute"
_GENERATED = "it scores completions, which trainers generate on data-parallel ranks only"
_SECOND = "it is a second model, which the layout of the trained model does not shard"

_REJECTED: tuple[tuple[str, str, str, str], ...] = (
    (_ONE_STAGE, "omit it, or use ZeRO", "compute_loss_func", "pp"),
    (_ONE_STAGE, "omit it, and evaluate the saved model", "compute_metrics preprocess_logits_for_metrics", "pp"),
    (_PARTS, "use sp with DeepSpeed", "compute_loss_func", "cp"),
    (_PARTS, "evaluate the saved model with cp = 1", "compute_metrics preprocess_logits_for_metrics", "cp"),
    (
        "it has the parameters of the full model, but each pipeline stage trains its own",
        "pass optimizer_cls_and_kwargs=(optimizer class, keywords)",
        "optimizers",
        "pp",
    ),
    (
        "it builds the model again when training starts, after the layout was applied to the first one",
        "pass model=model_init()",
        "model_init",
        "sp cp tp pp ep",
    ),
    (
        "the engine does not find the layers of its plan under the adapters' names",
        "use sp, ZeRO or FSDP2",
        "peft_config",
        "tp ep",
    ),
    (_PARTS, "use sp with DeepSpeed", "peft_config formatting_func", "cp"),
    (_STAGES, "use ZeRO or FSDP2", "peft_config formatting_func", "pp"),
    (_SECOND, "use ZeRO, FSDP2, tp or ep", "ref_model", "sp cp pp"),
    (_SECOND, "use ZeRO, FSDP2, tp or ep", "teacher_model", "sp cp pp"),
    (_GENERATED, "use ZeRO or FSDP2", "reward_funcs", "sp cp tp pp ep"),
    (
        "the trainer would load the full model on every rank, before the engine can shard it",
        "load the model with quantization_config and pass it as model",
        "quantization_config",
        "ddp zero0 zero1 zero2 zero3 fsdp2 zero_offload fsdp2_offload sp cp tp pp ep",
    ),
)
"""Reasons, fixes, parameters and layouts."""


TABLE: Mapping[tuple[str, str], Cell] = cells(_HONORED, ()) | {
    pair: replace(entry, fix=fix)
    for reason, fix, parameters, layouts in _REJECTED
    for pair, entry in cells((), [(reason, parameters, layouts)]).items()
}
"""Each parameter under each layout of `LAYOUTS`."""
PARAMETERS = tuple(dict.fromkeys(parameter for parameter, _ in TABLE))
"""Every parameter in the table."""


def parameter_errors(parameters: Iterable[str], layouts: Iterable[str]) -> list[ConfigError]:
    """Return an error for each non-default parameter that a layout of `LAYOUTS` rejects; none are one process."""
    columns = tuple(layouts) or (SINGLE,)
    errors = []
    for parameter in parameters:
        entries = [entry for column in columns if (entry := TABLE.get((parameter, column))) and not entry.is_proven]
        if entries:
            rule = f"is not supported with {COLUMNS[entries[0].column]}: {entries[0].reason}"
            errors.append(ConfigError(where=parameter, rule=rule, fix=entries[0].fix))
    return errors
