"""The page: fields on one side, what follows from them on the other, and a place to check a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from ...ds_configs.plan.plan import PlanDoesNotFitError
from ...ds_configs.specs.errors import ShardwrightError
from ...ds_configs.specs.settings import settings_of
from ...plugins.huggingface_hub.hub import search_models
from ..options import CheckedFor
from .address import CONFIG_FILE, PageSettings, pack_config, query_of, settings_from_form, settings_from_query
from .form import (
    LINKS,
    MAIN,
    MORE,
    UPLOADED,
    hardware_fields,
    model_choices,
    setting_field,
    shown_values,
    stated_by,
)
from .planned import offered, planned
from .views import TEMPLATES, faults_view, findings_view, found_view, misfit_view, plan_view

CONCURRENT_PLANS = 8
"""Visitors who are planned for at once; one may wait for the Hub."""
_TITLE = "Shardwright planner"
_HEADING = """<header class="top"><h1>Shardwright</h1><p>Which ZeRO stage, FSDP2 or parallel layout trains your model
on your hardware, with its memory, its time and the files that run it. Everything is computed here; only the Hub
is asked, for the <code>config.json</code> of a model that you name.</p></header>"""
_NOTHING_PASTED = """<p class="sub">Errors stop a run, or make it disobey the file; warnings are keys that do not do
what they say. Each comes with its line and the way out, as <code>shardwright check</code> prints it.</p>"""
_WRITE_ADDRESS = """(query) => {
  if (query && query !== location.search.slice(1)) history.pushState(null, "", "?" + query);
}"""


def theme() -> gr.Theme:
    """Return colours and fonts, which lie beside Gradio's program, so that none is fetched.

    Seen with gradio 6.31.0: its semi-bold IBM Plex lacks letters, such as a and b.
    """
    text = [gr.themes.LocalFont("IBM Plex Sans", weights=(400, 700)), "system-ui", "sans-serif"]
    code = [gr.themes.LocalFont("IBM Plex Mono", weights=(400, 700)), "ui-monospace", "monospace"]
    sizes = {"radius_size": "sm", "spacing_size": "sm"}
    return gr.themes.Base(primary_hue="blue", neutral_hue="slate", font=text, font_mono=code, **sizes).set(
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        block_label_text_color="*neutral_700",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        input_background_fill="white",
        input_background_fill_dark="*neutral_900",
        input_border_width="1px",
        input_border_color="*neutral_400",
        input_border_color_dark="*neutral_600",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_hover_dark="*primary_600",
    )


def head() -> str:
    """Return what the page brings for its results: colours, places and a few lines of script."""
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return f"<style>{style}</style><script>{script}</script>"


def build_page() -> gr.Blocks:
    """Return the page; what it knows of a visitor lies in the fields of the visitor's own browser."""
    with gr.Blocks(title=_TITLE, analytics_enabled=False, fill_width=True, delete_cache=(600, 600)) as page:
        gr.HTML(_HEADING, apply_default_css=False)
        with gr.Tabs():
            with gr.Tab("Plan", id="plan"):
                _plan_tab(page)
            with gr.Tab("Check a configuration", id="check"):
                _check_tab()
    page.queue(default_concurrency_limit=CONCURRENT_PLANS)
    return page


def _plan_tab(page: gr.Blocks) -> None:
    with gr.Row(elem_id="planner"):
        with gr.Column(scale=2, min_width=300, elem_id="form"):
            fields, upload = _model_fields()
            with gr.Group():
                fields |= hardware_fields()
                with gr.Accordion("Links, host memory, NVMe", open=False):
                    fields |= {name: setting_field(name) for name in LINKS}
            with gr.Group():
                fields |= {name: setting_field(name) for name in MAIN}
            for heading, names in MORE.items():
                with gr.Accordion(heading, open=False):
                    fields |= {name: setting_field(name) for name in names}
            button = gr.Button("Plan", variant="primary", elem_id="run")
        with gr.Column(scale=5, min_width=300, elem_id="result"):
            result = gr.HTML(apply_default_css=False)
    # What an address says; no field of its own on the page.
    address = gr.Textbox(visible=False)
    every = list(fields.values())
    picked = [field.input for field in every if isinstance(field, gr.Dropdown | gr.Radio | gr.Checkbox | gr.Number)]
    typed = [field.submit for field in every if isinstance(field, gr.Textbox)]

    def plan_form(*values: Any) -> Iterator[tuple[Any, str]]:
        yield from _planned_form(dict(zip(fields, values, strict=True)))

    def plan_upload(content: bytes, *values: Any) -> Iterator[tuple[Any, Any, Any, str]]:
        yield from _planned_upload(content, dict(zip(fields, values, strict=True)))

    def open_address(request: gr.Request) -> Iterator[list[Any]]:
        yield from _planned_address(str(request.query_params), list(fields))

    shown: dict[str, Any] = {"show_progress": "minimal", "show_progress_on": result, "api_visibility": "private"}
    asked = [button.click, *picked, *typed]
    from_form = gr.on(asked, plan_form, every, [result, address], trigger_mode="always_last", **shown)
    changed = [fields["model"], fields["config"], result, address]
    from_upload = upload.upload(plan_upload, [upload, *every], changed, **shown)
    for event in (from_form, from_upload):
        event.then(None, [address], js=_WRITE_ADDRESS)
    page.load(open_address, None, [*every, result], **shown)


def _planned_form(values: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield the results for the values of all fields, and their address; an empty one where they cannot be read."""
    try:
        settings = settings_from_form(stated_by(values))
    except ShardwrightError as error:
        yield faults_view(error), ""
        return
    for result in results(settings):
        yield result, query_of(settings)


def _planned_upload(content: bytes, values: dict[str, Any]) -> Iterator[tuple[Any, Any, Any, str]]:
    """Yield the new values of model and configuration, the results, and their address; a bad file changes no field."""
    try:
        packed = pack_config(content)
    except ShardwrightError as error:
        yield gr.skip(), gr.skip(), faults_view(error), ""
        return
    changed: tuple[Any, Any] = UPLOADED, packed
    for result, address in _planned_form(values | {"model": UPLOADED, "config": packed}):
        yield *changed, result, address
        changed = gr.skip(), gr.skip()


def _planned_address(query: str, names: list[str]) -> Iterator[list[Any]]:
    """Yield the values of the named fields, and the results; what cannot be read changes no field."""
    try:
        settings = settings_from_query(query)
    except ShardwrightError as error:
        yield [*(gr.skip() for _ in names), faults_view(error)]
        return
    shown: dict[str, Any] = shown_values(settings)
    for result in results(settings):
        yield [*(shown.get(name, gr.skip()) for name in names), result]
        shown = {}


def _model_fields() -> tuple[dict[str, gr.components.Component], gr.UploadButton]:
    with gr.Group():
        model = gr.Dropdown(
            model_choices(),
            label="Model",
            info="ORG/NAME on the Hub; those listed are planned without asking it",
            allow_custom_value=True,
            elem_id="model",
        )
        upload = gr.UploadButton(
            f"Upload a {CONFIG_FILE}", file_types=[".json"], type="binary", size="sm", elem_id="upload"
        )
        with gr.Accordion("Search the Hub, revision", open=False):
            words = gr.Textbox(label="Search the Hub", max_lines=1, elem_id="search")
            search = gr.Button("Search", size="sm", elem_id="search_run")
            said = gr.HTML(apply_default_css=False, elem_id="found")
            revision = setting_field("revision")
        config = gr.Textbox(visible=False)

    def find(text: str) -> tuple[Any, str]:
        try:
            found = search_models(text.strip()) if text.strip() else ()
        except ShardwrightError as error:
            return gr.skip(), faults_view(error)
        return gr.Dropdown(choices=list(found) or model_choices()), found_view(found)

    gr.on([search.click, words.submit], find, [words], [model, said], show_progress="minimal", api_visibility="private")
    return {"model": model, "config": config, "revision": revision}, upload


def _check_tab() -> None:
    with gr.Row(elem_id="checker"):
        with gr.Column(scale=2, min_width=300):
            text = gr.Textbox(
                label="DeepSpeed JSON or Accelerate YAML",
                info="Whoever wrote it; it stays on the machine that serves this page",
                # With more lines than at first, the field would be measured again for every letter of a long text.
                lines=20,
                max_lines=20,
                elem_id="pasted",
            )
            facts = {name: setting_field(name, CheckedFor) for name in CheckedFor.model_fields}
            button = gr.Button("Check", variant="primary", elem_id="check")
        with gr.Column(scale=3, min_width=300, elem_id="findings"):
            result = gr.HTML(_NOTHING_PASTED, apply_default_css=False)

    def find(pasted: str, *values: Any) -> str:
        stated = {name: value for name, value in zip(facts, values, strict=True) if value != ""}
        try:
            return findings_view(pasted, settings_of(CheckedFor, stated))
        except ShardwrightError as error:
            return faults_view(error)

    button.click(find, [text, *facts.values()], result, show_progress="minimal", api_visibility="private")


def results(settings: PageSettings) -> Iterator[str]:
    """Yield the plan, and where there are offers, which take three times as long, the plan with them."""
    try:
        found = planned(settings, offers=False)
        yield plan_view(found)
        more = offered(found)
    except PlanDoesNotFitError as error:
        yield misfit_view(error)
    except ShardwrightError as error:
        yield faults_view(error)
    else:
        if more.plan.offers:
            yield plan_view(more)
