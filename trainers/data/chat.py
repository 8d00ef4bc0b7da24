"""Tokens and labels of conversations and prompts; only what the assistant says has labels.

Seen with transformers 5.17.0: ``apply_chat_template(return_assistant_tokens_mask=True)`` returns zeros for a template
without ``{% generation %}``, with only a warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from ...ds_configs.specs.errors import ConfigError, UsageError

IGNORED_LABEL = -100
"""Label of a token without a loss, as in Transformers."""

_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value")


def special_prefix(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer adds before a text, such as its beginning-of-sequence token."""
    with_special = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(with_special)):
        if with_special[start : start + len(plain)] == plain:
            return list(with_special[:start])
    return []


def special_suffix(tokenizer: Any) -> list[int]:
    """Return the end-of-sequence token, if the tokenizer has one."""
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def encode_completion(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Return tokens and labels of a prompt with its completion; the completion and the end-of-sequence have labels.

    Prompt and completion are tokenized separately, as in generation.
    """
    first = special_prefix(tokenizer) + tokenizer(prompt, add_special_tokens=False)["input_ids"]
    second = tokenizer(completion, add_special_tokens=False)["input_ids"]
    if not second:
        return first, [IGNORED_LABEL] * len(first)
    end = special_suffix(tokenizer)
    second = list(second) if list(second[-1:]) == end else [*second, *end]
    return [*first, *second], [IGNORED_LABEL] * len(first) + second


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Any],
    *,
    first_labelled: int = 0,
    tools: Sequence[Any] | None = None,
    where: str = "messages",
) -> tuple[list[int], list[int]]:
    """Return tokens and labels of a conversation as the tokenizer's chat template renders it.

    The messages of the assistant have labels, with the token that ends each. A template can mark them with
    ``{% generation %}``; otherwise they are what rendering one more message adds to the prompt. Only the template adds
    special tokens.

    Args:
        messages: Each with `role` and `content`, or `from` and `value`; the assistant's may have `tool_calls` instead.
        first_labelled: Messages before this index are the prompt, whatever their role.
        tools: Functions that the assistant can call, as the template expects them.
        where: Name of the conversation in errors.

    Raises:
        UsageError: there is no template, it cannot render the conversation, or it changes earlier text when messages
            are added.
    """
    name = repr(tokenizer.name_or_path)

    def render(messages: list[dict[str, Any]], **settings: Any) -> Any:
        try:
            return tokenizer.apply_chat_template(messages, tools=tools, **({"tokenize": False} | settings))
        except Exception as error:
            rule = f"the chat template of {name} rejects it: {' '.join(str(error).split())}"
            raise UsageError(ConfigError(where=where, rule=rule)) from None

    template = tokenizer.chat_template
    if not template:
        rule = "conversations need a chat template, which the tokenizer does not have"
        fix = "pass --chat-template, such as chatml, or use the tokenizer of a chat model"
        raise UsageError(ConfigError(where=where, rule=rule, fix=fix))
    turns: list[dict[str, Any]] = []
    for message in messages:
        if not isinstance(message, Mapping):
            rule, fix = "each message must be an object", 'for example {"role": "user", "content": …}'
            raise UsageError(ConfigError(where=where, value=message, rule=rule, fix=fix))
        role = next((message[key] for key in _ROLE_KEYS if message.get(key)), None)
        content = next((message[key] for key in _CONTENT_KEYS if message.get(key) is not None), None)
        further = {key: value for key, value in message.items() if key not in (*_ROLE_KEYS, *_CONTENT_KEYS) and value}
        if role is None or (content is None and not further.get("tool_calls")):
            rule, fix = "each message needs a role and a content", 'for example {"role": "user", "content": …}'
            raise UsageError(ConfigError(where=where, value=dict(message), rule=rule, fix=fix))
        if calls := further.get("tool_calls"):
            further["tool_calls"] = [_with_arguments(call) for call in calls]
        turns.append({"role": _ROLES.get(str(role), str(role)), "content": content or "", **further})
    text = template if isinstance(template, str) else tokenizer.get_chat_template()
    if _MARKS_ASSISTANT.search(text):
        encoded = render(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask, prompt_tokens = list(encoded["input_ids"]), list(encoded["assistant_masks"]), 0
        if first_labelled:
            prompt = str(render(turns[:first_labelled]))
            prompt_tokens = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        labels = [
            token if is_assistant and index >= prompt_tokens else IGNORED_LABEL
            for index, (token, is_assistant) in enumerate(zip(ids, mask, strict=True))
        ]
        return ids, labels

    # The characters that each turn of the assistant adds to its prompt.
    spans, end, text = [], tokenizer.eos_token, str(render(turns))
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant" or index < first_labelled:
            continue
        prompt = str(render(turns[:index], add_generation_prompt=True)) if index else ""
        answered = str(render(turns[: index + 1]))
        if not answered.startswith(prompt) or not text.startswith(answered):
            rule = f"the chat template of {name} changes earlier text when a message is added"
            fix = "mark the assistant's messages with {% generation %} … {% endgeneration %} in it"
            raise UsageError(ConfigError(where=f"{where}[{index}]", rule=rule, fix=fix))
        answer = answered[len(prompt) :]
        if end and end in answer and not answer.rpartition(end)[2].strip():
            answer = answer[: answer.rindex(end) + len(end)]
        spans.append((len(prompt), len(prompt) + len(answer)))
    assert all(left[1] <= right[0] for left, right in pairwise(spans)), "turns follow each other"
    if not tokenizer.is_fast:
        rule = "a tokenizer without offsets cannot locate the assistant's tokens"
        fix = "mark them with {% generation %} in the chat template"
        raise UsageError(ConfigError(where=where, rule=rule, fix=fix))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, labels = list(encoded["input_ids"]), []
    for token, (start, stop) in zip(ids, encoded["offset_mapping"], strict=True):
        inside = stop > start and any(left <= start and stop <= right for left, right in spans)
        labels.append(token if inside else IGNORED_LABEL)
    return ids, labels


def _with_arguments(call: Any) -> Any:
    """Return a tool call with its arguments as an object, as templates expect; the OpenAI API writes JSON text."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"])}
    with suppress(ValueError):
        if isinstance(call.get("arguments"), str):
            return {**call, "arguments": json.loads(call["arguments"])}
    return call
