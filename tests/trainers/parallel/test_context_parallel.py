"""Context parallelism: rules, batches and arguments, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parallel_rules import rule_errors
from shardwright.ds_configs.legality.axes import context_parallel_errors, sample_errors
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins import accelerate as cpu_ranks
from shardwright.trainers.counting.counts import UNPADDED
from shardwright.trainers.parallel.context import ContextParallelCollator, ContextParallelism
from shared_sequences import arguments, sizes_of, tiny

pytestmark = pytest.mark.slow

IGNORED = -100
CONTEXT: dict[str, Any] = {"cp": 2, "engine": "fsdp2", "world_size": 4, "seq_len_tokens": 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cp": 0}, "must be at least 1"),
        ({"engine": "deepspeed"}, "requires FSDP2, not deepspeed"),
        ({"world_size": 3}, "3 % 2 = 1"),
        ({"seq_len_tokens": 66}, "must be a multiple of 2 * cp (66 % 4 = 2); nearest legal values: 64 or 68"),
        ({"attention": "flash_attention_2"}, "attn_implementation='sdpa'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attention_window_tokens": 4096}, "has a window of 4096 tokens"),
        ({"model_type": "rwkv"}, "rwkv layers"),
        ({"model_type": "gpt2"}, "which gpt2 does not have"),
        ({"names_self_attention": False}, "named self_attn"),
        ({"rope_type": "dynamic"}, "last position of the full sequence"),
        ({"sp": 2}, "sp = 2"),
        ({"tp": 2}, "tp = 2"),
        ({"dp_replicate": 2, "dp_shard": 1}, "dp_shard > 1"),
    ],
)
def test_context_parallel_rules(change: dict[str, Any], message: str) -> None:
    (error,) = rule_errors(context_parallel_errors, **CONTEXT | change)
    assert message in str(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_dimensions": 4}, "'4-D': must have at most 2 dimensions"),
        ({"packed": True}, "separate row"),
        ({"packed": True, "attention": "sdpa"}, "use flash_attention_2"),
        ({"packed": True, "attention": "flash_attention_2", "samples": 2}, "micro-batches of 1"),
        ({"left_padded": True, "attention": "sdpa"}, "pad on the right"),
    ],
)
def test_batches_that_ranks_cannot_share(change: dict[str, Any], message: str) -> None:
    plain: dict[str, Any] = {"mask_dimensions": 2, "left_padded": False, "packed": False}
    (error,) = sample_errors(**plain | change)
    assert message in str(error)
    assert sample_errors(**plain | {"packed": True, "attention": "flash_attention_2"}) == sample_errors(**plain) == []


def test_collator_pads_batches_to_a_multiple_of_twice_cp() -> None:
    def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor(rows)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "scale": torch.ones(len(rows))}

    batch = ContextParallelCollator(collate, 2)([[1, 2, 3, 4, 5]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4, 5, IGNORED, IGNORED, IGNORED]]
    assert batch.pop(UNPADDED) == (5, 5)
    assert batch.keys() == {"input_ids", "labels", "scale"}
    masked = ContextParallelCollator(lambda ids: {**collate(ids), "attention_mask": torch.tensor([[0, 1]])}, 2)
    with pytest.raises(UsageError, match="left padding"):
        masked([[1, 2]])


def test_collator_rejects_positions_that_do_not_count_tokens() -> None:
    def collated(positions: list[int], **more: Any) -> dict[str, Any]:
        ids = torch.tensor([[1, 2, 3]])
        batch = {"input_ids": ids, "position_ids": torch.tensor([positions]), **more}
        return ContextParallelCollator(lambda _: batch, 2)([])

    assert "position_ids" not in collated([0, 1, 2])
    assert collated([0, 1, 1], attention_mask=torch.tensor([[1, 1, 0]])).keys() == {"input_ids", UNPADDED}
    with pytest.raises(UsageError, match="count the tokens of a row from 0"):
        collated([3, 4, 5])


def test_context_parallelism_keeps_replicas_and_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import TorchContextParallelConfig

    handler = TorchContextParallelConfig(cp_comm_strategy="alltoall")

    def prepared(**changes: Any) -> Any:
        given = arguments(
            fsdp=True,
            deepspeed_plugin=None,
            world_size=8,
            device=torch.device("cpu"),
            accelerator_config=SimpleNamespace(split_batches=False, dispatch_batches=None),
            **changes,
        )
        ContextParallelism(2).prepare(given, tiny())
        return given

    given = prepared(parallelism_config=sizes_of(cp=2, dp_replicate_size=2, cp_handler=handler))
    assert given.accelerator_config.dispatch_batches is False
    config = given.parallelism_config
    assert (config.cp_size, config.dp_replicate_size, config.dp_shard_size) == (2, 2, 2)
    assert config.cp_handler is handler
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    assert prepared().parallelism_config.dp_shard_size == 2
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "3")
    with pytest.raises(UsageError, match="must divide world_size / cp = 4"):
        prepared()
    monkeypatch.delenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE")
    wrong = {"eval_strategy": "steps", "average_tokens_across_devices": False}
    with pytest.raises(UsageError) as caught:
        prepared(**wrong, neftune_noise_alpha=5.0)
    assert {error.where for error in caught.value.errors} == {*wrong, "neftune_noise_alpha"}


def test_trainers_with_own_loss_metrics_or_evaluation_are_rejected(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    settings: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    own = TrainingArguments(**settings)
    ContextParallelism(2).attach(plain := Trainer(model=tiny(), args=own))
    with pytest.raises(UsageError, match="wrong under context parallelism"):
        plain.evaluate(eval_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}])
    losing = Trainer(model=tiny(), args=own, compute_loss_func=print, compute_metrics=print)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        ContextParallelism(2).attach(losing)
    assert [error.where for error in caught.value.errors] == ["compute_loss_func", "compute_metrics"]
    smoothed = Trainer(model=tiny(), args=TrainingArguments(**settings, label_smoothing_factor=0.1))
    smoothed.args.parallelism_config = sizes_of(cp=2)
    with pytest.raises(UsageError, match="labels would be shifted within parts"):
        ContextParallelism(2).attach(smoothed)


def test_torch_ring_supports_only_cuda() -> None:
    """Fails when torch (2.13.0) has a ring for the CPU's attention."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    own = cpu_ranks.__name__
    assert ring.custom_ops
    assert not [name for name, work in ring.custom_ops.items() if "cpu" in str(name) and work.__module__ != own]
