"""`shardwright schema`: JSON schemas for editors and other tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from ..options import FormatOptions
from ..settings import FILLED, Options, grouped

grouped(FormatOptions)


def schema_command(
    subject: Literal["settings", "hardware", "plan", "serving"] = "settings",
    *,
    options: Annotated[FormatOptions, Options] = FILLED,
) -> int:
    """Print the JSON schema of a file that Shardwright reads or writes; in one line with `--format json`.

    Parameters
    ----------
    subject
        settings (YAML of plan --config), hardware (YAML of --hardware), plan (plan.json), or serving (JSON of serve).
    """
    from ..plan_settings import PlanSettings

    versions = {"type": "object", "additionalProperties": {"type": "string"}}
    added: dict[str, Any] = {"schema_version": {"const": 1}, "engine_versions": versions}
    schemas: dict[str, Callable[[], dict[str, Any]]] = {
        "settings": PlanSettings.model_json_schema,
        "hardware": _hardware_schema,
        "plan": _plan_schema,
        "serving": lambda: _object(added | _schema_of("ServingPlan")["properties"]),
    }
    print(json.dumps(schemas[subject](), indent=None if options.as_json else 2))
    return 0


def _hardware_schema() -> dict[str, Any]:
    schema = _schema_of("HardwareSpec")
    fields = schema["properties"]
    del fields["assumed"]
    for name, field in fields.items():
        if "bytes" in name or "flops" in name:
            fields[name] = {"title": field["title"], "anyOf": [{"type": "number"}, {"type": "string"}]}
    del schema["required"]
    return schema | {"additionalProperties": False}


def _plan_schema() -> dict[str, Any]:
    """Return the schema of `plan.json`, which nests parts differently from the dataclasses (`plan_to_dict`)."""
    schema = _schema_of("Plan")
    parts = schema["$defs"]
    memory = parts["MemoryEstimate"]["properties"]
    job = parts["TrainingJob"]["properties"]
    parts["TrainingJob"]["properties"] = {"seq_len": job.pop("seq_len_tokens")} | job
    parts["Layout"]["properties"]["label"] = {"type": "string"}
    host = parts["HostMemory"]
    nvme_used = host["properties"].pop("nvme_bytes_per_node")
    host["properties"]["nvme_capacity_bytes_per_node"] = memory["nvme_capacity_bytes_per_node"]
    host["required"] = [name for name in host["required"] if name in host["properties"]]
    layout = {
        "strategy": {"$ref": "#/$defs/Layout"},
        "gpu_memory": memory["gpu"],
        "host_memory": memory["host"],
        "nvme_bytes_per_node": nvme_used,
        "step_time": {"$ref": "#/$defs/StepTime"},
        "loss": {"enum": ["eager", "chunked"]},
        "reason": {"type": "string"},
    }
    placements = parts["Evaluated"]["properties"]["placements"]
    chosen = layout | {"teacher": {"anyOf": [placements["additionalProperties"], {"type": "null"}]}}
    del parts["MemoryEstimate"], parts["Evaluated"]
    text, texts, count = {"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "integer"}
    model = {
        "name": text,
        "parameters": count,
        "trainable_parameters": count,
        "architecture": text,
        "model_type": text,
        "revision": {"type": ["string", "null"]},
        "parameters_by_group": {"type": "object", "additionalProperties": count},
        "layer_classes": texts,
        "spec": {"$ref": "#/$defs/ModelSpec"},
    }
    properties = {
        "schema_version": {"const": 1},
        "model": _object(model),
        "hardware": {"$ref": "#/$defs/HardwareSpec"},
        "job": {"$ref": "#/$defs/TrainingJob"},
        "chosen": _object(chosen),
        "global_batch": _object({"sequences": {"type": "integer"}, "tokens": {"type": "integer"}, "reason": text}),
        "rejected": {"type": "array", "items": _object(layout)},
        "doubts": texts,
        "files": texts,
        "versions": {"type": "object", "additionalProperties": text},
    }
    optional: dict[str, Any] = {
        "activations": {"enum": ["upper bound"]},
        "command": text,
        "trials": {"type": "array", "items": {"$ref": "#/$defs/Trial"}},
    }
    return _object(properties, **optional) | {"$defs": parts}


def _object(properties: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties | optional,
        "required": sorted(properties),
        "additionalProperties": False,
    }


def _schema_of(name: str) -> dict[str, Any]:
    from pydantic import TypeAdapter

    from ...ds_configs.plan.plan import Plan
    from ...ds_configs.serving.plan import ServingPlan
    from ...ds_configs.specs.hardware import HardwareSpec

    kinds = {"HardwareSpec": HardwareSpec, "Plan": Plan, "ServingPlan": ServingPlan}
    adapter: TypeAdapter[Any] = TypeAdapter(kinds[name])
    return adapter.json_schema()
