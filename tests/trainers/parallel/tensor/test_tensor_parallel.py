"""Rules of tensor parallelism, the sections that are written, and what is refused before anything runs."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardwright.ds_configs.legality.tensor import (
    TENSOR_PARALLEL_FAMILIES,
    WITHOUT_TENSOR_PLAN,
    tensor_parallel_faults,
)
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.deepspeed.auto_tp import (
    host_generators,
    layers_without_rule,
    partition_config,
    seed_workers_by_group,
    set_host_generators,
    tensor_parallel_section,
    tensor_plan,
)
from shardwright.trainers.parallel.tensor.callback import TensorParallelCallback
from shardwright.trainers.parallel.tensor.checks import section_faults, tensor_trainer_faults

pytestmark = pytest.mark.slow

LEGAL: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "model_type": "llama",
    "world_size": 16,
    "ranks_per_node": 8,
}


def faults(size: int, **changes: Any) -> list[str]:
    return [str(fault) for fault in tensor_parallel_faults(tensor_parallel_size=size, **(LEGAL | changes))]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_legal_layouts(size: int, stage: int) -> None:
    assert faults(size, zero_stage=stage) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 30}, "must divide the attention heads (30 % 4 = 2); nearest legal values: 2"),
        ({"num_key_value_heads": 2}, "must divide the key/value heads (2 % 4 = 2); nearest legal values: 2"),
        ({"intermediate_size": 1001}, "must divide the width of the MLP (1001 % 4 = 1)"),
        ({"ranks_per_node": 2}, "must divide the accelerators of a node (2 % 4 = 2)"),
        ({"world_size": 6}, "must divide the ranks (6 % 4 = 2)"),
        ({"vocab_size": 50257, "vocabulary_parallel_head": True}, "must divide the vocabulary"),
        ({"zero_stage": 3}, "runs with ZeRO stages 0 to 2, not 3"),
        ({"engine": "fsdp2", "zero_stage": None}, "needs DeepSpeed AutoTP"),
        ({"num_experts": 8}, "AutoTP refuses mixtures of experts (8 experts in each layer); divide the experts: ep"),
        ({"method": "lora"}, "does not go with lora"),
        ({"sequence_parallel_size": 2}, "and sp = 2 do not compose"),
        ({"context_parallel_size": 2}, "and cp = 2 do not compose"),
        ({"expert_parallel_size": 2}, "and ep = 2 do not compose"),
        ({"model_type": "gpt2"}, "model_type = 'gpt2': keeps its weights in Conv1D"),
        ({"model_type": "mamba"}, "was not shown to train equally under AutoTP"),
        ({"model_type": "gemma2", "vocabulary_parallel_head": True}, "which scales its token embedding"),
    ],
)
def test_each_rule_names_what_is_violated(changes: dict[str, Any], message: str) -> None:
    (found,) = faults(4, **changes)
    assert message in found
    assert faults(1, **changes) == []


def test_an_odd_vocabulary_is_legal_while_logits_are_gathered() -> None:
    assert faults(4, vocab_size=50257) == []


def test_all_faults_come_together() -> None:
    found = faults(5, zero_stage=3, method="qlora", sequence_parallel_size=2)
    assert len(found) == 8
    assert all(text.startswith("tp = 5: ") for text in found)


@given(
    size=st.integers(1, 16),
    heads=st.integers(1, 64),
    groups=st.integers(1, 16),
    width=st.integers(1, 512),
    node=st.integers(1, 16),
)
def test_a_layout_is_legal_exactly_when_everything_divides(
    size: int, heads: int, groups: int, width: int, node: int
) -> None:
    found = tensor_parallel_faults(
        tensor_parallel_size=size,
        num_attention_heads=heads * groups,
        num_key_value_heads=groups,
        intermediate_size=width,
        vocab_size=7,
        ranks_per_node=node,
    )
    # Heads are a multiple of the groups of key/value heads.
    assert bool(found) == any(number % size for number in (groups, width, node))
    for fault in found:
        assert fault.value == size
        legal = [int(number) for number in fault.fix.removeprefix("nearest legal values: ").split(", ")]
        assert legal
        assert not any(number % other for number in (groups, width, node) for other in legal)


def small(family: str, **changes: Any) -> Any:
    """A model on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    names = {"vocab_size": 64, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(family, **(sizes | names | changes))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", sorted(TENSOR_PARALLEL_FAMILIES))
def test_every_matrix_of_a_family_has_a_rule(family: str) -> None:
    model = small(family)
    assert layers_without_rule(model) == []
    assert tensor_plan(model)


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "stablelm"])
def test_families_without_a_plan(family: str) -> None:
    """Fails when transformers gives one of them a plan: it can then be shown to train, and leave the list."""
    assert "layers.*.self_attn.o_proj" not in tensor_plan(small(family, tie_word_embeddings=False))
    assert family in WITHOUT_TENSOR_PLAN
    assert layers_without_rule(small(family))


def test_a_layer_without_a_rule_is_named_once() -> None:
    import torch

    model = small("llama")
    for layer in model.model.layers:
        layer.mlp.extra = torch.nn.Linear(2, 2, device="meta")
    (fault,) = layers_without_rule(model)
    assert fault.where == "model.layers.*.mlp.extra"


def test_autotp_still_lacks_the_split_input_style() -> None:
    """Fails when DeepSpeed (0.19.8 seen) translates it: `partition_config` is then no longer needed."""
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES

    assert "rowwise_split_input" not in SUPPORTED_STYLES


def test_fused_projections_are_translated() -> None:
    written = tensor_parallel_section(small("phi3"), 2, vocabulary_parallel_head=False)
    assert written["autotp_size"] == 2
    specs = {spec["patterns"][0]: spec for spec in written["partition_config"]["layer_specs"]}
    by_layer = {name.split(r"\.")[-2]: spec for name, spec in specs.items()}
    assert by_layer["qkv_proj"]["gather_output"]
    assert by_layer["gate_up_proj"]["shape"] == [2, -1]
    assert by_layer["down_proj"]["partition_type"] == "row"
    assert written["partition_config"]["lm_head_patterns"] == ["o_proj"]
    assert partition_config({"layers.*.self_attn.o_proj": "rowwise"}) is None


def test_deepspeed_reads_what_is_written() -> None:
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    config = TPTrainingConfig(**tensor_parallel_section(small("phi3"), 4, vocabulary_parallel_head=False))
    assert config.autotp_size == 4
    found = config.get_partition_config_object()
    spec = found.find_matching_spec("model.layers.0.self_attn.qkv_proj.weight")
    assert spec is not None
    assert spec.gather_output


WRITTEN = {"autotp_size": 2, "vocab_parallel_lm_head": False}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"autotp_size": 2},
        {"autotp_size": 2, "vocab_parallel_lm_head": None, "tp": {"tp_size": 2}},
        WRITTEN,
    ],
)
def test_sections_that_say_the_same_are_accepted(given: dict[str, Any]) -> None:
    assert section_faults(given, WRITTEN) == []


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"autotp_size": 4}, "tensor_parallel.autotp_size"),
        ({"vocab_parallel_lm_head": True}, "tensor_parallel.vocab_parallel_lm_head"),
        ({"tp": {"tp_size": 4}}, "tensor_parallel.tp.tp_size"),
        ({"preset_model": "llama"}, "tensor_parallel.preset_model"),
        ({"tp_overlap_comm": True}, "tensor_parallel.tp_overlap_comm"),
        ({"partition_config": {"layer_specs": []}}, "tensor_parallel.partition_config"),
    ],
)
def test_sections_that_contradict_are_named(given: dict[str, Any], where: str) -> None:
    (fault,) = section_faults(given, WRITTEN)
    assert fault.where == where


def arguments(configuration: dict[str, Any] | None = None, **changes: Any) -> Any:
    """What the callback reads of `TrainingArguments`, for two ranks."""
    values = {
        "bf16": False,
        "fp16": False,
        "deepspeed_plugin": SimpleNamespace(deepspeed_config=configuration) if configuration is not None else None,
        "world_size": 2,
        "process_index": 1,
        "parallelism_config": None,
        "accelerator_config": SimpleNamespace(split_batches=False, dispatch_batches=None),
    }
    return SimpleNamespace(**(values | changes))


def test_host_generators_draw_on_as_they_were() -> None:
    random.seed(3)
    numpy.random.seed(4)
    random.gauss(0, 1)
    numpy.random.randn()
    states = host_generators()

    def drawn() -> list[float]:
        return [random.gauss(0, 1), random.random(), float(numpy.random.randn()), float(numpy.random.rand())]

    first = drawn()
    random.seed(9)
    numpy.random.seed(9)
    set_host_generators(states)
    assert drawn() == first


def test_workers_are_seeded_by_group() -> None:
    from transformers.trainer_utils import seed_worker

    seed = functools.partial(seed_worker, num_workers=2, rank=3)
    loader = torch.utils.data.DataLoader([1, 2], num_workers=2, worker_init_fn=seed)  # type: ignore[arg-type]
    own = torch.utils.data.DataLoader([1, 2], worker_init_fn=print)  # type: ignore[arg-type]
    for made, expected in ((SimpleNamespace(base_dataloader=loader), 1), (loader, 1), (own, None)):
        trainer = SimpleNamespace(args=SimpleNamespace(process_index=3), get_train_dataloader=lambda made=made: made)
        seed_workers_by_group(trainer, 2)
        found = getattr(trainer.get_train_dataloader(), "base_dataloader", made).worker_init_fn
        assert found is print if expected is None else found.keywords == {"num_workers": 2, "rank": expected}


def test_true_batch_size_becomes_the_one_that_deepspeed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    mismatches = ["- ds train_batch_size=12 vs hf train_batch_size (calculated)=24", "- another"]
    configuration: dict[str, Any] = {"zero_optimization": {"stage": 1}, "train_batch_size": 12}
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    given = arguments(configuration, **sizes, hf_deepspeed_config=SimpleNamespace(mismatches=mismatches))
    TensorParallelCallback(2).prepare(given, small("llama"))
    assert configuration["train_batch_size"] == 24
    assert given.hf_deepspeed_config.mismatches == ["- another"]


def test_the_section_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    configuration: dict[str, Any] = {"zero_optimization": {"stage": 1}}
    TensorParallelCallback(2).prepare(arguments(configuration), small("llama"))
    assert configuration["tensor_parallel"] == WRITTEN
    assert configuration["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


@pytest.mark.parametrize(
    ("size", "configuration", "changes", "message"),
    [
        (2, None, {}, "needs DeepSpeed AutoTP"),
        (2, {"zero_optimization": {"stage": 3}}, {}, "not 3"),
        (4, {"zero_optimization": {"stage": 1}}, {}, "must divide the key/value heads (2 % 4 = 2)"),
        (2, {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 4}}, {}, "needs 2"),
        (
            2,
            {"zero_optimization": {"stage": 1}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
            {},
            "and ep = 2 do not compose",
        ),
        (
            2,
            {"zero_optimization": {"stage": 1}},
            {"parallelism_config": SimpleNamespace(tp_size=2, sp_size=2, cp_size=1)},
            "and sp = 2 do not compose",
        ),
        (
            2,
            {"zero_optimization": {"stage": 1}},
            {"accelerator_config": SimpleNamespace(split_batches=True, dispatch_batches=True)},
            "accelerator_config.split_batches = True",
        ),
    ],
)
def test_refused_at_construction(
    size: int, configuration: dict[str, Any] | None, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        TensorParallelCallback(size).prepare(arguments(configuration, **changes), small("llama"))
    assert message in str(error.value)


def test_a_model_without_attention_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=64, state_size=4)
    with pytest.raises(UsageError, match="model_type = 'mamba'"):
        TensorParallelCallback(2).prepare(arguments({"zero_optimization": {"stage": 1}}), MambaForCausalLM(config))


def test_mixtures_of_experts_are_refused() -> None:
    model = small("mixtral", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(UsageError, match="mixtures of experts"):
        TensorParallelCallback(2).prepare(arguments({"zero_optimization": {"stage": 1}}), model)


def test_a_size_below_one_and_a_forgotten_prepare() -> None:
    with pytest.raises(UsageError, match="must be at least 1"):
        TensorParallelCallback(0)
    with pytest.raises(UsageError, match=r"callback\.prepare"):
        TensorParallelCallback(2).attach(SimpleNamespace(args=arguments()))


def test_a_size_of_one_changes_nothing() -> None:
    settings, added = arguments(None), []
    trainer = SimpleNamespace(
        args=settings,
        callback_handler=SimpleNamespace(callbacks=[]),
        add_callback=lambda callback: added.append(callback),
    )
    callback = TensorParallelCallback(1)
    callback.prepare(settings, small("gpt2"))
    callback.attach(trainer)
    callback.on_train_begin(None, None, None)
    assert added == [callback]


def test_a_loss_of_ones_own_needs_whole_logits() -> None:
    from transformers import Trainer

    class OwnLoss(Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("its presence counts, nobody calls it")

    for kind, expected in ((Trainer, []), (OwnLoss, ["OwnLoss.compute_loss"])):
        trainer = object.__new__(kind)
        trainer.args, trainer.compute_loss_func = SimpleNamespace(label_smoothing_factor=0.0), None
        found = tensor_trainer_faults(trainer, vocabulary_parallel_head=True)
        assert [fault.where for fault in found] == expected
        assert tensor_trainer_faults(trainer, vocabulary_parallel_head=False) == []
