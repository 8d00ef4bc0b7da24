"""Logits that the losses of preference tasks hold, counted by hand from what TRL 1.14.2 assigns."""

from __future__ import annotations

import pytest
from planning import public_model
from shardwright.ds_configs.memory.loss import head_bytes
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.tasks import TaskName

MODEL = public_model("Qwen/Qwen2.5-7B")


@pytest.mark.parametrize(
    ("task", "accelerate", "deepspeed"),
    [
        # The fp32 logits beside those in 16 bits, or beside a copy of half of them; then their gradient.
        ("dpo", (6, 4, 8), (3, 2, 4)),
        # Chosen and rejected rows are copied, and then one of the two again.
        ("kto", (10, 4, 8), (5, 2, 4)),
        ("grpo", (6, 4, 8), (2, 2, 4)),
        ("rloo", (6, 4, 8), (2, 2, 4)),
    ],
)
def test_complete_logits_of_older_releases(
    task: TaskName, accelerate: tuple[int, int, int], deepspeed: tuple[int, int, int]
) -> None:
    job = TrainingJob(task=task, loss="eager", seq_len_tokens=512, weights_dtype="bf16").completed(MODEL)
    logits = 2 * 512 * MODEL.dimensions.vocab_size
    for layout, bytes_per_logit in (
        (Layout(engine="single", micro_batch_size=2), accelerate),
        (Layout(engine="deepspeed", zero_stage=3, dp_shard=8, micro_batch_size=2), deepspeed),
    ):
        most, kept, backward = head_bytes(layout, MODEL, job, element=2, on_gpu=True)
        assert (most, kept, backward.others) == tuple(count * logits for count in bytes_per_logit)
        assert not backward.head_gradient
