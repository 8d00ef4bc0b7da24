"""`shardwright env --patches`: the registry of patches against the installed releases."""

from __future__ import annotations

import json

import pytest
from shardwright.cli.main import run
from shardwright.plugins import patches, releases
from shardwright.plugins.llm_compressor import import_upstream
from shardwright.plugins.patches import Patch


def test_patches_are_listed_with_their_state(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"scope": "process", "reason": "It is wrong.", "canary": ""}
    listed = (
        Patch(name="fitting", target="torch:rand", **common),
        Patch(name="old", target="torch:rand", versions="<1", **common),
        Patch(name="changed", target="torch:no_such_function", **common),
        Patch(name="absent", target="no_such_package:attribute", **common),
    )
    if releases.installed_version("llmcompressor") is not None:
        # Its import needs entries of the registry, and would stay incomplete for later tests of this process.
        import_upstream()
    monkeypatch.setattr(patches, "PATCHES", listed)
    states = {
        "fitting": "applies",
        "old": "not needed by this release",
        "changed": "target differs",
        "absent": "package not installed",
    }
    assert run(["env", "--patches", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1
    assert {each["name"]: each["state"] for each in found["patches"]} == states
    assert [each["error"] is not None for each in found["patches"]] == [False, False, True, False]
    assert found["patches"][1]["releases"] == "<1"

    assert run(["env", "--patches"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name}: {state}\n" in shown for name, state in states.items())
    assert "patch changed replaces torch.no_such_function, which this release does not have" in shown


def test_env_create_names_its_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "create", "quantize"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "create" in line and "python -m venv" in line and "shardwright[quantize]" in line
