"""`shardwright train` in this process: bad input, dry runs, and whole runs of one rank without a launch."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shardwright
from commands import Shell, run_rank_here, shell_in
from distilling import tiny
from runnable_blocks import prepare
from shardwright.cli.main import run
from shardwright.ds_configs.plan.measurement import FILE_NAME, measurement_from_text
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.transformers.gradient_checkpointing import decoder_layers
from shardwright.trainers.runs import ranks
from training_runs import taken_away

pytestmark = pytest.mark.slow

DATA = ("--dataset", "python-help#8", "--seq-len", 32)
OUT = ("--output-dir", "out")


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    return shell_in(tmp_path, "train", capsys, monkeypatch)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    return run_rank_here(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "model"
    tiny("llama", vocab_size=300, max_position_embeddings=64).save_pretrained(directory)
    return directory


def test_a_dry_run_plans_and_writes_nothing(train: Shell, model: Path, tmp_path: Path) -> None:
    found = train(model, *OUT, *DATA, "--dry-run", "--format", "json", "--pipeline-parallel-size", 2)
    assert found.code == 0, found.err
    shown = json.loads(found.out)
    assert not list(tmp_path.iterdir())
    assert shown["plan"]["chosen"]["layout"]["pp"] == 2 and shown["plan"]["hardware"]["name"] == "2xCPU"
    assert shown["dataset"]["rows"] == 8
    text = train(model, *OUT, *DATA, "--dry-run").out
    assert "pass --output-dir" not in text and "A run would write" in text
    unstated = train(model, *OUT, "--dataset", "python-help#8", "--dry-run", "--format", "json")
    assert "--seq-len is set to 64, the largest length that the model supports" in unstated.err
    assert json.loads(unstated.out)["plan"]["job"]["seq_len"] == 64
    beyond = train(model, *OUT, "--dataset", "python-help#8", "--dry-run", "--seq-len", 65)
    assert beyond.code == 0 and beyond.err.count("positions that the model was trained on") == 1
    assert {"out/REPORT.md", "out/plan/plan.json"} <= set(shown["files"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--arg", "weight_decy=0.1"), "did you mean 'weight_decay'?"),
        (("--arg", "learning_rate=0.1"), "arg learning_rate = 0.1: is not an extra argument; use --learning-rate"),
        (("--arg", "deepspeed=mine.json"), "would run a different layout from the planned one"),
        (("--arg", "dataloader_drop_last=true"), "skips samples that the report counts as trained on"),
        (("--report-to", "flyte"), "report_to = 'flyte': is not installed; pip install flytekit"),
        (("--text-column", "body"), "text_column = 'body': is not a column of python-help#8; it has text"),
        (("--evaluation-dataset", "none.csv"), "dataset = 'none.csv': no such file or directory"),
        (("--evaluation-split", "test"), "evaluation_split = 'test': requires a Hub dataset"),
        (("--lora-alpha", 4), "lora_alpha = 4.0: requires --method lora"),
        (("--plan", "plan"), "plan = 'plan': no such file or directory"),
        (("--plan", "plan"), "seq_len = 32: is fixed by the plan"),
        (("--resume",), "output_dir = 'out': contains no checkpoint to resume from"),
    ],
)
def test_bad_input_is_reported_before_launch_and_writes_nothing(
    train: Shell, model: Path, tmp_path: Path, more: Any, said: str
) -> None:
    found = train(model, *OUT, *(DATA if "--dataset" not in more else ()), *more)
    assert (found.code, found.out) == (2, ""), found.err
    assert said in found.err and "Traceback" not in found.err
    assert not list(tmp_path.iterdir())


def test_a_plan_of_another_model_or_with_a_teacher_is_rejected(train: Shell, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny("llama", vocab_size=300, layers=3, max_position_embeddings=64).save_pretrained(other)
    job = TrainingJob(seq_len_tokens=32, precision="fp32")
    shardwright.plan(str(other), "1xCPU", job).write(tmp_path / "plan")
    found = train(model, *OUT, "--dataset", "python-help#8", "--plan", "plan")
    assert found.code == 2 and "is not the model of the plan" in found.err


def test_an_edited_plan_is_rejected_and_a_revision_is_an_option(train: Shell, model: Path, tmp_path: Path) -> None:
    job = TrainingJob(seq_len_tokens=32, precision="fp32")
    shardwright.plan(str(model), "1xCPU", job).write(tmp_path / "plan")
    (tmp_path / "plan" / "accelerate.yaml").write_text("num_processes: 2\n")
    found = train(model, *OUT, "--dataset", "python-help#8", "--plan", "plan", "--revision", "main")
    assert found.code == 2 and "plan/accelerate.yaml: was edited, but train runs the original plan" in found.err
    assert "revision = 'main': is fixed by the plan" not in found.err


def test_a_plan_trains_the_commit_that_it_was_made_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path, monkeypatch)
    name, commit = "openai-community/gpt2", "0" * 40
    plan = shardwright.plan(name, "1xCPU", TrainingJob(seq_len_tokens=32, precision="fp32"))
    assert plan.model.revision not in (None, commit)
    replace(plan, model=replace(plan.model, revision=commit)).write("plan")
    assert run(["train", name, *OUT, "--dataset", "python-help#8", "--plan", "plan"]) != 0
    assert "config.json is not cached" in capsys.readouterr().err, "that of main is, and has no tokenizer"


def test_a_plan_is_run_on_chats_with_adapters(
    train: Shell, model: Path, tmp_path: Path, one_rank: list[Sequence[str]]
) -> None:
    rows = [{"prompt": f"say {name}: ", "completion": name * 2} for name in "abcdefghij"]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "others.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:4]))
    job = TrainingJob(seq_len_tokens=16, precision="fp32", method="lora", lora_rank=2, micro_batch_size=2)
    shardwright.plan(str(model), "1xCPU", job).write(tmp_path / "plan")
    found = train(
        model, *OUT, "--plan", "plan", "--dataset", "rows.jsonl", "--evaluation-dataset", "others.jsonl",
        "--max-steps", 2, "--lora-alpha", 6, "--lora-dropout", 0.25,
        "--arg", "weight_decay=0.5", "--arg", "lr_scheduler_type=constant", "--logging-steps", 1, "--format", "json",
    )  # fmt: skip
    assert found.code == 0, found.err
    shown = json.loads(found.out)
    assert shown["dataset"]["kind"] == "prompt and completion" and shown["settings"]["seq_len"] == 16
    assert (shown["dataset"]["train_samples"], shown["dataset"]["evaluation_samples"]) == (10, 4)
    assert all(math.isfinite(shown["cross_entropy"][when]) for when in ("before", "after"))
    out = tmp_path / "out"
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    # A constant schedule is the user's; the command's own would fall.
    assert [step["learning_rate"] for step in steps] == [2e-4, 2e-4]
    adapter = json.loads((out / "adapter_config.json").read_text())
    assert [adapter[name] for name in ("r", "lora_alpha", "lora_dropout")] == [2, 6, 0.25]
    assert (out / "adapter_model.safetensors").is_file()
    assert "weight_decay" in (out / "REPORT.md").read_text()


def test_a_configuration_alone_trains_from_random_weights(
    train: Shell, model: Path, tmp_path: Path, one_rank: list[Sequence[str]]
) -> None:
    config = json.loads((model / "config.json").read_text()) | {"initializer_range": 1e-4}
    (tmp_path / "random").mkdir()
    (tmp_path / "random" / "config.json").write_text(json.dumps(config))
    words = ("random/config.json", *OUT, *DATA, "--max-steps", 1, "--hardware", "1xCPU", "--format", "json")
    found = train(*words, "--learning-rate", 1e-9)
    assert found.code == 0, found.err
    # Weights near zero predict all 300 tokens alike.
    assert json.loads(found.out)["cross_entropy"]["before"] == pytest.approx(math.log(300), abs=1e-2), found.err


def test_a_run_recomputes_what_its_plan_says_and_is_measured(
    train: Shell,
    model: Path,
    tmp_path: Path,
    one_rank: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The Trainer alone recomputes all layers completely."""
    job = TrainingJob(seq_len_tokens=32, precision="fp32", micro_batch_size=2, gradient_checkpointing="on")
    plan = shardwright.plan(str(model), "1xCPU", job)
    layout = replace(plan.chosen.layout, gradient_checkpointing=True, checkpointed_layers=1)
    replace(plan, chosen=replace(plan.chosen, layout=layout)).write(tmp_path / "plan")
    trainers: list[Any] = []
    train_guarded = ranks.train_guarded

    def observed(trainer: Any, **settings: Any) -> None:
        trainers.append(trainer)
        train_guarded(trainer, **settings)

    monkeypatch.setattr(ranks, "train_guarded", observed)
    data = ("--dataset", "python-help#8", "--evaluation-samples", 2, "--max-steps", 3)
    found = train(model, *OUT, *data, "--plan", "plan", "--format", "json")
    assert found.code == 0, found.err
    layers = decoder_layers(trainers[0].model)
    assert [layer.gradient_checkpointing for layer in layers] == [True, False]
    assert not (tmp_path / "out" / "checkpoints").exists()
    measured = measurement_from_text((tmp_path / "out" / FILE_NAME).read_bytes(), source="out")
    assert measured.differences == () and [rank.steps for rank in measured.measured] == [3]
    assert measured.plan.layout["checkpointed_layers"] == 1


def test_training_from_python_and_resuming(
    model: Path,
    tmp_path: Path,
    one_rank: list[Sequence[str]],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "rows.csv").write_text("body,id\n" + "".join(f'"{word} {word * 3}",1\n' for word in "abcdefgh") * 20)
    how: dict[str, Any] = {
        "dataset": str(tmp_path / "rows.csv"),
        "text_column": "body",
        "seq_len": 16,
        "hardware": "1xCPU",
        "micro_batch_size": 2,
        "global_batch_size": 2,
        "evaluation_samples": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "save_steps": 2,
    }
    whole = shardwright.train(str(model), tmp_path / "whole", **how)
    assert whole.metrics[-1]["loss"] < whole.metrics[0]["loss"]
    assert "\n" not in repr(whole) and len(repr(whole)) < 200 + len(str(tmp_path)) and "before" in repr(whole)
    # A run that ends behind its second step leaves that checkpoint.
    checkpoints = tmp_path / "whole" / "checkpoints"
    (tmp_path / "again" / "checkpoints").mkdir(parents=True)
    (checkpoints / "checkpoint-2").rename(tmp_path / "again" / "checkpoints" / "checkpoint-2")
    again = shardwright.train(str(model), tmp_path / "again", resume=True, **how)
    assert [entry["loss"] for entry in again.metrics] == [entry["loss"] for entry in whole.metrics]
    assert (again.result.before, again.result.after) == (whole.result.before, whole.result.after)
    assert capsys.readouterr().out == ""
    _refused_before_a_rank_starts(model, tmp_path, how, capsys)
    assert len(one_rank) == 2
    _finished_once(model, tmp_path / "again", how, again, caplog)
    assert len(one_rank) == 3


def _finished_once(model: Path, out: Path, how: dict[str, Any], run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A complete run starts no rank; one whose weights and report are missing gets the same, without a step."""
    caplog.set_level(logging.INFO)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    complete = shardwright.train(str(model), out, resume=True, **how)
    assert f"{out}: the run is complete, all of 4 steps, model and report" in caplog.messages
    assert complete.result == run.result and complete.metrics == run.metrics
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
    weights = taken_away(out)
    finished = shardwright.train(str(model), out, resume=True, **how)
    assert (finished.result.before, finished.result.after) == (run.result.before, run.result.after)
    assert finished.metrics == run.metrics and finished.result.tokens_per_second > 0
    assert {file.name: file.read_bytes() for file in out.glob("*.safetensors")} == weights
    assert {path.name for path in out.iterdir()} == {path.relative_to(out).parts[0] for path in before}


def _refused_before_a_rank_starts(
    model: Path, tmp_path: Path, how: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that differ from the one that saved, each in one line."""
    words = ["train", str(model), "--output-dir", str(tmp_path / "again"), "--resume"]
    before = sorted((tmp_path / "again").rglob("*"))
    for changed, said in (
        (
            {"max_steps": 3},
            "resume = 'checkpoint-4': all 3 steps are done, in a run of 4 steps; raise the steps or epochs",
        ),
        ({"max_steps": None, "epochs": 0.01}, "resume = 'checkpoint-4': all 1 steps are done, in a run of 4"),
        ({"max_steps": 9, "learning_rate": 2e-2}, "resume: learning_rate = 0.02: the checkpoint was saved with 0.01"),
        ({"max_steps": 9, "seq_len": 12}, "resume: data = "),
    ):
        (tmp_path / "settings.yaml").write_text(json.dumps(how | changed))
        assert run([*words, "--config", str(tmp_path / "settings.yaml")]) == 2
        reported = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
        assert len(reported) == 1 and reported[0].startswith(f"error: {said}"), reported
    assert sorted((tmp_path / "again").rglob("*")) == before


CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "ja" * (1 + n % 4)}]}
    for n in range(40)
]


def write_chats(directory: Path, rows: Sequence[Any] = CHATS) -> None:
    (directory / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def longer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "longer"
    tiny("llama", vocab_size=300, max_position_embeddings=256).save_pretrained(directory)
    return directory


ON_CHATS = ("--dataset", "chats.jsonl", "--chat-template", "alpaca", "--seq-len", 256)


def test_chats_are_packed_and_the_template_is_saved(
    train: Shell, longer_model: Path, tmp_path: Path, one_rank: list[Sequence[str]]
) -> None:
    write_chats(tmp_path)
    layout = ("--hardware", "1xCPU", "--global-batch-size", 2, "--logging-steps", 1, "--method", "lora")
    found = train(longer_model, *OUT, *ON_CHATS, *layout, "--max-steps", 3, "--format", "json")
    assert found.code == 0, found.err
    dataset = json.loads(found.out)["dataset"]
    assert dataset["packed_documents"] == 38 > 3 * dataset["train_samples"]
    assert f"packed 38 conversations into {dataset['train_samples']} rows of 256 tokens" in found.err
    saved = (tmp_path / "out" / "chat_template.jinja").read_text()
    assert "### Response:" in saved
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        assert step["positions_per_second"] > step["tokens_per_second"]
    report = (tmp_path / "out" / "REPORT.md").read_text()
    assert "Tokens/s of all ranks, with padding" in report and "Tokens/s without padding" in report
    assert "| packed documents | 38 |" in report


COMMANDS = {
    "train": OUT,
    "distill": ("MODEL", *OUT),
    "qat": (*OUT, "--scheme", "W4A16", "--group-size", 32),
    "cache-teacher": OUT,
}


CODE = "{{ messages[0].content.__class__.__mro__ }}"
NOT_AN_OBJECT = {"messages": [{"role": "user", "content": "?"}, "yes"]}


@pytest.mark.parametrize(
    ("command", "rows", "template", "said"),
    [
        ("train", CHATS, "chatlm", "is neither a file nor one of alpaca, chatml, llama3, zephyr"),
        ("distill", CHATS, CODE, "'__class__' of 'str' object is unsafe"),
        ("qat", [CHATS[0], {"text": "plain"}], "alpaca", "chats.jsonl[1]: has text, but earlier rows have messages"),
        ("cache-teacher", [*CHATS[:9], NOT_AN_OBJECT], "alpaca", "chats.jsonl[9] = 'yes': each message must be an"),
        ("train", CHATS, "alpaca --seq-len 8", "every label is masked"),
    ],
)
def test_bad_templates_and_rows_end_before_anything_is_written(
    command: str,
    rows: Sequence[Any],
    template: str,
    said: str,
    longer_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_chats(tmp_path, rows)
    words = template.split()
    if "{" in template:
        (tmp_path / "own.jinja").write_text(template)
        words = ["own.jinja"]
    call = shell_in(tmp_path, command, capsys, monkeypatch)
    models = [longer_model if word == "MODEL" else word for word in ("MODEL", *COMMANDS[command])]
    found = call(*models, "--dataset", "chats.jsonl", "--chat-template", *words)
    assert found.code == 2 and said in found.err, found.err
    assert found.err.count("error:") == 1, found.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "more", "said"),
    [
        ("train", ("--pipeline-parallel-size", 2), "pipeline parallelism does not support document masks"),
        ("train", ("--arg", "use_cache=true"), "with a cache"),
        ("distill", ("--teacher", "mamba"), "MambaForCausalLM mixes the documents of a packed row"),
    ],
)
def test_chats_are_padded_where_they_cannot_be_packed(
    command: str,
    more: Sequence[Any],
    said: str,
    longer_model: Path,
    mamba: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_chats(tmp_path)
    call = shell_in(tmp_path, command, capsys, monkeypatch)
    teacher = longer_model
    if more[0] == "--teacher":
        teacher, more = mamba, ()
    words = [*([teacher] if command == "distill" else []), longer_model, *ON_CHATS, "--dry-run", *more]
    words += ["--global-batch-size", 2, *(word for word in COMMANDS[command] if word != "MODEL")]
    padded = call(*words, "--format", "json")
    assert padded.code == 0, padded.err
    assert f"conversations are padded, not packed: {said}" in padded.err
    assert json.loads(padded.out)["dataset"]["packed_documents"] == 0
    if command == "train":
        demanded = call(*words, "--packing", "on")
        assert demanded.code == 2 and f"packing = 'on': is not supported here: {said}" in demanded.err
    assert not list(tmp_path.glob("out*"))


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import MambaConfig, MambaForCausalLM

    directory = tmp_path_factory.mktemp("models") / "mamba"
    MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2)).save_pretrained(directory)
    return directory
