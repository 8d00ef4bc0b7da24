"""Reference pages from the code itself: commands and flags, JSON schemas, and the public Python API.

`python tools/reference.py` writes them to docs/reference; a test holds them to the code.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest import mock

from shardwright.cli.commands.schema import schema_command
from shardwright.cli.main import build_app, run
from shardwright.ds_configs.legality.combinations import COLUMNS, ONLY_ON_ACCELERATORS, SETTINGS, cell, every_cell

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"
ERRORS = {
    "ShardwrightError": ROOT / "ds_configs" / "specs" / "errors.py",
    "UsageError": ROOT / "ds_configs" / "specs" / "errors.py",
    "DoesNotFitError": ROOT / "ds_configs" / "specs" / "errors.py",
    "PlanDoesNotFitError": ROOT / "ds_configs" / "plan" / "plan.py",
    "RefusedInputError": ROOT / "ds_configs" / "specs" / "errors.py",
    "NonFiniteError": ROOT / "trainers" / "guards" / "callback.py",
    "StoppedBySignalError": ROOT / "trainers" / "guards" / "signals.py",
}
"""What the public names raise, and where it is defined."""
RESULTS = {
    "CheckedFiles": ROOT / "ds_configs" / "check" / "files.py",
    "Finding": ROOT / "ds_configs" / "check" / "report.py",
    "Rehearsal": ROOT / "trainers" / "rehearsal" / "report.py",
    "Check": ROOT / "trainers" / "rehearsal" / "checks.py",
    "LaunchedOutcome": ROOT / "trainers" / "runs" / "report.py",
    "StepResult": ROOT / "trainers" / "runs" / "report.py",
    "TrainOutcome": ROOT / "trainers" / "training" / "report.py",
    "TrainResult": ROOT / "trainers" / "training" / "report.py",
    "DistillationOutcome": ROOT / "trainers" / "distillation" / "command" / "run_report.py",
    "DistillationResult": ROOT / "trainers" / "distillation" / "command" / "run_report.py",
    "QATOutcome": ROOT / "trainers" / "qat" / "command" / "run_report.py",
    "QATResult": ROOT / "trainers" / "qat" / "command" / "run_report.py",
    "StudentReport": ROOT / "trainers" / "distillation" / "student" / "maker.py",
    "QuantizationOutcome": ROOT / "trainers" / "quantization" / "report.py",
    "Evaluation": ROOT / "trainers" / "evaluation" / "result.py",
    "ModelResult": ROOT / "trainers" / "evaluation" / "result.py",
    "Comparison": ROOT / "trainers" / "evaluation" / "result.py",
    "Estimate": ROOT / "trainers" / "evaluation" / "estimates.py",
    "RunMeasurement": ROOT / "ds_configs" / "plan" / "measurement.py",
}
"""What the public functions return, and what it is made of, in the order in which a model goes through them."""
_MADE = "Made by `make readme` from the code; do not edit.\n"
_SOURCES = """
Hyphen and underscore are both accepted. The same names are keys of the YAML file of `--config`,
and each option is a variable too: `--seq-len` of `plan` is `SHARDWRIGHT_PLAN_SEQ_LEN`.
Defaults < file < environment < flag: [settings](../guides/settings.md).
"""


def commands_page() -> str:
    """Every command and flag, as the application that parses them describes itself."""
    # cyclopts 5.4.0 leaves a part of `python -m NAME`, by which a program was started, in the usage of nested commands.
    app = build_app()
    # So it does with the variables of options, whose names lack the command; the page says the rule instead.
    app.config = ()
    with mock.patch.object(sys, "argv", ["shardwright"]):
        described = app.generate_docs(output_format="markdown", usage_name="shardwright")
    # The heading and the contents of cyclopts repeat the list of commands, which says more.
    commands = described[described.index("**Commands**") :]
    # Its links drop hyphens that the anchors of headings keep.
    commands = commands.replace("(#shardwright-install-completion)", "(#shardwright---install-completion)")
    lines = [re.sub(r"^( *\S.*?) *$", r"\1", line) for line in commands.splitlines()]
    return f"# Commands and flags\n\n{_MADE}{_SOURCES}\n" + "\n".join(lines).replace("**Commands**:\n\n", "") + "\n"


def schema_page() -> str:
    """The files that Shardwright reads and writes, field by field."""
    parts = [
        "# JSON schemas\n",
        _MADE,
        "`shardwright schema NAME` prints the whole schema, for editors and programs.\n",
    ]
    for subject in get_args(get_type_hints(schema_command)["subject"]):
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
    proven = sum(one.is_proven for one in cells)
    reasons = list(dict.fromkeys(one.reason for one in cells if one.reason))
    parts = [
        "# What combines with what\n",
        _MADE,
        f"{proven} pairs are proven by a test, {len(cells) - proven} are refused before the first step, none is open.",
        "A run stands in one column for its engine and in one for each axis; the planner, the callbacks and the",
        "trainers read the same table (`ds_configs/legality/combinations.py`). ✓: trained and compared with one",
        "process. A number: refused, for the reason below.\n",
        "| | " + " | ".join(f"`{column}`" for column in COLUMNS) + " |",
        "|---|" + ":-:|" * len(COLUMNS),
    ]
    for setting, meaning in SETTINGS.items():
        found = [cell(setting, column) for column in COLUMNS]
        marks = ["✓" if one.is_proven else str(reasons.index(one.reason) + 1) for one in found]
        parts.append(f"| {meaning} | " + " | ".join(marks) + " |")
    parts += ["\n## Columns\n", *(f"- `{column}`: {meaning}" for column, meaning in COLUMNS.items())]
    parts += ["\n## Reasons\n", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))]
    tests = sorted({one.proven_by for one in cells if one.proven_by})
    parts += [
        "\n## Tests\n",
        *(f"- `{test}`" for test in tests),
        "\nOne draws layouts with settings at random:",
        "`pytest tests/equivalence/test_combinations.py --draw 50 --seed 7`. 16-bit runs are compared within 0.03",
        "nats, runs with dropout, whose ranks draw other masks, within 0.3, all others within 1e-5. Settings that need",
        "an accelerator are judged by the rules beside the table: "
        + ", ".join(f"`{name}`" for name in sorted(ONLY_ON_ACCELERATORS))
        + ".",
    ]
    return "\n".join(parts) + "\n"


def python_page() -> str:
    """What `shardwright` and `shardwright.trainers` offer, with signatures and docstrings, read without importing."""
    parts = ["# Python API\n", _MADE]
    for package, offered in public_names().items():
        parts.append(f"## {package}\n")
        for name, path, definition in offered:
            parts += [f"### {dotted(package, name, path)}\n", f"In `{path.relative_to(ROOT)}`.\n"]
            parts += [f"```python\n{_signature(name, definition)}\n```\n", f"```text\n{_docstring(definition)}\n```\n"]
            if isinstance(definition, ast.ClassDef):
                parts += [*_field_table(definition), *_methods(name, definition)]
    return "\n".join(parts)


def public_names() -> dict[str, list[tuple[str, Path, ast.ClassDef | ast.FunctionDef]]]:
    """What each public package offers, what it returns and raises: name, file and definition, in their order."""
    further = {
        heading: [(name, path, _defined(name, path)) for name, path in homes.items()]
        for heading, homes in (("Results", RESULTS), ("Errors", ERRORS))
    }
    packages = {"shardwright": ROOT, "shardwright.trainers": ROOT / "trainers"}
    return {package: list(_offered(directory)) for package, directory in packages.items()} | further


def _offered(directory: Path) -> Iterator[tuple[str, Path, ast.ClassDef | ast.FunctionDef]]:
    """Each name that a package offers, with the file and the definition that its type checkers see."""
    tree = ast.parse((directory / "__init__.py").read_text(encoding="utf-8"))
    homes = {
        alias.asname or alias.name: (alias.name, directory.joinpath(*(node.module or "").split(".")).with_suffix(".py"))
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    for shown, (name, path) in sorted(homes.items()):
        yield shown, path, _defined(name, path)


def _defined(name: str, path: Path) -> ast.ClassDef | ast.FunctionDef:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return next(n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)


def dotted(package: str, name: str, path: Path) -> str:
    """The name by which Python imports something public."""
    inside = ".".join(("shardwright", *path.relative_to(ROOT).with_suffix("").parts))
    return f"{inside if package in ('Results', 'Errors') else package}.{name}"


def _docstring(node: ast.ClassDef | ast.FunctionDef) -> str:
    found = ast.get_docstring(node)
    assert found, f"{node.name} is public and has no docstring"
    return found


def _signature(name: str, definition: ast.ClassDef | ast.FunctionDef) -> str:
    """A call as it would be written, one argument a line where it is long."""
    if isinstance(definition, ast.ClassDef):
        made = next((n for n in definition.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        bases = ", ".join(map(ast.unparse, definition.bases))
        return _signature(name, made) if made else f"class {name}({bases})" if bases else f"class {name}"
    arguments = list(_arguments(definition.args))
    returned = f" -> {ast.unparse(definition.returns)}" if definition.returns and definition.name != "__init__" else ""
    whole = f"{name}({', '.join(arguments)}){returned}"
    return whole if len(whole) <= 110 else f"{name}(\n" + "".join(f"    {one},\n" for one in arguments) + f"){returned}"


def _arguments(found: ast.arguments) -> Iterator[str]:
    positional = [*found.posonlyargs, *found.args]
    defaults = [None] * (len(positional) - len(found.defaults)) + list(found.defaults)
    for index, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        if argument.arg not in ("self", "cls"):
            yield _argument(argument, default)
        if index + 1 == len(found.posonlyargs):
            yield "/"
    if found.vararg:
        yield f"*{_argument(found.vararg, None)}"
    elif found.kwonlyargs:
        yield "*"
    for argument, default in zip(found.kwonlyargs, found.kw_defaults, strict=True):
        yield _argument(argument, default)
    if found.kwarg:
        yield f"**{_argument(found.kwarg, None)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")


def _field_table(definition: ast.ClassDef) -> list[str]:
    """The fields of a dataclass, each with the docstring under it."""
    rows = []
    for field, below in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.target).startswith("_"):
            said = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            default = f"`{ast.unparse(field.value)}`" if field.value else ""
            cells = [f"`{ast.unparse(field.target)}`", f"`{ast.unparse(field.annotation)}`", default, str(said)]
            rows.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return ["| field | type | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"] if rows else []


def _methods(name: str, definition: ast.ClassDef) -> list[str]:
    """Public methods that say what they do; hooks that a library calls have no docstring here."""
    found = [item for item in definition.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")]
    return [
        f"```python\n{_signature(f'{name}.{item.name}', item)}\n```\n\n```text\n{_docstring(item)}\n```\n"
        for item in found
        if ast.get_docstring(item)
    ]


MAKERS = {
    "combinations.md": combinations_page,
    "commands.md": commands_page,
    "schema.md": schema_page,
    "python.md": python_page,
}

if __name__ == "__main__":
    for file, make in MAKERS.items():
        (PAGES / file).write_text(make(), encoding="utf-8")
