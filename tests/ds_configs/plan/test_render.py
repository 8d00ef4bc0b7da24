"""Rendered files: content, determinism, and that the libraries which read them accept them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from planning import public_model
from shardwright.ds_configs.plan.plan import Plan, edited_files, make_plan, plan_from_dict, plan_to_dict, render_files
from shardwright.ds_configs.plan.rendering import deepspeed_config
from shardwright.ds_configs.specs.errors import RefusedInputError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob

LLAMA_8B = public_model("meta-llama/Llama-3.1-8B")
NODE = parse_hardware("8xH100-80GB", nvme="/local_nvme:7TB")
TWO_NODES = parse_hardware("2x8xH100-80GB")


def plan_of(hardware=NODE, model=LLAMA_8B, **job) -> Plan:
    return make_plan(model, hardware, TrainingJob(**job))


def deepspeed_of(plan: Plan) -> dict:
    return json.loads(render_files(plan)["ds_config.json"])


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp2"])
def test_only_changed_values_count_as_edits(strategy, tmp_path):
    plan = plan_of(strategy=strategy, method="lora")
    plan.write(tmp_path / "made")
    moved = (tmp_path / "made").rename(tmp_path / "moved")
    accelerate = moved / "accelerate.yaml"
    accelerate.write_text(f"# mine\n{accelerate.read_text()}")
    assert edited_files(Plan.load(moved), moved) == []
    for name in sorted({"accelerate.yaml", "ds_config.json", "training_arguments.json"} & set(plan.file_names)):
        text = (moved / name).read_text()
        (moved / name).write_text(re.sub(r": (?:true|\d+)(,?)$", r": 77\1", text, flags=re.MULTILINE))
        assert edited_files(plan, moved) == [name]
        (moved / name).write_text("[")
        assert edited_files(plan, moved) == [name]
        (moved / name).unlink()
        assert edited_files(plan, moved) == []


@pytest.mark.slow
def test_accelerate_reads_deepspeed_configuration_of_a_moved_directory(tmp_path, monkeypatch):
    """`accelerate launch` puts the value into this variable, and the ranks' plugin reads it there."""
    from accelerate import DeepSpeedPlugin
    from accelerate.commands.config import load_config_from_file

    plan = plan_of(strategy="zero3", offload="cpu")
    plan.write(tmp_path / "written")
    moved = (tmp_path / "written").rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    section = load_config_from_file(str(moved / "accelerate.yaml")).deepspeed_config
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", section["deepspeed_config_file"])
    plugin = DeepSpeedPlugin()
    assert deepspeed_config(plan).items() <= plugin.hf_ds_config.config.items() and plugin.zero_stage == 3
    for text in (path.read_text() for path in moved.iterdir() if path.name != "plan.json"):
        places = [line for line in text.splitlines() if str(tmp_path) in line]
        assert all("Run: " in line for line in places), places


def test_scripts_of_several_nodes_are_valid():
    files = render_files(plan_of(TWO_NODES, strategy="zero3"))
    for name in ("launch.sh", "launch.sbatch"):
        subprocess.run(["bash", "-n"], input=files[name], text=True, check=True)


def test_launch_script_passes_awkward_words_through(tmp_path):
    """The script's own words and the user's arguments reach the launcher unsplit, and no shell runs them."""
    awkward = "/models/with space/and 'quote' $(touch pwned) `touch pwned`\ntouch pwned\n; touch pwned"
    model = replace(LLAMA_8B, name=awkward)
    plan = make_plan(model, NODE, TrainingJob(strategy="zero2"))
    target = tmp_path / "a plan $(touch pwned)\ntouch pwned"
    plan.write(target)
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{fake.parent}:{os.environ['PATH']}"}

    def started(*words: str) -> list[str]:
        command = [str(target / "launch.sh"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
        return done.stdout.split("\0")[:-1]

    program, model = ["-m", "shardwright"], awkward
    text = ["--text", "two words"]
    assert started(*text) == [*program, "launch", str(target), "--", *text]
    data = ["--max-steps", "3", "--dataset", "two words"]
    assert started(*data) == [*program, "train", model, "--plan", str(target), *data]
    assert started("--dataset=my data") == [*program, "train", model, "--plan", str(target), "--dataset=my data"]
    script = ["my script.py", "--dataset", "two words"]
    assert started(*script) == [*program, "launch", str(target), "--", *script]
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(("hardware", "places"), [(NODE, []), (TWO_NODES, ["0", "main-host"])])
def test_launch_script_requires_a_script_or_data(tmp_path, hardware, places):
    plan_of(hardware, strategy="zero2").write(tmp_path / "plan")
    done = subprocess.run([str(tmp_path / "plan" / "launch.sh"), *places], capture_output=True, text=True)
    assert done.returncode == 2
    assert "SCRIPT [ARGUMENTS], or" in done.stderr and "--dataset FILE --output-dir DIRECTORY" in done.stderr


_KNOWN_PLAN = plan_to_dict(plan_of())


def _dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dictionaries(item)


@settings(max_examples=80, deadline=None, phases=[Phase.generate])
@given(data=st.data(), change=st.sampled_from(["remove", "rename", "add", "retype"]))
def test_plans_of_other_versions_are_read_or_rejected_in_one_line(data, change):
    values = json.loads(json.dumps(_KNOWN_PLAN))
    holder = data.draw(st.sampled_from([item for item in _dictionaries(values) if item]))
    key = data.draw(st.sampled_from(sorted(holder)))
    if change == "add":
        holder["of_another_version"] = 1
    elif change == "retype":
        holder[key] = data.draw(st.sampled_from([None, [], {}, "text", -1, 1.5, True, [[]], {"a": {}}]))
    else:
        value = holder.pop(key)
        holder |= {"of_another_version": value} if change == "rename" else {}
    try:
        plan = plan_from_dict(values, source="plan.json")
    except RefusedInputError as error:
        assert len(str(error).splitlines()) == 1
        assert str(error).endswith(("run `shardwright plan` again", "written by `shardwright plan`"))
    else:
        # Nothing that is read may be lost: a run would differ from the plan.
        assert change != "add" or "of_another_version" in json.dumps(plan_to_dict(plan))
