"""The printed JSON schemas against the files that they describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shardwright.cli.main import run
from shardwright.plugins.planning.from_names import read_hardware

KINDS: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def violations(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Return where a value breaks a schema, for the keywords that the printed schemas use."""
    if "anyOf" in schema:
        found = [violations(value, option, place) for option in schema["anyOf"]]
        return [] if [] in found else [f"{place}: none of {len(found)}"]
    if "const" in schema and value != schema["const"]:
        return [f"{place}: not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{place}: not one of {schema['enum']}"]
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", list(KINDS))
    if not any(isinstance(value, KINDS[kind]) and (kind == "boolean" or value is not True) for kind in kinds):
        return [f"{place}: {value!r} is not {kinds}"]
    errors: list[str] = []
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        errors += [f"{place}: lacks {name}" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            other = schema.get("additionalProperties", True)
            if name in properties:
                errors += violations(item, properties[name], f"{place}.{name}")
            elif isinstance(other, dict):
                errors += violations(item, other, f"{place}.{name}")
            elif other is False or properties:
                errors.append(f"{place}: does not know {name}")
    if isinstance(value, list):
        prefix = schema.get("prefixItems", [])
        for index, item in enumerate(value):
            kind = prefix[index] if index < len(prefix) else schema.get("items", {})
            errors += violations(item, kind, f"{place}[{index}]")
    return errors


@pytest.fixture
def schema(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["schema", request.param]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


@pytest.mark.parametrize("schema", ["hardware"], indirect=True)
def test_the_hardware_schema_takes_what_the_reader_takes(schema: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "h.yaml"
    good: tuple[dict[str, Any], ...] = (
        {"gpu": "A100-80GB"},
        {"gpu": "A100-80GB", "nodes": 2, "gpu_bytes": "70GB", "flops_per_s": 3e14, "nvme_path": None},
    )
    bad: tuple[dict[str, Any], ...] = (
        {"gpu": "A100-80GB", "gpus": 8},
        {"gpu": "A100-80GB", "nodes": "2"},
        {"gpu": "A100-80GB", "assumed": "x"},
    )
    for data in good:
        file.write_text(json.dumps(data))
        assert read_hardware(str(file)).gpu == "A100-80GB"
        assert violations(data, schema) == []
    for data in bad:
        file.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=r"h\.yaml|nodes"):
            read_hardware(str(file))
        assert len(violations(data, schema)) == 1


@pytest.mark.parametrize("schema", ["settings"], indirect=True)
def test_the_settings_schema_names_every_setting(schema: dict[str, Any]) -> None:
    assert violations({"hardware": "8xA100-80GB", "seq_len": 512, "micro_batch_size": "auto"}, schema) == []
    assert violations({"hardwear": "8xA100-80GB"}, schema) == [": does not know hardwear"]
    assert all(field.get("description") for field in schema["properties"].values())
