"""Mistakes of users by flag, dataset, model and hardware: the message names the problem, and its command works."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Result
from paths import CONFIGS
from shardwright.cli.main import run
from shardwright.trainers.quantization import suggested_command
from small_models import llama

QWEN = str(CONFIGS / "Qwen--Qwen2.5-0.5B")
GPU = "--hardware 8xA100-80GB"
TRAIN = "train model --hardware 2xCPU --output-dir out --dry-run"


def rows(name: str, *columns: str, count: int = 60) -> None:
    with Path(name).open("w") as file:
        for index in range(count):
            text = f"sentence {index} of a file that somebody wrote for a training"
            file.write(json.dumps(dict.fromkeys(columns, text)) + "\n")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory as users have it: a model, other weights, and data in several formats."""
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer

    work = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        llama(vocab_size=384).save_pretrained("model")
        byte_tokenizer(384).save_pretrained("model")
        shutil.copytree("model", "runs/checkpoint-3")
        Path("converted").mkdir()
        shutil.copy("model/config.json", "converted")
        Path("converted/pytorch_model.bin").write_bytes(b"pickle")
        rows("notes.jsonl", "text")
        rows("posts.jsonl", "body")
        rows("answers.jsonl", "question", "answer")
        chat = [{"role": "user", "content": "Are you there?"}, {"role": "assistant", "content": "Yes."}]
        Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat, "n": n}) + "\n" for n in range(60)))
    return work


Shell = Callable[[str], Result]


@pytest.fixture
def shell(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(work)

    def call(line: str) -> Result:
        capsys.readouterr()
        code = run(line.replace("QWEN", QWEN).split())
        return Result(code, *capsys.readouterr())

    return call


MISTAKES = [
    (
        "finetune model --dataset notes.jsonl --output-dir out",
        "finetune: is not a command; did you mean train?",
        f"{TRAIN} --dataset notes.jsonl",
    ),
    (f"{TRAIN} --dataset note.jsonl", "did you mean notes.jsonl?", f"{TRAIN} --dataset notes.jsonl"),
    (
        f"{TRAIN} --dataset posts.jsonl",
        "but has body; select one with --text-column body",
        f"{TRAIN} --dataset posts.jsonl --text-column body",
    ),
    (
        f"{TRAIN} --dataset chats.jsonl",
        "need a chat template, which the tokenizer does not have; pass --chat-template, such as chatml",
        f"{TRAIN} --dataset chats.jsonl --chat-template chatml --evaluation-dataset chats.jsonl",
    ),
    (f"plan runs {GPU}", "has no config.json; pass runs/checkpoint-3", f"plan runs/checkpoint-3 {GPU}"),
    (
        "train converted --hardware 2xCPU --output-dir out --dry-run --dataset notes.jsonl",
        "has pytorch_model.bin; convert them to safetensors, or pass the config.json for random weights",
        "train model --hardware 2xCPU --output-dir out --dry-run --dataset notes.jsonl",
    ),
    ("plan QWEN --hardware 8xA100", "write one of A100-40GB, A100-80GB", f"plan QWEN {GPU}"),
    ("plan QWEN --hardware A100-80GB:8", "[[NODESx]GPUSx]GPU; write 8xA100-80GB", f"plan QWEN {GPU}"),
    (
        "plan QWEN --hardware 2xT4",
        "precision = 'bf16': is not supported by T4; use fp16 or fp32",
        "plan QWEN --hardware 2xT4 --precision fp16 --seq-len 1024",
    ),
]


@pytest.mark.parametrize(("line", "said", "corrected"), MISTAKES)
def test_the_message_proposes_what_works(line: str, said: str, corrected: str, shell: Shell) -> None:
    wrong = shell(line)
    assert wrong.code != 0 and not wrong.out
    (error,) = wrong.errors
    assert said in error
    right = shell(corrected)
    assert right.code == 0, right.err
    assert not Path("out").exists()


@pytest.mark.needs("llmcompressor")
@pytest.mark.parametrize(
    ("scheme", "proposed"),
    [
        ("AWQ", "--method awq --scheme W4A16"),
        ("int4", "W4A16"),
        ("bnb-4bit", "NF4"),
        ("W4A16_G32", "--scheme W4A16 --group-size 32"),
    ],
)
def test_a_scheme_of_another_tool_is_answered_with_ours(scheme: str, proposed: str, shell: Shell) -> None:
    data = "--dataset notes.jsonl --seq-len 32"
    (error,) = shell(f"quantize model --dry-run {data} --scheme {scheme}").errors
    assert f"use {proposed}" in error and len(error) < 200
    flags = proposed if proposed.startswith("--") else f"--scheme {proposed}"
    flags += " --group-size 64" if flags.endswith(("W4A16", "W8A16")) else ""
    right = shell(f"quantize model --dry-run {data} {flags}")
    assert right.code == 0, right.err


@pytest.mark.needs("llmcompressor")
@pytest.mark.parametrize(
    ("hidden_size", "flags"),
    [(64, "--scheme W4A16 --group-size 64"), (48, "--scheme W8A16 --group-size -1")],
)
def test_the_next_step_after_a_training_works(hidden_size: int, flags: str, tmp_path: Path, shell: Shell) -> None:
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer

    model = tmp_path / "tuned"
    llama(hidden_size=hidden_size, vocab_size=384).save_pretrained(model)
    byte_tokenizer(384).save_pretrained(model)
    words = suggested_command(model)
    assert shlex.join(words).startswith(f"shardwright quantize {model} {flags} --output-dir {model}-w")
    # The 8-bit one is run, the others are checked.
    rest = "--no-evaluate" if hidden_size == 48 else "--dry-run"
    done = shell(f"{shlex.join(words[1:])} {rest}")
    assert done.code == 0, done.err


def test_json_of_a_dry_run_has_the_planned_sizes(shell: Shell) -> None:
    shown = json.loads(shell(f"{TRAIN} --dataset notes.jsonl --format json").out)
    layout, settings = shown["plan"]["chosen"]["layout"], shown["settings"]
    assert settings["micro_batch_size"] == layout["micro_batch_size"]
    assert settings["global_batch_size"] == 2 * layout["micro_batch_size"] * layout["gradient_accumulation_steps"]
