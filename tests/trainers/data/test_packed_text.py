"""Text as training samples, and the tokenizer of models that have none."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.sources import pack


@given(text=st.text(), seq_len=st.integers(2, 9))
@settings(max_examples=50, deadline=None)
def test_packed_samples_are_the_text_without_its_rest(text: str, seq_len: int) -> None:
    tokenizer = byte_tokenizer(300)
    samples = pack([text, "end of the text"], tokenizer, seq_len)
    tokens = [token for sample in samples for token in sample["input_ids"].tolist()]
    whole = [*tokenizer(text)["input_ids"], 256, *tokenizer("end of the text")["input_ids"], 256]
    assert tokens == whole[: len(whole) // seq_len * seq_len]
    assert all(len(sample["labels"]) == seq_len for sample in samples)


@given(text=st.text())
@settings(max_examples=50, deadline=None)
def test_byte_ids_are_as_many_as_bytes_and_decode_to_the_text(text: str) -> None:
    tokenizer = byte_tokenizer(256)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert all(0 <= index < 256 for index in ids)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
