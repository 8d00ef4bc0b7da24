"""The planner page: plan a model, download the files, check a configuration, share the address of a plan.

On a Space anyone can open the page, so no setting is a path that is read on this machine.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin
from urllib.parse import urlencode, urlsplit

import gradio as gr
import pandas as pd  # type: ignore[import-untyped]
from gradio.processing_utils import save_bytes_to_cache
from pydantic import Field
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse

from ...ds_configs.check.files import CheckedFiles, check_text
from ...ds_configs.models.model_config import LARGEST_CONFIG_BYTES, parse_config_json
from ...ds_configs.plan.gallery import packaged_model, packaged_models
from ...ds_configs.plan.plan import Plan, render_files
from ...ds_configs.search.run_estimates import run_estimate
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError, collecting
from ...ds_configs.specs.hardware import gpu_catalog, hardware_from_mapping, parse_hardware, parse_overrides
from ...ds_configs.specs.model import ModelSpec
from ...ds_configs.specs.settings import Settings, settings_of
from ...ds_configs.specs.terms import Place
from ...ds_configs.specs.texts import flag_words
from ...ds_configs.step_time.estimate import term_title
from ...plugins.huggingface_hub import ModelSource, read_hub_source
from ...plugins.planning import LoadedModel, model_from_source
from ...plugins.planning import plan as select_plan
from ...plugins.releases import transformers_release
from ...trainers.reports.report import plain, rows_of_terms
from ...trainers.reports.runs import plan_report
from ..options import CheckedFor, PlanSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LARGEST_BODY_BYTES = 2 * LARGEST_CONFIG_BYTES
"""Of a request: an escaped `config.json` of the largest allowed size."""
LONGEST_VALUE = 200
"""Characters of one setting."""
CONFIG_FILE = "config.json"
_PASTED = "pasted text"
_MAIN = (
    ("hardware",),
    ("method", "task"),
    ("seq_len", "global_batch_size"),
    ("strategy", "images_per_sample"),
)
"""Rows of settings that are always shown, without their descriptions, so that the form fits beside its result."""
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class PageSettings(PlanSettings):
    """Settings of the page and of its address; an uploaded configuration takes the place of `model`."""

    group = "Model"

    model: str = Field("", description="ORG/NAME of a model on the Hub; the listed models need no request to it")


NAMES = tuple(name for name in PageSettings.model_fields if name not in ("model", "num_processes"))
EXAMPLE = {"model": "meta-llama/Llama-3.1-8B", "hardware": "8xA100-80GB"}
"""Settings of an address without any."""


def settings_from(values: Mapping[str, Any], kind: type[Settings] = PageSettings) -> Any:
    """Return the settings of all values that are neither empty nor the default."""
    if long := [name for name, value in values.items() if max(len(name), len(str(value))) > LONGEST_VALUE]:
        rule = f"must have at most {LONGEST_VALUE} characters"
        raise UsageError([ConfigError(where=name[:LONGEST_VALUE], rule=rule, fix="shorten it") for name in long])
    filled = {name: value.strip() if isinstance(value, str) else value for name, value in values.items()}
    defaults = {name: str(field.default) for name, field in kind.model_fields.items()}
    stated = {name: value for name, value in filled.items() if str(value) not in ("", "None", defaults.get(name))}
    return settings_of(kind, stated)


def _stated(settings: Settings) -> dict[str, Any]:
    """Return the set options that are not `auto`; names joined by commas."""
    stated = {name: value for name, value in settings.stated().items() if value is not None}
    return {name: ",".join(value) if isinstance(value, tuple) else value for name, value in stated.items()}


def texts_of(settings: Settings) -> dict[str, str]:
    """Return the set options as texts for an address."""
    stated = _stated(settings).items()
    return {name: str(value).lower() if isinstance(value, bool) else f"{value}" for name, value in stated}


def command_of(settings: PageSettings) -> str:
    """Return the command line that makes the same plan."""
    flags = flag_words({name: value for name, value in _stated(settings).items() if name != "model"})
    return shlex.join(["shardwright", "plan", settings.model or CONFIG_FILE, *flags, "--output-dir", "plan"])


@cache
def known_models() -> dict[str, ModelSpec]:
    """Return the packaged models by Hub id, which need no request to the Hub."""
    return {name: packaged_model(name, release=transformers_release()) for name in packaged_models()}


def _named(name: str, revision: str | None) -> LoadedModel:
    if revision is None and name in known_models():
        return LoadedModel(spec=known_models()[name], config={}, notes=())
    return model_from_source(read_hub_source(name, revision=revision), by_structure=True)


class _Notes(logging.Handler):
    """Keeps what is logged in this thread; others make plans of other visitors."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.texts.append(record.getMessage())


def planned(settings: PageSettings, config: str = "") -> tuple[Plan, tuple[str, ...]]:
    """Return the plan that `shardwright plan` makes of the same settings, and its notes."""
    errors: list[ConfigError] = []
    with collecting(errors):
        named = parse_hardware(settings.hardware or "")
        counted = {"gpu": named.gpu, "nodes": named.nodes, "gpus_per_node": named.gpus_per_node}
        memory = parse_overrides(host_memory=settings.host_memory, nvme=settings.nvme)
        hardware = hardware_from_mapping(counted | memory, name=settings.hardware or "")
    with collecting(errors):
        if bool(config) == bool(settings.model):
            rule, fix = "must be a Hub id or a config.json", "enter one of them, and clear the other"
            raise UsageError(ConfigError(where="model", value=settings.model, rule=rule, fix=fix))
        if config:
            parsed = parse_config_json(config.encode("utf-8", "surrogatepass"), source=CONFIG_FILE)
            source = ModelSource(name=CONFIG_FILE, revision=None, config=parsed, checkpoint_parameters=None)
            model = model_from_source(source, by_structure=True)
        else:
            model = _named(settings.model, settings.revision)
    if errors:
        raise UsageError(errors)
    fields = settings.job_fields()
    fields |= {role: _named(name, None).spec for role, name in settings.second_models().items()}
    notes, planner = _Notes(), logging.getLogger("shardwright.plugins.planning")
    planner.addHandler(notes)
    try:
        plan = select_plan(model, hardware, **fields)
    finally:
        planner.removeHandler(notes)
    if settings.tokens is not None:
        notes.texts.append(f"The run: {run_estimate(plan.chosen.time, plan.hardware, tokens=settings.tokens)}.")
    return plan, tuple(notes.texts)


def term_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Return every term of memory on an accelerator and on a host, and of the step's time, the largest first."""
    groups: dict[Place, str] = {"accelerator": "memory", "host": "host", "step": "step"}
    return [(group, *row) for place, group in groups.items() for row in rows_of_terms(plan.chosen.terms, place)]


def archive(files: Mapping[str, str]) -> bytes:
    """Return a ZIP of the files, the same for the same files, with executable scripts."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files.items():
            entry = zipfile.ZipInfo(f"plan/{name}")
            entry.external_attr = (0o755 if name.endswith((".sh", ".sbatch")) else 0o644) << 16
            packed.writestr(entry, content)
    return stream.getvalue()


def checked(text: str, values: Mapping[str, Any]) -> CheckedFiles:
    """Return the findings about a pasted file."""
    facts = settings_from(values, CheckedFor)
    findings = check_text(
        text,
        filename=_PASTED,
        world_size=facts.num_processes,
        uses_transformers=facts.transformers,
        task=facts.task,
    )
    return CheckedFiles(findings=findings, files=(_PASTED,))


def setting_field(name: str, kind: type[Settings] = PageSettings, **looks: Any) -> gr.components.Component:
    """Return the field of a setting: choices, a checkbox, or text as after a flag."""
    field = kind.model_fields[name]
    label = name.replace("_", " ").capitalize()
    texts: dict[str, Any] = {"label": label, "info": field.description, "elem_id": name} | looks
    if name in ("model", "hardware"):
        choices = sorted(known_models(), key=str.lower) if name == "model" else [f"8x{gpu}" for gpu in gpu_catalog()]
        return gr.Dropdown(choices, value=EXAMPLE[name], allow_custom_value=True, **texts)
    if get_origin(field.annotation) is Literal:
        return gr.Dropdown(list(get_args(field.annotation)), value=field.default, **texts)
    if field.annotation is bool:
        return gr.Checkbox(field.default, **texts)
    return gr.Textbox(placeholder=str(field.default or ""), max_lines=1, max_length=LONGEST_VALUE, **texts)


def build_page() -> gr.Blocks:
    with gr.Blocks(title="Shardwright planner", analytics_enabled=False, delete_cache=(600, 600)) as page:
        gr.Markdown("# Shardwright\nEverything is computed here; a named model's `config.json` is read from the Hub.")
        with gr.Tab("Plan"):
            _plan_tab(page)
        with gr.Tab("Check a configuration"):
            _check_tab()
    page.queue(default_concurrency_limit=8)
    return page


def _table(label: str, *percent: int) -> gr.Dataframe:
    """Return a table whose cells are folded to the width of each column, so that a phone shows all columns."""
    return gr.Dataframe(label=label, interactive=False, wrap=True, column_widths=[f"{width}%" for width in percent])


def _plan_tab(page: gr.Blocks) -> None:
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            fields = {"model": setting_field("model", info=None)}
            with gr.Accordion("Upload or paste a config.json", open=False):
                upload = gr.File(label="Upload", file_types=[".json"], type="binary", height=120)
                config = gr.Textbox(
                    label=CONFIG_FILE, elem_id="config", lines=6, max_lines=6, max_length=LARGEST_CONFIG_BYTES
                )
            for names in _MAIN:
                with gr.Row():
                    fields |= {name: setting_field(name, info=None, min_width=120) for name in names}
            button = gr.Button("Plan", variant="primary")
            with gr.Accordion("More settings", open=False):
                fields |= {name: setting_field(name) for name in NAMES if name not in fields}
        with gr.Column(scale=5):
            status = gr.Textbox(label="Result", lines=3, max_lines=20, interactive=False)
            with gr.Row():
                files = gr.DownloadButton("Download the files as ZIP", min_width=160)
                keep = gr.Button("Keep to compare", min_width=160)
            facts = _table("Figures", 36, 24, 40)
            address = gr.Textbox(label="Address of this plan", elem_id="address", buttons=["copy"], interactive=False)
            bars = gr.BarPlot(
                x="term", y="GB", sort="-y", tooltip="all", label="Memory at the peak", height=300, x_label_angle=-45
            )
            terms = _table("Memory and time by term", 14, 24, 16, 46)
            others = _table("Other layouts", 22, 13, 18, 13, 34)
            command = gr.Textbox(label="Command", buttons=["copy"], interactive=False)
    kept, current = gr.State(), gr.State()
    stored = gr.BrowserState({}, storage_key="shardwright", secret="settings")  # noqa: S106
    outputs = [status, stored, facts, bars, terms, others, command, address, files, current]

    def show(values: Mapping[str, Any], config: str, kept: dict[str, str] | None = None) -> list[Any]:
        try:
            settings = settings_from(values)
            plan, notes = planned(settings, config or "")
        except ShardwrightError as error:
            return [str(error), gr.skip(), *(None for _ in outputs[2:])]
        report = plan_report(plan)
        reasons = [text for section in report.sections[:1] for text in section.texts]
        (layouts,) = report.sections[-1].tables
        sizes = [(term_title(name), size / 1e9) for name, size in plan.chosen.memory.gpu.terms.items()]
        figures = pd.DataFrame(report.summary[0].rows, columns=["figure", "value", "detail"])
        current = dict(zip(figures["figure"], figures["value"], strict=True))
        if kept:
            figures.insert(2, "kept plan", [kept.get(name, "") for name in figures["figure"]])
        rendered = render_files(plan) | ({CONFIG_FILE: config} if config else {})
        return [
            "\n".join([*reasons, *notes]),
            texts_of(settings),
            figures,
            pd.DataFrame(sizes, columns=["term", "GB"]),
            pd.DataFrame(term_rows(plan), columns=["of", "term", "amount", "meaning"]),
            pd.DataFrame(layouts.rows, columns=list(layouts.headings)),
            command_of(settings),
            "Upload the config.json again to repeat this plan." if config else f"?{urlencode(texts_of(settings))}",
            save_bytes_to_cache(archive(rendered), "plan.zip", files.GRADIO_CACHE),
            current,
        ]

    def from_form(config: str, kept: dict[str, str] | None, *values: Any) -> list[Any]:
        return show(dict(zip(fields, values, strict=True)), config, kept)

    def from_address(request: gr.Request, stored: dict[str, Any]) -> list[Any]:
        """Plan what the address says; else what this browser planned last; else the example."""
        # Names that begin with two underscores belong to Gradio and Spaces.
        query = {name.replace("-", "_"): text for name, text in request.query_params.items() if name[:2] != "__"}
        values = query or stored or EXAMPLE
        shown = {**dict.fromkeys(fields, ""), **values} if query or stored else values
        return [*(_restored(name, shown) for name in fields), *show(values, "")]

    def read(content: bytes | None) -> tuple[str, Any]:
        return (content or b"").decode(errors="replace"), "" if content else gr.skip()

    upload.upload(read, upload, [config, fields["model"]], api_visibility="private")
    keep.click(lambda shown: (shown, "Kept; plan again to compare"), current, [kept, keep], api_visibility="private")
    button.click(from_form, [config, kept, *fields.values()], outputs, api_visibility="private")
    page.load(from_address, stored, [*fields.values(), *outputs], api_visibility="private")


def _restored(name: str, values: Mapping[str, Any]) -> Any:
    """Return the value of a field for settings as texts."""
    field = PageSettings.model_fields[name]
    text = str(values.get(name, ""))[:LONGEST_VALUE]
    if field.annotation is bool:
        return text == "true"
    if get_origin(field.annotation) is Literal:
        return text if text in get_args(field.annotation) else field.default
    return text


def _check_tab() -> None:
    with gr.Row():
        with gr.Column(scale=2):
            text = gr.Textbox(label="DeepSpeed, Accelerate or TRL file", lines=20, max_lines=20, max_length=2**20)
            # A pasted file may not read the config.json of a model, which the hardware is for.
            names = [name for name in CheckedFor.model_fields if name != "hardware"]
            facts = {name: setting_field(name, CheckedFor) for name in names}
            button = gr.Button("Check", variant="primary")
        with gr.Column(scale=3):
            status = gr.Textbox(label="Result", interactive=False)
            table = gr.Dataframe(label="Findings", interactive=False, wrap=True)

    def find(pasted: str, *values: Any) -> tuple[str, Any]:
        try:
            result = checked(pasted, dict(zip(facts, values, strict=True)))
        except ShardwrightError as error:
            return str(error), None
        findings = sorted(result.to_dict()["findings"], key=lambda finding: finding["kind"] != "error")
        data = [
            (each["kind"], each["where"], plain(each["value"])[:200], each["rule"], each["fix"]) for each in findings
        ]
        rows = {"headers": ["severity", "location", "value", "rule", "fix"], "data": data} if findings else None
        return f"{result.errors} error(s), {len(result.findings) - result.errors} warning(s)", rows

    button.click(find, [text, *facts.values()], [status, table], api_visibility="private")


class Guard:
    """Middleware that rejects large requests, and requests from pages of other sites.

    Gradio 6.31.0 limits files only, and its CORS check hides answers from other sites but runs their requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self.app
        if scope["type"] in ("http", "websocket"):
            headers, changes = Headers(scope=scope), scope.get("method", "GET") not in _SAFE_METHODS
            origin, host = headers.get("origin", "none" if changes else ""), headers.get("host", "")
            if origin and urlsplit(origin).netloc != host:
                app = PlainTextResponse(f"Origin {origin[:200]}: only pages of {host} may call this server.\n", 403)
            elif changes and not headers.get("content-length", "").isdecimal():
                app = PlainTextResponse("Content-Length: is missing; send the length of the body.\n", 411)
            elif int(headers.get("content-length") or 0) > LARGEST_BODY_BYTES:
                rule = f"must be at most {LARGEST_BODY_BYTES:,} bytes"
                app = PlainTextResponse(f"Content-Length: {rule}; send a smaller file.\n", 413)
        await app(scope, receive, send)


def serve(host: str, port: int, *, announce: Callable[[str], None]) -> None:
    """Serve the page until the process ends; call `announce` with its address when it listens."""
    with tempfile.TemporaryDirectory(prefix="shardwright-ui-") as uploads:
        os.environ |= {"GRADIO_TEMP_DIR": uploads, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        own = host in ("127.0.0.1", "localhost", "::1")
        # Otherwise another site's name could resolve to 127.0.0.1 and read this page.
        names = ["127.0.0.1", "localhost", "[::1]"] if own else ["*"]
        page = build_page()
        try:
            _, address, _ = page.launch(
                server_name=host,
                server_port=port or None,
                theme=gr.themes.Default(primary_hue="blue").set(
                    # White on Gradio's own colours has less contrast than WCAG's 4.5.
                    button_primary_background_fill="*primary_700",
                    button_primary_background_fill_hover="*primary_800",
                    button_primary_background_fill_dark="*primary_700",
                    color_accent="*primary_700",
                ),
                css=".dark { --color-accent: var(--primary-400) }",
                max_file_size=LARGEST_CONFIG_BYTES,
                strict_cors=True,
                app_kwargs={"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=names), Middleware(Guard)]},
                ssr_mode=False,
                share=False,
                footer_links=[],
                run_history=False,
                enable_monitoring=False,
                quiet=True,
                prevent_thread_lock=True,
            )
        except (OSError, UnicodeError) as error:
            reason = str(error).splitlines()[0]
            fix = "pass another --port or --host, or --port 0 for a free port"
            raise ShardwrightError(f"{host}:{port}: cannot listen ({reason}); {fix}") from None
        try:
            announce(address)
            threading.Event().wait()
        finally:
            page.close(verbose=False)
