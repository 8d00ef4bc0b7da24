"""Reward functions from files, and what is known of a task before data and model are read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import shardwright
from packaging.specifiers import SpecifierSet
from paths import CONFIGS
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.preferences import trainer as preferences
from shardwright.trainers.preferences.trainer import (
    generation_errors,
    reward_function,
    second_model_errors,
    task_errors,
)
from shardwright.trainers.runs.inputs import load_second_model_spec
from shardwright.trainers.training.script import train_words
from small_models import llama


def test_a_reward_is_a_function_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "import math\nscale = 2\ndef longest(completions, **others):\n    return [scale for _ in completions]\n"
    )
    assert reward_function(f"{file}:longest")(completions=["a", "b"]) == [2, 2]
    for name, rule in (
        (f"{file}:shortest", "has no function shortest; it has longest"),
        (f"{file}:scale", "has no function scale"),
        (f"{tmp_path / 'none.py'}:longest", "has no such file"),
    ):
        with pytest.raises(UsageError, match=rule):
            reward_function(name)
    file.write_text("import not_installed\n")
    with pytest.raises(UsageError, match=r"fails when it is imported .ModuleNotFoundError: No module named 'not_inst"):
        reward_function(f"{file}:longest")


@pytest.mark.parametrize(
    ("task", "reward", "messages"),
    [
        ("dpo", None, []),
        ("grpo", None, ["reward: is required by task grpo; pass --reward FILE.py:FUNCTION, or a reward model"]),
        ("grpo", "org/model", []),
        ("rloo", "none.py:f", ["reward = 'none.py:f': has no such file; pass FILE.py:FUNCTION"]),
        (
            "ppo",
            "org/model",
            ["task = 'ppo': can be planned, but trl 1.16.0 has no trainer for ppo; use --task grpo or rloo"],
        ),
        (
            "gkd",
            None,
            ["task = 'gkd': has a teacher, as no run of train; pass TRL's GKDTrainer to shardwright.trainer_for"],
        ),
    ],
)
def test_errors_of_a_task_are_known_before_anything_is_read(task, reward, messages) -> None:
    assert list(map(str, task_errors(task, reward=reward))) == messages


def test_a_reward_that_a_task_cannot_use_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def one(completions, **others):\n    return [1.0] * len(completions)\n")
    (error,) = task_errors("dpo", reward=f"{file}:one")
    assert str(error).endswith("is not used by task dpo; use --task grpo or rloo, or omit it")
    (error,) = task_errors("grpo", reward=str(file))
    assert str(error).endswith(f"names a file without a function; pass {file}:FUNCTION")


def test_a_reward_accepts_what_every_reward_gets(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def one(completions, answer):\n    return [1.0]\n")
    rule = "does not accept prompts and completion_ids, which every reward function gets by name; add .*others to its"
    with pytest.raises(UsageError, match=rule):
        reward_function(f"{file}:one")
    file.write_text("def one(prompts, completions, completion_ids, answer, **others):\n    return [1.0]\n")
    assert reward_function(f"{file}:one")


def test_a_reward_that_never_returns_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("import time\ndef waits(completions, **others):\n    while True:\n        time.sleep(0.01)\n")
    reward = preferences.limited_reward(f"{file}:waits", 0.5)
    assert reward.__name__ == "waits"
    with pytest.raises(TimeoutError, match=r"not done after 0.4 s; raise --hang-timeout, or return None"):
        reward(completions=["a"])


def test_a_reward_model_scores_texts_with_the_end_that_it_was_trained_with() -> None:
    """TRL's GRPOTrainer calls the tokenizer of a reward model like this."""
    tokenizer: Any = byte_tokenizer(300)
    tokenizer.pad_token = tokenizer.eos_token
    (plain,) = tokenizer(["3+4=7"])["input_ids"]
    encode = preferences.ending_texts(tokenizer)
    found = encode(text=["3+4=7", "1"], padding=True, padding_side="right", add_special_tokens=False)
    assert found["input_ids"][0] == [*plain, tokenizer.eos_token_id]


def test_numbers_of_an_evaluation_leave_out_speed_and_missing_values() -> None:
    log = [{"eval_loss": 1.0, "step": 0, "eval_reward": None, "eval_runtime": 3.0}, {"eval_loss": 0.5, "step": 4}]
    trainer: Any = SimpleNamespace(state=SimpleNamespace(log_history=log))
    assert preferences.evaluated(trainer, first=True) == {"loss": 1.0}
    assert preferences.evaluated(trainer, first=False) == {"loss": 0.5}


def test_an_import_that_never_ends_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preferences, "IMPORT_SECONDS", 0.5)
    file = tmp_path / "rewards.py"
    file.write_text("import time\nwhile True:\n    time.sleep(0.01)\n")
    with pytest.raises(UsageError, match=r"TimeoutError: not done after 0.5 s; move slow work into the function"):
        reward_function(f"{file}:one")
    file.write_text("def one(completions, **others):\n    return [1.0]\n")
    assert reward_function(f"{file}:one")(completions=["a"]) == [1.0], "the limit ends with the import"


def test_second_models_fit_the_task_and_its_tokenizer(tmp_path: Path) -> None:
    model, tokenizer = llama(vocab_size=300), byte_tokenizer(300)
    for name in ("same", "other"):
        model.save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / "same")
    byte_tokenizer(300).train_new_from_iterator(["a b c"] * 9, 280).save_pretrained(tmp_path / "other")
    scores: dict[str, Any] = {"architectures": ["LlamaForSequenceClassification"], "vocab_size": 300}
    tokens: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 300}

    def rules(role: str, name: str, config: dict[str, Any]) -> list[str]:
        found = second_model_errors(role, str(tmp_path / name), config, tokenizer)
        assert all(error.where == role and error.value == str(tmp_path / name) for error in found)
        return [error.rule for error in found]

    assert rules("reference", "same", tokens) == rules("reward", "other", scores | {"id2label": {"0": "good"}}) == []
    assert "is '!' for the model and" in rules("reference", "other", tokens)[0]
    assert rules("reference", "same", scores) == ["returns a score of a sequence instead of tokens"]
    assert rules("reward", "same", tokens) == ["returns no score of a sequence"]
    assert rules("reward", "same", scores) == ["returns 2 classes"]


@pytest.mark.parametrize("role", ["teacher", "reference", "reward"])
def test_second_model_must_have_safe_weights_in_every_role(tmp_path, role):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=f"{role} = .*: has no weights; pass a trained model"):
        load_second_model_spec(role, str(tmp_path))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(RefusedInputError, match=f"{role} = .*: weights are read only from safetensors"):
        load_second_model_spec(role, str(tmp_path))


@pytest.mark.parametrize(
    ("hardware", "version", "rule"),
    [
        ("2xCPU", "0.30.0", "needs an accelerator"),
        ("8xA100-80GB", None, "needs the package vllm, which is not installed"),
        ("8xA100-80GB", "0.32.0", "needs vllm<=0.31.0,>=0.22.0, which the installed trl supports, but 0.32.0 is"),
        ("8xA100-80GB", "0.30.0", None),
    ],
)
def test_generation_with_vllm_needs_a_supported_release(
    hardware: str, version: str | None, rule: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preferences, "vllm_releases", lambda: (SpecifierSet(">=0.22.0,<=0.31.0"), version))
    model = str(CONFIGS / "Qwen--Qwen2.5-0.5B")
    plan = shardwright.plan(model, hardware, task="grpo", generation="vllm", seq_len=512)
    errors = generation_errors(plan)
    assert [error.where for error in errors] == (["generation"] if rule else [])
    assert rule is None or rule in errors[0].rule


@pytest.mark.parametrize(("task", "reward"), [("dpo", []), ("grpo", ["--reward", "org/model"])])
def test_launch_trains_a_task_that_has_second_models(task: Any, reward: list[str], tmp_path: Path) -> None:
    model = str(CONFIGS / "Qwen--Qwen2.5-0.5B")
    models = {"reward": model} if reward else {}
    shardwright.plan(model, "8xA100-80GB", task=task, seq_len=512, **models).write(tmp_path / "plan")
    words = train_words(tmp_path / "plan", ["--dataset", "rows.jsonl"])
    assert words == ["train", model, "--plan", str(tmp_path / "plan"), "--dataset", "rows.jsonl"]


def test_a_task_starts_from_trained_weights(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}')
    model = str(CONFIGS / "Qwen--Qwen2.5-0.5B")
    with pytest.raises(UsageError, match="has no weights, from which task dpo starts; pass a trained model"):
        shardwright.train(model, tmp_path / "out", dataset=str(tmp_path / "rows.jsonl"), task="dpo")
