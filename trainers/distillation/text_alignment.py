"""Which tokens of one tokenizer cover the same text as which of another, and which tokens both have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

Boundaries = dict[int, int]
"""Text positions where a token ends and another begins, each with the number of tokens before it."""
Span = tuple[int, int, int, int]
"""First and last-but-one token of the student, and of the teacher."""


def aligned_spans(student: Boundaries, teacher: Boundaries) -> list[Span]:
    """Return the shortest stretches that both tokenizers begin and end together, in order.

    They lie end to end from the first common boundary to the last, and each has at least one token of either.
    """
    common = sorted(student.keys() & teacher.keys())
    spans = []
    for start, end in pairwise(common):
        span = (student[start], student[end], teacher[start], teacher[end])
        if span[0] < span[1] and span[2] < span[3]:
            spans.append(span)
    return spans


def boundaries(offsets: Sequence[tuple[int, int]], text: str) -> Boundaries:
    """Return the boundaries of tokens with their character offsets.

    A boundary is where no later token begins earlier: several tokens of one character have one boundary, behind the
    last. White space before it does not count, since tokenizers disagree on which side it belongs. Tokens without
    text, such as those that begin a sequence, belong to the token that follows.
    """
    latest = [len(text)] * (len(offsets) + 1)
    for index in range(len(offsets) - 1, -1, -1):
        start, end = offsets[index]
        latest[index] = latest[index + 1] if start == end else min(start, latest[index + 1])
    found: Boundaries = {}
    reached = 0
    for index in range(len(offsets) + 1):
        if index:
            start, end = offsets[index - 1]
            if start == end and index > 1:
                continue
            reached = max(reached, end)
        if latest[index] >= reached:
            found[len(text[:reached].rstrip())] = index
    return found


def token_offsets(tokenizer: Any, token_ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of tokens and the characters that each covers.

    Where the tokenizer splits the text into the same tokens again its own offsets count; else prefixes are decoded,
    and a token that ends inside a character begins with it.
    """
    special = set(tokenizer.all_special_ids)
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    plain = [token for token in token_ids if token not in special]
    again = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if list(again["input_ids"]) == plain:
        own = iter(again["offset_mapping"])
        offsets, reached = [], 0
        for token in token_ids:
            if token in special:
                offsets.append((reached, reached))
            else:
                start, reached = next(own)
                offsets.append((start, reached))
        return text, offsets
    ends = []
    for count in range(1, len(token_ids) + 1):
        prefix = tokenizer.decode(list(token_ids[:count]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ends.append(len(prefix) if text.startswith(prefix) else -1)
    offsets, reached = [], 0
    for end in ends:
        offsets.append((reached, max(reached + 1, end) if end < 0 else max(reached, end)))
        reached = reached if end < 0 else max(reached, end)
    return text, offsets


@cache
def _byte_characters() -> dict[str, int]:
    from tokenizers.pre_tokenizers import ByteLevel

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    pairs = [(chr(byte), byte) for byte in printable] + [(chr(256 + index), byte) for index, byte in enumerate(others)]
    assert {character for character, _ in pairs} == set(ByteLevel.alphabet())
    return dict(pairs)


def token_bytes(tokenizer: Any) -> dict[bytes, int]:
    """Return each token's bytes with its id; special tokens are left out.

    Byte-level tokenizers write bytes as printable characters (openai/gpt-2, encoder.py `bytes_to_unicode`),
    SentencePiece a space as U+2581.
    """
    special = set(tokenizer.all_special_ids)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = backend is not None and "ByteLevel" in backend.to_str()
    characters = _byte_characters()
    found: dict[bytes, int] = {}
    for token, index in tokenizer.get_vocab().items():
        if index in special:
            continue
        if byte_level and all(character in characters for character in token):
            found[bytes(characters[character] for character in token)] = index
        elif not byte_level:
            found[token.replace("\u2581", " ").encode()] = index
    return found


def shared_vocabulary(student_tokenizer: Any, teacher_tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the tokens that both have, in the same order."""
    own, other = token_bytes(student_tokenizer), token_bytes(teacher_tokenizer)
    common = sorted(own.keys() & other.keys(), key=lambda piece: own[piece])
    return [own[piece] for piece in common], [other[piece] for piece in common]
