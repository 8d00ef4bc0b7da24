"""Parts of the documentation site that are made from the code while it is built.

A page of docs/ marks where a part goes: `<!-- built: commands -->`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from unittest import mock

from cyclopts import App
from shardwright.cli.commands.configuration import SUBJECTS
from shardwright.cli.main import build_app, run
from shardwright.ds_configs.legality.combinations import (
    COLUMNS,
    ONLY_ON_ACCELERATORS,
    SETTINGS,
    TRAINERS,
    cell,
    every_cell,
)
from shardwright.ds_configs.legality.trainer_parameters import LAYOUTS, PARAMETERS
from shardwright.ds_configs.legality.trainer_parameters import TABLE as PARAMETER_TABLE
from shardwright.trainers.checkpoints import RULES

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("ds_configs", "plugins", "trainers", "cli")
ERRORS = (
    *("ShardwrightError", "UsageError", "DoesNotFitError", "PlanDoesNotFitError", "RefusedInputError"),
    *("NonFiniteError", "StoppedBySignalError"),
)
"""What the public names raise."""
RESULTS = (
    *("CheckedFiles", "Finding", "Rehearsal", "Check", "LaunchedOutcome", "StepResult", "TrainOutcome", "TrainResult"),
    *("DistillationOutcome", "DistillationResult", "QATOutcome", "QATResult", "StudentReport"),
    *("QuantizationOutcome", "Evaluation", "ModelResult", "Comparison", "Estimate", "RunMeasurement"),
)
"""What the public functions return, and what it consists of, in the order in which a model goes through them."""


@cache
def command_pages() -> dict[str, str]:
    """Return a page for each command with all of its flags, by command, as the application describes itself."""
    # cyclopts 5.4.0 keeps a part of `python -m NAME`, which started the program, in the usage of nested commands.
    app = build_app()
    # It also shows the environment variables of options without the name of the command; the page states the rule.
    app.config = ()
    # Cyclopts 5.4.0 documents only subcommands of the application's own class.
    app.__class__ = App
    with mock.patch.object(sys, "argv", ["shardwright"]):
        described = app.generate_docs(output_format="markdown", usage_name="shardwright")
    _, *sections = re.split(r"^## shardwright (?=[a-z])", described, flags=re.MULTILINE)
    pages = {}
    for section in sections:
        text = re.sub(r"^(#+) shardwright", lambda match: match[0][1:], section, flags=re.MULTILINE)
        text = text.partition("\n## shardwright --")[0]
        lines = [re.sub(r"^( *\S.*?) *$", r"\1", line) for line in text.splitlines()]
        pages[section.partition("\n")[0]] = "# shardwright " + "\n".join(lines).rstrip() + "\n"
    return pages


def commands_list() -> str:
    """Return a table of the commands with the first sentence of each, and the navigation to their pages."""
    rows = ["| command | |", "|---|---|"]
    for name, page in command_pages().items():
        sentence = next(line for line in page.split("```\n", 1)[1].splitlines() if line)
        rows.append(f"| [`{name}`](commands/{name}.md) | {sentence} |")
    return "\n".join(rows) + "\n\n" + _hidden_contents(f"commands/{name}" for name in command_pages())


def _hidden_contents(pages: Iterable[str]) -> str:
    return "```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def schema_page() -> str:
    """The files that Shardwright reads and writes, field by field."""
    parts = []
    for subject in SUBJECTS:
        printed = StringIO()
        with redirect_stdout(printed):
            run(["schema", subject])
        schema = json.loads(printed.getvalue())
        parts += [f"## {subject}\n", *_described(schema), _fields(schema)]
        for name, definition in schema.get("$defs", {}).items():
            parts += [f"### {subject}: {name}\n", *_described(definition)]
            parts.append(_fields(definition) if "properties" in definition else f"`{_kind(definition)}`\n")
    return "\n".join(parts)


def _described(schema: Mapping[str, Any]) -> list[str]:
    text = schema.get("description", "")
    return [text.split("\n\n")[0].replace("\n", " ") + "\n"] if text else []


def _fields(schema: Mapping[str, Any]) -> str:
    rows = ["| field | type | default | |", "|---|---|---|---|"]
    for name, field in schema["properties"].items():
        default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
        meaning = field.get("description", "").replace("\n", " ").replace("|", "\\|")
        rows.append(f"| `{name}` | {_kind(field)} | {default} | {meaning} |")
    return "\n".join(rows) + "\n"


def _kind(field: Mapping[str, Any]) -> str:
    """The type of a field in words; a definition of the same schema by its name."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return f"list of {_kind(field['items'])}" if "items" in field else "list"
    kinds = field.get("type", "any")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def combinations_page() -> str:
    """The table of what a training run may combine, with the reason of each refusal."""
    cells = every_cell()
    proven = sum(pair.is_proven for pair in cells)
    reasons = list(dict.fromkeys(pair.reason for pair in cells if pair.reason))
    parts = [
        f"{proven} pairs are proven by a test, {len(cells) - proven} are rejected before the first step.\n",
        "| | " + " | ".join(f"`{column}`" for column in COLUMNS) + " |",
        "|---|" + ":-:|" * len(COLUMNS),
    ]
    parts += _rows(SETTINGS, reasons)
    of_trainers = every_cell(TRAINERS)
    parts += [
        "\n## Trainers\n",
        f"{sum(one.is_proven for one in of_trainers)} of these pairs are proven,",
        f"{sum(not one.is_proven for one in of_trainers)} rejected by `shardwright.trainer_for`, none is open.",
        "A subclass is in the row of its nearest base. What a configuration adds, such as packing or a mixture's",
        "load-balancing loss, is in the table above too: a run needs both rows.\n",
        "| | " + " | ".join(f"`{column}`" for column in COLUMNS) + " |",
        "|---|" + ":-:|" * len(COLUMNS),
        *_rows(TRAINERS, reasons),
    ]
    parts += ["\n## Columns\n", *(f"- `{column}`: {meaning}" for column, meaning in COLUMNS.items())]
    parts += ["\n## Reasons\n", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))]
    parts += _parameter_table()
    tests = sorted({proof.proven_by for proof in [*cells, *PARAMETER_TABLE.values()] if proof.proven_by})
    parts += [
        "\n## Tests\n",
        *(f"- `{test}`" for test in tests),
        "\nThe table does not contain settings that need an accelerator; rules of their own decide on them: "
        + ", ".join(f"`{name}`" for name in sorted(ONLY_ON_ACCELERATORS))
        + ".",
    ]
    return "\n".join(parts) + "\n"


def _rows(rows: Mapping[str, str], reasons: list[str]) -> list[str]:
    lines = []
    for row, meaning in rows.items():
        found = [cell(row, column) for column in COLUMNS]
        marks = ["✓" if one.is_proven else str(reasons.index(one.reason) + 1) for one in found]
        lines.append(f"| {meaning} | " + " | ".join(marks) + " |")
    return lines


def _parameter_table() -> list[str]:
    """What `trainer_for` does with each parameter of the Trainer and of TRL's trainers, with reasons and fixes."""
    rejected = [each for each in PARAMETER_TABLE.values() if not each.is_proven]
    reasons = list(dict.fromkeys((each.reason, each.fix) for each in rejected))
    parts = [
        "\n## Parameters of trainers\n",
        "What `shardwright.trainer_for` does with each parameter. ✓: the same as in one process, if the trainer class",
        "supports the layout. A letter: rejected, for the reason below.\n",
        "| | " + " | ".join(f"`{layout}`" for layout in LAYOUTS) + " |",
        "|---|" + ":-:|" * len(LAYOUTS),
    ]
    for parameter in PARAMETERS:
        decisions = [PARAMETER_TABLE[parameter, layout] for layout in LAYOUTS]
        marks = [
            "✓" if each.is_proven else ascii_lowercase[reasons.index((each.reason, each.fix))] for each in decisions
        ]
        parts.append(f"| `{parameter}` | " + " | ".join(marks) + " |")
    named = zip(ascii_lowercase, reasons, strict=False)
    return [*parts, "", *(f"- {letter}: {reason}. Fix: {fix}." for letter, (reason, fix) in named)]


@cache
def api_pages() -> dict[str, str]:
    """Return pages that autodoc fills: what `shardwright` and `shardwright.trainers` export, its results and errors."""
    packages = {"shardwright": ROOT, "shardwright.trainers": ROOT / "trainers"}
    sections = {
        name: [(f"{name}.{shown}", definition) for shown, definition in _offered(directory)]
        for name, directory in packages.items()
    }
    for heading, names in (("Results", RESULTS), ("Errors", ERRORS)):
        sections[heading] = [_class_of_package(name) for name in names]
    pages = {}
    for heading, definitions in sections.items():
        parts = [f"# {heading}\n"]
        for dotted, definition in definitions:
            name = dotted.rpartition(".")[2]
            is_class = isinstance(definition, ast.ClassDef)
            directive = "autoexception" if name in ERRORS else "autoclass" if is_class else "autofunction"
            options = ["   :show-inheritance:"] if isinstance(definition, ast.ClassDef) and definition.bases else []
            options += ["   :members:"] if directive == "autoclass" else []
            described = "\n".join([f".. {directive}:: {dotted}", *options])
            parts.append(f"## {name}\n\n```{{eval-rst}}\n{described}\n```\n")
        pages[heading.lower()] = "\n".join(parts)
    return pages


def api_list() -> str:
    """Return the names on each page of the Python API, and the navigation to these pages."""
    rows = ["| page | names |", "|---|---|"]
    for name, page in api_pages().items():
        names = ", ".join(f"`{each}`" for each in re.findall(r"^## (\w+)$", page, flags=re.MULTILINE))
        rows.append(f"| [{name}](python/{name}.md) | {names} |")
    return "\n".join(rows) + "\n\n" + _hidden_contents(f"python/{name}" for name in api_pages())


def _offered(directory: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Each name that a package offers, with the definition that type checkers see."""
    homes = {
        alias.asname or alias.name: (alias.name, directory.joinpath(*(node.module or "").split(".")).with_suffix(".py"))
        for node in ast.walk(_parsed(directory / "__init__.py"))
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    for shown, (name, path) in sorted(homes.items()):
        yield shown, next(node for node in _parsed(path).body if getattr(node, "name", None) == name)


def _class_of_package(name: str) -> tuple[str, ast.stmt]:
    """The full name of a class that no public package offers, and its definition."""
    for path in (path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))):
        for node in _parsed(path).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return ".".join(("shardwright", *path.relative_to(ROOT).with_suffix("").parts, name)), node
    raise LookupError(f"no class {name} in the package: correct RESULTS or ERRORS in tools/reference.py")


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def accelerators() -> str:
    """Return one row for each accelerator of the catalog."""
    catalog = tomllib.loads((ROOT / "ds_configs" / "data" / "gpus.toml").read_text(encoding="utf-8"))
    rows = [
        "| name | usable GB | dense 16-bit TFLOP/s | memory GB/s | link GB/s | source |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, gpu in catalog.items():
        usable = gpu["usable_gib"] * 2**30 / 1e9
        figures = (gpu["bf16_flops"] / 1e12, gpu["memory_bytes_per_s"] / 1e9, gpu["link_bytes_per_s"] / 1e9)
        shown = " | ".join(f"{figure:,.0f}" for figure in figures)
        rows.append(f"| `{name}` | {usable:.1f} | {shown} | {gpu['source']} |")
    return "\n".join(rows)


def resume_rules() -> str:
    """One row for each fact that a resumed run is compared by."""
    rows = [f"| `{rule.fact}` | {rule.action} | {rule.why} |" for rule in RULES]
    return "\n".join(["| fact that differs | consequence | reason |", "|---|---|---|", *rows])


PARTS = {
    "accelerators": accelerators,
    "api": api_list,
    "combinations": combinations_page,
    "commands": commands_list,
    "resume rules": resume_rules,
    "schemas": schema_page,
}
"""The parts by the names that pages give them."""
_MARK = re.compile(r"<!-- built: ([a-z ]+) -->")


def with_parts(page: str) -> str:
    """A page with the parts that it marks."""
    return _MARK.sub(lambda mark: PARTS[mark[1]](), page)
