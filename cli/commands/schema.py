"""`shardwright schema`: JSON schemas for editors."""

from __future__ import annotations

import json

from pydantic import TypeAdapter

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.hardware import HardwareSpec
from ...ds_configs.specs.synonyms import REMOVED
from ..options import Output, PlanSettings
from ..settings import FILLED, Options

SUBJECTS = ("settings", "hardware")


def schema_command(subject: str = "settings", *, options: Options[Output] = FILLED) -> int:
    """Print the JSON schema of a file that you write; in one line with `--format json`.

    Parameters
    ----------
    subject
        settings (YAML of plan --config) or hardware (YAML of --hardware).
    """
    if subject not in SUBJECTS:
        rule, fix = "must be 'settings' or 'hardware'", REMOVED.get(f"subject={subject}", "")
        raise UsageError(ConfigError(where="subject", value=subject, rule=rule, fix=fix))
    schema = PlanSettings.model_json_schema()
    if subject == "hardware":
        schema = TypeAdapter(HardwareSpec).json_schema() | {"additionalProperties": False}
        fields = schema["properties"]
        del fields["assumed"], schema["required"]
        for name, field in fields.items():
            if "bytes" in name or "flops" in name:
                fields[name] = {"title": field["title"], "anyOf": [{"type": "number"}, {"type": "string"}]}
    print(json.dumps(schema, indent=None if options.as_json else 2))
    return 0
