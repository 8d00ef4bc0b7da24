"""Python for a user's own script: words of `plan`, keywords of `TrainingArguments`, and `trainer_for`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import shardwright
from commands import run_rank_here
from distilling import collate, rows, tiny
from planning import llama, public_model
from shardwright.cli.main import run
from shardwright.ds_configs.plan.plan import Plan, make_plan
from shardwright.ds_configs.plan.rendering import trainer_line
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.transformers import training_arguments


def planned(hardware: str, **job: Any) -> Plan:
    return make_plan(llama(hidden_size=64, intermediate_size=128), parse_hardware(hardware), TrainingJob(**job))


def test_arguments_of_a_plan_are_keywords_that_may_be_overridden() -> None:
    plan = planned("1xCPU", seq_len_tokens=32, micro_batch_size=4)
    found = plan.training_arguments("out", max_steps=3, optim="sgd")
    assert (found["output_dir"], found["max_steps"], found["optim"]) == ("out", 3, "sgd")
    assert found["per_device_train_batch_size"] == 4 and found["use_cpu"] is True
    assert "use_cpu" not in planned("1xRTX4090", seq_len_tokens=32).training_arguments("out")


@pytest.mark.slow
def test_trainer_for_reports_differences_from_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Trainer

    plan = planned("1xCPU", seq_len_tokens=32, micro_batch_size=4, precision="fp32")
    args = plan.training_arguments(
        tmp_path / "out", max_steps=1, report_to="none", save_strategy="no", per_device_train_batch_size=2
    )
    trainer = shardwright.trainer_for(
        plan, Trainer, model=tiny("llama"), args=args, train_dataset=rows("llama", 4), data_collator=collate
    )
    trainer.train()
    assert (tmp_path / "out" / "plan_measurement.json").is_file()
    assert "per_device_train_batch_size was 2, but the plan has 4" in capsys.readouterr().err


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launches that would have started ranks."""
    started: list[Any] = []
    monkeypatch.setattr("shardwright.trainers.runs.run.launch_ranks", lambda *args, **_: started.append(args))
    return started


@pytest.mark.parametrize("where", [[], ["--on", "slurm", "--dry-run"]])
def test_launch_without_a_script_takes_the_flags_of_train(
    where: list[str], tmp_path: Path, launches: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are checked before machines start."""
    plan = planned("1xCPU", seq_len_tokens=32)
    plan.write(tmp_path / "plan")
    launch = ["launch", str(tmp_path / "plan"), *where, "--"]
    assert run(launch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "script: is missing, and there is no data; pass your script and its arguments, or flags of train" in line
    assert f"shardwright train {plan.model.name} --plan {tmp_path / 'plan'} --dataset YOUR_DATA" in line
    out = ["--output-dir", str(tmp_path / "out")]
    for flags, errors in (
        (["--text", "notes.txt", *out], ["--text: is not an option"]),
        (["--max-steps", "3", *out], ["dataset: is missing; pass --dataset"]),
        (["--dataset", "python-help"], ["output_dir: is missing"]),
        ([*out, "--dataset", "python-help", "--seq-len", "32"], ["seq_len = 32: is fixed by the plan"]),
    ):
        assert run([*launch, *flags]) == 2
        reported = capsys.readouterr().err
        assert all(error in reported for error in errors), reported
    assert not launches


def test_launch_without_a_script_trains_with_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the same report as `train --plan`; an interrupted run that never saved starts over."""
    tiny("llama", vocab_size=300, max_position_embeddings=64).save_pretrained(tmp_path / "model")
    job = TrainingJob(seq_len_tokens=32, precision="fp32", micro_batch_size=2)
    shardwright.plan(str(tmp_path / "model"), "1xCPU", job).write(tmp_path / "plan")
    launched = run_rank_here(monkeypatch)
    out = tmp_path / "out"
    words = ["--dataset", "python-help#8", "--evaluation-samples", "2", "--max-steps", "2", "--output-dir", str(out)]
    words = ["launch", str(tmp_path / "plan"), "--", *words, "--format", "json", "--save-steps", "1"]
    assert run([*words, "--resume"]) == 2
    assert "contains no checkpoint to resume from" in capsys.readouterr().err
    assert run([*words, "--resume-or-anew"]) == 0 and len(launched) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["steps"] == 2 and "has no checkpoint: training begins at step 0" in shown.err
    report = json.loads((out / "report.json").read_text())
    assert report["command"].startswith("shardwright train model --plan plan --dataset 'python-help#8'")
    for record in out.glob("checkpoints/*/checkpoint_complete.json"):
        record.unlink()
    assert run([*words, "--resume"]) == 4
    assert "is not a complete checkpoint" in capsys.readouterr().err
    assert run([*words, "--resume-or-anew"]) == 0 and len(launched) == 2
    assert "no checkpoint is complete, training starts again at step 0" in capsys.readouterr().err
    assert run([*words, "--resume-or-anew"]) == 0 and len(launched) == 2, "the run is complete"


@pytest.mark.parametrize("words", [["own.py"], ["--", "--dataset", "python-help", "--output-dir", "out"]])
def test_a_plan_for_gpus_does_not_start_on_cpu_ranks(
    words: list[str], tmp_path: Path, launches: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    planned("8xA100-80GB", seq_len_tokens=32, loss="eager").write(tmp_path / "plan")
    (tmp_path / "own.py").touch()
    assert (
        run(["launch", str(tmp_path / "plan"), *(str(tmp_path / "own.py") if w == "own.py" else w for w in words)]) == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert "requires 8 x A100-80GB on 1 node(s); this machine has 0 GPUs" in line
    assert "test the plan on CPU ranks with `shardwright rehearse`" in line
    assert not launches


def test_a_missing_package_of_a_plan_is_reported_before_ranks_start(
    tmp_path: Path, launches: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training_arguments, "find_spec", lambda name: None)
    planned("1xCPU", seq_len_tokens=32).write(tmp_path / "plan")
    (tmp_path / "own.py").touch()
    file = tmp_path / "plan" / "training_arguments.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_liger_kernel": True}))
    assert run(["launch", str(tmp_path / "plan"), str(tmp_path / "own.py")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs the package liger-kernel, which is not installed; pip install liger-kernel" in line
    assert not launches


LAYOUTS: list[tuple[str, dict[str, Any], str]] = [
    ("8xA100-80GB", {"strategy": "zero2"}, "use `accelerate launch`"),
    ("8xA100-80GB", {"strategy": "zero2", "tensor_parallel_size": 2}, "`shardwright launch` or trainer_for (TP 2)"),
    ("8xA100-80GB", {"strategy": "zero1", "pipeline_parallel_size": 2}, "a stock Trainer has no pipelines"),
    ("8xA100-80GB", {"strategy": "fsdp2", "context_parallel_size": 2}, "a stock Trainer has no context parallelism"),
    ("2xCPU", {"strategy": "fsdp2"}, "`shardwright launch` or trainer_for (CPU ranks)"),
]


@pytest.mark.parametrize(("hardware", "job", "line"), LAYOUTS)
def test_a_plan_states_whether_a_stock_trainer_runs_it(hardware: str, job: dict[str, Any], line: str) -> None:
    assert line in trainer_line(planned(hardware, seq_len_tokens=64, **job))


@pytest.mark.parametrize(("host_memory", "fits"), [("4TB", True), ("1TB", False)])
def test_a_plan_states_the_host_memory_of_loading_without_launch(host_memory: str, fits: bool) -> None:
    cluster = parse_hardware("2x8xH100-80GB", host_memory=host_memory)
    plan = make_plan(public_model("meta-llama/Llama-3.1-70B"), cluster, TrainingJob(strategy="fsdp2"))
    assert ("loading in less than 2281.7 GB per node" in trainer_line(plan)) is not fits
