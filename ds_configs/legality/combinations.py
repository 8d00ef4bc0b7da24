"""The one table of what a training run may combine: settings against engines and axes, each proven or refused.

A cell is *proven*, with the test that trains it and compares it with one process, or *refused*, with what was seen in
deepspeed 0.19.8, transformers 5.17.0, accelerate 1.15.0 and torch 2.13.0. There is nothing in between: a pair that the
table does not name is refused. Rules on sizes and families stand beside this table, one file for each axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..specs.errors import Fault
from ..specs.strategy import Strategy

COLUMNS: Mapping[str, str] = {
    "ddp": "whole copies on every rank (DDP)",
    "zero0": "DeepSpeed without ZeRO",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "fsdp2": "FSDP2",
    "zero_offload": "ZeRO with the optimizer, or the parameters too, on the host",
    "fsdp2_offload": "FSDP2 with everything on the host",
    "sp": "sequence parallelism (Ulysses)",
    "cp": "context parallelism (ring attention)",
    "tp": "tensor parallelism (AutoTP)",
    "pp": "pipeline stages",
    "ep": "expert parallelism (AutoEP)",
}
"""Engines, offload and axes; a run is in one column for its engine and in one for each axis beside it."""

SETTINGS: Mapping[str, str] = {
    "qat": "quantization-aware training of weights",
    "qat_inputs": "quantization-aware training with inputs rounded token by token",
    "qat_ranges": "quantization-aware training with stored ranges of inputs",
    "learned_scales": "quantization-aware training with learned scales",
    "pruning": "magnitude pruning of each matrix by itself",
    "global_pruning": "magnitude pruning of all matrices together",
    "l1": "an L1 penalty on weights",
    "lora": "LoRA adapters",
    "frozen": "frozen parameters",
    "distillation": "distillation of logits",
    "distilled_features": "distillation of hidden states",
    "distilled_attention": "distillation of attention",
    "on_policy": "distillation on the student's own completions",
    "moving_average_teacher": "a moving average of the student as its teacher",
    "balance_loss": "a mixture's load-balancing loss (output_router_logits)",
    "dropout": "dropout of attention",
    "gradient_checkpointing": "gradient checkpointing",
    "label_smoothing": "label smoothing",
    "packing": "documents that share a row",
    "streams": "data sets without a length",
    "last_batch": "a last batch that ranks do not share evenly (even_batches)",
    "split_batches": "batches that Accelerate splits (split_batches)",
    "compile": "torch.compile",
    "bf16": "bf16 mixed precision",
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "fused AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "adafactor": "Adafactor",
}
"""What a run may have besides its layout; optimizers by the Trainer's names."""
ONLY_ON_ACCELERATORS = frozenset(
    ["fp16", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_32bit", "lion_8bit"]
)
"""Settings that CPU ranks cannot train, so that no cell of theirs can be proven here: the rules beside this table judge
them."""

DRAWN, QAT, DISTILLED = (
    "tests/equivalence/test_combinations.py",
    "tests/distributed/test_qat_layouts.py",
    "tests/distributed/test_distillation_layouts.py",
)
ZERO0 = "tests/distributed/test_losses_equal.py"
"""Also holds what DeepSpeed does there in 16 bit, and what every run says of it: a first step on zero gradients."""

_ENGINES = "ddp zero0 zero1 zero2 zero3 fsdp2"
_OFFLOADED = "zero_offload fsdp2_offload"
_DATA_PARALLEL = f"{_ENGINES} {_OFFLOADED}"

_PROVEN: tuple[tuple[str, str, str], ...] = (
    (DRAWN, "qat", f"{_DATA_PARALLEL} sp cp tp pp ep"),
    (DRAWN, "learned_scales", f"{_DATA_PARALLEL} sp cp"),
    (DRAWN, "pruning global_pruning l1", f"{_DATA_PARALLEL} sp cp tp pp ep"),
    (DRAWN, "lora", f"{_DATA_PARALLEL} sp cp"),
    (DRAWN, "frozen", f"{_DATA_PARALLEL} sp cp tp"),
    (DRAWN, "distillation distilled_features", f"{_DATA_PARALLEL} tp ep"),
    (DRAWN, "moving_average_teacher", _DATA_PARALLEL),
    (DRAWN, "gradient_checkpointing", f"{_DATA_PARALLEL} sp cp tp pp ep"),
    (DRAWN, "dropout", f"{_DATA_PARALLEL} sp tp pp ep"),
    (DRAWN, "label_smoothing", "ddp zero0 zero1 zero2 zero3 zero_offload sp tp ep"),
    (DRAWN, "packing", f"{_DATA_PARALLEL} tp pp ep"),
    (DRAWN, "streams", f"{_DATA_PARALLEL} sp cp tp pp ep"),
    (DRAWN, "split_batches", f"{_DATA_PARALLEL} ep"),
    (DRAWN, "last_batch", f"{_DATA_PARALLEL} sp cp tp pp ep"),
    (DRAWN, "compile", f"{_DATA_PARALLEL} sp cp tp"),
    (DRAWN, "bf16", "ddp zero1 zero2 zero3 fsdp2 zero_offload fsdp2_offload sp cp tp pp ep"),
    (DRAWN, "adamw_torch adamw_torch_fused", f"{_DATA_PARALLEL} sp cp tp pp ep"),
    (DRAWN, "sgd rmsprop", f"{_ENGINES} fsdp2_offload sp cp tp pp ep"),
    (DRAWN, "adagrad", "ddp zero0 fsdp2 fsdp2_offload cp"),
    (DRAWN, "adafactor", "ddp"),
    (DRAWN, "balance_loss", f"{_DATA_PARALLEL} ep"),
    (ZERO0, "bf16", "zero0"),
    (QAT, "qat_inputs", "ddp zero0 zero1 zero2 zero3 fsdp2 pp"),
    (QAT, "qat_ranges", "ddp zero1 zero2 zero3 fsdp2"),
    (DISTILLED, "distillation distilled_features", "sp"),
    (DISTILLED, "distilled_attention on_policy", "ddp zero2 zero3 fsdp2"),
)
"""Tests, settings and columns: every pair of a line."""

_FLAT = (
    "trains as another optimizer: the engine steps flat pieces, and this one's arithmetic reads the shape of matrices"
)
_STATES_FIRST = "makes its states before DeepSpeed puts its own tensors in the place of parameters, and then fails"
_HOST = "is replaced by DeepSpeed's CPU Adam, whatever it was"
_DTENSOR = "mixes plain tensors with the DTensors of FSDP2, and fails"
_NO_ROUNDING = "has scales that are parameters of layers which the engine replaces, and neither cuts nor keeps"
_STAGE_LOSS = "is no part of the loss of a pipeline, whose last stage computes the cross-entropy of labels alone"
_BALANCE = "is of all tokens of a sequence, padding left out, and a rank sees a part of it without its mask"
_STATISTICS = "reads ranges that no rank sees whole"
_POSITIONS = "would attend to the documents before it: attention has no mask when ranks share a sequence"
_SAMPLES = "splits a batch over all ranks, and some of them are to read the same"
_QUALITY = "has no test that compares it with one process"

_REFUSED: tuple[tuple[str, str, str], ...] = (
    (_FLAT, "adafactor", "zero0 zero1 zero2 zero3 zero_offload sp tp pp ep"),
    (_DTENSOR, "adafactor", "fsdp2 fsdp2_offload cp"),
    (_STATES_FIRST, "adagrad", "zero1 zero2 zero3 sp tp pp ep"),
    (_HOST, "sgd rmsprop adagrad", "zero_offload"),
    (_NO_ROUNDING, "learned_scales", "tp pp ep"),
    ("is rounded token by token, of whose channels a rank sees a part", "qat_inputs qat_ranges", "tp"),
    ("are made equal over all ranks, which hold other layers", "qat_ranges", "pp"),
    ("would be stored as integers, of which Transformers loads no experts", "qat_inputs qat_ranges", "ep"),
    (_STATISTICS, "qat_ranges", "sp cp"),
    ("finds no layer of the engine's plan under the adapters' names", "lora", "tp pp ep"),
    ("leaves stages, or groups of experts, without a parameter to train", "frozen", "pp ep"),
    (_STAGE_LOSS, "distillation distilled_features distilled_attention on_policy", "pp"),
    (_STAGE_LOSS, "moving_average_teacher balance_loss label_smoothing", "pp"),
    ("is read in an order that a teacher cannot follow", "distillation distilled_features", "cp"),
    ("is read in an order that a teacher cannot follow", "distilled_attention on_policy moving_average_teacher", "cp"),
    ("follows weights by name, which the engine has divided or renamed", "moving_average_teacher", "tp ep"),
    ("is of whole sequences, of which a rank sees a part", "distilled_attention on_policy", "sp"),
    (_BALANCE, "balance_loss", "sp cp"),
    ("is refused with mixtures of experts", "balance_loss", "tp"),
    (
        "would be taken of labels that are not shifted: the Trainer reads from the class's name whether to, and FSDP2 "
        "renames the class",
        "label_smoothing",
        "fsdp2 fsdp2_offload",
    ),
    ("shifts labels within parts of sequences that are no neighbours", "label_smoothing", "cp"),
    (_POSITIONS, "packing", "sp cp"),
    (_SAMPLES, "split_batches", "sp cp tp pp"),
    ("is not compiled: DeepSpeed's schedule runs stages", "compile", "pp"),
    ("cannot trace the routing of AutoEP", "compile", "ep"),
    ("mixes plain tensors with DTensors, and fails", "dropout", "cp"),
)
"""Reasons, settings and columns, as seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One pair of the table."""

    setting: str
    """A key of `SETTINGS`."""
    column: str
    """A key of `COLUMNS`."""
    proven_by: str = ""
    """The test that holds it; empty where it is refused."""
    reason: str = ""
    """Why it is refused; empty where it is proven."""

    @property
    def is_proven(self) -> bool:
        """Whether a test holds it."""
        return bool(self.proven_by)


def _cells() -> Iterator[tuple[tuple[str, str], Cell]]:
    for test, settings, columns in _PROVEN:
        for setting in settings.split():
            for column in columns.split():
                yield (setting, column), Cell(setting=setting, column=column, proven_by=test)
    for reason, settings, columns in _REFUSED:
        for setting in settings.split():
            for column in columns.split():
                yield (setting, column), Cell(setting=setting, column=column, reason=reason)


_TABLE: Mapping[tuple[str, str], Cell] = dict(_cells())


def cell(setting: str, column: str) -> Cell:
    """Return what is known of a pair; one that the table does not name is refused.

    >>> cell("dropout", "cp").reason
    'mixes plain tensors with DTensors, and fails'
    """
    return _TABLE.get((setting, column), Cell(setting=setting, column=column, reason=_QUALITY))


def every_cell() -> list[Cell]:
    """Return the whole table, settings by columns."""
    return [cell(setting, column) for setting in SETTINGS for column in COLUMNS]


def columns_of(strategy: Strategy) -> tuple[str, ...]:
    """Return the columns that a layout is in; none for one process, which every setting is compared with.

    >>> columns_of(Strategy(engine="deepspeed", zero_stage=1, tp=2))
    ('zero1', 'tp')
    """
    offloads = {strategy.offload_optimizer, strategy.offload_param} - {"none"}
    found = []
    if strategy.engine == "deepspeed":
        # A pipeline without ZeRO has a 16-bit optimizer of its own.
        found += [] if strategy.pp > 1 and not strategy.zero_stage else [f"zero{strategy.zero_stage or 0}"]
        found += ["zero_offload"] if offloads else []
    elif strategy.engine == "fsdp2":
        found += ["fsdp2", "fsdp2_offload"] if offloads else ["fsdp2"]
    elif strategy.engine == "ddp":
        found += ["ddp"]
    return (*found, *(axis for axis in ("sp", "cp", "tp", "pp", "ep") if axis in strategy.axes))


def incompatibility_faults(settings: Iterable[str], columns: Iterable[str]) -> list[Fault]:
    """Return a fault for each pair of settings and columns that is not proven.

    Args:
        settings: What a run has, as in `SETTINGS`; unknown names are refused in every column.
        columns: Where it runs, as in `COLUMNS`.
    """
    wanted = tuple(dict.fromkeys(one for one in settings if one not in ONLY_ON_ACCELERATORS))
    places = tuple(columns)
    faults = []
    for setting in wanted:
        for column in places:
            found = cell(setting, column)
            if not found.is_proven:
                proven = [other for other in COLUMNS if cell(setting, other).is_proven]
                fix = f"proven with {', '.join(proven)}" if proven else "leave it out"
                rule = f"with {COLUMNS.get(column, column)} {found.reason}"
                faults.append(Fault(where=SETTINGS.get(setting, setting), rule=rule, fix=fix))
    return faults
