"""The printed JSON schemas against the files that they describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from shardwright.cli.main import run
from shardwright.plugins.planning import read_hardware


def violations(value: Any, schema: dict[str, Any]) -> list[str]:
    return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


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
    (message,) = violations({"hardwear": "8xA100-80GB"}, schema)
    assert "hardwear" in message
    assert all(field.get("description") for field in schema["properties"].values())
