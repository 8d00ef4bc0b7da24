"""`PlanCallback` in real Trainer runs of a tiny model on this process's CPU."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_settings import cpu_arguments
from shardwright.ds_configs.plan.measurement import FILE_NAME, RunMeasurement, measured_run, measurement_from_text
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.metering import AcceleratorMeter, MeterPhase, MeterReading
from shardwright.plugins.planning import plan
from shardwright.trainers.runs.plan_callback import argument_differences, unread_edits

pytestmark = pytest.mark.slow

SEQ_LEN = 16
JOB = TrainingJob(seq_len_tokens=SEQ_LEN, micro_batch_size=2, global_batch_size=4, precision="fp32")


class Meter(AcceleratorMeter):
    """Reports the given memory as that of the run."""

    def __init__(self, allocated: int, reserved: int) -> None:
        super().__init__()
        self._given = MeterReading(current_bytes=0, peaks={"init": allocated}, roles={}, reserved_peak_bytes=reserved)

    def enter(self, phase: MeterPhase) -> None:
        """Know no phases."""

    def reading(self) -> MeterReading:
        return self._given


@pytest.fixture(scope="module")
def planned(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("planned") / "plan"
    plan(str(tiny_llama), "1xCPU", JOB, calibration=None).write(directory)
    return directory


def reporter() -> Any:
    """A reporter such as TensorBoard's: it records what is logged until training ends, then it is closed."""
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[dict[str, Any]] = []
            self.closed = False

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            assert not self.closed, "a closed reporter loses what is logged"
            self.seen.append(dict(logs))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.closed = True

    return Reporter()


def trainer_of(model: Path, output: Path, callbacks: list[Any], steps: int = 4, **changes: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Trainer, default_data_collator

    ids = torch.arange(SEQ_LEN)
    settings = {"gradient_accumulation_steps": 2, "optim": "adamw_torch_fused", "max_steps": steps}
    return Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False),
        args=cpu_arguments(output, 2, **(settings | changes)),
        train_dataset=[{"input_ids": ids, "labels": ids}] * 64,
        data_collator=default_data_collator,
        callbacks=callbacks,
    )


def written(output: Path) -> RunMeasurement:
    return measurement_from_text((output / FILE_NAME).read_bytes(), source="test")


def test_an_attached_callback_reports_once_while_reporters_are_open(
    planned: Path, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardwright.trainers import PlanCallback

    allocated = Plan.load(planned).chosen.memory.gpu.allocated_bytes
    callback = PlanCallback(planned, meter=Meter(allocated - 1000, allocated * 2), seq_len_tokens=SEQ_LEN)
    recorder = reporter()
    # Counting tokens puts train_runtime into the log of every step.
    trainer = trainer_of(tiny_llama, tmp_path, [recorder], logging_steps=1, include_num_input_tokens_seen="all")
    callback.attach(trainer)
    trainer.train()

    ours = [logs for logs in recorder.seen if any(name.startswith("plan/") for name in logs)]
    assert len(ours) == 1 and recorder.closed
    assert sum("train_runtime" in logs for logs in recorder.seen) > 4
    assert ours[0]["plan/peak_allocated_gb"] == pytest.approx((allocated - 1000) / 1e9)
    assert ours[0]["plan/peak_reserved_gb"] == pytest.approx(allocated * 2 / 1e9)
    assert ours[0]["plan/predicted_allocated_gb"] == pytest.approx(allocated / 1e9)
    assert ours[0]["plan/step_seconds"] > 0
    assert any("plan/peak_allocated_gb" in logs for logs in trainer.state.log_history)
    steps = [logs for logs in recorder.seen if "loss" in logs]
    expected = Plan.load(planned).chosen.time.seconds
    assert [logs["planned_step_seconds"] for logs in steps] == [pytest.approx(expected)] * 4
    assert all(logs["step_seconds"] > 0 for logs in steps)

    found = written(tmp_path)
    (rank,) = found.measured
    assert found.differences == ()
    assert (found.plan.model_type, found.plan.layout["label"], found.plan.gpu) == ("llama", "single", "CPU")
    assert found.plan.parameters == trainer.model.num_parameters()
    assert (rank.rank, rank.device, rank.steps, len(rank.first_step_seconds)) == (0, "cpu", 4, 2)
    assert 0 < (rank.median_step_seconds or 0) < 60
    assert rank.device_used_bytes is None and rank.later_peak_allocated_bytes is None
    assert measured_run(found).ratio == pytest.approx(2.0)
    assert {"torch", "transformers", "deepspeed"} <= found.versions.keys()
    shown = capsys.readouterr().err
    assert "tensors (peak allocated)" in shown and "written to" in shown


@pytest.mark.parametrize(("axes", "share"), [({}, 1.0), ({"tp": 2}, 0.5), ({"sp": 2}, None)])
def test_positions_count_what_the_model_reads_once(
    axes: dict[str, int], share: float | None, planned: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    """Ranks of a tensor-parallel group read the same samples; shards of a sequence are not counted."""
    from shardwright.trainers.runs.clock import StepClock

    plan = Plan.load(planned)
    chosen = replace(plan.chosen, layout=replace(plan.chosen.layout, **axes))
    trainer = trainer_of(tiny_llama, tmp_path, [], logging_steps=2)
    StepClock(replace(plan, chosen=chosen), tokens_of=lambda steps: 4 * SEQ_LEN * steps).follow(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry]
    assert len(logged) == 2
    for entry in logged:
        positions = None if share is None else pytest.approx(share * entry["tokens_per_second"])
        assert entry.get("positions_per_second") == positions


def test_logging_and_saving_are_no_part_of_a_step(planned: Path, tiny_llama: Path, tmp_path: Path) -> None:
    from shardwright.trainers import PlanCallback
    from transformers import TrainerCallback

    class Slow(TrainerCallback):
        def on_log(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.3)

        on_save = on_log

    trainer = trainer_of(tiny_llama, tmp_path, [Slow()], logging_steps=1, save_strategy="steps", save_steps=1)
    PlanCallback(planned).attach(trainer)
    trainer.train()
    seconds = [entry["step_seconds"] for entry in trainer.state.log_history if "step_seconds" in entry]
    assert len(seconds) == 4 and min(seconds[1:]) < 0.3


def test_what_ran_otherwise_than_planned_is_named(planned: Path, tiny_llama: Path, tmp_path: Path) -> None:
    from shardwright.trainers import PlanCallback

    callback = PlanCallback(planned, meter=Meter(1, 1), seq_len_tokens=8, method="lora")
    changes = {"per_device_train_batch_size": 1, "optim": "sgd", "gradient_checkpointing": True}
    trainer_of(tiny_llama, tmp_path, [callback], steps=1, **changes).train()
    assert written(tmp_path).differences == (
        "per_device_train_batch_size was 1, but the plan has 2",
        "gradient_checkpointing was True, but the plan has False",
        "optim was sgd, but the plan has adamw_torch_fused",
        "sequence length was 8, but the plan has 16",
        "method was lora, but the plan has full",
    )


def test_another_kind_of_recomputation_than_planned_is_named(planned: Path, tmp_path: Path) -> None:
    plan, kwargs = Plan.load(planned), {"use_reentrant": True}
    plan = replace(plan, chosen=replace(plan.chosen, layout=plan.chosen.layout.changed(gradient_checkpointing=True)))
    arguments = cpu_arguments(tmp_path, 2, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    line = "use_reentrant was True, but the plan has False"
    assert line in argument_differences(plan, arguments, None, ranks=1)
    reentrant = replace(plan, job=replace(plan.job, gradient_checkpointing="reentrant"))
    assert not any("reentrant" in text for text in argument_differences(reentrant, arguments, None, ranks=1))


def test_weights_of_another_type_than_planned_are_named(planned: Path, tmp_path: Path) -> None:
    import torch

    model, line = torch.nn.Linear(2, 2, dtype=torch.bfloat16), "type of trained weights was {}, but the plan has {}"
    plan, arguments = Plan.load(planned), cpu_arguments(tmp_path, 2, optim="adamw_torch_fused")
    fixed = f'{line.format("bf16", "fp32")}: load the model with dtype="float32", or plan with --weights-dtype bf16'
    assert fixed in argument_differences(plan, arguments, model, ranks=1)
    assert not any("type of" in text for text in argument_differences(plan, arguments, model.float(), ranks=1))
    in_bf16 = replace(plan, job=replace(plan.job, weights_dtype="bf16"))
    found = argument_differences(in_bf16, arguments, model, ranks=1)
    assert any(
        text.startswith(f'{line.format("fp32", "bf16")}: load the model with dtype="bfloat16"') for text in found
    )


def test_an_edit_that_accelerate_does_not_read_is_reported_before_training(
    planned: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardwright.trainers import PlanCallback

    plan = shutil.copytree(planned, tmp_path / "plan")
    (plan / "ds_config.json").write_text('{"_shardwright": ["mine"], "steps_per_print": 7, "bf16": {"enabled": true}}')
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", '{"steps_per_print": 1, "bf16": {"enabled": true}}')
    trainer_of(tiny_llama, tmp_path / "out", [PlanCallback(plan)], steps=1).train()
    assert f"note: steps_per_print of {plan / 'ds_config.json'} is not read" in capsys.readouterr().err
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(plan / "ds_config.json"))
    assert unread_edits(plan) == []
