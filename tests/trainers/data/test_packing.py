"""Packed conversations: rows, documents that do not read each other, and the losses of single documents."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardwright.ds_configs.specs.layout import Layout
from shardwright.trainers.data.chat import IGNORED_LABEL
from shardwright.trainers.data.samples import (
    Samples,
    SampleStatistics,
    collate,
    fitting_rows,
    packed_if_possible,
    packed_row,
    packing_obstacle,
)
from shardwright.trainers.data.sources import DataSettings
from small_models import SIZES, llama, mixtral
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, set_seed

SEQ_LEN = 32
DDP = Layout(engine="ddp", dp_replicate=2)


@given(st.lists(st.integers(min_value=2, max_value=SEQ_LEN), max_size=60))
def test_rows_have_each_document_once_and_are_never_longer(lengths: list[int]) -> None:
    rows = fitting_rows(lengths, SEQ_LEN)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < size <= SEQ_LEN for size in sizes)
    assert sum(size <= SEQ_LEN // 2 for size in sizes) <= 1, "two of them would fit in one row"


def gpt2() -> Any:
    set_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=512, n_positions=64))


def documents() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for length in (9, 5, 14, 7, 3, 11):
        ids = torch.randint(0, 512, (length,), generator=draw).tolist()
        # The first token has a label too, as if a template marked it: nothing predicts it.
        made.append({"input_ids": ids, "labels": [ids[0], *[IGNORED_LABEL] * (length // 3), *ids[1 + length // 3 :]]})
    return made


def loss_of_single_documents(model: Any) -> torch.Tensor:
    """Return the mean over all labelled tokens, of documents that are read one by one, without this project's code."""
    nats, count = torch.zeros((), dtype=torch.float64), 0
    for document in documents():
        logits_TV = model(input_ids=torch.tensor([document["input_ids"]]), use_cache=False).logits[0]
        log_probabilities_TV = torch.log_softmax(logits_TV, -1)
        for position, label in enumerate(document["labels"][1:]):
            if label != IGNORED_LABEL:
                nats, count = nats - log_probabilities_TV[position, label], count + 1
    return nats / count


def compare_with_single_documents(packed: Any, alone: Any, batch: Any) -> None:
    """Compare the loss of packed rows and its gradients with those of the same documents one by one."""
    labelled = int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
    loss = packed(**batch, use_cache=False, num_items_in_batch=labelled).loss
    expected = loss_of_single_documents(alone)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    loss.backward()
    expected.backward()
    for (name, parameter), other in zip(packed.named_parameters(), alone.parameters(), strict=True):
        if other.grad is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert (parameter.grad - other.grad).abs().max() < 1e-6, name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [llama, mixtral, gpt2])
def test_loss_and_gradients_are_those_of_single_documents(build: Any, attention: str) -> None:
    packed, alone = build().double().eval(), build().double().eval()
    for model in (packed, alone):
        model.set_attn_implementation(attention)
        # Fused experts have no fp64.
        model.config._experts_implementation = "eager"
    made = documents()
    indices = fitting_rows([len(document["input_ids"]) for document in made], 28)
    rows = [packed_row([made[index] for index in row]) for row in indices]
    batch = collate(rows)
    assert len(rows) == 2 and "attention_mask" not in batch
    for row, positions in zip(rows, batch["position_ids"].tolist(), strict=True):
        # A document of one token each.
        assert positions == row["position_ids"] + [0] * (len(positions) - len(row["input_ids"]))
    compare_with_single_documents(packed, alone, batch)


@pytest.mark.parametrize(("packing", "batch", "rows"), [("auto", 2, 2), ("auto", 3, 6), ("on", 3, 2), ("off", 2, 6)])
def test_rows_that_do_not_fill_a_global_batch_are_packed_on_request_only(packing: Any, batch: int, rows: int) -> None:
    tokens = sum(len(document["input_ids"]) for document in documents())
    counts = {"rows": 6, "train_samples": 6, "train_tokens": tokens, "train_labels": 30}
    unused = dict.fromkeys(("empty_rows", "unlabelled_rows", "cut_rows", "evaluation_samples"), 0)
    statistics = SampleStatistics(source="chats", kind="messages", **counts, **unused)
    plan: Any = SimpleNamespace(chosen=SimpleNamespace(layout=Layout(engine="ddp", dp_replicate=batch)))
    samples = Samples(train=documents(), evaluation=[], statistics=statistics)
    found = packed_if_possible(samples, DataSettings(packing=packing, seq_len=28), plan, [])
    packed = 6 if rows == 2 else 0
    assert len(found.train) == rows
    assert found.statistics == replace(statistics, train_samples=rows, packed_documents=packed)


@pytest.mark.parametrize(
    ("layout", "further", "said"),
    [
        (Layout(engine="deepspeed", zero_stage=0, pp=2), {}, "pipeline parallelism does not support document masks"),
        (Layout(engine="deepspeed", zero_stage=1, sp=2), {}, "sequence parallelism"),
        (Layout(engine="fsdp2", cp=2), {}, "context parallelism"),
        (
            Layout(engine="ddp", dp_replicate=2, micro_batch_size=2),
            {"attention": "flash_attention_2"},
            "only with --micro-batch-size 1",
        ),
    ],
)
def test_obstacles_of_layouts_are_named(layout: Layout, further: dict[str, Any], said: str) -> None:
    stated: dict[str, Any] = {"attention": "sdpa", "seq_len": SEQ_LEN} | further
    assert said in str(packing_obstacle(layout, llama().config.to_dict(), **stated))


@pytest.mark.parametrize(
    ("kind", "further", "said"),
    [
        ("llama", {}, None),
        ("qwen3", {}, None),
        ("mistral", {"sliding_window": 16}, None),
        ("mixtral", {"num_local_experts": 4}, None),
        ("mixtral", {"output_router_logits": True}, "balance loss"),
        ("qwen3_next", {}, "Qwen3NextForCausalLM mixes the documents of a packed row"),
        ("mamba", {}, "MambaForCausalLM mixes the documents of a packed row"),
        ("bloom", {"n_head": 4}, "BloomForCausalLM mixes the documents of a packed row"),
    ],
)
def test_models_that_mix_documents_are_found(kind: str, further: dict[str, Any], said: str | None) -> None:
    sizes = {name: value for name, value in SIZES.items() if kind != "bloom" or name != "num_attention_heads"}
    config = AutoConfig.for_model(kind, **(sizes | {"intermediate_size": 128} | further)).to_dict()
    before = torch.random.get_rng_state()
    found = packing_obstacle(DDP, config, attention="sdpa", seq_len=SEQ_LEN)
    assert (found is None) if said is None else said in str(found)
    assert torch.equal(before, torch.random.get_rng_state())
