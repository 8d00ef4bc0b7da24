"""The batch equation: train_batch_size = micro batch · accumulation steps · data-parallel world size."""

from __future__ import annotations

from .report import Report

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


def check_batch(report: Report, *, world_size: int | None, uses_transformers: bool) -> None:
    """Check the three batch keys against each other and against the number of processes.

    The equation and the order in which missing values are derived are those of deepspeed/runtime/config.py
    (`_set_batch_related_parameters`), which rounds down and then asserts.
    """
    if not report.has(_TRAIN) and not report.has(_MICRO):
        fix = f'add "{_MICRO}": "auto"' if uses_transformers else f"add {_MICRO}"
        report.error("", f"{_TRAIN} or {_MICRO} must be given", fix)
        return
    if any(report.value(key) == "auto" for key in (_TRAIN, _MICRO, _STEPS)):
        return
    present = {key: report.integer(key) for key in (_TRAIN, _MICRO, _STEPS) if report.has(key)}
    if any(value is None or value <= 0 for value in present.values()):
        return
    numbers = {key: value for key, value in present.items() if value is not None}
    ranks = _data_parallel_size(report, world_size)
    if ranks is None:
        _check_without_world(report, numbers)
    elif ranks >= 1:
        _check_equation(report, numbers, ranks)


def _data_parallel_size(report: Report, world_size: int | None) -> int | None:
    """Return the world size over the sequence-parallel size; 0 after reporting that it does not divide."""
    sequence, data = report.integer("sequence_parallel_size"), report.integer("data_parallel_size")
    if sequence is not None and data is not None and sequence > 0 and data > 0:
        if world_size is not None and sequence * data != world_size:
            rule = f"times sequence_parallel_size {sequence} must equal {world_size} processes"
            report.error("data_parallel_size", rule)
            return 0
        return data
    if world_size is None or sequence is None or sequence <= 0:
        return world_size
    if world_size % sequence:
        report.error("sequence_parallel_size", f"must divide the {world_size} processes")
        return 0
    return world_size // sequence


def _check_equation(report: Report, numbers: dict[str, int], ranks: int) -> None:
    train = numbers.get(_TRAIN)
    if train is None:
        return
    micro, steps = numbers.get(_MICRO), numbers.get(_STEPS)
    if micro is not None and steps is not None:
        if train != micro * steps * ranks:
            product = micro * steps * ranks
            rule = f"must equal micro batch · accumulation · ranks = {micro} · {steps} · {ranks} = {product}"
            report.error(_TRAIN, rule, f"write {product}, or remove one of the three keys")
        return
    known, name = 1, ""
    if micro is not None:
        known, name = micro, _MICRO
    elif steps is not None:
        known, name = steps, _STEPS
    factor = known * ranks
    if train % factor or train < factor:
        factors = f"{name} · ranks = {known} · {ranks} = {factor}" if name else f"the {ranks} ranks"
        lower, upper = max(train // factor, 1) * factor, (train // factor + 1) * factor
        fix = f"write {lower}" + (f" or {upper}" if upper != lower else "")
        report.error(_TRAIN, f"must be a multiple of {factors}", fix)


def _check_without_world(report: Report, numbers: dict[str, int]) -> None:
    train = numbers.get(_TRAIN)
    factor = numbers.get(_MICRO, 1) * numbers.get(_STEPS, 1)
    if train is not None and train % factor:
        parts = " · ".join(str(numbers[key]) for key in (_MICRO, _STEPS) if key in numbers)
        fix = f"write {max(train // factor, 1) * factor} or {(train // factor + 1) * factor}"
        report.error(_TRAIN, f"must be a multiple of micro batch and accumulation, {parts} = {factor}", fix)
