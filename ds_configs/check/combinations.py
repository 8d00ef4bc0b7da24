"""Pairs of the table of combinations that configuration files state, and that are refused before training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..legality.combinations import COLUMNS, SETTINGS, cell
from .report import Report

_OPTIMIZERS = {
    "adam": "adamw_torch",
    "adamw": "adamw_torch",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rmsprop": "rmsprop",
    "adafactor": "adafactor",
}
_MADE_BY_DEEPSPEED = frozenset({("sgd", "zero_offload"), ("rmsprop", "zero_offload")})
"""Accelerate replaces optimizers that the Trainer makes, and none that the DeepSpeed JSON names."""
_DEVICES = ("MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """A setting or a column of the table, and where a file states it."""

    name: str
    """A key of `SETTINGS` or `COLUMNS`."""
    report: Report
    """Of the file."""
    path: str
    """Key that states it."""


def check_combinations(settings: Iterator[Stated], columns: Iterator[Stated]) -> None:
    """Report each pair of what files state that no test proves, where its setting stands."""
    places = list(columns)
    for setting in settings:
        refused: dict[str, list[str]] = {}
        for column in places:
            found = cell(setting.name, column.name)
            if not found.is_proven and (setting.name, column.name) not in _MADE_BY_DEEPSPEED:
                refused.setdefault(found.reason, []).append(COLUMNS[column.name])
        proven = [other for other in COLUMNS if cell(setting.name, other).is_proven]
        fix = f"proven with {', '.join(proven)}" if proven else "leave it out"
        for reason, where in refused.items():
            rule = f"{SETTINGS[setting.name]} with {', '.join(where)} {reason}"
            setting.report.warning(setting.path, rule, fix)


def check_deepspeed_combinations(report: Report) -> None:
    """Check what a DeepSpeed JSON states by itself, as a Trainer reads it."""
    check_combinations(settings_of_deepspeed(report), columns_of_deepspeed(report))
    path = next((one.path for one in columns_of_deepspeed(report) if one.name == "tp"), None)
    if path is not None and not any(report.has(section) for section in ("bf16", "bfloat16", "fp16")):
        rule = "divides the model in fp32 where no section names a precision, whatever TrainingArguments say"
        report.warning(path, rule, 'write "bf16": {"enabled": "auto"}')


def settings_of_deepspeed(report: Report) -> Iterator[Stated]:
    """Yield the settings that a DeepSpeed JSON states."""
    optimizer = _OPTIMIZERS.get((report.text("optimizer.type") or "").lower())
    if optimizer is not None:
        yield Stated(name=optimizer, report=report, path="optimizer.type")
    for name, path in (("bf16", "bf16.enabled"), ("compile", "compile.deepcompile")):
        if report.true(path):
            yield Stated(name=name, report=report, path=path)


def columns_of_deepspeed(report: Report) -> Iterator[Stated]:
    """Yield the columns that a DeepSpeed JSON stands in."""
    stage = report.integer("zero_optimization.stage") if report.has("zero_optimization.stage") else 0
    if stage in (0, 1, 2, 3):
        yield Stated(name=f"zero{stage}", report=report, path="zero_optimization.stage")
    for part in ("optimizer", "param"):
        path = f"zero_optimization.offload_{part}.device"
        if report.text(path) in ("cpu", "nvme"):
            yield Stated(name="zero_offload", report=report, path=path)
            break
    sizes = {
        "sp": "sequence_parallel_size",
        "tp": "tensor_parallel.autotp_size",
        "ep": "expert_parallel.autoep_size",
    }
    for name, path in sizes.items():
        enabled = name != "ep" or report.true("expert_parallel.enabled")
        if enabled and (report.integer(path) or 1) > 1:
            yield Stated(name=name, report=report, path=path)


def settings_of_accelerate(report: Report) -> Iterator[Stated]:
    """Yield the settings that an Accelerate YAML hands to the processes."""
    kind = report.text("distributed_type")
    if report.text("mixed_precision") == "bf16":
        yield Stated(name="bf16", report=report, path="mixed_precision")
    for path in ("dynamo_config.dynamo_backend", "dynamo_config.backend"):
        if kind != "DEEPSPEED" and (report.text(path) or "no").lower() != "no":
            yield Stated(name="compile", report=report, path=path)
    path = "fsdp_config.fsdp_activation_checkpointing"
    if kind == "FSDP" and str(report.value(path)).lower() == "true":
        yield Stated(name="gradient_checkpointing", report=report, path=path)


def columns_of_accelerate(report: Report) -> Iterator[Stated]:
    """Yield the columns that an Accelerate YAML stands in, without those of a DeepSpeed JSON that it names."""
    kind = report.text("distributed_type")
    if kind in _DEVICES:
        yield Stated(name="ddp", report=report, path="distributed_type")
    version = report.value("fsdp_config.fsdp_version") or report.value("fsdp_config.version")
    if kind == "FSDP" and str(version) == "2":
        yield Stated(name="fsdp2", report=report, path="distributed_type")
        path = "fsdp_config.fsdp_offload_params"
        if str(report.value(path)).lower() == "true":
            yield Stated(name="fsdp2_offload", report=report, path=path)
    stage = report.integer("deepspeed_config.zero_stage")
    if kind == "DEEPSPEED" and stage in (0, 1, 2, 3):
        yield Stated(name=f"zero{stage}", report=report, path="deepspeed_config.zero_stage")
    for name in ("sp", "cp"):
        path = f"parallelism_config.parallelism_config_{name}_size"
        if (report.integer(path) or 1) > 1:
            yield Stated(name=name, report=report, path=path)
