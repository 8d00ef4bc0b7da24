"""The documentation site holds every page and every configuration of the gallery, and none of its links is dead.

`make docs` builds it, with every warning an error; here are the pages that it is built from.
"""

from __future__ import annotations

import re
import shlex

import pytest
from docs_site import DOCS, gather, links
from gallery_pages import gallery_pages, page
from paths import ROOT
from picture import PICTURE, picture
from runnable_blocks import prepare
from shardwright.cli.main import run
from shardwright.ds_configs.plan.gallery import GALLERY
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning import from_names


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    """The directory that Sphinx reads."""
    directory = tmp_path_factory.mktemp("site")
    gather(directory)
    return directory


def test_every_page_is_in_the_site_and_every_link_of_it_leads_somewhere(gathered):
    found = {str(path.relative_to(gathered)) for path in gathered.rglob("*.md")}
    assert found > {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    dead = [
        (place, target)
        for place in found
        for target, _ in links((gathered / place).read_text(encoding="utf-8"))
        if not ((gathered / place).parent / target).is_file()
    ]
    assert dead == []


def test_every_page_stands_in_the_navigation(gathered):
    """A page that only text leads to is found by nobody who looks down the side of the screen."""
    listed = set()
    for index in gathered.rglob("index.md"):
        for tree in re.findall(
            r"^```\{toctree\}\n(.*?)^```", index.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            listed |= {(index.parent / target).resolve() for target in re.findall(r"<(\S+)>", tree)}
    pages = {path for path in gathered.rglob("*.md") if gathered / "source" not in path.parents}
    assert pages - listed == {gathered / "index.md"}


def test_the_gallery_has_every_configuration_with_its_figures():
    pages = gallery_pages()
    for entry in GALLERY:
        plan = Plan.load(ROOT / "ds_configs" / "gallery" / entry.name / "plan.json")
        text = pages[page(entry.model)]
        assert f"shardwright configs cp {entry.name} plan" in text
        assert plan.chosen.reason in text
        anchor = re.sub("[^a-z0-9]+", "-", entry.name.lower())
        assert f"({anchor})=\n" in text
        assert pages["index.md"].count(f"({page(entry.model)}#{anchor})") == 2, "in the matrix and in the list"


def test_commands_of_the_gallery_ask_for_its_plans(tmp_path, monkeypatch):
    """Each is read by the real command line, up to where the planner itself would start."""
    asked = []

    def planner(model, hardware, job, **_):
        asked.append((model.name, hardware, job))
        raise from_names.ShardwrightError("planned")

    prepare(tmp_path, monkeypatch)
    monkeypatch.setattr(from_names, "make_plan", planner)
    texts = gallery_pages()
    for entry in GALLERY:
        (line,) = re.findall(rf"cp {re.escape(entry.name)} plan\n\$ (shardwright plan .*)", texts[page(entry.model)])
        run(shlex.split(line)[1:])
        job = TrainingJob(**entry.job)
        assert asked.pop() == (entry.model, parse_hardware(entry.hardware, nvme=entry.nvme), job)


def test_the_picture_is_current():
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run `python tools/picture.py`"
