"""`shardwright qat` as a user runs it: two CPU ranks, ZeRO-3, interrupted, resumed, and exported."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from session import warm_command
from training_runs import completed, cross_entropy, taken_away

pytestmark = pytest.mark.distributed

VOCAB, SEQ_LEN, SAVED = 300, 32, 20
SETTINGS = {
    "dataset": "python-help#8",
    "seq-len": SEQ_LEN,
    "scheme": "W4A16",
    "group_size": 32,
    "strategy": "zero3",
    "learning_rate": 2e-3,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "evaluation_samples": 32,
    "logging_steps": 1,
    "save_steps": SAVED,
}


def interrupt_after(command: list[str], directory: Path, *, steps: int) -> int:
    """Start a command, end it as Ctrl-C does once so many steps are logged, and return its exit code."""
    metrics = directory / "out" / "metrics.jsonl"
    with (directory / "first.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=directory,
            start_new_session=True,
            # A suite that was started in the background ignores Ctrl-C, and its children would too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        deadline = time.monotonic() + 300
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if metrics.is_file() and len(metrics.read_text().splitlines()) >= steps:
                    process.send_signal(signal.SIGINT)
                    return process.wait(timeout=60)
                time.sleep(0.05)
        finally:
            process.kill()
    raise AssertionError((directory / "first.log").read_text())


def check_finishing(command: list[str], directory: Path, found: dict[str, Any]) -> None:
    """A run killed after its last checkpoint exports the same codes; a complete run is not repeated."""
    out = directory / "out"
    weights = taken_away(out)
    for reported in ("only the rest of the command runs", "the run is complete"):
        done = completed(command, directory)
        assert reported in done.stderr
        again = json.loads(done.stdout)
        for name in ("cross_entropy", "weight_difference", "logit_difference"):
            assert again[name] == found[name]
        assert {file.name: file.read_bytes() for file in out.glob("*.safetensors")} == weights


def test_interrupted_run_resumes_and_exports(tmp_path: Path, deepspeed_cpu_ops: None) -> None:
    from distilling import tiny
    from shardwright.trainers.data.samples import load_samples
    from transformers import AutoTokenizer

    model = tiny("llama", hidden=64, vocab_size=VOCAB, max_position_embeddings=64)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    (tmp_path / "settings.yaml").write_text(json.dumps(SETTINGS))
    words = "qat model --output-dir out --config settings.yaml --max-steps"
    command = [*warm_command("shardwright"), *words.split()]
    code = interrupt_after([*command, "400"], tmp_path, steps=SAVED + 2)
    assert code == 130
    out = tmp_path / "out"
    assert (out / "checkpoints" / f"checkpoint-{SAVED}").is_dir() and not (out / "config.json").exists()

    # Ctrl-C leaves a checkpoint too, as many steps later as ranks need to hear of it.
    steps = 4 + max(int(path.name.removeprefix("checkpoint-")) for path in (out / "checkpoints").glob("checkpoint-*"))
    command = [*command, str(steps), "--resume", "--format", "json"]
    found = json.loads(completed(command, tmp_path).stdout)
    check_finishing(command, tmp_path, found)
    assert found["layout"] == "zero3" and found["steps"] == steps
    assert (found["weight_difference"], found["logit_difference"]) == (0.0, 0.0)
    nats = found["cross_entropy"]
    assert nats["trained"] < nats["dense"] and nats["rounded"] != nats["dense"]
    logged = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert logged == list(range(1, steps + 1))
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert config["dtype"] == "bfloat16"
    held_out = load_samples("python-help#8", AutoTokenizer.from_pretrained(out), seq_len=SEQ_LEN).evaluation
    loaded, _ = cross_entropy(out, held_out[: found["dataset"]["evaluation_samples"]])
    # Training computes in fp32, what is loaded in the bf16 of its files.
    assert loaded == pytest.approx(nats["trained"], abs=0.02)
    assert f"{math.exp(nats['trained']):.4g}" in (out / "REPORT.md").read_text()
