"""Names of options in other tools: accepted where they mean the same, or answered with ours."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from commands import Shell, shell_in
from paths import CONFIGS
from shardwright.cli.commands.explain import explained_texts
from shardwright.cli.main import _COMMANDS, build_app, run
from shardwright.cli.settings import _options, resolve
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.job import HUGGING_FACE_NAMES
from shardwright.ds_configs.specs.synonyms import synonyms
from shardwright.plugins.planning import plan

QWEN = str(CONFIGS / "Qwen--Qwen2.5-0.5B")
TRAINING = {"train": ["m"], "distill": ["t", "s"], "qat": ["m"]}


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return shell_in(tmp_path, "plan", capsys, monkeypatch)


def values(*words: str) -> dict[str, object]:
    """Return the options that the words of a command set."""
    _, bound = resolve(build_app(), words)
    settings = bound.arguments["settings"]
    stated: dict[str, object] = settings.stated()
    assert {settings.origins()[name] for name in stated} == {"flag"}
    return stated


@pytest.mark.parametrize("command", TRAINING)
def test_names_of_hugging_face_are_flags_of_a_training(command: str) -> None:
    words = "--per_device_train_batch_size 4 --learning-rate 1e-4 --num-train-epochs=2 --max-length 64 --lora-r 8"
    assert values(
        command, *TRAINING[command], "--output-dir", "o", *shlex.split(words), "--bf16", "--optim", "sgd"
    ) == {
        "micro_batch_size": 4,
        "learning_rate": 1e-4,
        "epochs": 2.0,
        "seq_len": 64,
        "lora_rank": 8,
        "precision": "bf16",
        "optimizer": "sgd",
    }


@pytest.mark.parametrize(
    ("switch", "precision"), [("--bf16", "bf16"), ("--bf16 True", "bf16"), ("--fp16=true", "fp16"), ("--fp16", "fp16")]
)
def test_a_precision_switch_is_accepted_in_any_position(switch: str, precision: str) -> None:
    words = ["m", "--hardware", "2xT4"]
    for start in (0, 1, 3):
        stated = values("plan", *words[:start], *switch.split(), *words[start:])
        assert stated == {"hardware": "2xT4", "precision": precision}


def test_a_file_and_the_environment_accept_them_once(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path("settings.yaml")
    file.write_text("per_device_train_batch_size: 2\nmax_length: 512\n")
    monkeypatch.setenv("SHARDWRIGHT_PLAN_LORA_R", "4")
    words = (QWEN, "--hardware", "1xA100-80GB", "--method", "lora", "--format", "json")
    job = json.loads(shell(*words, "--config", file).out)["job"]
    assert (job["micro_batch_size"], job["seq_len"], job["lora_rank"]) == (2, 512, 4)
    file.write_text("per_device_train_batch_size: 2\nmicro_batch_size: 4\n")
    assert shell(*words, "--config", file).errors == [
        f"per_device_train_batch_size (from {file}:1): is set by another name too; keep one of them"
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan --zero-stage 3 m", ["--zero-stage: is not an option; use --strategy zero1, zero2 or zero3"]),
        ("plan m --hardware 1xT4 --bf16 false", ["--bf16: is not an option; use --precision bf16, fp16 or fp32"]),
        (
            "plan m --hardware 1xT4 --method lora --lora-rank 32 --lora-alpha 64",
            ["--lora-alpha: is not an option of plan; pass --lora-alpha to train, distill or qat"],
        ),
        (
            "plan m --effective-batch-size 8",
            ["--effective-batch-size: is not an option; did you mean --global-batch-size?"],
        ),
        ("serve m --engine x", ["--engine: is not an option; omit it: serve starts vLLM only"]),
        (
            "configs ls quantize",
            ["subject = 'quantize': is not in the gallery; recipes are files of examples/quantization: "
             "pass one to quantize --config"],
        ),
        (
            "calibrate --forget cpu",
            ["--forget = 'cpu': is not a stored run; omit it: rates of CPU ranks are not stored"],
        ),
        (
            "distill t s --output-dir o --teacher-url http://localhost:8000",
            ["--teacher-url: is not an option; run shardwright cache-teacher TEACHER first, then distill TEACHER "
             "STUDENT --teacher-cache DIRECTORY"],
        ),
        ("quantize m --dry-run --awq", ["--awq: is not an option; use --method gptq, awq or smoothquant"]),
    ],
)  # fmt: skip
def test_a_name_of_another_tool_is_answered_with_ours(
    capsys: pytest.CaptureFixture[str], arguments: str, said: list[str]
) -> None:
    assert run(arguments.split()) == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {line}" for line in said]


def test_python_names_the_setting_too() -> None:
    with pytest.raises(UsageError, match="zero_stage: is not a setting; use strategy: zero1, zero2 or zero3"):
        plan(QWEN, "2xT4", zero_stage=3)
    with pytest.raises(UsageError, match=r"lora_alpha = 64: is not part of a plan.*pass it to train"):
        plan(QWEN, "2xT4", method="lora", lora_rank=32, lora_alpha=64)


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("fsdp", ["fsdp2"]),
        ("ZeRO", ["zero1", "zero2", "zero3"]),
        ("ZeRO-3", ["zero3"]),
        ("stage 3", ["zero3"]),
        ("bf16", ["precision", "dtype"]),
        ("fp16", ["precision", "dtype"]),
        ("lora", ["method"]),
        ("offload", ["offload"]),
        ("oom", ["accelerator_out_of_memory", "host_out_of_memory"]),
        ("NCCL timeout", ["collective_timeout", "lost_connection"]),
        ("tensor parallel", ["tensor_parallel"]),
        ("sequence parallel", ["sequence_parallel"]),
        ("moe", ["expert_parallel_size"]),
        ("gradient accumulation steps", ["global_batch_size"]),
        ("dpo", ["dpo"]),
        ("lr", ["learning_rate"]),
        ("packing", ["packing"]),
        ("ZeRO-3 vs FSDP", ["zero3", "fsdp2"]),
        ("which stage", ["zero1", "zero2", "zero3"]),
        ("why out of memory", ["accelerator_out_of_memory", "host_out_of_memory"]),
        ("why is training slow", ["slow_steps"]),
    ],
)
def test_explain_answers_the_words_that_people_type(
    word: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = explained_texts()
    assert run(["explain", word, "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    lines = [f"{name}: {texts[name]}" for name in names]
    assert answer["meaning"] in ("\n".join(lines), texts[names[0]])
    assert run(["explain", word]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(" ".join("\n".join(lines).split()))


def test_explain_names_the_nearest_words(capsys: pytest.CaptureFixture[str]) -> None:
    for word, fix in {"zerro3": "zero3, zero, zero2", "hangs": "hang", "xyzzy": "shardwright explain names"}.items():
        assert run(["explain", word]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "is not a path or a known name" in line and fix in line


def test_synonyms_lead_to_options_that_exist() -> None:
    every = {
        option
        for name, (target, _) in _COMMANDS.items()
        if not target.endswith(":app")
        for option in _options(build_app()[name].assemble_argument_collection())
    }
    listed = {option for options in synonyms().values() for option in options}
    assert {option.name for option in listed} | {option.beside for option in listed if option.beside} <= every | {
        *explained_texts()
    }
    assert set(HUGGING_FACE_NAMES) <= every
