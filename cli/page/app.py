"""The planner page: a form with the plan beside it, and a tab that checks a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import gradio as gr

from ...ds_configs.plan.plan import PlanDoesNotFitError
from ...ds_configs.specs.errors import ShardwrightError
from ...ds_configs.specs.hardware import gpu_catalog, parse_hardware
from ...ds_configs.specs.settings import Settings, settings_of
from ...plugins.huggingface_hub.hub import search_models
from ..options import CheckedFor
from .address import CONFIG_FILE, EXAMPLE, PageSettings, pack_config, query_of, settings_from_form, settings_from_query
from .planned import known_models, offered, planned
from .views import TEMPLATES, errors_view, findings_view, misfit_view, plan_view

MAIN = ("method", "seq_len", "global_batch_size", "micro_batch_size", "precision")
MORE: Mapping[str, tuple[str, ...]] = {
    "Training": (
        "optimizer",
        "gradient_checkpointing",
        "loss",
        "strategy",
        "offload",
        "objective",
        "lora_rank",
        "lora_targets",
    ),
    "Parallel layout": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "sequence_parallel_size",
        "context_parallel_size",
        "expert_parallel_size",
        "zero_quantized_weights",
        "zero_quantized_gradients",
    ),
    "Distillation": ("teacher", "teacher_placement"),
    "The whole run": ("tokens", "deadline", "gpu_hour_price", "save_seconds", "mtbf_hours"),
}
LINKS = ("link_bytes_per_s", "network_bytes_per_s", "host_memory", "nvme")
UPLOADED = "config.json (uploaded)"
"""Text of the model field while an uploaded file is planned."""
_LABELS = {
    "seq_len": "Sequence length, tokens",
    "gpu_hour_price": "Price of a GPU hour",
    "lora_rank": "LoRA rank",
    "lora_targets": "LoRA targets",
    "mtbf_hours": "Mean hours between failures",
    "num_processes": "Ranks of the job",
    "nvme": "NVMe of a node",
    "host_memory": "Memory of a node",
    "link_bytes_per_s": "Link within a node",
    "network_bytes_per_s": "Network between nodes",
    "transformers": "For the Trainer",
    "zero_quantized_weights": "ZeRO++ quantized weights",
    "zero_quantized_gradients": "ZeRO++ quantized gradients",
}
_FEW = 4
"""Most choices that are shown as radio buttons."""


def setting_field(name: str, kind: type[Settings] = PageSettings) -> gr.components.Component:
    """Return the field of a setting: choices, a checkbox, or text as after a flag."""
    field = kind.model_fields[name]
    texts = {"label": _LABELS.get(name, name.replace("_", " ").capitalize()), "info": field.description}
    if get_origin(field.annotation) is Literal:
        choices = list(get_args(field.annotation))
        component = gr.Radio if len(choices) <= _FEW else gr.Dropdown
        return component(choices, value=field.default, elem_id=name, **texts)
    if field.annotation is bool:
        return gr.Checkbox(value=field.default, elem_id=name, **texts)
    placeholder = "" if field.default is None else str(field.default)
    return gr.Textbox(placeholder=placeholder, max_lines=1, elem_id=name, **texts)


def hardware_fields() -> dict[str, gr.components.Component]:
    named = parse_hardware(EXAMPLE.hardware or "")
    gpu = gr.Dropdown(list(gpu_catalog()), value=named.gpu, label="Accelerator", elem_id="gpu")
    with gr.Row():
        gpus = gr.Number(named.gpus_per_node, label="Per node", precision=0, min_width=80, elem_id="gpus_per_node")
        nodes = gr.Number(named.nodes, label="Nodes", precision=0, min_width=80, elem_id="nodes")
    return {"gpu": gpu, "gpus_per_node": gpus, "nodes": nodes}


def model_choices() -> list[str]:
    return sorted(known_models(), key=str.lower)


def stated_by(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings from the values of all fields by name."""
    others = dict(values)
    gpu, gpus, nodes = (others.pop(name) for name in ("gpu", "gpus_per_node", "nodes"))
    counts = [1 if count is None else count for count in (nodes, gpus)]
    uploaded = others["model"] == UPLOADED
    others["model"], others["config"] = (None, others["config"]) if uploaded else (others["model"], None)
    return others | {"hardware": f"{counts[1]}x{gpu}" if counts[0] == 1 else f"{counts[0]}x{counts[1]}x{gpu}"}


def shown_values(settings: PageSettings) -> dict[str, Any]:
    """Return the value of each field; invalid hardware becomes that of the example, beside the error message."""
    stated = settings.stated()
    try:
        named = parse_hardware(settings.hardware or "")
    except ShardwrightError:
        named = parse_hardware(EXAMPLE.hardware or "")
    values: dict[str, Any] = {}
    for name, field in PageSettings.model_fields.items():
        value = stated.get(name, field.default)
        is_text = get_origin(field.annotation) is not Literal and field.annotation is not bool
        values[name] = ("" if name not in stated or value is None else str(value)) if is_text else value
    counted = {"nodes": named.nodes, "gpus_per_node": named.gpus_per_node, "gpu": named.gpu}
    return values | counted | {"model": UPLOADED if settings.config else settings.model or None}


CONCURRENT_PLANS = 8
"""Plans that are computed concurrently; a plan may wait for the Hub."""
_TITLE = "Shardwright planner"
_HEADING = """<header class="top"><h1>Shardwright</h1><p>Select a ZeRO stage, FSDP2 or parallel layout for your model
and hardware, with its memory, time and configuration files. Everything is computed here. Only the
<code>config.json</code>
of a model that you name is requested from the Hub.</p></header>"""
_NOTHING_PASTED = """<p class="sub">Errors stop a run, or make it ignore the file. Warnings are about keys with no
effect or a surprising one. Each has its line and a fix, as in <code>shardwright check</code>.</p>"""
_WRITE_ADDRESS = """(query) => {
  if (query && query !== location.search.slice(1)) history.pushState(null, "", "?" + query);
}"""


def theme() -> gr.Theme:
    """Return colours and local fonts of Gradio, so that nothing is fetched.

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
    """Return style and script of the results."""
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return f"<style>{style}</style><script>{script}</script>"


def build_page() -> gr.Blocks:
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
    # Query of the address, without a visible field.
    address = gr.Textbox(visible=False)
    every = list(fields.values())
    picked = [field.input for field in every if isinstance(field, gr.Dropdown | gr.Radio | gr.Checkbox | gr.Number)]
    typed = [field.submit for field in every if isinstance(field, gr.Textbox)]

    def plan_form(*values: Any) -> Iterator[tuple[Any, str]]:
        yield from _planned_form(dict(zip(fields, values, strict=True)))

    def plan_upload(content: bytes, *values: Any) -> Iterator[tuple[Any, Any, Any, str]]:
        # An invalid file changes no field.
        try:
            packed = pack_config(content)
        except ShardwrightError as error:
            yield gr.skip(), gr.skip(), errors_view(error), ""
            return
        changed: tuple[Any, Any] = UPLOADED, packed
        uploaded = dict(zip(fields, values, strict=True)) | {"model": UPLOADED, "config": packed}
        for text, query in _planned_form(uploaded):
            yield *changed, text, query
            changed = gr.skip(), gr.skip()

    def open_address(request: gr.Request) -> Iterator[list[Any]]:
        try:
            settings = settings_from_query(str(request.query_params))
        except ShardwrightError as error:
            yield [*(gr.skip() for _ in fields), errors_view(error)]
            return
        values: dict[str, Any] = shown_values(settings)
        for text in results(settings):
            yield [*(values.get(name, gr.skip()) for name in fields), text]
            values = {}

    shown: dict[str, Any] = {"show_progress": "minimal", "show_progress_on": result, "api_visibility": "private"}
    from_form = gr.on(
        [button.click, *picked, *typed], plan_form, every, [result, address], trigger_mode="always_last", **shown
    )
    outputs = [fields["model"], fields["config"], result, address]
    from_upload = upload.upload(plan_upload, [upload, *every], outputs, **shown)
    for event in (from_form, from_upload):
        event.then(None, [address], js=_WRITE_ADDRESS)
    page.load(open_address, None, [*every, result], **shown)


def _planned_form(values: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield the results for the values of all fields, and their address; an empty address for invalid values."""
    try:
        settings = settings_from_form(stated_by(values))
    except ShardwrightError as error:
        yield errors_view(error), ""
        return
    for result in results(settings):
        yield result, query_of(settings)


def _model_fields() -> tuple[dict[str, gr.components.Component], gr.UploadButton]:
    with gr.Group():
        model = gr.Dropdown(
            model_choices(),
            label="Model",
            info="ORG/NAME on the Hub; the listed models need no request to it",
            allow_custom_value=True,
            elem_id="model",
        )
        upload = gr.UploadButton(
            f"Upload a {CONFIG_FILE}", file_types=[".json"], type="binary", size="sm", elem_id="upload"
        )
        with gr.Accordion("Search the Hub, revision", open=False):
            words = gr.Textbox(label="Search the Hub", max_lines=1, elem_id="search")
            search = gr.Button("Search", size="sm", elem_id="search_run")
            matches = gr.HTML(apply_default_css=False, elem_id="found")
            revision = setting_field("revision")
        config = gr.Textbox(visible=False)

    def find(text: str) -> tuple[Any, str]:
        try:
            names = search_models(text.strip()) if text.strip() else ()
        except ShardwrightError as error:
            return gr.skip(), errors_view(error)
        result = f"Found: {len(names)}. Select one under Model" if names else "No model found"
        return gr.Dropdown(choices=list(names) or model_choices()), f'<p class="sub" role="status">{result}</p>'

    gr.on(
        [search.click, words.submit], find, [words], [model, matches], show_progress="minimal", api_visibility="private"
    )
    return {"model": model, "config": config, "revision": revision}, upload


def _check_tab() -> None:
    with gr.Row(elem_id="checker"):
        with gr.Column(scale=2, min_width=300):
            text = gr.Textbox(
                label="DeepSpeed JSON or Accelerate YAML",
                info="Stays on the machine that serves this page",
                # A field that grows is measured again for every letter of a long text.
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
            return errors_view(error)

    button.click(find, [text, *facts.values()], result, show_progress="minimal", api_visibility="private")


def results(settings: PageSettings) -> Iterator[str]:
    """Yield the plan, then the plan with its offers, which take three times as long."""
    try:
        result = planned(settings, offers=False)
        yield plan_view(result)
        more = offered(result)
    except PlanDoesNotFitError as error:
        yield misfit_view(error)
    except ShardwrightError as error:
        yield errors_view(error)
    else:
        if more.plan.offers:
            yield plan_view(more)
