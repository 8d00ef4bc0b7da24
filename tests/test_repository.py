"""Declared dependencies and license, no code that runs what it reads, and no path of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = ("cli", "ds_configs", "plugins", "trainers")


def test_the_license_is_stated_and_ships() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_oldest_environment_has_the_pinned_engines() -> None:
    """Else `OLDEST_TESTS` of the Makefile needs tests/equivalence, which trains every layout."""
    names = ("accelerate", "deepspeed", "torch", "transformers")
    pinned, oldest = (
        [re.findall(rf"^{name}==.*", (ROOT / file).read_text(), re.MULTILINE) for name in names]
        for file in ("constraints.txt", "constraints-oldest.txt")
    )
    assert pinned == oldest and all(pinned)


def test_suites_of_the_makefile_name_tests_that_exist() -> None:
    """pytest runs nothing if one path is missing."""
    variables = subprocess.run(["make", "-pn"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    suites = dict(re.findall(r"^(\w+_TESTS) := (.*)$", variables, re.MULTILINE))
    assert set(suites) >= {"GRID_TESTS", "NEWEST_TESTS", "OLDEST_TESTS"}
    missing = [(name, path) for name, paths in suites.items() for path in paths.split() if not (ROOT / path).exists()]
    assert not missing


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [lines for name, lines in project["optional-dependencies"].items() if name != "dev"]
    # pydantic's own core, whose version it pins.
    declared = {"pydantic-core"}
    for line in (*project["dependencies"], *(line for lines in extras for line in lines)):
        declared.add(re.split(r"[^\w-]", line)[0].lower())
    distributions = packages_distributions()
    undeclared = {}
    for path in (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            absolute = isinstance(node, ast.ImportFrom) and not node.level
            modules = (
                [node.module] if absolute else [a.name for a in node.names] if isinstance(node, ast.Import) else []
            )
            for package in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names:
                names = {name.lower().replace("_", "-") for name in distributions.get(package, [package])}
                if not names & declared:
                    undeclared[package] = path.relative_to(ROOT).as_posix()
    assert not undeclared


def test_the_package_runs_no_shell_strings_and_no_code_of_checkpoints() -> None:
    forbidden = re.compile(r"shell=True|weights_only=False|trust_remote_code=True")
    for path in (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")):
        match = forbidden.search(path.read_text(encoding="utf-8"))
        assert match is None, f"{path}: {match and match[0]}"


def test_no_file_names_a_path_of_one_machine() -> None:
    machine_path = re.compile(r"(?<![\w.])/(?:work|root|farm)/")
    folders = (*(ROOT / layer for layer in LAYERS), ROOT / "docs")
    files = [
        *ROOT.glob("*.md"),
        *(path for folder in folders for path in folder.rglob("*.*") if path.suffix in (".py", ".md")),
    ]
    for path in files:
        match = machine_path.search(path.read_text(encoding="utf-8"))
        assert match is None, f"{path}: {match and match[0]}"
