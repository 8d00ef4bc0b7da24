"""Results of the page as HTML: a plan, what does not fit, faults, and findings of `check`."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...ds_configs.check import Finding, check_text, detect_kind, parse_report
from ...ds_configs.plan.plan import PlanDoesNotFitError
from ...ds_configs.search.questions import doubts
from ...ds_configs.specs.errors import ShardwrightError
from ...ds_configs.specs.units import gigabytes, human_count
from ..options import CheckedFor
from .address import command_of, is_shared_by
from .charts import layout_chart, phases_chart, shown_layout, time_rows
from .planned import Planned, archive

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
_PASTED = "pasted text"
_KINDS = {"deepspeed": "DeepSpeed JSON", "accelerate": "Accelerate YAML"}
_LONGEST_LINE = 500
"""Characters of a pasted line that are shown."""


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gigabytes": gigabytes, "human_count": human_count, "seconds": shown_seconds}
    return environment


def _render(template: str, **values: object) -> str:
    return _environment().get_template(f"{template}.html.j2").render(**values)


def shown_seconds(seconds: float) -> str:
    """Return seconds with three digits that count, and no more than milliseconds.

    >>> shown_seconds(2.3567), shown_seconds(0.0004), shown_seconds(1234.5)
    ('2.36', '0.000', '1,234')
    """
    digits = 0 if seconds >= 100 else 1 if seconds >= 10 else 2 if seconds >= 1 else 3
    return f"{seconds:,.{digits}f}"


def plan_view(found: Planned) -> str:
    """Return a plan with its charts, its alternatives and its files, which lie in the link to download them."""
    plan = found.plan
    chosen = shown_layout(plan.chosen, chosen=True)
    layouts = [chosen, *map(shown_layout, plan.rejected)]
    texts = {name: content for name, content in found.files.items() if isinstance(content, str)}
    return _render(
        "plan",
        plan=plan,
        chosen=chosen,
        gpu=plan.chosen.memory.gpu,
        host=plan.chosen.memory.host,
        time=plan.chosen.time,
        remarks=list(_remarks(found)),
        memory=phases_chart(plan),
        times=time_rows(plan.chosen.time),
        layouts=layouts,
        chart=layout_chart(layouts, plan.pareto, capacity_bytes=plan.hardware.gpu_bytes),
        name=found.name,
        archive=base64.b64encode(archive(found.files.items(), directory=found.name)).decode(),
        shared=is_shared_by(found.settings),
        command=command_of(found.settings),
        files=texts,
    )


def _remarks(found: Planned) -> Iterator[tuple[str, str]]:
    plan = found.plan
    for answer in found.answers:
        yield "Asked:", answer
    if plan.chosen.teacher is not None:
        yield "Teacher:", plan.chosen.teacher.reason
    for offer in plan.offers:
        yield "Changes the numbers:", str(offer)
    for remark in found.remarks:
        yield "Note:", remark
    for doubt in doubts(plan.chosen.strategy, plan.model, plan.hardware, plan.job):
        yield "Less sure:", doubt


def misfit_view(error: PlanDoesNotFitError) -> str:
    """Return what was tried, and what would fit."""
    layouts = [shown_layout(candidate) for candidate in error.tried]
    chart = layout_chart(layouts, (), capacity_bytes=error.hardware.gpu_bytes)
    closest = str(error).splitlines()[0]
    return _render("misfit", error=error, closest=closest, layouts=layouts, chart=chart)


def faults_view(error: ShardwrightError) -> str:
    """Return an error as the command line prints it, a line for each fault."""
    return _render("faults", lines=str(error).splitlines())


def found_view(names: Sequence[str]) -> str:
    """Return what a search brought."""
    said = f"{len(names)} found: pick one under Model" if names else "Nothing was found"
    return _render("found", said=said)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownFinding:
    """A finding beside the line that it is about."""

    kind: str
    line: int
    """Counted from 1; 0 where it is about the whole text."""
    key: str
    value: str
    """As Python writes it, shortened; empty where something is missing."""
    rule: str
    fix: str
    text: str
    """The line; empty without one."""


def findings_view(text: str, facts: CheckedFor) -> str:
    """Return what `check` finds in a pasted configuration, each with its line."""
    world_size, uses_transformers = facts.num_processes, facts.transformers
    findings = check_text(text, filename=_PASTED, world_size=world_size, uses_transformers=uses_transformers)
    lines = text.splitlines() if findings else []
    found = sorted((_shown(finding, lines) for finding in findings), key=lambda one: one.kind != "error")
    errors = sum(one.kind == "error" for one in found)
    return _render("findings", found=found, errors=errors, kind=_kind(text))


def _kind(text: str) -> str:
    root, _ = parse_report(text, _PASTED)
    return "no configuration" if root is None else _KINDS[detect_kind(root, _PASTED)]


def _shown(finding: Finding, lines: list[str]) -> ShownFinding:
    fault = finding.fault
    number, _, key = fault.where.removeprefix(f"{_PASTED}:").partition(" ")
    line = int(number) if number.isdecimal() else 0
    value = str(fault).removeprefix(f"{fault.where} = ").removesuffix(f"; {fault.fix}").removesuffix(f": {fault.rule}")
    return ShownFinding(
        kind=finding.kind,
        line=line,
        key=key,
        value="" if fault.value is None else value,
        rule=fault.rule,
        fix=fault.fix,
        text=lines[line - 1][:_LONGEST_LINE] if 0 < line <= len(lines) else "",
    )
