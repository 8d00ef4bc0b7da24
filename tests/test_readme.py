"""The README and the docs stay true: the tree, the links, the commands and the Makefile targets they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT
from readme_parts import PAGES, with_generated_parts
from shardwright.cli.main import build_app


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert text == with_generated_parts(text), "run `make readme`"


def test_links_lead_somewhere():
    for page in pages():
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_commands_and_make_targets_exist():
    commands = {name for name in build_app() if not name.startswith("-")}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for command in re.findall(r"`shardwright ([a-z-]+)", text):
            assert command in commands, f"{page.name} names `shardwright {command}`"
        for target in re.findall(r"(?:^    |`)make ([a-z]+)", text, flags=re.MULTILINE):
            assert target in targets, f"{page.name} names `make {target}`"


def test_the_project_speaks_of_itself_alone():
    machine_path = re.compile(r"(?<![\w.])/(?:work|root|farm|tmp)/")
    for page in pages():
        match = machine_path.search(page.read_text(encoding="utf-8"))
        assert match is None, f"{page.name} holds {match and match[0]}"
