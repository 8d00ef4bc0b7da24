"""Plans for two CPU ranks run as written: the launch line of each, with its own files, ends at the same losses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from session import warm_path
from shardwright.ds_configs.plan.measurement import FILE_NAME, measurement_from_text
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.launching.launch import Launch, launch_ranks
from shardwright.plugins.planning import plan

pytestmark = pytest.mark.distributed

STEPS = 4
JOB = TrainingJob(seq_len_tokens=64, global_batch_size=8, micro_batch_size=2, precision="fp32")
LAYOUTS = [
    replace(JOB, strategy="ddp"),
    replace(JOB, strategy="fsdp2"),
    replace(JOB, strategy="zero3", offload="cpu-all"),
]


def launch(made: Plan, directory: Path, environment: dict[str, str]) -> list[float]:
    made.write(directory.with_name("written"))
    directory.with_name("written").rename(directory)
    line = (directory / "launch.sh").read_text().splitlines()[-1]
    assert line.startswith("exec ")
    output = directory.with_name(f"{directory.name}-tuned")
    arguments = ["--dataset", "python-help#40", "--max-steps", str(STEPS), "--logging-steps", "1"]
    arguments += ["--evaluation-samples", "4", "--output-dir", str(output)]
    script = ["-c", "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"]
    launch_ranks(
        Launch(arguments=(*script, "bash", str(directory / "launch.sh"), *arguments), environment=environment),
        timeout_seconds=240,
    )
    check_measurement(made, output)
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def check_measurement(made: Plan, output: Path) -> None:
    """Both ranks are in the file beside the model, and nothing ran otherwise than planned."""
    found = measurement_from_text((output / FILE_NAME).read_bytes(), source="launch")
    assert [rank.rank for rank in found.measured] == list(range(made.hardware.world_size))
    assert all(rank.steps == STEPS and rank.median_step_seconds for rank in found.measured)
    assert found.plan.layout["label"] == made.chosen.layout.label
    assert found.differences == ()


def test_generated_files_run_and_agree(tiny_llama: Path, deepspeed_cpu_ops: None, tmp_path: Path) -> None:
    losses = []
    warm = {"PATH": warm_path()}
    for index, job in enumerate(LAYOUTS):
        made = plan(str(tiny_llama), "2xCPU", job)
        assert made.chosen.layout.gradient_accumulation_steps == 2
        losses.append(launch(made, tmp_path / str(index), warm))
    reference = losses[0]
    assert len(reference) == STEPS
    for other in losses[1:]:
        assert other == pytest.approx(reference, abs=1e-5)
