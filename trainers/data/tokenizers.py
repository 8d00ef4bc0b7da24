"""Comparison of two tokenizers: whether they are equal, and which of their tokens cover the same text."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ...ds_configs.specs.errors import ConfigError, UsageError

Boundaries = dict[int, tuple[int, int]]
"""Text positions between two tokens: the number of tokens before it, and the index of the token after it.

The two differ if tokens without text, such as those that end a document, are in between.
"""
Span = tuple[int, int, int, int]
"""First token and end (exclusive), of the student and of the teacher."""
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def aligned_spans(student: Boundaries, teacher: Boundaries, text: str) -> list[Span]:
    """Return the shortest spans that begin and end at a boundary of both tokenizers, in order.

    They are adjacent, from the first common boundary to the last, and each has at least one token of both tokenizers.
    Tokenizers assign white space to different sides of a boundary. Boundaries that differ only by white space count as
    common too, where a span would otherwise be longer.
    """
    exact = sorted(student.keys() & teacher.keys())
    # The last position of each end of visible text, between the common ones.
    own, taught = (
        {_visible_end(position, text): position for position in sorted(sides.keys() - exact)}
        for sides in (student, teacher)
    )
    exact_ends = {_visible_end(position, text) for position in exact}
    common = [(position, position) for position in exact]
    for end in own.keys() & taught.keys() - exact_ends:
        if bisect(exact, own[end]) == bisect(exact, taught[end]):
            common.append((own[end], taught[end]))
    spans = []
    for (own_start, taught_start), (own_end, taught_end) in pairwise(sorted(common)):
        span = (student[own_start][1], student[own_end][0], teacher[taught_start][1], teacher[taught_end][0])
        if span[0] < span[1] and span[2] < span[3]:
            spans.append(span)
    return spans


def _visible_end(position: int, text: str) -> int:
    while position and text[position - 1].isspace():
        position -= 1
    return position


def boundaries(offsets: Sequence[tuple[int, int]], text: str) -> Boundaries:
    """Return the boundaries of tokens with their character offsets.

    At a boundary, no later token begins earlier: several tokens of one character have one boundary, after the last.
    Tokens without text, such as those that begin a sequence, belong to no span.
    """
    latest = [len(text)] * (len(offsets) + 1)
    for index in range(len(offsets) - 1, -1, -1):
        start, end = offsets[index]
        latest[index] = latest[index + 1] if start == end else min(start, latest[index + 1])
    by_position: Boundaries = {0: (0, 0)}
    reached = 0
    for index, (start, end) in enumerate(offsets):
        empty = start == end
        reached = reached if empty else max(reached, end)
        if latest[index + 1] < reached:
            continue
        before = by_position[reached][0] if empty and reached in by_position else index + 1
        by_position[reached] = (before, index + 1)
    return by_position


def token_offsets(tokenizer: Any, token_ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of tokens and the characters that each covers.

    If the tokenizer splits the decoded text into the same tokens, its own offsets are used. Otherwise prefixes are
    decoded, and a token that ends inside a character begins with that character.
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
    offsets, reached = [], 0
    for count in range(1, len(token_ids) + 1):
        prefix = tokenizer.decode(list(token_ids[:count]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if text.startswith(prefix):
            start, reached = reached, max(reached, len(prefix))
            offsets.append((start, reached))
        else:
            offsets.append((reached, reached + 1))
    return text, offsets


def token_bytes(tokenizer: Any) -> dict[bytes, int]:
    """Return each token's bytes with its id; special tokens are omitted.

    Byte-level tokenizers write bytes as printable characters (openai/gpt-2, encoder.py `bytes_to_unicode`),
    SentencePiece a space as U+2581 and bytes without a piece as `<0x0A>`.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = set(tokenizer.all_special_ids)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = backend is not None and "ByteLevel" in backend.to_str()
    characters = {character: byte for byte, character in bytes_to_unicode().items()}
    ids_by_bytes: dict[bytes, int] = {}
    bytes_without_a_piece: dict[bytes, int] = {}
    for token, index in tokenizer.get_vocab().items():
        if index in special:
            continue
        if byte_level and all(character in characters for character in token):
            ids_by_bytes[bytes(characters[character] for character in token)] = index
        elif not byte_level:
            fallback = _BYTE_PIECE.fullmatch(token)
            if fallback is None:
                ids_by_bytes[token.replace("\u2581", " ").encode()] = index
            else:
                bytes_without_a_piece[bytes.fromhex(fallback[1])] = index
    return bytes_without_a_piece | ids_by_bytes


def shared_vocabulary(student_tokenizer: Any, teacher_tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the tokens that both tokenizers have, in the same order."""
    own, other = token_bytes(student_tokenizer), token_bytes(teacher_tokenizer)
    common = sorted(own.keys() & other.keys(), key=lambda piece: own[piece])
    return [own[piece] for piece in common], [other[piece] for piece in common]


PROBE_TEXT = "Ünïcode, 日本語 and 🤗: x = {'a': 1};\n\tif x != 0:  return [3.14, -2]\n"


def agreed_vocab_size(
    own_tokenizer: Any,
    other_tokenizer: Any,
    *,
    roles: tuple[str, str] = ("student", "teacher"),
    fix: str = "use models of one family, or --cross-tokenizer",
) -> int:
    """Return the number of ids of two equal tokenizers, one more than the largest id.

    Models may have wider heads, whose further rows belong to no token.

    Args:
        own_tokenizer: Tokenizer of the first role.
        other_tokenizer: Tokenizer of the second role.
        roles: Names of the two models in an error.
        fix: Fix in an error.

    Raises:
        UsageError: the tokenizers differ; reports the first difference.
    """
    tokenizers = (own_tokenizer, other_tokenizer)
    own, other = ({index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in tokenizers)
    first = next((index for index in sorted(own.keys() | other.keys()) if own.get(index) != other.get(index)), None)
    split = [tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"] for tokenizer in tokenizers]
    if first is not None:
        rule = f"token {first} is {own.get(first)!r} for the {roles[0]} and {other.get(first)!r} for the {roles[1]}"
    elif split[0] != split[1]:
        rule = f"{roles[0]} and {roles[1]} split a text differently, into {len(split[0])} and {len(split[1])} tokens"
    else:
        return int(max(own)) + 1
    raise UsageError(ConfigError(where="tokenizer", rule=rule, fix=fix))
