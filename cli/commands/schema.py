"""`shardwright schema`: JSON schemas for editors."""

from __future__ import annotations

import json
from typing import Any, Literal

from ..options import Output, PlanSettings
from ..settings import FILLED, Options


def schema_command(subject: Literal["settings", "hardware"] = "settings", *, options: Options[Output] = FILLED) -> int:
    """Print the JSON schema of a file that you write; in one line with `--format json`.

    Parameters
    ----------
    subject
        settings (YAML of plan --config) or hardware (YAML of --hardware).
    """
    schema = PlanSettings.model_json_schema() if subject == "settings" else _hardware_schema()
    print(json.dumps(schema, indent=None if options.as_json else 2))
    return 0


def _hardware_schema() -> dict[str, Any]:
    from pydantic import TypeAdapter

    from ...ds_configs.specs.hardware import HardwareSpec

    schema = TypeAdapter(HardwareSpec).json_schema()
    fields = schema["properties"]
    del fields["assumed"], schema["required"]
    for name, field in fields.items():
        if "bytes" in name or "flops" in name:
            fields[name] = {"title": field["title"], "anyOf": [{"type": "number"}, {"type": "string"}]}
    return schema | {"additionalProperties": False}
