"""Plan directories and every file that a plan consists of, as written, moved and edited."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from planning import llama
from shardwright.ds_configs.check.files import check
from shardwright.ds_configs.plan.plan import Plan, make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob


def planned(strategy: str) -> Plan:
    job = TrainingJob(seq_len_tokens=64, strategy=strategy)  # type: ignore[arg-type]
    return make_plan(llama(hidden_size=64, intermediate_size=128), parse_hardware("2xCPU"), job)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp2"])
def test_written_plans_pass_check(strategy: str, tmp_path: Path) -> None:
    plan = planned(strategy)
    plan.write(tmp_path / "plan")
    assert check(tmp_path / "plan").findings == ()
    assert check(*(tmp_path / "plan" / name for name in plan.file_names)).findings == ()


@pytest.mark.parametrize("edited", ["ds_config.json", "accelerate.yaml"])
def test_edited_copy_of_the_deepspeed_config_is_an_error(edited: str, tmp_path: Path) -> None:
    planned("zero2").write(tmp_path / "written")
    directory = (tmp_path / "written").rename(tmp_path / "moved")
    assert check(directory).findings == ()
    text = (directory / edited).read_text()
    (directory / edited).write_text(
        text.replace('"overlap_comm": ', '"overlap_comm": not_').replace("not_true", "false")
    )
    for named in (directory, directory / "accelerate.yaml"):
        (finding,) = check(named).findings
        assert (
            finding.kind == "error"
            and "differs from" in str(finding.error)
            and "zero_optimization" in str(finding.error)
        )
    (directory / "accelerate.yaml").write_text(_naming(directory / "accelerate.yaml", directory / "ds_config.json"))
    assert check(directory).findings == ()
    (finding,) = check(directory.rename(tmp_path / "again")).findings
    assert finding.kind == "warning"
    assert "the plan is now in" in str(finding.error) and "shardwright launch" in str(finding.error)


def _naming(accelerate: Path, file: Path) -> str:
    config = yaml.safe_load(accelerate.read_text())
    config["deepspeed_config"]["deepspeed_config_file"] = str(file)
    return yaml.safe_dump(config)


def test_checks_configs_embedded_in_yaml(tmp_path: Path) -> None:
    planned("zero2").write(tmp_path / "plan")
    text = (tmp_path / "plan" / "accelerate.yaml").read_text().replace('"stage": 2', '"stage": 7')
    (tmp_path / "theirs.yaml").write_text(text)
    assert "zero_optimization.stage = 7" in str(check(tmp_path / "theirs.yaml").findings[0].error)
    config = yaml.safe_load(text)["deepspeed_config"]["deepspeed_config_file"].encode()
    (tmp_path / "theirs.yaml").write_text(
        _naming(tmp_path / "theirs.yaml", Path(base64.urlsafe_b64encode(config).decode()))
    )
    assert "zero_optimization.stage = 7" in str(check(tmp_path / "theirs.yaml").findings[0].error)


def test_training_arguments_that_contradict_tiles_and_offloaded_checkpoints_are_errors(tmp_path: Path) -> None:
    plan = planned("zero2")
    features = {"tiled_mlp": True, "offloaded_checkpoints": 1, "gradient_checkpointing": True}
    layout = replace(plan.chosen.layout, **features)
    replace(plan, chosen=replace(plan.chosen, layout=layout)).write(tmp_path)
    assert check(tmp_path).findings == ()
    file = tmp_path / "training_arguments.json"
    arguments = json.loads(file.read_text())
    file.write_text(json.dumps(arguments | {"gradient_checkpointing": False, "use_liger_kernel": True}))
    errors = " ".join(str(finding.error) for finding in check(tmp_path).findings if finding.kind == "error")
    assert "gradient_checkpointing = False: must be true" in errors
    assert "liger_kernel_config: must set swiglu and geglu to false" in errors


def test_missing_and_edited_files_are_named(tmp_path: Path) -> None:
    planned("zero2").write(tmp_path)
    (tmp_path / "launch.sh").unlink()
    arguments = json.loads((tmp_path / "training_arguments.json").read_text())
    (tmp_path / "training_arguments.json").write_text(json.dumps(arguments | {"per_device_train_batch_size": 999}))
    found = check(tmp_path)
    assert found.errors == 1
    said = " ".join(str(finding.error) for finding in found.findings)
    assert "launch.sh: is missing" in said and "per_device_train_batch_size = 999" in said
    (tmp_path / "plan.json").write_text("{")
    assert "is not valid JSON" in str(check(tmp_path).findings[0].error)


def test_rejects_directories_without_a_plan(tmp_path: Path) -> None:
    assert "is a directory without plan.json" in str(check(tmp_path).findings[0].error)
