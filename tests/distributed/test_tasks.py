"""`shardwright train --task` on two CPU ranks: losses and rewards of one process, from data to a saved model."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
import shardwright
from small_models import llama

pytestmark = pytest.mark.distributed

REWARDS = """
def digits(completions, answer, **others):
    return [sum(letter.isdigit() for letter in text) / 8 + 0.1 * len(own) for text, own in zip(completions, answer)]
"""
_PAIRS = {"dataset": "pairs.jsonl", "seq_len": 48}
_PROMPTS = {"dataset": "prompts.jsonl", "seq_len": 32, "completion_tokens": 8, "num_generations": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    **{task: {"task": task, **_PAIRS} for task in ("dpo", "kto", "orpo", "cpo", "reward")},
    "dpo-lora": {"task": "dpo", "method": "lora", **_PAIRS},
    "dpo-cached": {"task": "dpo", "reference_placement": "cached", **_PAIRS},
    "grpo": {"task": "grpo", "beta": 0.1, "reward": "rewards.py:digits", **_PROMPTS},
    "rloo": {"task": "rloo", "reward": "rewards.py:digits", **_PROMPTS},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    llama(vocab_size=300, eos_token_id=256).save_pretrained(root / "model")
    sums = [(first, second) for first in range(8) for second in range(5)]
    pairs = [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a + b + 1} or {a}"} for a, b in sums]
    prompts = [{"prompt": pair["prompt"], "answer": pair["chosen"]} for pair in pairs]
    for name, rows in (("pairs", pairs), ("prompts", prompts)):
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "rewards.py").write_text(REWARDS)
    return root


@pytest.fixture(scope="module")
def run(inputs: Path) -> Any:
    found: dict[tuple[str, str], Any] = {}

    def of(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> Any:
        if (name, layout) not in found:
            monkeypatch.chdir(inputs)
            alone = layout == "single"
            planned = {
                "hardware": "1xCPU" if alone else "2xCPU",
                "strategy": layout,
                "global_batch_size": 8,
                "micro_batch_size": 4 if alone else 2,
            } | SETTINGS[name]
            if (name, layout) in _BY_PLAN:
                own = {key: planned.pop(key) for key in ("dataset", "reward") if key in planned}
                shardwright.plan("model", planned.pop("hardware"), precision="fp32", **planned).write("plan")
                planned = own | {"plan": "plan"}
            outcome = shardwright.train(
                "model",
                f"{name}-{layout}",
                max_steps=3,
                logging_steps=1,
                learning_rate=1e-3,
                evaluation_fraction=0.2,
                **planned,
            )
            losses = [entry["loss"] for entry in outcome.metrics if "loss" in entry]
            found[name, layout] = losses, outcome.result.evaluations, outcome
        return found[name, layout]

    return of


_CELLS = [("dpo", "zero3"), ("grpo", "zero2")]
_BY_PLAN = _CELLS[1:]
"""Trained from a directory that `plan` wrote."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *_CELLS,
        *(
            pytest.param(name, layout, marks=pytest.mark.full)
            for name in SETTINGS
            for layout in ("ddp", "zero2", "zero3", "fsdp2")
            if (name, layout) not in (*_CELLS, *((task, "fsdp2") for task in ("grpo", "rloo", "dpo-cached")))
        ),
    ],
)
def test_losses_and_rewards_are_those_of_one_process(
    name: str, layout: str, run: Any, inputs: Path, monkeypatch: pytest.MonkeyPatch, deepspeed_cpu_ops: None
) -> None:
    losses, evaluations, outcome = run(name, layout, monkeypatch)
    expected, alone, _ = run(name, "single", monkeypatch)
    assert len(losses) == 3 and losses == pytest.approx(expected, abs=1e-5)
    for when in ("before", "after"):
        assert evaluations[when].keys() == alone[when].keys() and evaluations[when]
        own, others = (
            # A mean over padding too, which depends on the micro-batch.
            {key: value for key, value in each[when].items() if not key.startswith("logits/") or name == "dpo"}
            for each in (evaluations, alone)
        )
        assert own == pytest.approx(others, abs=1e-5), when
    assert evaluations["before"] != evaluations["after"]
    files = {path.name for path in (inputs / f"{name}-{layout}").iterdir()}
    assert {"REPORT.md", "adapter_model.safetensors" if "lora" in name else "model.safetensors"} <= files
    text, page = ((inputs / f"{name}-{layout}" / file).read_text() for file in ("REPORT.md", "report.html"))
    assert all("held-out samples, by TRL" in each and "nats per token" not in each for each in (text, page))
    if name == "dpo":
        assert "| Win rate against the reference | 100.0 % (67.6 to 100.0) |" in text
    assert outcome.to_dict()["task"] == SETTINGS[name]["task"]
    # With another adapter in a checkpoint, the trained one is not resumed.
    assert "ref" not in files


@pytest.mark.parametrize(
    "name", ["grpo", *(pytest.param(task, marks=pytest.mark.full) for task in ("dpo-lora", "kto"))]
)
def test_a_resumed_run_logs_what_an_uninterrupted_one_logs(
    name: str, inputs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(inputs)
    settings = {"hardware": "1xCPU", "global_batch_size": 8, "max_steps": 3, "logging_steps": 1, "save_steps": 1}
    settings |= {"learning_rate": 1e-3, **SETTINGS[name]}
    whole = shardwright.train("model", tmp_path / "whole", **settings)
    cut = copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (2, 3):
        rmtree(cut / "checkpoints" / f"checkpoint-{step}")
    for file in (*cut.glob("*.safetensors"), cut / "report.json"):
        file.unlink()
    resumed = shardwright.train("model", cut, resume=True, **settings)
    names = ("loss", "grad_norm", "reward", "rewards/margins", "entropy")
    logged = [
        {entry["step"]: [entry.get(name) for name in names] for entry in run.metrics if "loss" in entry}
        for run in (whole, resumed)
    ]
    assert logged[0].keys() == logged[1].keys() == {1, 2, 3}
    for step in (2, 3):
        assert logged[1][step] == pytest.approx(logged[0][step], abs=1e-6)
