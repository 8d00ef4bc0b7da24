"""Conversations and prompts as tokens, with labels on what the assistant says and nowhere else.

Seen with transformers 5.17.0: ``apply_chat_template(return_assistant_tokens_mask=True)`` answers zeros for a template
without ``{% generation %}``, and warns only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ...ds_configs.specs.errors import Fault, UsageError

Message = Mapping[str, Any]

IGNORED_LABEL = -100
"""Label of a token that no loss counts, as Transformers has it."""

_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value")


def special_prefix(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer puts before a text, such as its beginning-of-sequence token."""
    with_special = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start, length in ((start, len(plain)) for start in range(len(with_special))):
        if with_special[start : start + length] == plain:
            return list(with_special[:start])
    return []


def special_suffix(tokenizer: Any) -> list[int]:
    """Return the end-of-sequence token that follows a text, if there is one."""
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def encode_completion(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Return tokens and labels of a prompt with its completion; the prompt has no labels, the end-of-sequence has.

    Both are split on their own, as they are when the completion is generated.
    """
    first = special_prefix(tokenizer) + tokenizer(prompt, add_special_tokens=False)["input_ids"]
    second = tokenizer(completion, add_special_tokens=False)["input_ids"]
    if not second:
        return first, [IGNORED_LABEL] * len(first)
    end = special_suffix(tokenizer)
    second = list(second) if list(second[-1:]) == end else [*second, *end]
    return [*first, *second], [IGNORED_LABEL] * len(first) + second


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], *, first_labelled: int = 0, where: str = "messages"
) -> tuple[list[int], list[int]]:
    """Return tokens and labels of a conversation as the tokenizer's chat template renders it.

    Labels stand on what the assistant says, with the token that ends its turn. A template that marks these parts
    with ``{% generation %}`` is believed; otherwise they are what rendering one message more adds to the prompt.
    Special tokens come from the template alone.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: Each with `role` and `content`, or `from` and `value`.
        first_labelled: Messages before this one are prompt, whoever says them.
        where: Names the conversation in errors.

    Raises:
        UsageError: there is no template, it cannot render the conversation, or the beginning of a conversation changes
            when messages are added to it.
    """
    template = tokenizer.chat_template
    if not template:
        rule = "conversations need a chat template, and the tokenizer has none"
        raise UsageError(Fault(where=where, rule=rule, fix="use the tokenizer of a chat model, or a column `text`"))
    turns = [_normalised(message, where) for message in messages]
    text = template if isinstance(template, str) else tokenizer.get_chat_template()
    if _MARKS_ASSISTANT.search(text):
        return _by_marks(tokenizer, turns, first_labelled, where)
    spans = _assistant_spans(tokenizer, turns, first_labelled, where)
    return _labelled(tokenizer, _render(tokenizer, turns, where), spans, where)


def _normalised(message: Message, where: str) -> dict[str, Any]:
    role = next((message[key] for key in _ROLE_KEYS if message.get(key)), None)
    content = next((message[key] for key in _CONTENT_KEYS if message.get(key) is not None), None)
    if role is None or content is None:
        rule = "each message needs a role and a content"
        raise UsageError(
            Fault(where=where, value=dict(message), rule=rule, fix='such as {"role": "user", "content": …}')
        )
    kept = {key: value for key, value in message.items() if key not in (*_ROLE_KEYS, *_CONTENT_KEYS) and value}
    return {"role": _ROLES.get(str(role), str(role)), "content": content, **kept}


def _by_marks(
    tokenizer: Any, turns: list[dict[str, Any]], first_labelled: int, where: str
) -> tuple[list[int], list[int]]:
    try:
        encoded = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    except Exception as error:
        raise _cannot_render(tokenizer, where, error) from None
    ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    prompt = 0
    if first_labelled:
        rendered = _render(tokenizer, turns[:first_labelled], where)
        prompt = len(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    labels = [
        token if said and place >= prompt else IGNORED_LABEL
        for place, (token, said) in enumerate(zip(ids, mask, strict=True))
    ]
    return ids, labels


def _assistant_spans(
    tokenizer: Any, turns: list[dict[str, Any]], first_labelled: int, where: str
) -> list[tuple[int, int]]:
    """Return the characters that each turn of the assistant adds to its prompt."""
    spans, end = [], tokenizer.eos_token
    whole = _render(tokenizer, turns, where)
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant" or index < first_labelled:
            continue
        prompt = _render(tokenizer, turns[:index], where, add_generation_prompt=True) if index else ""
        answered = _render(tokenizer, turns[: index + 1], where)
        if not answered.startswith(prompt) or not whole.startswith(answered):
            rule = f"the chat template of {tokenizer.name_or_path!r} changes earlier text when a message is added"
            fix = "mark the assistant's words with {% generation %} … {% endgeneration %} in it"
            raise UsageError(Fault(where=f"{where}[{index}]", rule=rule, fix=fix))
        said = answered[len(prompt) :]
        if end and end in said and not said.rpartition(end)[2].strip():
            said = said[: said.rindex(end) + len(end)]
        spans.append((len(prompt), len(prompt) + len(said)))
    assert all(left[1] <= right[0] for left, right in pairwise(spans)), "turns follow each other"
    return spans


def _labelled(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], where: str) -> tuple[list[int], list[int]]:
    if not tokenizer.is_fast:
        rule = "a tokenizer without offsets cannot say which tokens the assistant's words are"
        raise UsageError(Fault(where=where, rule=rule, fix="mark them with {% generation %} in the chat template"))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, labels = list(encoded["input_ids"]), []
    for token, (start, end) in zip(ids, encoded["offset_mapping"], strict=True):
        inside = end > start and any(left <= start and end <= right for left, right in spans)
        labels.append(token if inside else IGNORED_LABEL)
    return ids, labels


def _render(tokenizer: Any, turns: list[dict[str, Any]], where: str, **settings: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **settings))
    except Exception as error:
        raise _cannot_render(tokenizer, where, error) from None


def _cannot_render(tokenizer: Any, where: str, error: Exception) -> UsageError:
    rule = f"the chat template of {tokenizer.name_or_path!r} refuses it: {' '.join(str(error).split())}"
    return UsageError(Fault(where=where, rule=rule))
