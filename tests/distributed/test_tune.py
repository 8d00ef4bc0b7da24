"""`shardwright tune` on two real ranks: trials, memory that runs out, and a killed command."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import shardwright
from session import warm_command
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.trainers.runs.plan_callback import LIMIT_VARIABLE
from shardwright.trainers.tuning import tune
from small_models import llama

pytestmark = [pytest.mark.distributed, pytest.mark.once]

WORDS: dict[str, Any] = {"seq_len": 32, "global_batch_size": 4, "precision": "fp32"}


@pytest.fixture(scope="module")
def tuned(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two layouts of a model, measured by the command; the directory and what it printed."""
    root = tmp_path_factory.mktemp("tuned")
    shardwright.plan(str(tiny_llama), "2xCPU", **WORDS).write(root / "plan")
    command = [*warm_command("shardwright"), "tune", str(root / "plan")]
    command += ["--trials", "2", "--steps", "3", "--output-dir", str(root / "out"), "--format", "json"]
    environment = os.environ | {"SHARDWRIGHT_DATA_DIR": str(root / "data")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout)


def test_two_layouts_are_measured_beside_their_prediction(tuned: tuple[Path, dict[str, Any]]) -> None:
    root, data = tuned
    first, second = data["trials"]
    assert first["outcome"] == "measured" and first["steps"] == 3
    assert second["outcome"] in ("measured", "slower"), second
    for trial in (first, second):
        assert trial["step_seconds"] > 0 and trial["predicted_seconds"] > 0
        # Tensors of a rank, counted while the first two steps ran.
        assert trial["peak_allocated_bytes"] == pytest.approx(trial["predicted_allocated_bytes"], rel=0.25)
    best = min((one for one in (first, second) if one["outcome"] == "measured"), key=lambda one: one["step_seconds"])
    assert data["chosen"]["layout"] == best["layout"] and "is measured" in data["chosen"]["reason"]
    assert Plan.load(root / "out").to_dict()["trials"] == data["trials"]
    assert (root / "out" / "report.html").is_file()


def test_its_step_times_correct_the_next_plan(
    tuned: tuple[Path, dict[str, Any]], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, data = tuned
    monkeypatch.setenv("SHARDWRIGHT_DATA_DIR", str(root / "data"))
    after = shardwright.plan(str(tiny_llama), "2xCPU", **WORDS)
    first = data["trials"][0]
    own = [other for other in (after.chosen, *after.rejected) if other.layout.label == first["layout"]["label"]]
    before, measured = first["predicted_seconds"], first["step_seconds"]
    assert min(before, measured) < own[0].time.seconds < max(before, measured)
    assert "times the published prediction, from" in after.chosen.reason


def test_memory_that_runs_out_is_a_result(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv(LIMIT_VARIABLE, "1000000")
    plan = shardwright.plan(str(tiny_llama), "2xCPU", strategy="ddp", **WORDS)
    with pytest.raises(ShardwrightError, match="out of memory in phase"):
        tune(plan, trials=1, steps=3)


_GROUPED = {"completion_tokens": 16, "num_generations": 4}


@pytest.mark.needs("trl")
@pytest.mark.parametrize(
    ("task", "job"),
    [
        ("dpo", {}),
        ("grpo", {"beta": 0.1, **_GROUPED}),
        *(
            pytest.param(task, job, marks=pytest.mark.full)
            for task, job in (
                ("dpo", {"method": "lora", "strategy": "zero3"}),
                ("dpo", {"reference_placement": "cached"}),
                ("kto", {"strategy": "fsdp2"}),
                ("orpo", {}),
                ("cpo", {}),
                ("reward", {"strategy": "zero2"}),
                ("reward", {"method": "lora"}),
                ("rloo", _GROUPED),
            )
        ),
    ],
)
def test_tasks_are_measured_with_their_trainer(
    task: str, job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_DATA_DIR", str(tmp_path / "data"))
    llama(vocab_size=300, eos_token_id=256).save_pretrained(tmp_path / "model")
    plan = shardwright.plan(
        str(tmp_path / "model"), "2xCPU", task=task, seq_len=32, global_batch_size=8, precision="fp32", **job
    )
    tuned = tune(plan, trials=1, steps=3, output_dir=tmp_path / "out")
    (trial,) = tuned.trials
    assert trial.outcome == "measured" and trial.step_seconds is not None, trial.detail
    # The rows have the planned number of tokens, and no completion ends early.
    assert trial.peak_allocated_bytes == pytest.approx(trial.predicted_allocated_bytes, rel=0.05)
    assert Plan.load(tmp_path / "out").chosen.placements == plan.chosen.placements
