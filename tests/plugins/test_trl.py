"""Completions are samples of the model, and depend on the row of the batch of all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardwright.plugins.trl import generate_as_one_process, weigh_evaluated_batches
from small_models import llama

pytestmark = pytest.mark.needs("trl")


def generating(rank: int, *, step: int = 3, seed: int = 0) -> Any:
    """Return the context in which a rank of a GKD trainer generates."""
    from trl.experimental.gkd import GKDTrainer

    trainer: Any = object.__new__(GKDTrainer)
    trainer.state, trainer.args = SimpleNamespace(global_step=step), SimpleNamespace(seed=seed)
    trainer.accelerator = SimpleNamespace(process_index=rank)
    trainer.model = SimpleNamespace(training=True)
    generate_as_one_process(trainer)
    return trainer.generating


def completions(model: Any, prompts: torch.Tensor, **settings: Any) -> torch.Tensor:
    sampled = {"do_sample": True, "max_new_tokens": 6, "min_new_tokens": 6, "top_k": 0, "pad_token_id": 0, **settings}
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), **sampled)[:, prompts.shape[1] :]  # type: ignore[no-any-return]


def test_two_ranks_sample_the_completions_of_one_process() -> None:
    model, prompts = llama(hidden_size=16), torch.arange(1, 33).view(8, 4)
    with generating(0)(True):
        expected = completions(model, prompts)
    for rank in range(2):
        torch.manual_seed(rank)
        with generating(rank)(True):
            assert torch.equal(completions(model, prompts[4 * rank : 4 * rank + 4]), expected[4 * rank : 4 * rank + 4])


def test_other_rows_steps_seeds_and_calls_have_other_completions() -> None:
    model, prompts = llama(hidden_size=16), torch.ones(8, 4, dtype=torch.long)
    context = generating(0)
    with context(True):
        first, second = completions(model, prompts), completions(model, prompts)
    with context(True):
        third = completions(model, prompts)
    with generating(0, step=4)(True):
        later = completions(model, prompts)
    with generating(0, seed=1)(True):
        seeded = completions(model, prompts)
    rows = torch.cat([first, second, third, later, seeded])
    assert len(torch.unique(rows, dim=0)) == len(rows)


def test_tokens_have_the_frequencies_of_their_probabilities() -> None:
    model, prompts = llama(hidden_size=16), torch.ones(4000, 2, dtype=torch.long)
    with torch.no_grad():
        model.lm_head.weight.mul_(40.0)
        logits = model(prompts[:1]).logits[0, -1]
    settings = {"temperature": 0.8, "top_k": 5}
    kept = logits.topk(5)
    probabilities = torch.zeros_like(logits).scatter(0, kept.indices, (kept.values / 0.8).softmax(0))
    with generating(0)(True):
        tokens = completions(model, prompts, max_new_tokens=1, min_new_tokens=1, **settings)[:, 0]
    counts = torch.bincount(tokens, minlength=len(logits)).float()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities[probabilities > 0] * len(tokens)
    # The value of four degrees of freedom that one in ten thousand samples exceeds.
    assert float(((counts[probabilities > 0] - expected) ** 2 / expected).sum()) < 23.5


def test_greedy_generation_is_not_changed() -> None:
    model, prompts = llama(hidden_size=16), torch.arange(1, 9).view(2, 4)
    expected = completions(model, prompts, do_sample=False)
    with generating(0)(True):
        assert torch.equal(completions(model, prompts, do_sample=False), expected)


def test_incomplete_batches_of_an_evaluation_weigh_less() -> None:
    from trl.experimental.gkd import GKDTrainer

    trainer: Any = object.__new__(GKDTrainer)
    values = {"rewards/margins": [1.0, 4.0], "max_reward": [1.0, 4.0], "num_tokens": [7.0]}
    trainer._metrics = {"train": {"rewards/margins": [1.0, 4.0]}, "eval": dict(values)}
    weigh_evaluated_batches(trainer, [4.0, 2.0])
    assert sum(trainer._metrics["eval"]["rewards/margins"]) / 2 == pytest.approx((4 * 1.0 + 2 * 4.0) / 6)
    assert trainer._metrics["eval"]["max_reward"] == [1.0, 4.0] and trainer._metrics["eval"]["num_tokens"] == [7.0]
    assert trainer._metrics["train"]["rewards/margins"] == [1.0, 4.0]
