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
from shardwright.plugins.trl import batch_loss_errors
from shardwright.trainers.parallel.trainer_for import check_second_models, own_steps_errors


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


def own_class(base: type, *methods: str) -> type:
    return type("Own", (base,), {"__module__": "script", **{name: lambda *args: None for name in methods}})


def sampling_mixin(base: type) -> type:
    mixin = type("Sampling", (), {"__module__": "library.samplers", "_get_train_sampler": lambda self: None})
    return type("Mixed", (mixin, base), {"__module__": "script"})


@pytest.mark.parametrize("axis", ["tp", "sp", "cp", "pp"])
def test_classes_with_own_samples_or_steps_are_rejected_where_ranks_share_samples(axis: str) -> None:
    from transformers import Seq2SeqTrainer, Trainer

    own = ("_get_train_sampler", "get_train_dataloader", "training_step", "_prepare_inputs", "get_batch_samples")
    for kind in (*(own_class(Trainer, name) for name in own), sampling_mixin(Trainer)):
        for subclass in (kind, own_class(kind, "compute_loss")):
            assert len(own_steps_errors(subclass, ["zero1", axis])) == 1
            assert own_steps_errors(subclass, ["zero2"]) == own_steps_errors(subclass, ["zero2", "ep"]) == []
    for kind in (Trainer, Seq2SeqTrainer, own_class(Trainer, "compute_loss", "log", "prediction_step")):
        assert own_steps_errors(kind, ["zero1", axis]) == []


@pytest.mark.needs("trl")
@pytest.mark.parametrize("axis", ["tp", "sp", "cp", "pp", "ep"])
def test_trainers_of_trl_that_no_test_compares_are_rejected_where_ranks_share_samples(axis: str) -> None:
    from trl import DPOTrainer, GRPOTrainer, RLOOTrainer, SFTTrainer
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.online_dpo import OnlineDPOTrainer

    for kind in (GRPOTrainer, RLOOTrainer, CPOTrainer, OnlineDPOTrainer):
        assert own_steps_errors(kind, ["zero1", axis]) and own_steps_errors(own_class(kind), ["zero1", axis])
        assert own_steps_errors(kind, ["zero1"]) == []
    for kind in (SFTTrainer, DPOTrainer, GKDTrainer):
        assert own_steps_errors(own_class(kind, "compute_loss"), ["zero1", axis]) == []


@pytest.mark.needs("trl")
@pytest.mark.parametrize(
    ("name", "settings", "where"),
    [
        ("DPOTrainer", {"loss_type": ["sigmoid", "bco_pair", "sft"]}, "loss_type"),
        ("DPOTrainer", {"loss_type": ["aot"]}, "loss_type"),
        ("DPOTrainer", {"loss_type": ["aot_unpaired"]}, "loss_type"),
        ("DPOTrainer", {"loss_type": ["ipo", "bco_pair"]}, ""),
        ("GRPOTrainer", {"loss_type": "bnpo"}, "loss_type"),
        ("GRPOTrainer", {"loss_type": "dapo"}, ""),
        ("GRPOTrainer", {"loss_type": "dr_grpo"}, ""),
        ("GRPOTrainer", {"loss_type": "dapo", "balances": True}, "router_aux_loss_coef"),
        ("RLOOTrainer", {"balances": True}, "router_aux_loss_coef"),
        ("CPOTrainer", {"loss_type": "sigmoid", "cpo_alpha": 1.0}, "cpo_alpha"),
        ("CPOTrainer", {"loss_type": "simpo", "cpo_alpha": 0.0}, ""),
    ],
)
def test_losses_of_trl_that_are_no_sums_over_rows_are_rejected(name: str, settings: dict[str, Any], where: str) -> None:
    import trl
    from trl.experimental.cpo import CPOTrainer

    kind = CPOTrainer if name == "CPOTrainer" else getattr(trl, name)
    balances = settings.get("balances", False)
    for ranks, accumulation in ((2, 1), (1, 2), (1, 1)):
        trainer = object.__new__(own_class(kind))
        trainer.args = SimpleNamespace(**settings, world_size=ranks, gradient_accumulation_steps=accumulation)
        trainer.aux_loss_enabled, trainer.router_aux_loss_coef = balances, 0.001
        expected = [where] if where and ranks * accumulation > 1 else []
        assert [error.where for error in batch_loss_errors(trainer)] == expected
