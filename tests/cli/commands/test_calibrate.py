"""`shardwright calibrate` and what `shardwright plan` makes of it, through the entry point."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Shell, every_command
from measuring import measurement_of, plan_on, run_of, write_measurement
from paths import CONFIGS
from shardwright.ds_configs.plan.measurement import FILE_NAME, RunMeasurement
from shardwright.plugins.planning import FILE_NAME as DATABASE

LLAMA = str(CONFIGS / "meta-llama--Llama-3.1-8B")
PLAN = ("plan", LLAMA, "--hardware", "8xH100-80GB", "--format", "json")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    monkeypatch.setenv("SHARDWRIGHT_DATA_DIR", str(tmp_path / "data"))
    return every_command(capsys, monkeypatch)


def gpu_memory(shell: Shell, *flags: str) -> dict[str, Any]:
    result = shell(*PLAN, *flags)
    assert result.code == 0, result.err
    return dict(json.loads(result.out)["chosen"]["gpu_memory"])


def test_a_stored_run_moves_later_plans_until_it_is_forgotten(shell: Shell, tmp_path: Path) -> None:
    before = gpu_memory(shell)
    measurement = measurement_of(plan_on(), 1.021)
    directory = write_measurement(measurement, tmp_path / "run")
    stored = shell("calibrate", str(directory))
    assert (stored.code, stored.err) == (0, "")
    identifier = run_of(plan_on(), 1.021).identifier
    assert f"Stored run {identifier[:12]}, LlamaForCausalLM on H100-80GB" in stored.out
    assert "0.989 to 1.084 (1 measured)" in stored.out
    again = shell("calibrate", str(directory / FILE_NAME))
    assert again.code == 0 and again.out.startswith("Already stored: run")
    assert "0.989 to 1.084 (1 measured)" in again.out

    after = gpu_memory(shell)
    assert (before["calibrated_runs"], after["calibrated_runs"]) == (0, 1)
    assert before["low_bytes"] < after["low_bytes"] < after["high_bytes"] < before["high_bytes"]
    assert gpu_memory(shell, "--no-calibration") == gpu_memory(shell, "--no_calibration") == before
    assert "interval comes from 1 measured run on H100-80GB" in json.loads(shell(*PLAN).out)["chosen"]["reason"]

    listed = shell("calibrate", "--list")
    assert listed.code == 0 and identifier[:12] in listed.out and "1.021" in listed.out and "1.32" in listed.out
    assert listed.err == f"file: {tmp_path / 'data' / DATABASE}\n"
    forgotten = shell("calibrate", "--forget", identifier[:8])
    assert (forgotten.code, forgotten.out) == (0, "Removed 1 run\n")
    assert gpu_memory(shell) == before
    assert shell("calibrate", "--list").out.startswith("No stored runs")


def steps_of(ratio: float, **changes: Any) -> RunMeasurement:
    """Return a run of the planned layout whose steps took `ratio` times the prediction."""
    measurement = measurement_of(plan_on())
    ranks = tuple(replace(rank, median_step_seconds=ratio) for rank in measurement.measured)
    return replace(measurement, measured=ranks, predicted_step_seconds=1.0, **changes)


def step_time(shell: Shell) -> dict[str, Any]:
    return dict(json.loads(shell(*PLAN).out)["chosen"]["step_time"])


def test_slow_runs_move_the_next_plan_and_explain_lists_them(shell: Shell, tmp_path: Path) -> None:
    before = step_time(shell)
    widths = []
    for count in range(1, 6):
        run_directory = write_measurement(steps_of(3.0 + count / 100), tmp_path / f"run{count}")
        assert f"later plans use {count} run" in shell("calibrate", str(run_directory)).out
        time = step_time(shell)
        assert time["measured_runs"] == count
        widths.append(time["high_seconds"] / time["low_seconds"])
    assert time["learned_scale"] == pytest.approx((1 + 5 * 3.03) / 6) and time["seconds"] > 2 * before["seconds"]
    # The first run is far from the published prediction, which widens the interval; five runs narrow it.
    assert widths[0] > widths[2] > widths[-1] and widths[-1] < before["high_seconds"] / before["low_seconds"]
    assert shell("plan", LLAMA, "--hardware", "8xH100-80GB", "--output-dir", str(tmp_path / "plan")).code == 0
    explained = shell("explain", str(tmp_path / "plan")).out
    assert (
        "times the published prediction, from the runs below" in explained
        and "Runs that corrected the step's time" in explained
    )
    learned = json.loads(shell("explain", str(tmp_path / "plan"), "--format", "json").out)["learned"]
    assert [run["ratio"] for run in learned["runs"]] == pytest.approx([3.01, 3.02, 3.03, 3.04, 3.05])
    assert learned["factor"] == pytest.approx(time["learned_scale"])


def test_steps_that_another_release_predicted_are_kept_and_not_used(shell: Shell, tmp_path: Path) -> None:
    before = step_time(shell)
    run = steps_of(3.0, versions={"shardwright": "0.0.9", "torch": "2.13.0"})
    stored = shell("calibrate", str(write_measurement(run, tmp_path / "run"))).out
    assert "predicted by Shardwright 0.0.9, not by" in stored and "does not correct later plans" in stored
    planned = shell(*PLAN)
    assert "step times on H100-80GB that Shardwright 0.0.9 predicted stay stored (1)" in planned.err
    assert json.loads(planned.out)["chosen"]["step_time"] == before
    assert len(json.loads(shell("calibrate", "--list", "--format", "json").out)["steps"]) == 1


def test_bad_usage_and_rejected_files_leave_the_store_alone(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / FILE_NAME).write_text("{")
    other = replace(measurement_of(plan_on()), differences=("ranks was 4, but the plan has 8",))
    cases: list[tuple[list[str], int, str]] = [
        ([], 2, "pass exactly one of RUN_DIR, --list and --forget"),
        (["run", "--list"], 2, "pass exactly one of RUN_DIR, --list and --forget"),
        ([str(tmp_path / "nowhere")], 2, "has no plan_measurement.json that can be read"),
        ([str(tmp_path)], 2, "pass the output directory of `shardwright train`"),
        (["x" * 5000], 2, "File name too long"),
        (["--forget", "beef"], 2, "is not a stored run; `shardwright calibrate --list`"),
        ([str(tmp_path / "cut")], 4, "is not valid JSON"),
        ([str(write_measurement(other, tmp_path / "other"))], 2, "but the plan has 8; run the plan unchanged"),
    ]
    for arguments, code, message in cases:
        result = shell("calibrate", *arguments)
        assert (result.code, result.out) == (code, ""), arguments
        assert message in result.err and "Traceback" not in result.err
    assert not (tmp_path / "data").exists()


def test_a_broken_store_stops_calibrate_but_not_plan(shell: Shell, tmp_path: Path) -> None:
    before = gpu_memory(shell)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / DATABASE).write_text("not a database, " * 100)
    directory = write_measurement(measurement_of(plan_on()), tmp_path / "run")
    for arguments in ([str(directory)], ["--list"], ["--forget", "all"]):
        result = shell("calibrate", *arguments)
        assert (result.code, result.out) == (4, "")
        assert "line 1 is not a measurement" in result.err
    planned = shell(*PLAN)
    assert planned.code == 0 and json.loads(planned.out)["chosen"]["gpu_memory"] == before
    assert planned.err.startswith("note: planning without measured runs: ") and planned.err.count("\n") == 1
    assert shell(*PLAN, "--no-calibration").err == ""


def test_a_file_from_elsewhere_cannot_steer_the_terminal(shell: Shell, tmp_path: Path) -> None:
    measurement = measurement_of(plan_on())
    steering = "\x1b]0;owned\x07[bold]"
    ranks = tuple(replace(rank, device=steering) for rank in measurement.measured)
    plan = replace(
        measurement.plan, gpu=steering, model=steering, layout={**measurement.plan.layout, "label": steering}
    )
    directory = write_measurement(replace(measurement, measured=ranks, plan=plan), tmp_path / "run")
    for arguments in ([str(directory)], ["--list"]):
        result = shell("calibrate", *arguments)
        assert result.code == 0 and "\x1b" not in result.out and "\x07" not in result.out
        # Columns of a wide table are folded.
        assert "[bo" in result.out
