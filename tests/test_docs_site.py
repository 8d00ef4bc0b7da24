"""The documentation site: its pages, the parts that are made from the code, and every configuration of the gallery.

`make docs` builds it with every warning as an error. These tests read the pages that it is built from.
"""

from __future__ import annotations

import re

import pytest
import shardwright
import shardwright.trainers
from docs_site import DOCS, gather, links
from gallery_pages import gallery_pages, page
from shardwright.cli.main import build_app
from shardwright.ds_configs.plan.gallery import GALLERY, gallery_plan


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    """The directory that Sphinx reads."""
    directory = tmp_path_factory.mktemp("site")
    gather(directory)
    return directory


def test_the_site_has_every_page_and_no_dead_link(gathered):
    found = {str(path.relative_to(gathered)) for path in gathered.rglob("*.md")}
    assert found > {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    dead = [
        (place, target)
        for place in found
        for target, _ in links((gathered / place).read_text(encoding="utf-8"))
        if not ((gathered / place).parent / target).is_file()
    ]
    assert dead == []


def test_marked_parts_are_made_from_the_code(gathered):
    commands = {name for name in build_app() if not name.startswith("-")}
    assert {path.stem for path in (gathered / "reference" / "commands").iterdir()} == commands
    api = "".join(path.read_text(encoding="utf-8") for path in (gathered / "reference" / "python").iterdir())
    for module in (shardwright, shardwright.trainers):
        missing = [name for name in module.__all__ if f":: {module.__name__}.{name}\n" not in api]
        assert missing in ([], ["__version__"])
    expected = {
        "reference/accelerators.md": ["| `A100-80GB` |"],
        "reference/schema.md": ["## hardware\n"],
        "reference/combinations.md": ["## Reasons", "## Parameters of trainers"],
        "guides/checkpoints.md": ["| fact that differs |"],
        "index.md": [":::{grid-item-card} Install\n:link: start/install\n"],
    }
    assert not [
        path for path in gathered.rglob("*.md") if re.search("<!-- built: [a-z]", path.read_text(encoding="utf-8"))
    ]
    for name, parts in expected.items():
        text = (gathered / name).read_text(encoding="utf-8")
        assert not [part for part in parts if part not in text]


def test_the_gallery_has_every_configuration_with_its_figures():
    pages = gallery_pages()
    for entry in GALLERY:
        plan = gallery_plan(entry)
        text = pages[page(entry.model)]
        assert f"shardwright configs cp {entry.name} plan" in text
        assert plan.chosen.reason in text
        anchor = re.sub("[^a-z0-9]+", "-", entry.name.lower())
        assert f"({anchor})=\n" in text
        assert pages["index.md"].count(f"({page(entry.model)}#{anchor})") == 2, "in the matrix and in the list"
