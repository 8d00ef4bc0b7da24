"""Settings of the documentation site. `make docs` builds it from the pages that `tools/docs_site.py` gathers."""

from __future__ import annotations

from typing import Any

from shardwright import __version__

project = "Shardwright"
author = "The Shardwright authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
# Copy commands without the prompt and without their output.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
myst_enable_extensions = ["colon_fence"]
# Types in signatures lead to a page where there is one. Links that people wrote, and errors, must all lead somewhere.
nitpick_ignore_regex = [("py:class", ".*")]
# Docstrings have code in single backticks.
default_role = "code"
# GitHub gives headings these anchors.
myst_heading_anchors = 4

# The list of what is on a page would name every field.
toc_object_entries = False
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_logo = html_favicon = "_static/icon.svg"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": []}


def docstring_of_attribute(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon for a type; docstrings of our fields are sentences."""
    if what == "attribute":
        lines.insert(0, "\\ ")


def name_without_module(app: Any, env: Any, node: Any, shown: Any) -> Any:
    """`Raises:` names an error without its module: the page has one of that name."""
    if node.get("refdomain") == "py" and node["reftype"] == "exc":
        node["refspecific"] = True
        domain = env.get_domain("py")
        return domain.resolve_xref(env, node["refdoc"], app.builder, "exc", node["reftarget"], node, shown)
    return None


def refined(_app: Any, _page: str, _template: str, context: dict[str, Any], _tree: Any) -> None:
    """Give captions of the navigation a level, without which readers of screens cannot place them (sphinx 9.0.4).

    Options in code get a class as well, by which they are not broken behind their hyphens.
    """
    if tree := context.get("furo_navigation_tree"):
        context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')
    if body := context.get("body"):
        context["body"] = body.replace('<span class="pre">--', '<span class="pre option">--')


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", docstring_of_attribute, priority=400)
    # After Furo has made the navigation.
    app.connect("html-page-context", refined, priority=900)
    app.connect("missing-reference", name_without_module)
