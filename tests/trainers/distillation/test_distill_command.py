"""`shardwright distill` without launching ranks: errors, dry runs, settings and the report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import shardwright
from commands import Shell, run_rank_here, shell_in
from distilling import tiny
from shardwright.ds_configs.plan.measurement import FILE_NAME, measurement_from_text
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.distillation.teacher_cache import CacheSettings, prepare_cache, run_cache_job

VOCAB = 300


@pytest.fixture
def distill(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    return shell_in(tmp_path, "distill", capsys, monkeypatch)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}
    for name, changes in (
        ("teacher", {"hidden": 48}),
        ("student", {}),
        ("stranger", {}),
        ("narrow", {"vocab_size": 128}),
    ):
        made[name] = root / name
        tiny("llama", **({"vocab_size": VOCAB} | changes)).save_pretrained(made[name])
    words = byte_tokenizer(VOCAB)
    words.add_tokens(["Hello"])
    words.save_pretrained(made["stranger"])
    for name in ("unsafe", "empty"):
        made[name] = root / name
        made[name].mkdir()
        shutil.copy(made["student"] / "config.json", made[name])
        if name == "unsafe":
            (made[name] / "pytorch_model.bin").write_bytes(b"pickle")
    return made


def common(models: dict[str, Path], *more: object) -> tuple[object, ...]:
    return (
        models["teacher"],
        models["student"],
        "--output-dir",
        "out",
        *more,
        *(() if "--seq-len" in more else ("--seq-len", 32)),
    )


DATA = ("--dataset", "python-help#8")


def test_dry_run_plans_and_writes_nothing(distill: Shell, models: dict[str, Path], tmp_path: Path) -> None:
    found = distill(*common(models, *DATA, "--dry-run", "--format", "json"))
    assert found.code == 0, found.err
    shown = json.loads(found.out)
    assert not list(tmp_path.iterdir())
    assert shown["plan"]["hardware"]["name"] == "2xCPU"
    assert shown["plan"]["job"]["precision"] == "fp32"
    assert shown["plan"]["chosen"]["teacher"]["placement"] == "replica"
    assert shown["dataset"]["train_samples"] > 0
    assert {"out/REPORT.md", "out/plan/plan.json", "out/metrics.jsonl"} <= set(shown["files"])
    human = distill(*common(models, *DATA, "--dry-run", "--hardware", "8xA100-80GB"))
    assert human.code == 0 and "A run would write out/plan/accelerate.yaml" in human.out
    assert not list(tmp_path.iterdir())


def test_all_errors_are_reported_together(distill: Shell, models: dict[str, Path], tmp_path: Path) -> None:
    found = distill(
        *(models["empty"], models["student"], "--output-dir", "out"),
        *("--alpha", 2, "--temperature", 0, "--teacher-cache", "none", "--hidden-states", 1, "--dataset", "none.txt"),
        *("--hardware", "8xA100-80GB"),
    )
    assert found.code == 2
    reported = "\n".join(found.errors)
    for part in (
        "alpha = 2.0: must be from 0 to 1",
        "temperature = 0.0: must be above 0",
        "teacher_cache = 'none': must be an existing directory",
        "hidden_states = 1.0: requires a live teacher",
        "has no weights; pass a trained model",
        "requires 8 x A100-80GB on 1 node(s)",
    ):
        assert part in reported, part
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ((), 2, "dataset: is missing; pass --dataset"),
        (("--dataset", "none.jsonl"), 2, "dataset = 'none.jsonl': no such file or directory"),
        ((*DATA, "--seq-len", "1"), 2, "seq_len = 1: must be greater than or equal to 2"),
        ((*DATA, "--evaluation-fraction", "0.0001", "--seq-len", "20000"), 2, "is empty: duplicate rows"),
        ((*DATA, "--teacher-placement", "cached"), 2, "teacher_placement = 'cached': requires a cache"),
        ((*DATA, "--resume"), 2, "output_dir = 'out': contains no checkpoint to resume from"),
        ((*DATA, "--micro-batch-size", "3", "--global-batch-size", "32"), 2, "global_batch_size"),
        ((*DATA, "--loss", "skewed_kl"), 2, "use jsd, which is bounded too"),
        ((*DATA, "--method", "lora", "--hidden-states", "1"), 2, "which LoRA adapters cannot store"),
        ((*DATA, "--dataset-revision", "main"), 2, "only a Hub dataset has revisions"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    distill: Shell, models: dict[str, Path], tmp_path: Path, more: Any, code: int, said: str
) -> None:
    found = distill(*common(models, *more))
    assert (found.code, found.out) == (code, ""), found.err
    assert said in found.err and "Traceback" not in found.err
    assert not list(tmp_path.iterdir())


def test_incompatible_models_are_rejected(distill: Shell, models: dict[str, Path], tmp_path: Path) -> None:
    rest = ("--output-dir", "out", "--seq-len", 32, *DATA, "--dry-run")
    strangers = distill(models["stranger"], models["student"], *rest)
    assert strangers.code == 0, "a student without a tokenizer takes its teacher's"
    narrow = distill(models["stranger"], models["narrow"], *rest)
    assert narrow.code == 2 and "the teacher's has ids up to" in narrow.err
    split = distill(models["teacher"], models["stranger"], *rest)
    assert split.code == 2 and "use models of one family" in split.err
    unsafe = distill(models["unsafe"], models["student"], *rest)
    assert unsafe.code == 4 and "only from safetensors" in unsafe.err
    swapped = distill(models["student"], models["teacher"], *rest)
    assert swapped.code == 0 and "are they swapped?" in swapped.err
    assert not list(tmp_path.iterdir())


def test_a_cache_decides_which_held_out_samples_are_compared(
    distill: Shell, models: dict[str, Path], tmp_path: Path
) -> None:
    for name, letters in (("stored", "abcdefghijk"), ("train", "abcdefgh"), ("more", "ijklm"), ("others", "lm")):
        rows = ({"prompt": f"say {letter}: ", "completion": letter * 3} for letter in letters)
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    stored = CacheSettings(dataset=str(tmp_path / "stored.jsonl"), seq_len=32)
    run_cache_job(prepare_cache(str(models["teacher"]), stored), tmp_path / "cache")
    rest = ("--teacher-cache", "cache", "--dry-run", "--format", "json")
    data = ("--dataset", "train.jsonl", "--evaluation-dataset")
    shown = json.loads(distill(*common(models, *rest, *data, "more.jsonl")).out)
    assert shown["dataset"]["evaluation_samples"] == 3 and shown["plan"]["chosen"]["teacher"]["placement"] == "cached"
    for own, rule in (
        ((*data, "others.jsonl"), "has none of the held-out samples"),
        (("--dataset", "more.jsonl", "--evaluation-dataset", "train.jsonl"), "lacks 2 of 5 training samples"),
    ):
        found = distill(*common(models, *rest, *own))
        assert found.code == 2 and rule in found.out


@pytest.mark.parametrize("part", ["teacher", "student"])
def test_model_directories_are_not_overwritten(distill: Shell, models: dict[str, Path], part: str) -> None:
    before = (models[part] / "model.safetensors").read_bytes()
    rest = ("--output-dir", models[part], "--force", "--lora-rank", 4, "--seq-len", 32)
    found = distill(models["teacher"], models["student"], *DATA, *rest)
    assert (
        found.code == 2
        and f"is the {part} itself" in found.err
        and "lora_rank = 4: requires --method lora" in found.err
    )
    assert (models[part] / "model.safetensors").read_bytes() == before


def test_python_call_equals_the_command(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = run_rank_here(monkeypatch)
    teacher, student = str(models["teacher"]), str(models["student"])
    data = {"dataset": "python-help#8", "seq_len": 32, "evaluation_samples": 8, "hardware": "1xCPU"}
    long = {"tiled_mlp": "on", "offload_activations": "on"}
    found = shardwright.distill(teacher, student, tmp_path / "out", max_steps=2, learning_rate=1e-2, **long, **data)
    assert len(launched) == 1 and found.result.steps == 2
    layout = json.loads((tmp_path / "out" / "plan" / "plan.json").read_text())["chosen"]["layout"]
    assert layout["tiled_mlp"] and layout["offloaded_checkpoints"] == 2
    assert found.result.after["kl_per_token"] != found.result.before["kl_per_token"]
    assert found.to_dict()["settings"]["learning_rate"] == 1e-2
    assert {"model.safetensors", "REPORT.md", "plan"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert measurement_from_text((tmp_path / "out" / FILE_NAME).read_bytes(), source="out").differences == ()
    assert capsys.readouterr().out == ""
    with pytest.raises(UsageError) as caught:
        shardwright.distill(teacher, student, tmp_path / "out", alpha=2.0, **data)
    assert {error.where for error in caught.value.errors} == {"alpha", "output_dir"}
