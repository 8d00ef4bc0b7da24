"""Python for a user's own script: words of `plan`, keywords of `TrainingArguments`, and `trainer_for`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shardwright
from distilling import collate, rows, tiny
from planning import llama
from shardwright.cli.main import run
from shardwright.ds_configs.plan.plan import Plan, make_plan
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning.from_names import job_from_words
from shardwright.trainers.checkpoints.record import file_records, write_record
from shardwright.trainers.training import script


def test_words_of_plan_are_fields_of_a_job() -> None:
    words: dict[str, Any] = {"seq_len": 2048, "method": "lora", "lora_targets": "q_proj, v_proj", "micro_batch_size": 2}
    assert job_from_words(words) == TrainingJob(
        seq_len_tokens=2048, method="lora", lora_targets=("q_proj", "v_proj"), micro_batch_size=2
    )
    assert job_from_words({"tensor_parallel_size": "auto"}) == TrainingJob()
    with pytest.raises(UsageError, match="did you mean seq_len"):
        job_from_words({"seq_length": 5})
    with pytest.raises(UsageError, match="cannot be combined with a TrainingJob"):
        job_from_words({"seq_len": 5}, TrainingJob())


def planned(hardware: str, **job: Any) -> Plan:
    return make_plan(llama(hidden_size=64, intermediate_size=128), parse_hardware(hardware), TrainingJob(**job))


def test_arguments_of_a_plan_are_keywords_that_may_be_overridden() -> None:
    plan = planned("1xCPU", seq_len_tokens=32, micro_batch_size=4)
    found = plan.training_arguments("out", max_steps=3, optim="sgd")
    assert (found["output_dir"], found["max_steps"], found["optim"]) == ("out", 3, "sgd")
    assert found["per_device_train_batch_size"] == 4 and found["use_cpu"] is True
    assert "use_cpu" not in planned("1xRTX4090", seq_len_tokens=32).training_arguments("out")


@pytest.mark.slow
def test_a_trainer_for_a_plan_says_what_ran_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "per_device_train_batch_size was 2, the plan says 4" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_whose_training_went_on_longer_starts_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned("1xCPU", seq_len_tokens=32, micro_batch_size=4, precision="fp32").write(tmp_path / "plan")
    checkpoint = tmp_path / "plan" / "model" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text('{"max_steps": 6}')
    write_record(checkpoint, step=4, files=file_records(checkpoint), facts={"max_steps": 6, "seed": 7})
    started: list[Any] = []
    monkeypatch.setattr(script, "launch_ranks", lambda *launches, **_: started.append(launches))
    words = ["launch", str(tmp_path / "plan"), "--", "--resume", "--max-steps"]
    assert run([*words, "4"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].partition(":")[0] for line in told] == [" resume", " resume = 'checkpoint-4'"], told
    assert "all 4 steps are done, in a run of 6" in told[1] and "the checkpoint was saved with 7" in told[0]
    (tmp_path / "plan" / "training_arguments.json").write_text('{"seed": 7}')
    assert run([*words, "5"]) == 0 and len(started) == 1
