"""The entry points: one file, and an Accelerate YAML together with the DeepSpeed JSON that it names."""

from __future__ import annotations

from .accelerate import check_accelerate
from .combinations import (
    check_combinations,
    columns_of_accelerate,
    columns_of_deepspeed,
    settings_of_accelerate,
    settings_of_deepspeed,
)
from .deepspeed import check_deepspeed
from .parsing import detect_kind, parse
from .report import Finding, Report, from_problem, in_order
from .tree import Node


def check_text(
    text: str | bytes, *, filename: str, world_size: int | None = None, uses_transformers: bool = True
) -> tuple[Finding, ...]:
    """Return everything wrong with one configuration file; never raises, whatever the bytes.

    `world_size` is the number of processes of the run, when known. `uses_transformers` says whether
    a Transformers Trainer reads the file, which fills some `auto` values and compares others.
    """
    root, findings = parse_report(text, filename)
    if root is not None:
        findings += _check_tree(root, filename, world_size, uses_transformers)
    return in_order(findings, filename)


def parse_report(text: str | bytes, filename: str) -> tuple[Node | None, list[Finding]]:
    """Return the tree of a file, `None` unless it holds a mapping, and what is wrong with its syntax."""
    parsed = parse(text, filename)
    findings = [from_problem(problem, filename) for problem in parsed.problems]
    root = parsed.root
    if root is not None and root.kind != "mapping":
        report = Report(root, filename)
        empty = root.kind == "scalar" and root.scalar is None
        rule = "the file is empty" if empty else "the file must hold a mapping of keys to values"
        report.error("", rule, value=None if empty else root.plain())
        return None, findings + report.findings
    return root, findings


def _check_tree(root: Node, filename: str, world_size: int | None, uses_transformers: bool) -> list[Finding]:
    report = Report(root, filename)
    if not root.entries:
        report.error("", "the file holds no key")
    elif detect_kind(root, filename) == "accelerate":
        check_accelerate(report, world_size=world_size)
    else:
        check_deepspeed(report, world_size=world_size, uses_transformers=uses_transformers)
    return report.findings


def check_pair(
    accelerate: tuple[Node, str],
    deepspeed: tuple[Node, str],
    *,
    world_size: int | None,
    uses_transformers: bool,
) -> tuple[Finding, ...]:
    """Check a DeepSpeed JSON as the Accelerate YAML that names it will use it."""
    launch, config = Report(*accelerate), Report(*deepspeed)
    processes = launch.integer("num_processes") or world_size
    check_deepspeed(config, world_size=_ranks(launch, processes), uses_transformers=uses_transformers)
    _check_precision(launch, config)
    if uses_transformers:
        check_combinations(settings_of_deepspeed(config), columns_of_accelerate(launch))
        check_combinations(settings_of_accelerate(launch), columns_of_deepspeed(config))
    if not config.has("zero_optimization") and not uses_transformers:
        config.error("zero_optimization", "is missing, and Accelerate refuses such a config", "add the section")
    init = str(launch.value("deepspeed_config.zero3_init_flag")).lower()
    stage = config.integer("zero_optimization.stage")
    if init == "true" and stage is not None and stage != 3:
        rule = f"has no effect: {config.filename} asks for stage {stage}"
        launch.warning("deepspeed_config.zero3_init_flag", rule, "remove the key")
    return (*launch.findings, *in_order(config.findings, config.filename))


def _ranks(launch: Report, processes: int | None) -> int | None:
    """Return the data-parallel processes: sequence-parallel ranks share one batch."""
    sequence = launch.integer("parallelism_config.parallelism_config_sp_size") or 1
    return processes // sequence if processes and sequence >= 1 and processes % sequence == 0 else None


def _check_precision(launch: Report, config: Report) -> None:
    wanted = launch.text("mixed_precision")
    opposite = {"bf16": "fp16", "fp8": "fp16", "fp16": "bf16"}.get(wanted or "")
    if opposite is not None and config.true(f"{opposite}.enabled"):
        rule = f"conflicts with {opposite}.enabled in {config.filename}"
        launch.error("mixed_precision", rule, "remove mixed_precision here: the DeepSpeed JSON decides")
    fp8 = launch.has("fp8_config") and config.true("fp16.enabled")
    if fp8:
        launch.error("fp8_config", f"needs bf16, but {config.filename} enables fp16", "enable bf16 instead")
