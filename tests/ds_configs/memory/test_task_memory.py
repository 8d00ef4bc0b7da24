"""The memory of preference and RL tasks against metered runs and against what TRL and ms-swift published."""

from __future__ import annotations

import json

import published_tasks
import task_memory
from shardwright.ds_configs.memory.generation import generation_moments
from shardwright.ds_configs.memory.layers import rank_step
from shardwright.ds_configs.memory.loss import head_bytes
from shardwright.ds_configs.memory.rank_parameters import rank_shares
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout

UNEXPLAINED = {"ms-swift, simpo 3B, ZeRO-2"}


def test_predicted_phases_match_metered_ones() -> None:
    rows = task_memory.rows(json.loads(task_memory.GRID.measured.read_text(encoding="utf-8")))
    passed, sentence = task_memory.verdict(rows)
    assert passed, sentence
    document = task_memory.GRID.document.read_text(encoding="utf-8")
    assert f"{sentence}." in document and task_memory.table(rows) in document, "the document shows other figures"


def test_published_memory_is_predicted() -> None:
    for case in published_tasks.CASES:
        error = case.predicted_bytes() / 2**30 / case.gib - 1
        limit = 0.15 if case.reserved else 0.10
        assert abs(error) <= limit or case.name in UNEXPLAINED, f"{case.name}: {error:+.1%}"
    document = published_tasks.PAGE.read_text(encoding="utf-8")
    assert published_tasks.table() in document and published_tasks.longest_table() in document


def test_rloo_of_older_releases_scores_beside_the_logits_of_the_micro_batch_before() -> None:
    model, logits = published_tasks.GEMMA, 4 * 8192 * 262144
    job = TrainingJob(task="rloo", loss="eager", seq_len_tokens=8192, weights_dtype="bf16")
    for micro_batches, scored in ((1, 1.5), (2, 2.5)):
        layout = Layout(engine="single", gradient_accumulation_steps=micro_batches)
        score, _, _ = head_bytes(layout, model, job, element=2, on_gpu=True, scores=True)
        assert score == scored * logits


def test_fsdp2_keeps_norm_and_head_gathered_between_generation_and_update() -> None:
    model = published_tasks.QWEN7
    layout = Layout(engine="fsdp2", dp_shard=8, gradient_accumulation_steps=8)
    job = TrainingJob(task="grpo", generation="transformers", seq_len_tokens=512).completed(model)
    (share,) = rank_shares(layout, model, job)
    score = generation_moments(rank_step(layout, share, job), {}, engine_bytes=0)["score"]
    assert score == {"scoring_gathered": 2 * model.tail_parameters}


def test_ppo_gathers_policy_and_value_model_to_generate_and_keeps_scores() -> None:
    model = published_tasks.LLAMA
    layout = Layout(engine="deepspeed", zero_stage=3, dp_shard=8)
    fields = {"task": "ppo", "reward": model, "value": model, "seq_len_tokens": 1024, "completion_tokens": 512}
    job = TrainingJob(**fields).completed(model)
    (share,) = rank_shares(layout, model, job)
    terms = generation_moments(rank_step(layout, share, job), {}, engine_bytes=0)["generate"]
    value = next(second.spec for second in job.second_models if second.role == "value")
    assert terms["generation_weights"] == 2 * (model.parameter_count + value.parameter_count)
    assert terms["generation_activations"] == 8 * 512 * 128256
