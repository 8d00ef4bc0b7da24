"""Errors of values that no source states alone, and of plan files: where each value was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Shell, shell_in
from paths import CONFIGS

LLAMA = str(CONFIGS / "meta-llama--Llama-3.1-8B")


def test_values_that_conflict_name_their_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell: Shell = shell_in(tmp_path, "plan", capsys, monkeypatch)
    monkeypatch.setenv("SHARDWRIGHT_PLAN_LORA_RANK", "8")
    Path("job.yaml").write_text("# a job\nteacher_placement: sharded\n")
    conflict = shell(LLAMA, "--hardware", "8xA100-80GB", "--config", "job.yaml", "--method", "full", "--format", "json")
    assert [error["where"] for error in json.loads(conflict.out)["error"]["errors"]] == [
        "lora_rank (from SHARDWRIGHT_PLAN_LORA_RANK)",
        "teacher_placement (from job.yaml:2)",
    ]


def test_unknown_and_wrong_keys_of_a_plan_file_are_named_together_with_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell: Shell = shell_in(tmp_path, "plan", capsys, monkeypatch)
    assert shell(LLAMA, "--hardware", "8xA100-80GB", "--output-dir", tmp_path / "p").code == 0
    file = tmp_path / "p" / "plan.json"
    data = json.loads(file.read_text())
    explain: Shell = shell_in(tmp_path, "explain", capsys, monkeypatch)
    data["job"] |= {"seq_len": "x", "dummy_size": 3}
    data["rejected"][1]["gpu_memory"]["peak_bytes"] = "much"
    text = json.dumps(data, indent=2)
    file.write_text(text)
    (error,) = explain(tmp_path / "p").errors
    first, second, third = (1 + text[: text.index(key)].count("\n") for key in ('"x"', '"dummy_size"', '"much"'))
    assert error.startswith(f"{file}: is not a plan that this version wrote")
    assert f"line {first}: job.seq_len must be an integer" in error
    assert f"line {second}: job.dummy_size is not a key of this version" in error
    assert f"line {third}: rejected.1.gpu_memory.peak_bytes must be an integer" in error
