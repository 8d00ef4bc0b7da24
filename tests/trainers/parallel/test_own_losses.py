"""Upstream behaviour that layouts correct; a failure means that a release has changed it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from shardwright.ds_configs.legality.combinations import AXES
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.releases import installed_version
from shardwright.trainers.parallel.planned import (
    MULTIPLY_BY_RANKS,
    PlannedParallelism,
    check_balance_of_batches,
    check_learned_positions,
    check_second_models,
    parallelism_of,
)
from small_models import llama


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
    import trl

    losses = {
        (kind.name, "num_processes" in ast.unparse(method))
        for file in Path(trl.__file__).parent.rglob("*.py")
        for kind in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, ast.FunctionDef) and method.name == "compute_loss"
    }
    assert {name for name, multiplies in losses if multiplies} == MULTIPLY_BY_RANKS
    assert ("GKDTrainer", False) in losses


@pytest.mark.needs("trl")
def test_kto_still_pairs_rows_within_the_batch_of_a_rank() -> None:
    from trl import KTOTrainer

    source = inspect.getsource(KTOTrainer._prepare_dataset)
    assert "add_kl_completion_ids, batched=True, batch_size=args.per_device_train_batch_size" in source


@pytest.mark.needs("trl")
def test_trl_still_averages_over_the_tokens_of_a_rank() -> None:
    from trl import DPOTrainer
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer
    from trl.experimental.tpo import TPOTrainer

    assert "chosen_per_token_logps[chosen_mask.bool()].mean()" in inspect.getsource(DPOTrainer._compute_loss)
    assert "F.cross_entropy(ref_logits[ref_mask], ref_labels[ref_mask])" in inspect.getsource(TPOTrainer._compute_loss)
    for kind in (CPOTrainer, ORPOTrainer):
        source = inspect.getsource(kind.concatenated_forward)
        assert "CrossEntropyLoss()" in source
        assert "rejected_logits, chosen_nll_loss)" in source or "rejected_logits, nll_loss)" in source


@pytest.mark.needs("trl")
@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_trl_still_shuffles_the_completions_of_a_rank(name: str) -> None:
    import trl
    from trl.trainer.utils import shuffle_sequence_dict

    assert "shuffle_sequence_dict" in names_in(getattr(trl, name)._prepare_inputs)
    assert "gather" not in names_in(shuffle_sequence_dict)


@pytest.mark.needs("trl")
@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_trl_still_gathers_rewards_without_checking_them(name: str) -> None:
    import trl

    names = names_in(getattr(trl, name)._calculate_rewards)
    assert {"gather", "isnan"} <= names and not names & {"isfinite", "gather_object"}


def test_generate_still_samples_from_one_random_state() -> None:
    from transformers import GenerationMixin

    assert "multinomial" in names_in(GenerationMixin._sample)
    assert "_get_logits_processor" in names_in(GenerationMixin.generate)
    # The last processor reads what all others left.
    assert "generator" not in names_in(GenerationMixin._sample)


def layout(name: str) -> PlannedParallelism:
    return parallelism_of(Layout(engine="deepspeed", zero_stage=1, **({name: 2} if name in AXES else {})))


def rejected_class(kind: type, axis: str, **args: Any) -> str:
    settings = SimpleNamespace(world_size=2, deepspeed=None, **args)
    parallelism = layout(axis)
    columns = ("zero1", *parallelism.layout.axes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedParallelism, "columns", lambda *_: columns)
        return "; ".join(f"{error.where} {error.rule}" for error in parallelism.class_errors(kind, settings))  # type: ignore[arg-type]


def _subclasses() -> list[tuple[type, str]]:
    from transformers import Seq2SeqTrainer, Trainer
    from trl import GRPOTrainer, RLOOTrainer, SFTTrainer
    from trl.experimental.gold import GOLDTrainer
    from trl.experimental.tpo import TPOTrainer

    class OwnLoss(Trainer):
        def compute_loss(self, *args: Any, **keywords: Any) -> Any: ...

        def prediction_step(self, *args: Any, **keywords: Any) -> Any: ...

    class OwnLossOfSFT(SFTTrainer):
        def compute_loss(self, *args: Any, **keywords: Any) -> Any: ...

    class Sampled(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any: ...

    class Loaded(Trainer):
        def get_train_dataloader(self) -> Any: ...

    class Mixin:
        def training_step(self, *args: Any, **keywords: Any) -> Any: ...

    class Stepped(Mixin, SFTTrainer):
        pass

    class Between(SFTTrainer, Loaded):
        pass

    class MyGRPO(GRPOTrainer):
        def compute_loss(self, *args: Any, **keywords: Any) -> Any: ...

    return [
        (Trainer, ""),
        (Seq2SeqTrainer, ""),
        (SFTTrainer, ""),
        (OwnLoss, ""),
        (OwnLossOfSFT, ""),
        (Sampled, "Sampled overrides _get_train_sampler"),
        (Loaded, "Loaded overrides get_train_dataloader"),
        (Stepped, "Mixin overrides training_step"),
        (Between, "Loaded overrides get_train_dataloader"),
        (GRPOTrainer, "GRPOTrainer overrides"),
        (RLOOTrainer, "RLOOTrainer overrides"),
        (MyGRPO, "GRPOTrainer overrides"),
        (GOLDTrainer, "GOLDTrainer"),
        (TPOTrainer, "no test compares TPOTrainer"),
    ]


@pytest.mark.needs("trl")
def test_classes_that_change_samples_or_steps_are_rejected_where_ranks_share_samples() -> None:
    for kind, reason in _subclasses():
        assert rejected_class(kind, "zero1") == ""
        for axis in ("tp", "ep", "sp"):
            shown = rejected_class(kind, axis)
            assert reason in shown and bool(reason) == bool(shown), (kind, axis, shown)


@pytest.mark.needs("trl")
def test_losses_that_are_no_sum_over_rows_are_rejected_on_several_ranks() -> None:
    from trl import DPOTrainer, GRPOTrainer
    from trl.experimental.distillation import DistillationTrainer
    from trl.experimental.gmpo import GMPOTrainer
    from trl.experimental.sdpo import SDPOTrainer

    for kind, args, setting in (
        (DistillationTrainer, {"eval_strategy": "steps"}, "eval_strategy"),
        (DPOTrainer, {"loss_type": ["sigmoid", "aot"]}, "loss_type"),
        (DPOTrainer, {"loss_type": ["aot_unpaired"]}, "loss_type"),
        (DPOTrainer, {"loss_type": ["sigmoid", "sft"], "use_weighting": True}, "use_weighting"),
        (GMPOTrainer, {"loss_type": "bnpo"}, "loss_type"),
        (GMPOTrainer, {"loss_type": "grpo", "entropy_coef": 0.1}, "entropy_coef"),
        (GRPOTrainer, {"loss_type": "dapo", "use_adaptive_entropy": True}, "entropy_coef"),
        (SDPOTrainer, {"loss_type": "dapo"}, "loss_type"),
    ):
        assert rejected_class(kind, "zero1", **args).startswith(f"{setting} "), (kind, args)
    exact = [
        (GRPOTrainer, {"loss_type": name}) for name in ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo")
    ]
    exact += [(DPOTrainer, {"loss_type": [name]}) for name in ("bco_pair", "sft", "sppo_hard", "ipo", "discopop")]
    for kind, args in exact:
        assert rejected_class(kind, "zero1", **args) == ""
    # All ranks of a tensor-parallel layer have the rows of a batch.
    assert rejected_class(DPOTrainer, "tp", loss_type=["aot"]) == ""


@pytest.mark.needs("trl")
@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_generating_trainers_reject_the_balance_loss_of_a_mixture_on_several_ranks(name: str) -> None:
    import trl
    from transformers import LlamaConfig, MixtralConfig

    def check(config: Any, ranks: int = 2, coefficient: float | None = None) -> None:
        trainer: Any = object.__new__(getattr(trl, name))
        trainer.model = SimpleNamespace(config=config)
        trainer.args = SimpleNamespace(world_size=ranks, router_aux_loss_coef=coefficient)
        check_balance_of_batches(trainer)

    for config, coefficient in ((MixtralConfig(), None), (MixtralConfig(router_aux_loss_coef=0.0), 0.1)):
        with pytest.raises(UsageError, match="router_aux_loss_coef"):
            check(config, coefficient=coefficient)
        check(config, ranks=1, coefficient=coefficient)
        check(config, coefficient=0.0)
    check(LlamaConfig())


@pytest.mark.needs("trl")
@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_generating_trainers_reject_learned_positions_on_several_ranks(name: str) -> None:
    import trl
    from transformers import GPT2Config, GPT2LMHeadModel

    trainer: Any = object.__new__(getattr(trl, name))
    learned = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=32))
    for ranks, model in ((1, learned), (2, llama(hidden_size=16))):
        trainer.model, trainer.args = model, SimpleNamespace(world_size=ranks)
        check_learned_positions(trainer)
    trainer.model = learned
    with pytest.raises(UsageError, match=r"learned positions.*or one process"):
        check_learned_positions(trainer)


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


def test_transformers_divides_by_tensor_parallel_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure means that Transformers changed its scaling: check `ExactTrainer.get_tp_size`."""
    from transformers import Trainer, TrainingArguments

    ranks, size, tokens = 4, 2, torch.ones(1, 11, dtype=torch.long)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=3)
    trainer: Any = Trainer(llama(hidden_size=16), arguments)
    trainer.accelerator = SimpleNamespace(
        num_processes=ranks, parallelism_config=None, gather=lambda n: n.repeat(ranks)
    )
    trainer.model._tp_size = size
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: torch.ones(())
    monkeypatch.setattr(TrainingArguments, "world_size", ranks)
    batch = {"input_ids": tokens, "labels": tokens}
    counted = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    factor = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=counted)
    # From 5.19 on it divides labels and factor under DeepSpeed.
    divides = Version(installed_version("transformers") or "0") >= Version("5.19.0")
    expected = ranks // size if divides else ranks
    assert (int(counted), float(factor)) == (10 * expected, expected)
    assert trainer.get_total_train_batch_size(arguments) == 3 * ranks // size
