"""Renderings of a report: Markdown (`REPORT.md`), HTML of the same text with charts; and model cards (`README.md`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ...plugins.huggingface_hub import Relation, license_of, model_card, shown_name
from .charts import svg
from .report import Report, Table

_LINE_ENDS = re.compile(r"[\r\n]+")
_PIPES = re.compile(r"(\\*)\|")
"""A backslash before a pipe would escape the backslash that escapes the pipe."""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title} – Shardwright</title><style>{style}</style></head>
<body><main>
{body}</main><footer><p>Shardwright {version}{sources}. This file loads nothing from the network.</p></footer>
</body></html>
"""


def html(report: Report) -> str:
    """Return the same Markdown as one HTML file without network access; every text is escaped."""
    from markdown_it import MarkdownIt

    from ... import __version__

    # Without links, pictures and emphasis: a name with an asterisk is shown as it is.
    parser = MarkdownIt("zero").enable(["table", "heading", "backticks", "escape"])
    body = parser.render(markdown(report, charts="\ue000"))
    body = body.replace("<table>", '<div class="table" tabindex="0"><table>').replace("</table>", "</table></div>")
    if report.charts:
        titles = "; ".join(chart.title for chart in report.charts)
        drawn = svg(*(chart.draw for chart in report.charts), title=titles)
        body = body.replace("<p>\ue000</p>", f"<figure>{drawn}</figure>")
    return _PAGE.format(
        title=escape(f"{report.title}: {report.kind.lower()}"),
        style=(Path(__file__).parent / "templates" / "report.css").read_text(encoding="utf-8"),
        body=body,
        version=__version__,
        sources=escape(f", from {', '.join(report.files)}" if report.files else ""),
    )


def markdown(report: Report, *, charts: str = "") -> str:
    """Return the report as Markdown, with the text `charts` and the charts' notes where they are."""
    blocks = [f"# {report.kind} report", ": ".join(filter(None, (code(report.title), _text(report.subtitle))))]
    blocks += _tables(report.summary)
    if report.charts and charts:
        blocks += [charts, *(_text(f"{chart.title}. {chart.note}") for chart in report.charts)]
    for section in report.sections:
        blocks += [f"## {section.heading}", *map(_text, section.texts)]
        blocks += _tables(section.tables)
    blocks += ["## How this was made", code(report.command) if report.command else "By a Python program."]
    blocks.append(_text(", ".join(f"{name} {version}" for name, version in report.versions.items())))
    return "\n\n".join(filter(None, blocks)) + "\n"


def _tables(tables: Sequence[Table]) -> list[str]:
    return [block for shown in tables for block in (_text(shown.caption), table(shown.headings, shown.rows))]


def _text(text: str) -> str:
    return re.sub(r"^[#|`]|<", r"\\\g<0>", _LINE_ENDS.sub(" ", text))


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


def usage(*, adapter: bool = False) -> str:
    """Return a Python example that loads the model of a card, which is complete or a PEFT adapter."""
    auto_class = "AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM"
    imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if adapter:
        imports = ["from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer"]
    lines = [
        *imports,
        "",
        f'model = {auto_class}.from_pretrained(".")',
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
) -> str:
    """Return `README.md` with the metadata that the Hub reads.

    Args:
        title: First heading.
        blocks: Paragraphs, tables and code above the section on licenses; empty ones are omitted.
        licenses: Text of that section.
        others: Further models whose license may apply, such as a second model.
        base, relation, tags, library: As in `model_card`.
    """
    text = "\n\n".join(filter(None, [f"# {title}", *blocks, "## License", licenses])) + "\n"
    tags = (*tags, "shardwright")
    return model_card(text, base=base, relation=relation, library=library, tags=tags, others=others)
