"""What pages refer to exists: links, files, commands, flags, modules. Blocks that run print what they show."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT
from runnable_blocks import agrees, marked_blocks, prepare, run_page
from shardwright.cli.main import build_app

READ = [ROOT / "README.md", ROOT / "SKILL.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALL = [ROOT / "CHANGELOG.md", *READ]
FENCED = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
FLAGS_OF_OTHERS = {
    *("--write", "--change", "--strict", "--every", "--engine-python", "--meter"),  # benchmarks and tools
    *("--converter", "--llama-python", "--torchao", "--real"),  # benchmarks
    "--exclude",  # hf upload
    "--autotuning",  # DeepSpeed's launcher
    *("--no-deps", "--no-binary", "--outfile", "--outtype"),  # pip, llama.cpp's converter
    *("--stored", "--terms", "--kept-products"),
    *("--nproc-per-node", "--standalone"),  # torchrun
    *("--enable-prefix-caching", "--lora-modules", "--max-lora-rank", "--speculative-config"),  # vLLM
    "--tasks",  # lm-evaluation-harness
    "--all-files",  # pre-commit
    *("--hypothesis-profile", "--hypothesis-seed", "--draw", "--seed", "--pictures"),  # pytest
    *("--dist", "--durations"),
    *("--partition", "--time", "--deepspeed", "--install-completion"),  # sbatch, Transformers, ours without a command
    "--help",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[str, str]]:
    """Targets and anchors of the links of a page, except links to the web."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text)
    return [(target, anchor) for target, anchor in found if not target.startswith("http")]


def test_links_have_a_target():
    errors = []
    for page in ALL:
        for target, anchor in links(page):
            to = (page.parent / target).resolve() if target else page
            # Headings of parts that are made from the code exist on the site only; `make docs` checks links to them.
            if not to.exists() or (
                anchor and "<!-- built: " not in to.read_text(encoding="utf-8") and anchor not in anchors(to)
            ):
                errors.append(f"{name_of(page)} leads to {target}#{anchor}")
    assert not errors


def test_named_files_exist():
    at_a_commit = r"`[^`]*`\s+at\s+(?:commit )?`[0-9a-f]{8}`|^.*# at commit [0-9a-f]{8}$"
    directories = "ds_configs|plugins|trainers|cli|tests|tools|benchmarks|examples|docs"
    errors = []
    for page in READ:
        text = re.sub(at_a_commit, "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for path in re.findall(rf"(?<![\w./-])((?:{directories})/[\w./*-]*\w/?)", text):
            if not list(ROOT.glob(path.removesuffix("/"))):
                errors.append(f"{name_of(page)} names {path}")
    assert not errors


def test_pages_that_code_names_exist():
    folders = ("ds_configs", "plugins", "trainers", "cli", "benchmarks", "tools", "tests", "examples")
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8").replace('" / "', "/")
        for page in re.findall(r"docs/[\w/]+\.(?:md|png)", text):
            assert (ROOT / page).is_file(), f"{name_of(path)} names {page}"


def test_modules_that_pages_and_messages_run_exist():
    folders = ("ds_configs", "plugins", "trainers", "cli")
    for path in [*ALL, *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))]:
        for module in re.findall(r"-m shardwright\.([\w.]*\w)", path.read_text(encoding="utf-8")):
            place = ROOT.joinpath(*module.split("."))
            is_there = place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()
            assert is_there, f"{name_of(path)} runs {module}"


def test_imports_of_python_blocks_exist():
    for page in READ:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```python[^\n]*\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shardwright":
                    path = ROOT.joinpath(*node.module.split(".")[1:])
                    module = path.with_suffix(".py")
                    source = module if module.is_file() else path / "__init__.py"
                    defined = source.read_text(encoding="utf-8")
                    for alias in node.names:
                        name = rf"\b{alias.name}\b"
                        pattern = rf"^\s*(?:class|def) {name}|^{name}.*=|import .*{name}|\"{name}\""
                        is_defined = re.search(pattern, defined, flags=re.MULTILINE)
                        assert is_defined, f"{name_of(page)} imports {alias.name}, which is not in {source}"


def test_commands_and_make_targets_exist():
    commands = {name for name in build_app() if not name.startswith("-")}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for page in ALL:
        text = page.read_text(encoding="utf-8")
        for command in re.findall(r"(?:`|^\$ |^    )shardwright ([a-z][a-z-]*)", text, flags=re.MULTILINE):
            assert command in commands, f"{page.name} names `shardwright {command}`"
    for page in READ:
        for target in re.findall(r"(?:^    |`)make ([a-z]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            assert target in targets, f"{page.name} names `make {target}`"


def test_named_flags_exist():
    """A flag after one of our commands is one of that command."""
    known = {name: flags_of(name) for name in build_app() if not name.startswith("-")}
    every = set().union(FLAGS_OF_OTHERS, *known.values())
    errors = []
    for page in READ:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        stated = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w-])", text))
        errors += [f"{name_of(page)} names {flag}" for flag in stated - every]
        for command, rest in re.findall(r"shardwright ([a-z][a-z-]*)([^\n`|;]*)", text):
            for flag in re.findall(r"(?<=\s)--[a-z][a-z-]*", rest) if command in known else ():
                if flag not in known[command] | {"--help"}:
                    errors.append(f"{name_of(page)} names shardwright {command} {flag}")
    assert not errors


@cache
def flags_of(command: str) -> set[str]:
    app = build_app()[command]
    apps = [app[name] for name in app if not name.startswith("-")] + ([app] if app.default_command else [])
    return {name for one in apps for argument in one.assemble_argument_collection() for name in argument.names}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        page if name_of(page) in ("README.md", "SKILL.md") else pytest.param(page, marks=pytest.mark.full)
        for page in READ
        if marked_blocks(page)
    ],
    ids=name_of,
)
def test_blocks_that_run_print_what_they_show(page, tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    for command, shown, printed in run_page(page):
        assert agrees(shown, printed), f"{command}\nprints\n{printed}"
