"""Text as training samples, and what a starting model demands of lengths and tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.models import (
    StartingModel,
    agreed_vocab_size,
    load_config,
    load_model,
    load_tokenizer,
    with_positions,
)
from shardwright.trainers.data.sources import DataSettings, pack
from small_models import llama
from transformers import GPT2Config, LlamaConfig


@given(text=st.text(), seq_len=st.integers(2, 9))
@settings(max_examples=50, deadline=None)
def test_packed_samples_are_the_text_without_its_rest(text: str, seq_len: int) -> None:
    tokenizer = byte_tokenizer(300)
    samples = pack([text, "end of the text"], tokenizer, seq_len)
    tokens = [token for sample in samples for token in sample["input_ids"].tolist()]
    whole = [*tokenizer(text)["input_ids"], 256, *tokenizer("end of the text")["input_ids"], 256]
    assert tokens == whole[: len(whole) // seq_len * seq_len]
    assert all(len(sample["labels"]) == seq_len for sample in samples)
    assert all(sample["labels"].equal(sample["input_ids"]) for sample in samples)


@given(text=st.text())
@settings(max_examples=50, deadline=None)
def test_byte_ids_are_as_many_as_bytes_and_decode_to_the_text(text: str) -> None:
    tokenizer = byte_tokenizer(256)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert all(0 <= index < 256 for index in ids)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_lengths_end_at_learned_positions_and_may_exceed_rotary_ones(capsys: pytest.CaptureFixture[str]) -> None:
    learned, rotary = GPT2Config(n_positions=16), LlamaConfig(max_position_embeddings=24)
    assert with_positions(DataSettings(), rotary, learned).seq_len == 16
    assert with_positions(DataSettings(seq_len=16), learned).seq_len == 16
    assert with_positions(DataSettings(seq_len=40), rotary).seq_len == 40
    assert "--seq-len 40 exceeds the 24 positions" in capsys.readouterr().err
    with pytest.raises(UsageError, match="the model has 16 learned positions; use at most 16"):
        with_positions(DataSettings(seq_len=17), rotary, learned)


class Words:
    """Tokenizer of a vocabulary with a gap."""

    def __init__(self, *pieces: int) -> None:
        self.pieces = list(pieces)

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 5}

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.pieces}


def test_tokenizers_agree_up_to_their_largest_id_and_on_how_they_split_text() -> None:
    assert agreed_vocab_size(Words(0, 5), Words(0, 5), roles=("student", "teacher")) == 6
    with pytest.raises(UsageError, match="split a text differently, into 2 and 1 tokens"):
        agreed_vocab_size(Words(0, 5), Words(0), roles=("student", "teacher"))


def test_models_embed_every_token_and_random_weights_have_a_seed(tmp_path: Path) -> None:
    byte_tokenizer(300).save_pretrained(tmp_path)
    llama(hidden_size=32, vocab_size=257).config.save_pretrained(tmp_path)
    source = StartingModel(model=str(tmp_path), random_weights=True)
    assert load_tokenizer(source, 257).eos_token_id == 256
    with pytest.raises(UsageError, match="must be below the model's vocab_size = 256, but the largest is 256"):
        load_tokenizer(source, 256)
    first, again, other = (load_model(source, load_config(source), "float32", seed).lm_head for seed in (0, 0, 1))
    assert first.weight.equal(again.weight) and not first.weight.equal(other.weight)


def test_evaluations_leave_the_4_bit_layers_of_qlora_as_they_were_loaded(tmp_path: Path) -> None:
    """On processors with AVX512-BF16 they would round the scales in place."""
    from bitsandbytes.nn import Linear4bit

    llama(hidden_size=64).save_pretrained(tmp_path)
    source = StartingModel(model=str(tmp_path), method="qlora")
    model = load_model(source, load_config(source), torch.float32, 0)
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 14 and not any(layer.support_avx512bf16_for_cpu for layer in layers)
