"""Upstream behaviour that layouts correct; a failure means that a release has changed it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.accelerate.repeated_samples import KeptPart
from shardwright.trainers.parallel.trainer_for import check_second_models


def names_in(function: Any) -> set[str]:
    """Return the names that the code of a function and of its inner functions reads."""

    def read(code: CodeType) -> Iterator[str]:
        yield from code.co_names
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from read(inner)

    return set(read(inspect.unwrap(function).__code__))


@pytest.mark.needs("trl")
def test_a_loss_of_trl_still_divides_by_all_labels_without_multiplying_by_the_ranks() -> None:
    from trl import SFTTrainer
    from trl.experimental.gkd import GKDTrainer

    assert "num_processes" not in names_in(GKDTrainer.compute_loss)
    assert {"num_processes", "average_tokens_across_devices"} <= names_in(SFTTrainer.compute_loss)


@pytest.mark.needs("trl")
def test_kto_still_pairs_rows_within_the_batch_of_a_rank() -> None:
    from trl import KTOTrainer

    source = inspect.getsource(KTOTrainer._prepare_dataset)
    assert "add_kl_completion_ids, batched=True, batch_size=args.per_device_train_batch_size" in source


@pytest.mark.needs("trl")
def test_trl_still_multiplies_with_the_weight_of_the_head() -> None:
    from trl.trainer.utils import add_fused_lm_head

    assert {"get_output_embeddings", "weight", "bias"} <= names_in(add_fused_lm_head)


def test_deepspeed_divides_every_model_of_a_tensor_parallel_engine() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert "_apply_autotp_partitioning" in names_in(DeepSpeedEngine._configure_tensor_parallel)


def test_models_still_look_their_balance_loss_up_in_their_module() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

    for kind in (MixtralForCausalLM, Qwen3MoeForCausalLM):
        assert {"load_balancing_loss_func", "router_aux_loss_coef"} <= names_in(kind.forward)


def test_kept_part_of_the_last_batch_is_its_first_rows_or_tokens() -> None:
    like = torch.ones(6)
    assert KeptPart(rows=3, kept_rows=2).mask(6, like).tolist() == [1, 1, 1, 1, 0, 0]
    assert KeptPart(rows=3, kept_rows=2, kept_tokens=3).mask(6, like).tolist() == [1, 1, 1, 0, 0, 0]
    assert KeptPart(rows=3, kept_rows=0).mask(6, like).tolist() == [0] * 6


def test_fsdp2_loading_on_the_first_rank_rejects_a_second_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    trainer = SimpleNamespace(model=model, model_wrapped=model, ref_model=reference, is_fsdp_enabled=True)
    trainer.accelerator = SimpleNamespace(parallelism_config=None)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    check_second_models(trainer)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    with pytest.raises(UsageError) as error:
        check_second_models(trainer)
    assert str(error.value).startswith(
        "SimpleNamespace.ref_model: is a second model, whose weights only the first rank"
    )
    trainer.is_fsdp_enabled = False
    check_second_models(trainer)
