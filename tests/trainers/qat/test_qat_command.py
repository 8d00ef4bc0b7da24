"""`shardwright qat` in this process: bad input, dry runs, reports, and whole runs of one rank without a launch."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import Shell, run_rank_here, shell_in
from distilling import tiny
from shardwright.ds_configs.quantization.scheme import scheme_named
from shardwright.ds_configs.specs.layout import Layout
from shardwright.trainers.qat.command import QATOutcome, QATResult
from shardwright.trainers.qat.settings import QATSettings
from shardwright.trainers.runs.inputs import optimizer_steps

pytestmark = pytest.mark.slow

VOCAB = 300
DATA = ("--dataset", "python-help#8", "--seq-len", 32)
OUT = ("--output-dir", "out")


@pytest.fixture
def qat(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    return shell_in(tmp_path, "qat", capsys, monkeypatch)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    return run_rank_here(monkeypatch)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return directories of a model, one whose head is tied, a mixture, and models that cannot be trained so."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}
    for name, changes in (
        ("model", {"hidden": 128}),
        ("tied", {"hidden": 128, "tie_word_embeddings": True}),
        ("narrow", {"hidden": 48}),
    ):
        made[name] = root / name
        tiny("llama", vocab_size=VOCAB, max_position_embeddings=64, **changes).to(torch.bfloat16).save_pretrained(
            made[name]
        )
    made["conv1d"] = root / "conv1d"
    tiny("gpt2", vocab_size=VOCAB).save_pretrained(made["conv1d"])
    for name in ("unsafe", "quantized"):
        made[name] = root / name
        shutil.copytree(made["model"], made[name])
    (made["unsafe"] / "model.safetensors").unlink()
    (made["unsafe"] / "pytorch_model.bin").write_bytes(b"pickle")
    config = json.loads((made["quantized"] / "config.json").read_text())
    (made["quantized"] / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "compressed-tensors"}})
    )
    return made


def test_a_dry_run_plans_and_writes_nothing(qat: Shell, models: dict[str, Path], tmp_path: Path) -> None:
    long = ("--loss", "chunked", "--tiled-mlp", "on", "--offload-activations", "on")
    found = qat(models["model"], *OUT, *DATA, *long, "--dry-run", "--format", "json", "--scheme", "w8a8-static")
    assert found.code == 0, found.err
    shown = json.loads(found.out)
    assert shown["plan"]["chosen"]["layout"]["tiled_mlp"] and shown["plan"]["job"]["loss"] == "chunked"
    assert not list(tmp_path.iterdir())
    assert shown["plan"]["hardware"]["name"] == "2xCPU" and shown["plan"]["chosen"].get("teacher") is None
    assert shown["scheme"]["format"] == "int-quantized"
    assert len(shown["layers"]) == 14 and not any("lm_head" in name for name in shown["layers"])
    assert {"out/REPORT.md", "out/plan/plan.json", "out/qat_report.json"} <= set(shown["files"])
    human = qat(models["model"], *OUT, *DATA, "--dry-run", "--teacher", "self", "--asymmetric")
    assert human.code == 0, human.err
    assert "14 quantized" in human.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--scheme", "W9A16"), "scheme = 'W9A16': is not a quantization scheme"),
        (("--method", "lora"), "train the adapter with train, merge it, and train the merged model"),
        (("--scheme", "FP8_DYNAMIC"), "scheme = 'FP8_DYNAMIC': has floating-point codes"),
        (("--ignore", "model.layers.0.mlp"), "matches no linear layer"),
        (("--start-step", 5, "--max-steps", 5), "start_step = 5: training ends at step 5, before anything is rounded"),
        (("--alpha", 0.5), "alpha = 0.5: requires a teacher; add --teacher self"),
        (("--teacher", "org/large"), "teacher = 'org/large': must be"),
        (("--teacher", "self", "--loss", "chunked"), "loss = 'chunked': is for training without a teacher"),
        (("--teacher", "self", "--teacher-placement", "cached"), "cached teacher outputs require `distill`"),
        (("--micro-batch-size", 3, "--global-batch-size", 32), "global_batch_size"),
        (("--resume",), "output_dir = 'out': contains no checkpoint to resume from"),
    ],
)
def test_bad_input_fails_before_launch_and_writes_nothing(
    qat: Shell, models: dict[str, Path], tmp_path: Path, more: Any, said: str
) -> None:
    found = qat(models["model"], *OUT, *DATA, *more)
    assert (found.code, found.out) == (2, ""), found.err
    assert said in found.err and "Traceback" not in found.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "more", "code", "said"),
    [
        ("tied", ("--ignore", "re:.*q_proj"), 2, "targets = 'lm_head': shares its weight with the token embedding"),
        ("conv1d", (), 2, "has 8 transposed matrices in Conv1D"),
        ("unsafe", (), 4, "other formats can run code"),
        ("quantized", (), 4, "is already quantized (compressed-tensors)"),
    ],
)
def test_unsuitable_models_are_rejected(
    qat: Shell, models: dict[str, Path], tmp_path: Path, model: str, more: Any, code: int, said: str
) -> None:
    found = qat(models[model], *OUT, *DATA, *(models.get(word, word) for word in more))
    assert (found.code, found.out) == (code, ""), found.err
    assert said in found.err
    assert not list(tmp_path.iterdir())


def test_all_errors_are_reported_together(qat: Shell, models: dict[str, Path], tmp_path: Path) -> None:
    found = qat(
        *(models["narrow"], "--output-dir", models["narrow"], "--force", "--scheme", "W4A16"),
        *("--teacher", "self", "--temperature", 0, "--dataset", "none.txt", "--hardware", "8xA100-80GB"),
        *("--lora-rank", 4),
    )
    reported = "\n".join(found.errors)
    for part in (
        "is the model itself",
        "lora_rank = 4: requires --method lora",
        "temperature = 0.0: must be above 0",
        "requires 8 x A100-80GB",
        "group_size = 128: must divide",
        "no such file or directory",
    ):
        assert part in reported, part
    assert found.code == 2 and not list(tmp_path.iterdir())


def test_an_old_compression_file_is_rejected_with_what_replaces_it(
    qat: Shell, models: dict[str, Path], tmp_path: Path
) -> None:
    shared = {"enabled": True, "quantization_type": "symmetric", "schedule_offset": 0, "quantize_groups": 1}
    old = {"weight_quantization": {"shared_parameters": shared, "different_groups": {}}}
    (tmp_path / "ds_config.json").write_text(json.dumps({"train_batch_size": 8, "compression_training": old}))
    found = qat(models["model"], *OUT, *DATA, "--config", "ds_config.json")
    assert found.code == 2 and "remove it, and use options of shardwright qat" in found.err


def test_interrupted_run_with_teacher_and_stored_ranges_resumes_and_exports(
    qat: Shell, one_rank: list[Sequence[str]], models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.trainers.qat.callback import QATCallback

    arguments = (
        *(models["model"], *OUT, "--dataset", "python-help#8", "--seq-len", 32, "--teacher", "self"),
        *("--hardware", "1xCPU", "--evaluation-samples", 16, "--logging-steps", 1),
        *("--save-steps", 2, "--learning-rate", 1e-3, "--format", "json"),
    )
    with monkeypatch.context() as interrupted:
        interrupted.setattr(QATCallback, "export", Mock(side_effect=KeyboardInterrupt))
        assert qat(*arguments, "--scheme", "W8A8_STATIC", "--max-steps", 3).code == 130
    assert list(one_rank[0][-3:-1]) == ["-m", "shardwright.trainers.rank_main"]
    out = tmp_path / "out"
    state = json.loads((out / "checkpoints" / "checkpoint-2" / "trainer_state.json").read_text())
    assert not (out / "config.json").exists()

    other = qat(*arguments, "--scheme", "W8A8", "--max-steps", 4, "--resume")
    assert other.code == 2 and "differs from the checkpoint" in other.err, other.err
    assert len(one_rank) == 1
    found = qat(*arguments, "--scheme", "W8A8_STATIC", "--max-steps", 4, "--resume")
    assert found.code == 0, found.err
    shown = json.loads(found.out)
    assert shown["steps"] == 4 and (shown["weight_difference"], shown["logit_difference"]) == (0.0, 0.0)
    nats, first = shown["cross_entropy"], state["log_history"][0]
    assert nats["dense"] == first["dense_cross_entropy"] != nats["trained"] and nats["rounded"] is None
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4] and all("kl_per_token" in entry for entry in steps)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized" and config["dtype"] == "bfloat16"
    assert f"{nats['trained']:.4f}" in (out / "REPORT.md").read_text()


def test_steps_are_counted_as_the_trainer_counts_them() -> None:
    layout = Layout(engine="ddp", dp_replicate=2, micro_batch_size=3, gradient_accumulation_steps=2)
    counts = {(25, 1.0): 3, (24, 1.0): 2, (25, 2.5): 8, (1, 0.5): 1}
    for (samples, epochs), steps in counts.items():
        assert optimizer_steps(QATSettings(epochs=epochs), layout, samples) == steps, (samples, epochs)


def test_the_report_holds_what_was_measured(models: dict[str, Path]) -> None:
    from shardwright.ds_configs.specs.job import TrainingJob
    from shardwright.plugins.planning import plan
    from shardwright.trainers.data.samples import SampleStatistics

    counts = dict.fromkeys(("rows", "empty_rows", "unlabelled_rows", "cut_rows", "train_samples"), 8)
    tokens = {"train_tokens": 3200, "train_labels": 3200, "evaluation_samples": 16}
    losses = {"dense": 3.0, "rounded": 3.4, "trained": 3.1}
    measured = {"weight_difference": 0.0, "logit_difference": 0.0, "peak_bytes": 3 * 10**9, "step_seconds": 2.0}
    outcome = QATOutcome(
        settings=QATSettings(dataset="python-help"),
        model="org/base",
        scheme=scheme_named("W8A8_STATIC"),
        layers=14,
        plan=plan(str(models["model"]), "2xCPU", TrainingJob(seq_len_tokens=32, precision="fp32")),
        statistics=SampleStatistics(source="python-help", kind="text", **counts, **tokens),
        result=QATResult(steps=5, tokens=3200, timed_tokens=1600, **losses, **measured),
        metrics=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}],
        seconds=9.0,
    )
    files = outcome.files("qat")
    text = files["REPORT.md"]
    for part in (
        f"| before, rounded to the nearest | 3.4000 | {math.exp(3.4):.4g} |",
        "costs 0.4000 nats per token; training recovered 75 % of it.",
        "| Tokens/s of all ranks | 800 |",
        "8 bit, symmetric, a scale for each output channel; inputs 8 bit, with stored ranges",
    ):
        assert part in text, part
    assert "| alpha |" not in text, "without a teacher its settings mean nothing"
