"""Plan directories and every file that a plan consists of, as written, moved and edited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planning import llama
from shardwright.ds_configs.check.files import check
from shardwright.ds_configs.plan.plan import Plan, make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob


def planned(strategy: str) -> Plan:
    job = TrainingJob(seq_len_tokens=64, strategy=strategy)  # type: ignore[arg-type]
    return make_plan(llama(hidden_size=64, intermediate_size=128), parse_hardware("2xCPU"), job)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp2"])
def test_what_is_written_has_no_fault(strategy: str, tmp_path: Path) -> None:
    plan = planned(strategy)
    plan.write(tmp_path / "plan")
    assert check(tmp_path / "plan").findings == ()
    assert check(*(tmp_path / "plan" / name for name in plan.file_names)).findings == ()


def test_a_moved_plan_says_how_to_start_it(tmp_path: Path) -> None:
    planned("zero2").write(tmp_path / "plan")
    (tmp_path / "plan").rename(tmp_path / "moved")
    (finding,) = check(tmp_path / "moved").findings
    assert finding.kind == "warning"
    assert "the plan lies in" in str(finding.fault) and "shardwright launch" in str(finding.fault)


def test_missing_and_edited_files_are_named(tmp_path: Path) -> None:
    planned("zero2").write(tmp_path)
    (tmp_path / "launch.sh").unlink()
    arguments = json.loads((tmp_path / "training_arguments.json").read_text())
    (tmp_path / "training_arguments.json").write_text(json.dumps(arguments | {"per_device_train_batch_size": 999}))
    found = check(tmp_path)
    assert found.errors == 1
    said = " ".join(str(finding.fault) for finding in found.findings)
    assert "launch.sh: is missing" in said and "per_device_train_batch_size = 999" in said
    (tmp_path / "plan.json").write_text("{")
    assert "is not valid JSON" in str(check(tmp_path).findings[0].fault)


def test_a_directory_without_a_plan_is_refused(tmp_path: Path) -> None:
    assert "is a directory without plan.json" in str(check(tmp_path).findings[0].fault)
