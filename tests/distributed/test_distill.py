"""`shardwright distill` on two CPU ranks, with a trained teacher and real text."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from distilling import tiny
from session import warm_command
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.sources import pack, read_documents
from shardwright.trainers.reports.runs import report_html
from training_runs import completed, cross_entropy, taken_away

pytestmark = pytest.mark.distributed

VOCAB, SEQ_LEN, STEPS = 300, 48, 24


def trained_teacher(directory: Path) -> None:
    """Train a small Llama on the same text for some steps of AdamW, and save it."""

    model = tiny("llama", hidden=64, vocab_size=VOCAB, max_position_embeddings=64).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    samples = pack(read_documents(None), byte_tokenizer(VOCAB), SEQ_LEN)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(60):
        ids_BS = torch.stack([samples[index]["input_ids"] for index in order[16 * step : 16 * step + 16]])
        model(input_ids=ids_BS, labels=ids_BS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)


def test_distill_trains_saves_and_reports(tmp_path: Path) -> None:
    from shardwright.trainers.data.samples import load_samples
    from transformers import AutoTokenizer

    trained_teacher(tmp_path / "teacher")
    tiny("llama", vocab_size=VOCAB, max_position_embeddings=64).save_pretrained(tmp_path / "student")
    settings = {
        "dataset": "python-help",
        "seq-len": SEQ_LEN,
        "max_steps": STEPS,
        "alpha": 0.8,
        "temperature": 2.0,
        "learning_rate": 5e-3,
        "micro_batch_size": 8,
        "evaluation_samples": 50,
        "logging_steps": 6,
        "save_steps": STEPS,
        "strategy": "fsdp2",
        "teacher_placement": "sharded",
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    arguments = ("--output-dir", "taught", "--config", "settings.json", "--format", "json")
    done = completed([*warm_command("shardwright"), "distill", "teacher", "student", *arguments], tmp_path)
    assert re.search(r"^note: step 24 of 24, loss [\d.]+, [\d,]+ tokens/s.*, 0 s left$", done.stderr, re.MULTILINE)
    found, taught = json.loads(done.stdout), tmp_path / "taught"
    before, after = found["before"], found["after"]
    assert after["kl_per_token"] < 0.5 * before["kl_per_token"]
    assert after["top1_agreement"] > before["top1_agreement"]
    assert found["layout"] == "fsdp2" and found["steps"] == STEPS
    assert found["tokens"] == STEPS * 32 * SEQ_LEN and found["tokens_per_second"] > 0
    check_files(taught, found)
    check_finishing(tmp_path, (*arguments, "--resume"), found)
    check_student(taught, found, load_samples("python-help", AutoTokenizer.from_pretrained(taught), seq_len=SEQ_LEN))


def check_files(taught: Path, found: dict[str, Any]) -> None:
    """The directory has a model and a report, and no file that runs code when it is loaded."""
    names = {path.name for path in taught.iterdir()}
    report = "REPORT.md metrics.jsonl plan report.json report.html checkpoints"
    model = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert names == {*report.split(), *model.split(), "plan_measurement.json"}
    text = (taught / "REPORT.md").read_text()
    for values in (found["before"], found["after"]):
        assert f"{values['kl_per_token']:.4f}" in text and f"{math.exp(values['student_cross_entropy']):.4g}" in text
    steps = [json.loads(line) for line in (taught / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in steps] == [6, 12, 18, 24]
    for entry in steps:
        assert entry["tokens_per_second"] > 0 < entry["step_seconds"] and entry["planned_tokens_per_second"] > 0
    assert (taught / "report.html").read_text() == report_html(taught), "the same files, the same page"
    telemetry = {"kl_per_token", "top1_agreement", "speculative_acceptance", "student_cross_entropy"}
    assert all({*telemetry, "teacher_cross_entropy", "loss"} <= entry.keys() for entry in steps)
    assert steps[-1]["kl_per_token"] < steps[0]["kl_per_token"]


def check_finishing(directory: Path, arguments: tuple[str, ...], found: dict[str, Any]) -> None:
    """A run that was killed after its last checkpoint ends with the same weights and measurements."""
    weights = taken_away(directory / "taught")
    done = completed([*warm_command("shardwright"), "distill", "teacher", "student", *arguments], directory)
    again = json.loads(done.stdout)
    times = {"runtime", "samples_per_second", "steps_per_second"}
    for when in ("before", "after"):
        assert {name: again[when][name] for name in found[when].keys() - times} == {
            name: found[when][name] for name in found[when].keys() - times
        }
    assert {file.name: file.read_bytes() for file in (directory / "taught").glob("*.safetensors")} == weights
    check_files(directory / "taught", again)


def check_student(taught: Path, found: dict[str, Any], samples: Any) -> None:
    """The saved student and the teacher have the reported cross-entropy on the held-out samples."""
    held_out = samples.evaluation[: found["dataset"]["evaluation_samples"]]
    assert len(held_out) == 50
    after = found["after"]
    for model, name in ((taught, "student_cross_entropy"), (taught.parent / "teacher", "teacher_cross_entropy")):
        assert cross_entropy(model, held_out)[0] == pytest.approx(after[name], abs=1e-4)
