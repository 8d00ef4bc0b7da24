"""`tune` without ranks: its requests, what it makes of each kind of trial, and what it stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Shell, shell_in
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.search.tuning import layouts_to_measure
from shardwright.ds_configs.specs.errors import ShardwrightError, UsageError
from shardwright.plugins.launching.elastic import RankFailure
from shardwright.plugins.launching.launch import Launch, LaunchFailedError
from shardwright.plugins.planning import plan as make
from shardwright.trainers.rank_main import read_task
from shardwright.trainers.reports.runs import report_html
from shardwright.trainers.tuning import TrialTask, tune
from small_models import llama

Behave = Callable[[str, TrialTask], Any]
"""Returns the seconds of a layout's steps, or raises what its launch raises."""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDWRIGHT_DATA_DIR", str(tmp_path / "data"))
    llama(hidden_size=64, vocab_size=512).save_pretrained(tmp_path / "model")
    plan = make(str(tmp_path / "model"), "2xCPU", seq_len=32, global_batch_size=4, precision="fp32")
    plan.write(tmp_path / "plan")
    return tmp_path / "plan"


@pytest.fixture
def timeouts() -> list[float]:
    """Seconds that each launch may take."""
    return []


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, timeouts: list[float]) -> Callable[[Behave], list[str]]:
    """Replace launches by a function of the layout, and return the labels of the launched ones."""

    def replaced(behave: Behave) -> list[str]:
        labels: list[str] = []

        def launch_ranks(launch: Launch, *, timeout_seconds: float, **_: Any) -> None:
            file = Path(launch.arguments[-1])
            task = read_task(file)
            assert isinstance(task, TrialTask)
            timeouts.append(timeout_seconds)
            labels.append(Plan.load(task.plan).chosen.layout.label)
            result = {"step_seconds": behave(labels[-1], task), "peak_allocated_bytes": 3_000_000}
            (file.parent / "result.json").write_text(json.dumps(result))

        monkeypatch.setattr("shardwright.trainers.runs.run.launch_ranks", launch_ranks)
        monkeypatch.setattr("shardwright.trainers.runs.run.compile_operators", lambda devices, optimizer: None)
        return labels

    return replaced


def failure(message: str = "", exit_code: int = 1, **values: Any) -> LaunchFailedError:
    failures = [RankFailure(rank=1, message=message, exit_code=exit_code, **values)]
    return LaunchFailedError("torchrun: stopped", output="", launcher_exit_code=1, failures=failures)


def test_the_fastest_measured_layout_becomes_the_plan(planned: Path, ranks: Any, tmp_path: Path) -> None:
    labels = ranks(lambda label, task: [0.1, 0.11, 0.1, 0.1, 0.1] if label == "zero1" else [0.2] * task.steps)
    tuned = tune(planned, trials=4, output_dir=tmp_path / "out")
    assert len(labels) == 4 and labels[0] == Plan.load(planned).chosen.layout.label
    assert tuned.chosen.layout.label == "zero1" and "100.0 % faster" in tuned.chosen.reason
    written = Plan.load(tmp_path / "out")
    assert written.trials == tuned.trials and len(tuned.trials) == 4
    assert "zero1" in (tmp_path / "out" / "accelerate.yaml").read_text()
    page = report_html(tmp_path / "out")
    assert "Measured layouts" in page and all(trial.name in page for trial in tuned.trials)


def test_a_trial_that_remains_measures_another_micro_batch_of_the_fastest_layout(
    planned: Path, ranks: Any, tmp_path: Path
) -> None:
    ranks(lambda label, task: ([0.2] if task.best_seconds is None else [0.1]) * task.steps)
    plan = Plan.load(planned)
    near = layouts_to_measure(plan.chosen, plan.rejected, trials=99)
    tuned = tune(planned, trials=99, output_dir=tmp_path / "out")
    assert len(tuned.trials) == len(near) + 1
    *before, last = tuned.trials
    assert last.layout.label in {one.layout.label for one in before if one.step_seconds == 0.1}
    assert last.key not in {one.key for one in before} and Plan.load(tmp_path / "out").trials == tuned.trials


def test_out_of_memory_and_failures_are_results(
    planned: Path, ranks: Any, tmp_path: Path, timeouts: list[float]
) -> None:
    endings = iter(
        [
            failure("out of memory in phase backward: 9 GB\nplans that need less", 3),
            failure(signal="SIGKILL"),
            LaunchFailedError("torchrun: stopped after 9 s", output="", launcher_exit_code=None),
        ]
    )

    def behave(label: str, task: TrialTask) -> Any:
        if (ending := next(endings, None)) is not None:
            raise ending
        return [0.2] * task.steps

    ranks(behave)
    tuned = tune(planned, trials=4, output_dir=tmp_path / "out", time_limit_minutes=100)
    # A trial that hangs leaves time for the others.
    assert max(timeouts[:3]) <= 3000 < timeouts[3] <= 6000
    assert [trial.outcome for trial in tuned.trials] == ["out of memory", "failed", "stopped", "measured"]
    assert tuned.trials[0].detail == "rank 1: out of memory in phase backward: 9 GB"
    assert "rank 1 was killed by SIGKILL" in tuned.trials[1].detail
    assert (tuned.chosen.layout, tuned.chosen.loss) == tuned.trials[3].key


def test_trials_that_all_fail_are_one_error_with_every_reason(planned: Path, ranks: Any, tmp_path: Path) -> None:
    def behave(label: str, task: TrialTask) -> Any:
        raise failure(f"{label} broke")

    labels = ranks(behave)
    with pytest.raises(ShardwrightError, match="no layout was measured") as caught:
        tune(planned, trials=3, output_dir=tmp_path / "out")
    assert all(f"{label} broke" in str(caught.value) for label in labels)
    assert len(labels) == 3 and not (tmp_path / "out" / "plan.json").exists()


def test_slow_steps_end_a_trial_and_noise_is_reported(
    planned: Path, ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ranks(lambda label, task: [0.1, 0.2, 0.1, 0.1, 0.1] if task.best_seconds is None else [0.2, 0.2, 0.2])
    with caplog.at_level("INFO"):
        tuned = tune(planned, trials=2)
    assert [trial.outcome for trial in tuned.trials] == ["measured", "slower"]
    assert "vary by 100 %: another job may use this machine" in caplog.text
    reasons = {candidate.layout: candidate.reason for candidate in tuned.rejected}
    assert "ended after 3 steps" in reasons[tuned.trials[1].layout]


def test_all_wrong_values_are_reported_together(planned: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        tune(planned, trials=0, steps=1, time_limit_minutes=0)
    assert [error.where for error in caught.value.errors] == ["trials", "steps", "time_limit"]
    with pytest.raises(UsageError, match="trials run on one machine"):
        tune(make(str(tmp_path / "model"), "2x1xCPU", seq_len=32, global_batch_size=4, precision="fp32"))


def test_classifiers_are_neither_trained_nor_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shell = shell_in(tmp_path, "plan", capsys, monkeypatch)
    planned = shell("config.json", "--hardware", "2xCPU", "--seq-len", 32, "--output-dir", "plan")
    assert planned.out.splitlines()[-1] == "Run: shardwright launch plan YOUR_SCRIPT.py"
    with pytest.raises(UsageError, match="is no causal language model"):
        tune(tmp_path / "plan")
    train = shell_in(tmp_path, "train", capsys, monkeypatch)
    wrong = train("config.json", "--dataset", "python-help#8", "--seq-len", 32, "--output-dir", "out", "--dry-run")
    assert wrong.code == 2 and any("returns scores instead of tokens" in error for error in wrong.errors), wrong.err


def test_errors_of_a_task_are_reported_before_ranks_start(planned: Path, ranks: Any, tmp_path: Path) -> None:
    labels = ranks(lambda label, task: [0.2] * task.steps)
    sizes: dict[str, Any] = {"seq_len": 32, "precision": "fp32"}
    model = str(tmp_path / "model")
    ppo = make(model, "2xCPU", task="ppo", reward=model, value=model, **sizes)
    with pytest.raises(UsageError, match="has no trainer for ppo"):
        tune(ppo)
    with pytest.raises(UsageError, match="has no weights, from which task dpo starts"):
        tune(make(str(tmp_path / "model" / "config.json"), "2xCPU", task="dpo", **sizes))
    ahead = make(
        model, "2xCPU", task="grpo", completion_tokens=8, steps_per_generation=8, global_batch_size=16, **sizes
    )
    with pytest.raises(UsageError, match="steps with and without generation"):
        tune(ahead)
    assert not labels


def test_a_tuned_plan_keeps_the_placement_of_its_reference(planned: Path, ranks: Any, tmp_path: Path) -> None:
    placements = []

    def behave(label: str, task: TrialTask) -> Any:
        placements.append(Plan.load(task.plan).chosen.placements["reference"].placement)
        return [0.1] * task.steps if len(placements) == 2 else [0.2] * task.steps

    ranks(behave)
    sizes: dict[str, Any] = {"seq_len": 32, "global_batch_size": 4, "precision": "fp32"}
    plan = make(str(tmp_path / "model"), "2xCPU", task="dpo", **sizes)
    tuned = tune(plan, trials=2, output_dir=tmp_path / "out")
    assert tuned.chosen.layout != plan.chosen.layout and placements == ["replica", "replica"]
    assert Plan.load(tmp_path / "out").chosen.placements == plan.chosen.placements


def test_the_command_prints_trials_and_keeps_other_files(
    planned: Path, ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell: Shell = shell_in(tmp_path, "tune", capsys, monkeypatch)
    monkeypatch.setenv("SHARDWRIGHT_DATA_DIR", str(tmp_path / "data"))
    ranks(lambda label, task: [0.2] * task.steps)
    done = shell("plan", "--trials", 2)
    assert done.code == 0 and "DDP" in done.out and "s per step" in done.out and "--plan plan/tuned" in done.out
    data = json.loads(shell("plan", "--trials", 2, "--format", "json").out)
    assert [one["outcome"] for one in data["trials"]] == ["measured", "measured"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("")
    assert shell("plan", "--output-dir", "other").code == 2
    assert "pass it to plan, and tune the plan" in shell("model", "--hardware", "2xCPU").err
    script = shell("plan", "--script", "script.py")
    assert script.code == 2 and "trials train with random weights; launch runs a script" in script.err
