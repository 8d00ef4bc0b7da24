"""Results of the page as HTML: a plan, a plan that does not fit, errors, and findings of `check`."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...ds_configs.check import Finding, check_text, detect_kind, parse_report
from ...ds_configs.plan.plan import PlanDoesNotFitError
from ...ds_configs.search.run_estimates import doubts
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
"""Longest excerpt of a pasted line, in characters."""


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
    """Return seconds with three significant digits, but at most milliseconds.

    >>> shown_seconds(2.3567), shown_seconds(0.0004), shown_seconds(1234.5)
    ('2.36', '0.000', '1,234')
    """
    digits = 0 if seconds >= 100 else 1 if seconds >= 10 else 2 if seconds >= 1 else 3
    return f"{seconds:,.{digits}f}"


def plan_view(result: Planned) -> str:
    plan = result.plan
    chosen = shown_layout(plan.chosen, chosen=True)
    layouts = [chosen, *map(shown_layout, plan.rejected)]
    texts = {name: content for name, content in result.files.items() if isinstance(content, str)}
    return _render(
        "plan",
        plan=plan,
        chosen=chosen,
        gpu=plan.chosen.memory.gpu,
        host=plan.chosen.memory.host,
        time=plan.chosen.time,
        notes=[
            *(("Run:", answer) for answer in result.answers),
            *(("Teacher:", teacher.reason) for teacher in (plan.chosen.teacher,) if teacher is not None),
            *(("Changes the results:", str(offer)) for offer in plan.offers),
            *(("Note:", text) for text in result.notes),
            *(("Less certain:", doubt) for doubt in doubts(plan.chosen.strategy, plan.model, plan.hardware, plan.job)),
        ],
        memory=phases_chart(plan),
        times=time_rows(plan.chosen.time),
        layouts=layouts,
        chart=layout_chart(layouts, plan.pareto, capacity_bytes=plan.hardware.gpu_bytes),
        name=result.name,
        archive=base64.b64encode(archive(result.files.items(), directory=result.name)).decode(),
        shared=is_shared_by(result.settings),
        command=command_of(result.settings),
        files=texts,
    )


def misfit_view(error: PlanDoesNotFitError) -> str:
    """Return the layouts that do not fit, and changes that would."""
    layouts = [shown_layout(candidate) for candidate in error.tried]
    chart = layout_chart(layouts, (), capacity_bytes=error.hardware.gpu_bytes)
    closest = str(error).splitlines()[0]
    return _render("misfit", error=error, closest=closest, layouts=layouts, chart=chart)


def errors_view(error: ShardwrightError) -> str:
    return _render("errors", lines=str(error).splitlines())


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownFinding:
    """A finding with its line."""

    kind: str
    line: int
    """Line number from 1; 0 for the whole text."""
    key: str
    value: str
    """Shortened Python literal; empty if a key is missing."""
    rule: str
    fix: str
    text: str


def findings_view(text: str, facts: CheckedFor) -> str:
    world_size, uses_transformers = facts.num_processes, facts.transformers
    findings = check_text(text, filename=_PASTED, world_size=world_size, uses_transformers=uses_transformers)
    lines = text.splitlines() if findings else []
    shown = sorted((_shown(finding, lines) for finding in findings), key=lambda finding: finding.kind != "error")
    errors = sum(finding.kind == "error" for finding in shown)
    root, _ = parse_report(text, _PASTED)
    kind = "an unknown format" if root is None else _KINDS[detect_kind(root, _PASTED)]
    return _render("findings", findings=shown, errors=errors, kind=kind)


def _shown(finding: Finding, lines: list[str]) -> ShownFinding:
    error = finding.error
    number, _, key = error.where.removeprefix(f"{_PASTED}:").partition(" ")
    line = int(number) if number.isdecimal() else 0
    value = str(error).removeprefix(f"{error.where} = ").removesuffix(f"; {error.fix}").removesuffix(f": {error.rule}")
    return ShownFinding(
        kind=finding.kind,
        line=line,
        key=key,
        value="" if error.value is None else value,
        rule=error.rule,
        fix=error.fix,
        text=lines[line - 1][:_LONGEST_LINE] if 0 < line <= len(lines) else "",
    )
