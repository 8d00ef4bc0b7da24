"""The documentation site: `python tools/docs_site.py [DIRECTORY]` gathers its pages and builds them with Sphinx.

The pages of docs/ are written for GitHub. What a site needs in addition is made here: the parts that pages mark
(`tools/reference.py`), navigation from the lists of docs/index.md, pages for the source files
that pages link to, and the gallery.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from gallery_pages import gallery_pages
from reference import api_pages, command_pages, with_parts

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GALLERY = ROOT / "ds_configs" / "plan" / "gallery.py"
OUTSIDE = {ROOT / "CONTRIBUTING.md": "contributing.md", ROOT / "CHANGELOG.md": "changelog.md"}
"""Pages outside docs/, and their location on the site."""
MOCKED = (
    *("accelerate", "bitsandbytes", "datasets", "deepspeed", "peft", "safetensors", "tokenizers", "torch"),
    "transformers",
)
"""Libraries that public modules import for their base classes; the API is read without loading them."""
_FENCED = re.compile(r"(^````.*?^````$|^```.*?^```$)", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)((?:#[^)\s]+)?)(?=\))")
_LISTED = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!http|source/)[^)#\s]+\.md)(#[^)\s]+)?\)")
"""Links to pages: their words, their targets and their anchors."""
_COMMAND = re.compile(r"#shardwright-([a-z-]+)")
"""Anchors of commands: each has a page on the site."""
_CARDS = re.compile(r"^<!-- cards -->\n(.*?)^<!-- end of cards -->$", flags=re.DOTALL | re.MULTILINE)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash"}
"""Source files that have a page; others are downloads."""


def gather(directory: Path) -> None:
    """Write all that Sphinx reads into a directory."""
    made = {f"gallery/{name}": text for name, text in gallery_pages().items()}
    made |= {f"reference/commands/{name}.md": text for name, text in command_pages().items()}
    made |= {f"reference/python/{name}.md": text for name, text in api_pages().items()}
    sources = set()
    for page in [*OUTSIDE, *sorted(DOCS.rglob("*.md"))]:
        text = with_parts(page.read_text(encoding="utf-8"))
        sources |= {path for target, _ in links(text) if is_source(path := (page.parent / target).resolve())}
        made.setdefault(place_of(page), for_site(page, text))
    files = {path for path in DOCS.rglob("*") if path.suffix in (".png", ".svg", ".json")}
    for path in sources:
        if path.suffix in _LANGUAGES:
            made[place_of(path)] = source_page(path)
        else:
            files.add(path)
    for path in files:
        (directory / place_of(path)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, directory / place_of(path))
        if path.suffix == ".md":
            # No section lists it: it is read outside of the site.
            text = path.read_text(encoding="utf-8").removeprefix("---\n")
            (directory / place_of(path)).write_text(f"---\norphan: true\n{text}", encoding="utf-8")
    for place, text in made.items():
        (directory / place).parent.mkdir(parents=True, exist_ok=True)
        (directory / place).write_text(text, encoding="utf-8")


def links(text: str) -> list[tuple[str, str]]:
    """Targets and anchors of the links of a page that do not lead into the web."""
    return [found for found in _LINK.findall(_FENCED.sub("", text)) if not found[0].startswith("http")]


def is_source(path: Path) -> bool:
    """Whether a linked file is neither a page nor belongs to one."""
    return DOCS not in path.parents and path not in (GALLERY, *OUTSIDE)


def place_of(path: Path) -> str:
    """Where the site has a file of the repository."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path == GALLERY:
        return "gallery/index.md"
    if DOCS in path.parents:
        return str(path.relative_to(DOCS))
    return f"source/{path.relative_to(ROOT)}" + (".md" if path.suffix in _LANGUAGES else "")


def for_site(page: Path, text: str) -> str:
    """A page with its links as the site has them, and with the navigation that its sections make."""
    here = Path(place_of(page)).parent

    def rewritten(found: re.Match[str]) -> str:
        target, anchor = found.groups()
        if target.startswith("http"):
            return found[0]
        if command := _COMMAND.fullmatch(anchor) if target.endswith("reference/commands.md") else None:
            return os.path.relpath(f"reference/commands/{command[1]}.md", here)
        return os.path.relpath(place_of((page.parent / target).resolve()), here) + anchor

    parts = _FENCED.split(text)
    text = "".join(part if part.startswith("```") else _LINK.sub(rewritten, part) for part in parts)
    contents = navigation(page, text) if page.name == "index.md" else ""
    return _CARDS.sub(lambda match: cards(match[1]), text) + contents


def cards(items: str) -> str:
    """Return a list `- [title](page): text` as a grid of cards that link to the pages."""
    grid = ["::::{grid} 1 2 3 3", ":gutter: 2", ""]
    for title, target, text in re.findall(r"^- \[(.+?)\]\((.+?)\.md\): (.+)$", items, flags=re.MULTILINE):
        grid += [f":::{{grid-item-card}} {title}", f":link: {target}", ":link-type: doc", "", text, ":::", ""]
    return "\n".join([*grid, "::::"])


def navigation(page: Path, text: str) -> str:
    """Hidden tables of contents of a page that lists others: what it links to, in its words, under its sections."""
    is_front = page.parent == DOCS
    whole = {target for _, target, anchor in _LISTED.findall(text) if not anchor}
    trees, seen = [], set()
    # The front page says more before its first section than what it lists.
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[is_front:]:
        entries = {}
        for words, target, anchor in _LISTED.findall(section):
            leads_to_page = not anchor or target not in whole
            if leads_to_page and target not in seen and (is_front or "/" not in target):
                seen.add(target)
                entries[target] = words.replace("`", "")
        if entries:
            # The list of a folder stands under the caption that the front page gives it.
            caption = f":caption: {section.partition(chr(10))[0]}\n" if is_front else ""
            lines = (f"{words[0].upper()}{words[1:]} <{target}>\n" for target, words in entries.items())
            trees.append(f"```{{toctree}}\n:hidden:\n{caption}\n{''.join(lines)}```\n")
    return "\n" + "\n".join(trees)


def source_page(path: Path) -> str:
    """A page that shows a source file."""
    code = path.read_text(encoding="utf-8").rstrip("\n")
    heading = f"---\norphan: true\n---\n\n# `{path.relative_to(ROOT)}`\n"
    return f"{heading}\n````{_LANGUAGES[path.suffix]}\n{code}\n````\n"


def build(site: Path, *, only: Collection[str] = ()) -> int:
    """Gather the pages beside the site and build it; returns what Sphinx ends with.

    Every warning is an error. `only` some pages are for a look: whatever they link to is then missing.
    """
    from sphinx.cmd.build import main as sphinx_build
    from sphinx.ext.autodoc.mock import mock

    pages, doctrees = (site.with_name(f"{site.name}-{part}") for part in ("pages", "doctrees"))
    for old in (pages, doctrees, *([site] if (site / ".buildinfo").is_file() else [])):
        shutil.rmtree(old, ignore_errors=True)
    gather(pages)
    for page in pages.rglob("*.md") if only else ():
        if str(page.relative_to(pages)) not in only:
            page.unlink()
    strict = ["-Q"] if only else ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    # autodoc's own mocks (sphinx 9.0.4) end where it looks for the source of a base class, and import the library.
    with mock(list(MOCKED)):
        return sphinx_build(["-b", "html", "-c", str(DOCS), "-d", str(doctrees), *strict, str(pages), str(site)])


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"))
