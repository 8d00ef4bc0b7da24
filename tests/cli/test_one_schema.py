"""A field of `TrainingJob` is declared once: every input and output has it, with its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Shell, shell_in
from paths import CONFIGS

LLAMA, QWEN = str(CONFIGS / "meta-llama--Llama-3.1-8B"), str(CONFIGS / "Qwen--Qwen2.5-0.5B")

PROGRAM = """
import importlib.util, json, os, sys
from pathlib import Path
import shardwright

# A release with one more line in the declaration of a job.
spec = importlib.util.find_spec("shardwright.ds_configs.specs.job")
source = Path(spec.origin).read_text()
first = "    group: ClassVar[str] = \\"Training\\"\\n"
line = "    dummy_size: Annotated[int | None, Count(9), _option(\\"Size\\", hugging_face=(\\"dummy\\",))] = None\\n"
assert first in source
teacher = "    teacher: Annotated[ModelSpec | None, _option(\\"Frozen teacher model for distillation\\")] = None\\n"
judge = teacher.replace("teacher", "judge")
judge += "    judge_placement: Annotated[PlacementOption, _option(\\"Where it is\\")] = \\"auto\\"\\n"
assert teacher in source
source = source.replace(teacher, teacher + judge)
# Its role, and the task that runs it.
from typing import Literal
from shardwright.ds_configs.specs import second_models, tasks
second_models.SecondModelRole = Literal["teacher", "reference", "reward", "value", "judge"]
object.__setattr__(tasks.TASKS["sft"], "second_models", ("judge",))
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
exec(compile(source.replace(first, first + line, 1), spec.origin, "exec"), module.__dict__)

from shardwright.cli.main import build_app, run
from shardwright.cli.settings import resolve
from shardwright.ds_configs.plan.out_of_memory import OutOfMemory, out_of_memory_text
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware

def settings(*words):
    return resolve(build_app(), words)[1].arguments["settings"]

model, directory = sys.argv[1], Path(sys.argv[2])
train = ("train", "m", "--dataset", "d", "--output-dir", "o")
(directory / "job.yaml").write_text("dummy_size: 4\\n")
found = {"plan": [settings("plan", model, flag, "3").dummy_size for flag in ("--dummy-size", "--dummy")]}
found["file"] = settings(*train, "--config", str(directory / "job.yaml")).dummy_size
os.environ["SHARDWRIGHT_TRAIN_DUMMY_SIZE"] = "5"
own = settings(*train)
found["environment"] = own.dummy_size
from shardwright.trainers.runs.inputs import training_job
found["train"] = training_job(own, parse_hardware("8xA100-80GB")).dummy_size
assert run(["plan", model, "--hardware", "8xA100-80GB", "--dummy-size", "6", "--output-dir", str(directory / "p")]) == 0
plan = Plan.load(directory / "p")
found["plan.json"] = [json.loads((directory / "p" / "plan.json").read_text())["job"]["dummy_size"], plan.job.dummy_size]
found["flags"] = shardwright.TrainingJob(dummy_size=6).flags(shardwright.TrainingJob())
text = out_of_memory_text(plan, OutOfMemory(phase="backward", error="out of memory"))
found["commands"] = [line.split() for line in text.splitlines() if line.startswith("    shardwright plan ")]
from shardwright.cli.page.app import NAMES, command_of, settings_from, term_rows
on_page = settings_from({"model": "a/b", "hardware": "8xT4", "dummy_size": "7"})
found["page"] = ["dummy_size" in NAMES, on_page.dummy_size, "--dummy-size 7" in command_of(on_page)]
try:
    shardwright.plan(model, "8xA100-80GB", dummy_size=10, seq_len="x")
except UsageError as error:
    found["errors"] = str(error).splitlines()
# A second model: its own flags, keys, fields, lines, terms and errors.
(directory / "job.yaml").write_text("judge: a/b\\njudge_placement: sharded\\n")
own = settings("plan", model, "--config", str(directory / "job.yaml"))
found["second model"] = [own.second_models(), own.judge_placement]
words = ["plan", model, "--hardware", "8xA100-80GB", "--judge", sys.argv[3], "--judge-placement", "sharded"]
assert run([*words, "--verbose", "--output-dir", str(directory / "second")]) == 0
plan = Plan.load(directory / "second")
chosen = json.loads((directory / "second" / "plan.json").read_text())["chosen"]
found["second plan"] = [chosen["teacher"], chosen["judge"]["placement"], *(one.role for one in plan.job.second_models)]
found["second flags"] = plan.job.flags(shardwright.TrainingJob())
text = out_of_memory_text(plan, OutOfMemory(phase="backward", error="out of memory"))
found["second commands"] = [line.split() for line in text.splitlines() if line.startswith("    shardwright plan ")]
found["second terms"] = [group for group, title, *_ in term_rows(plan) if "judge" in title]
on_page = settings_from({"model": "a/b", "hardware": "8xT4", "judge": "c/d", "judge_placement": "sharded"})
found["second page"] = ["judge" in NAMES, command_of(on_page)]
try:
    shardwright.plan(model, "8xA100-80GB", judge_placement="sharded")
except UsageError as error:
    found["second error"] = str(error)
print(json.dumps(found))
"""


def test_a_new_field_of_a_job_and_a_new_second_model_are_declared_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, LLAMA, str(tmp_path), QWEN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["plan"] == [3, 3] and found["file"] == 4 and found["environment"] == 5 and found["train"] == 5
    assert found["plan.json"] == [6, 6]
    assert found["flags"] == ["--dummy-size", "6"]
    assert found["commands"] and all(words[words.index("--dummy-size") + 1] == "6" for words in found["commands"])
    assert found["page"] == [True, 7, True]
    assert found["errors"] == [
        "dummy_size = 10: must be an integer from 1 to 9, or auto",
        "seq_len = 'x': must be an integer from 1 to 100,000,000",
    ]
    placed = ["--judge-placement", "sharded"]
    assert found["second model"] == [{"judge": "a/b"}, "sharded"]
    assert found["second plan"] == [None, "sharded", "judge"]
    assert {QWEN, "--judge", *placed} <= set(found["second flags"])
    assert all(QWEN in words and "--judge-placement" in words for words in found["second commands"])
    assert {"memory", "step"} <= set(found["second terms"])
    assert found["second page"][0] and "--judge c/d" in found["second page"][1]
    assert found["second error"] == "judge_placement = 'sharded': requires a judge; pass --judge too"
    for line in ("Judge", "Memory includes the judge", "judge weights"):
        assert line in done.stdout or line in (tmp_path / "second" / "launch.sh").read_text(), line


def test_options_that_conflict_name_the_variable_and_the_line_that_set_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell: Shell = shell_in(tmp_path, "plan", capsys, monkeypatch)
    monkeypatch.setenv("SHARDWRIGHT_PLAN_LORA_RANK", "8")
    Path("job.yaml").write_text("# a job\nteacher_placement: sharded\noptimizer: adamww\n")
    conflict = shell(LLAMA, "--hardware", "8xA100-80GB", "--config", "job.yaml", "--method", "full", "--format", "json")
    assert [error["where"] for error in json.loads(conflict.out)["error"]["errors"]] == [
        "lora_rank (from SHARDWRIGHT_PLAN_LORA_RANK)",
        "teacher_placement (from job.yaml:2)",
        "optimizer (from job.yaml:3)",
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
    data["chosen"] |= {"dummy_speed": 4}
    data |= {"dummy_key": 5}
    text = json.dumps(data, indent=2)
    file.write_text(text)
    (error,) = explain(tmp_path / "p").errors
    line = {
        key: 1 + text[: text.index(f'"{key}"')].count("\n")
        for key in ("x", "much", *(f"dummy_{each}" for each in ("size", "speed", "key")))
    }
    assert error.startswith(f"{file}: is not a plan that this version wrote")
    assert f"line {line['x']}: job.seq_len must be an integer" in error
    for key in ("job.dummy_size", "chosen.dummy_speed", "dummy_key"):
        assert f"line {line[key.rpartition('.')[2]]}: {key} is not a key of this version" in error
    assert f"line {line['much']}: rejected.1.gpu_memory.peak_bytes must be an integer" in error
