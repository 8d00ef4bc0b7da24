"""Fields of the page, made of the settings that the command line declares: choices, defaults and descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import gradio as gr
from pydantic.fields import FieldInfo

from ...ds_configs.specs.errors import ShardwrightError
from ...ds_configs.specs.hardware import gpu_catalog, parse_hardware
from ...ds_configs.specs.settings import Settings
from .address import EXAMPLE, PageSettings
from .planned import known_models

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
"""What the field of the model says while an uploaded file is planned."""
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
"""Choices that stand side by side."""


def setting_field(name: str, kind: type[Settings] = PageSettings) -> gr.components.Component:
    """Return the field of a setting: choices to pick from, a box to tick, or text as behind a flag."""
    field = kind.model_fields[name]
    label = _LABELS.get(name, name.replace("_", " ").capitalize())
    info = field.description
    choices = _choices(field)
    if choices:
        component = gr.Radio if len(choices) <= _FEW else gr.Dropdown
        return component(choices, value=field.default, label=label, info=info, elem_id=name)
    if field.annotation is bool:
        return gr.Checkbox(value=field.default, label=label, info=info, elem_id=name)
    shown = "" if field.default is None else str(field.default)
    return gr.Textbox(placeholder=shown, label=label, info=info, max_lines=1, elem_id=name)


def _choices(field: FieldInfo) -> list[str]:
    return list(get_args(field.annotation)) if get_origin(field.annotation) is Literal else []


def hardware_fields() -> dict[str, gr.components.Component]:
    """Return the fields that make up `hardware`."""
    named = parse_hardware(EXAMPLE.hardware or "")
    gpu = gr.Dropdown(list(gpu_catalog()), value=named.gpu, label="Accelerator", elem_id="gpu")
    with gr.Row():
        gpus = gr.Number(named.gpus_per_node, label="In each node", precision=0, min_width=80, elem_id="gpus_per_node")
        nodes = gr.Number(named.nodes, label="Nodes", precision=0, min_width=80, elem_id="nodes")
    return {"gpu": gpu, "gpus_per_node": gpus, "nodes": nodes}


def model_choices() -> list[str]:
    """Return the models that are planned without asking the Hub."""
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
    """Return the value of each field; hardware that no field can show is left to the message about it."""
    stated = settings.stated()
    try:
        named = parse_hardware(settings.hardware or "")
    except ShardwrightError:
        named = parse_hardware(EXAMPLE.hardware or "")
    found: dict[str, Any] = {}
    for name, field in PageSettings.model_fields.items():
        value = stated.get(name, field.default)
        is_text = not _choices(field) and field.annotation is not bool
        found[name] = ("" if name not in stated or value is None else str(value)) if is_text else value
    counted = {"nodes": named.nodes, "gpus_per_node": named.gpus_per_node, "gpu": named.gpu}
    return found | counted | {"model": UPLOADED if settings.config else settings.model or None}
