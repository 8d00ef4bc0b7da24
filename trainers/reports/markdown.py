"""Markdown rendering of reports (`REPORT.md`), and model cards (`README.md`)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...plugins.huggingface_hub.push import Relation, license_of, model_card, shown_name
from .report import Report, pictured_charts

_LINE_ENDS = re.compile(r"[\r\n]+")
_PIPES = re.compile(r"(\\*)\|")
"""A backslash before a pipe would escape the backslash that escapes the pipe."""


def markdown(report: Report, picture_file: str = "") -> str:
    """Return the report as Markdown, with the charts of `picture` in place of the page's drawings."""
    pictured_section, charts = pictured_charts(report)
    blocks = [f"# {report.kind} report", ": ".join(filter(None, (code(report.title), _text(report.subtitle))))]
    facts = [(fact.label, fact.value, fact.detail) for fact in report.facts]
    blocks.append(table(("figure", "value", "detail"), facts))
    for section in report.sections:
        blocks += [f"## {section.heading}", *map(_text, section.texts)]
        if section is pictured_section and picture_file:
            blocks.append(f"![{_text('; '.join(chart.title for chart in charts))}]({picture_file})")
            blocks += [_text(f"{chart.title}: {chart.note}") for chart in charts if chart.note]
        for shown in section.tables:
            blocks += [_text(shown.caption), table(shown.headings, shown.rows)]
    blocks += ["## How this was made", code(report.command) if report.command else "By a Python program."]
    blocks.append(_text(", ".join(f"{name} {version}" for name, version in report.versions.items())))
    return "\n\n".join(filter(None, blocks)) + "\n"


def _text(text: str) -> str:
    return _LINE_ENDS.sub(" ", text).replace("<", r"\<")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table.

    >>> print(table(("a", "b"), [(1, "x|y")]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(_LINE_ENDS.sub(" ", _PIPES.sub(r"\1\1\|", str(cell))) for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def code(value: object) -> str:
    """Return a value as inline code, fenced by more backticks than it contains.

    >>> code("model"), code("a`b")
    ('`model`', '`` a`b ``')
    """
    text = _LINE_ENDS.sub(" ", str(value))
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{text}{space}{fence}"


def usage(adapter: str | None = None) -> str:
    """Return a Python example that loads the model of a card.

    Args:
        adapter: `None` for a complete model, `.` for a directory that is a PEFT adapter, or its subdirectory.
    """
    auto_class = "AutoPeftModelForCausalLM" if adapter == "." else "AutoModelForCausalLM"
    imports = {
        None: ["from transformers import AutoModelForCausalLM, AutoTokenizer"],
        ".": ["from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer"],
    }.get(adapter, ["from peft import PeftModel", "from transformers import AutoModelForCausalLM, AutoTokenizer"])
    lines = [*imports, "", f'model = {auto_class}.from_pretrained(".")']
    if adapter not in (None, "."):
        lines.append(f'model = PeftModel.from_pretrained(model, ".", subfolder="{adapter}")')
    lines += [
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        'inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False).to(model.device)',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0], skip_special_tokens=True))",
    ]
    intro = 'Run this in the directory of this card, or replace `"."` with the model\'s id on the Hub:'
    return "\n".join([intro, "", "```python", *lines, "```"])


def license_line(model: str, label: str = "") -> str:
    """Return the license of a model that a card's model is derived from."""
    return f"{label or code(shown_name(model))}: {license_of(model)}."


def card_text(
    title: str,
    blocks: Sequence[str],
    licenses: str,
    *,
    base: str,
    relation: Relation,
    tags: Sequence[str],
    library: str = "transformers",
    others: Sequence[str] = (),
    task: str | None = "text-generation",
) -> str:
    """Return `README.md` with the metadata that the Hub reads.

    Args:
        title: First heading.
        blocks: Paragraphs, tables and code above the section on licenses; empty ones are omitted.
        licenses: Text of that section.
        base: Hub id or path of the model that the weights come from.
        relation: How they were derived from it.
        tags: Tags on the Hub.
        library: Library that loads the model.
        others: Further models whose license may apply, such as a teacher.
        task: Task on the Hub, if any.
    """
    text = "\n\n".join(filter(None, [f"# {title}", *blocks, "## License", licenses])) + "\n"
    tags = (*tags, "shardwright")
    return model_card(text, base=base, relation=relation, library=library, tags=tags, others=others, task=task)
