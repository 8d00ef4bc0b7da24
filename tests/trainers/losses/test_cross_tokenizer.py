"""Distillation across tokenizers: alignment, losses against fp64, and training."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from distilling import collate, tiny, training_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.trainers.data.tokenizers import (
    aligned_spans,
    boundaries,
    shared_vocabulary,
    token_bytes,
    token_offsets,
)
from shardwright.trainers.distillation import DistillationConfig, DistillationTrainer
from shardwright.trainers.losses.cross_tokenizer import (
    SPANS,
    TEACHER_IDS,
    CrossTokenizerCollator,
    CrossTokenizerLoss,
    labelled_spans,
)
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.slow

TEXT = "Ünïcode and 日本 🤗 are  split in two\n\tways: x = {'a': 1}; return x  "


def byte_pairs(vocab_size: int, *, begin: bool = False) -> Any:
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)[:20]], trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Any, Any]:
    return byte_pairs(600), byte_pairs(400, begin=True)


def cuts_of(text: str, data: st.DataObject) -> list[tuple[int, int]]:
    """Draw a tokenization of a text."""
    cuts = data.draw(st.sets(st.integers(1, len(text)), max_size=12))
    return list(pairwise(sorted({0, len(text)} | cuts)))


@settings(max_examples=60, deadline=None)
@given(st.text("ab\u65e5 \n", min_size=1, max_size=30), st.data())
def test_spans_cover_the_text_and_agree(text: str, data: st.DataObject) -> None:
    """Both sides of a span have the same text except for whitespace at its ends; spans cover all tokens."""
    cuts = [cuts_of(text, data) for _ in range(2)]
    spans = aligned_spans(*(boundaries(offsets, text) for offsets in cuts), text)
    assert [span[0] for span in spans] == [0] + [span[1] for span in spans[:-1]]
    assert [span[2] for span in spans] == [0] + [span[3] for span in spans[:-1]]
    assert (spans[-1][1], spans[-1][3]) == tuple(map(len, cuts))
    for a, b, c, d in spans:
        own, other = (text[offsets[x][0] : offsets[y - 1][1]] for offsets, x, y in ((cuts[0], a, b), (cuts[1], c, d)))
        assert own.strip() == other.strip()
    common = {end for _, end in cuts[0]} & {end for _, end in cuts[1]}
    assert common <= {cuts[0][span[1] - 1][1] for span in spans}


def test_tokens_without_text_belong_to_no_span() -> None:
    """Two special tokens begin the sequence, and one separates documents."""
    text = "abc"
    own = [(0, 0), (0, 0), (0, 1), (1, 1), (1, 2), (2, 3), (3, 3)]
    spans = aligned_spans(boundaries(own, text), boundaries([(0, 1), (1, 3)], text), text)
    assert spans == [(2, 3, 0, 1), (4, 6, 1, 2)]


def test_real_tokenizers_align(tokenizers: tuple[Any, Any]) -> None:
    own, other = tokenizers
    ids = own(TEXT)["input_ids"] + [own.eos_token_id]
    text, offsets = token_offsets(own, ids)
    assert text == TEXT
    taught = other(TEXT, return_offsets_mapping=True)
    spans = aligned_spans(boundaries(offsets, text), boundaries(taught["offset_mapping"], text), text)
    assert len(spans) > 15
    assert (spans[0][0], spans[0][2], spans[-1][1]) == (0, 1, len(ids) - 1)
    for first, end, taught_first, taught_end in spans:
        decoded = [
            tokenizer.decode(list(tokens), skip_special_tokens=True)
            for tokenizer, tokens in ((own, ids[first:end]), (other, taught["input_ids"][taught_first:taught_end]))
        ]
        assert decoded[0].strip() == decoded[1].strip()
        assert "\ufffd" not in decoded[0]


def test_sentencepiece_bytes_align() -> None:
    """A line break is a token in a byte-level tokenizer, and a byte token in SentencePiece."""
    from tokenizers import Tokenizer, models

    pieces = ["<unk>", "<0x0A>", "<0x41>", "\u2581of", "A"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    unknown = {"unk_token": pieces[0]}
    model = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, **unknown)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **unknown)
    assert token_bytes(tokenizer) == {b"\n": 1, b"A": 4, b" of": 3}


def test_merged_span_matches_hand_computation(tokenizers: tuple[Any, Any]) -> None:
    """The student has two tokens where the teacher has one; position t predicts token t + 1."""
    loss = CrossTokenizerLoss(*tokenizers)
    draw = torch.Generator().manual_seed(1)
    own, taught = torch.randn(1, 3, 600, generator=draw), torch.randn(1, 2, 400, generator=draw)
    ids, taught_ids = torch.tensor([[7, 8, 9]]), torch.tensor([[3, 4]])
    inputs = {SPANS: torch.tensor([[[1, 3, 1, 2]]]), TEACHER_IDS: taught_ids}
    found = float(loss(own, taught, inputs, ids, torch.tensor([[8, 9, -100]]), 1.0))
    log_q = torch.log_softmax(own[0].double(), -1)
    q = math.exp(float(log_q[0, 8] + log_q[1, 9]))
    p = float(torch.softmax(taught[0].double(), -1)[0, 4])
    assert found == pytest.approx(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), rel=1e-4)
    half_masked = torch.tensor([[-100, 9, -100]])
    assert len(labelled_spans(inputs[SPANS], half_masked)) == 0
    assert float(loss(own, taught, inputs, ids, half_masked, 1.0)) == 0.0


def test_single_tokens_compare_common_tokens(tokenizers: tuple[Any, Any]) -> None:
    loss = CrossTokenizerLoss(*tokenizers)
    draw = torch.Generator().manual_seed(1)
    own, taught = torch.randn(1, 2, 600, generator=draw), torch.randn(1, 2, 400, generator=draw)
    inputs = {SPANS: torch.tensor([[[1, 2, 1, 2]]]), TEACHER_IDS: torch.tensor([[3, 4]])}
    found = float(loss(own, taught, inputs, torch.tensor([[7, 8]]), torch.tensor([[8, -100]]), 2.0))
    mine, theirs = shared_vocabulary(*tokenizers)
    q, p = torch.softmax(own[0, 0].double() / 2, 0)[mine], torch.softmax(taught[0, 0].double() / 2, 0)[theirs]
    rest_q, rest_p = 1 - q.sum(), 1 - p.sum()
    expected = float((p * (p / q).log()).sum() + rest_p * (rest_p / rest_q).log())
    assert found == pytest.approx(expected, rel=1e-5)


def test_contained_vocabulary_has_no_rest_bin(tokenizers: tuple[Any, Any]) -> None:
    """A model without other tokens gives them no probability; the divergence must stay finite."""
    loss = CrossTokenizerLoss(*tokenizers)
    mine, theirs = shared_vocabulary(*tokenizers)
    draw = torch.Generator().manual_seed(1)
    own, taught = torch.randn(1, 2, 600, generator=draw), torch.randn(1, 2, 400, generator=draw)
    loss._shared = (torch.arange(len(mine)), torch.tensor(theirs))
    inputs = {SPANS: torch.tensor([[[1, 2, 1, 2]]]), TEACHER_IDS: torch.tensor([[3, 4]])}
    cut = own[..., : len(mine)]
    found = float(loss(cut, taught, inputs, torch.tensor([[7, 8]]), torch.tensor([[8, -100]]), 1.0))
    q, p = torch.softmax(cut[0, 0].double(), 0), torch.softmax(taught[0, 0, theirs].double(), 0)
    assert found == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)


def test_long_texts_keep_one_copy_of_logits(tokenizers: tuple[Any, Any]) -> None:
    """For both kinds, tensors saved for the backward pass are no larger than the compared rows."""
    loss = CrossTokenizerLoss(*tokenizers)
    count = 600
    logits = {side: torch.randn(1, count, width) for side, width in (("own", 600), ("taught", 400))}
    logits["own"].requires_grad_()
    ids, spans = torch.randint(0, 400, (1, count)), {}
    spans["single"] = [[i, i + 1, i, i + 1] for i in range(1, count - 1)]
    spans["several"] = [[i, i + 2, i, i + 1] for i in range(1, count - 2, 2)]
    for name, rows in spans.items():
        saved = []

        def keep(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss(logits["own"], logits["taught"], {SPANS: torch.tensor([rows]), TEACHER_IDS: ids}, ids, ids, 1.0)
        copies = 4 * count * (600 + (400 if name == "single" else 0))
        assert sum(saved) < 1.1 * copies, name


def equal_models(own: Any, texts: list[str]) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return a batch aligned with itself, the labels of its rows, and a model's logits."""
    samples = [{"input_ids": own(text)["input_ids"], "labels": own(text)["input_ids"]} for text in texts]
    batch = CrossTokenizerCollator(own, own, collate)(samples)
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return batch, shifted, tiny("llama", vocab_size=600)(batch["input_ids"]).logits.detach()


def test_equal_tokenizers_give_the_divergence_of_every_token(tokenizers: tuple[Any, Any]) -> None:
    own, _ = tokenizers
    text = "def one(a):\n\n    return [a,  1]\n"
    batch, shifted, logits = equal_models(own, [text, "of a"])
    taught = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    labelled = shifted != -100
    assert len(labelled_spans(batch[SPANS], shifted)) == int(labelled.sum())
    found = float(CrossTokenizerLoss(own, own)(logits, taught, batch, batch["input_ids"], shifted, 1.0))
    p, q = (torch.softmax(side[labelled].double(), -1) for side in (taught, logits))
    special = torch.zeros(600, dtype=torch.bool)
    special[own.all_special_ids] = True
    p, q = (torch.cat([side[:, ~special], side[:, special].sum(1, keepdim=True)], 1) for side in (p, q))
    assert found == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)


def test_left_padding_shifts_spans(tokenizers: tuple[Any, Any]) -> None:
    own, other = tokenizers
    samples = [{"input_ids": own(text)["input_ids"]} for text in (TEXT, "return x")]

    def left(rows: list[dict[str, Any]]) -> dict[str, Any]:
        longest = max(len(row["input_ids"]) for row in rows)
        return {"input_ids": torch.tensor([[0] * (longest - len(row["input_ids"])) + row["input_ids"] for row in rows])}

    batch = CrossTokenizerCollator(own, other, left)(copy.deepcopy(samples))
    for index, text in enumerate((TEXT, "return x")):
        spans = [span for span in batch[SPANS][index].tolist() if span[0] > 0]
        assert spans
        decoded = [own.decode(batch["input_ids"][index, first:end]) for first, end, _, _ in spans]
        assert text.endswith("".join(decoded))
    with pytest.raises(UsageError, match="data_collator: row 0 of its batch does not have the tokens of sample 0"):
        CrossTokenizerCollator(own, other, lambda rows: {"input_ids": torch.zeros(1, 9, dtype=torch.long)})(samples)


def test_student_learns_across_tokenizers(tokenizers: tuple[Any, Any], tmp_path: Path) -> None:
    from pydoc_data.topics import topics

    own, other = tokenizers
    texts = [topics[name][:160] for name in sorted(topics)[:12]]
    samples = [{"input_ids": own(text)["input_ids"], "labels": own(text)["input_ids"]} for text in texts]
    start = tiny("llama", vocab_size=600)
    losses = []
    for accumulation in (1, 3):
        trainer = DistillationTrainer(
            model=copy.deepcopy(start),
            args=training_arguments(
                tmp_path,
                max_steps=4,
                learning_rate=0.5,
                per_device_train_batch_size=12 // accumulation,
                gradient_accumulation_steps=accumulation,
            ),
            teacher=tiny("llama", vocab_size=400, seed=3),
            teacher_tokenizer=other,
            distillation=DistillationConfig(alpha=0.9, cross_tokenizer=True),
            train_dataset=samples,
            data_collator=collate,
            processing_class=own,
        )
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert logs[-1]["divergence"] < logs[0]["divergence"]
        losses.append([entry["loss"] for entry in logs])
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)


def test_bad_input(tokenizers: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        DistillationTrainer(
            model=tiny("llama"),
            args=training_arguments(tmp_path),
            teacher=tiny("llama"),
            distillation=DistillationConfig(cross_tokenizer=True),
        )
    assert [error.where for error in caught.value.errors] == ["processing_class", "teacher_tokenizer", "data_collator"]
    with pytest.raises(UsageError, match="cannot be combined with cross_tokenizer"):
        from shardwright.trainers.distillation import OnPolicy

        DistillationConfig(cross_tokenizer=True, on_policy=OnPolicy())
    with pytest.raises(UsageError, match="cross_tokenizer = 'uld': must be True or False"):
        DistillationConfig(cross_tokenizer="uld")  # type: ignore[arg-type]
