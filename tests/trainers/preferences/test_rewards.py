"""Reward functions from files, and what is known of a task before data and model are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import shardwright
from paths import CONFIGS
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.trainers.preferences.trainer import reward_function, task_errors


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
        ("gkd", None, ["task = 'gkd': is a command of its own; use shardwright distill TEACHER STUDENT --on-policy"]),
    ],
)
def test_errors_of_a_task_are_known_before_anything_is_read(task, reward, messages) -> None:
    assert list(map(str, task_errors(task, reward=reward))) == messages


def test_a_task_starts_from_trained_weights(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}')
    model = str(CONFIGS / "Qwen--Qwen2.5-0.5B")
    with pytest.raises(UsageError, match="has no weights, from which task dpo starts; pass a trained model"):
        shardwright.train(model, tmp_path / "out", dataset=str(tmp_path / "rows.jsonl"), task="dpo")
