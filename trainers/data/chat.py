"""Tokens and labels of conversations and prompts, and chat templates; only what the assistant says has labels.

Seen with transformers 5.17.0: ``apply_chat_template(return_assistant_tokens_mask=True)`` returns zeros for a template
without ``{% generation %}``, with only a warning. Transformers renders templates in Jinja's immutable sandbox, where a
template can neither read private attributes nor change objects (`transformers.utils.chat_template_utils`). Named
templates mark the assistant's turns and the text that ends them with ``{% generation %}``, which decides the labels.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from .sources import one_line, read_utf8

IGNORED_LABEL = -100
"""Label of a token without a loss, as in Transformers."""

_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}
_OTHER_CONTENTS = ("\u27e6x\u27e7", "\u27eay\u27eb")
"""Contents that begin and end with other characters; templates neither strip nor split them."""
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


def turns_of(messages: Sequence[Any], *, where: str) -> list[dict[str, Any]]:
    """Return messages with `role` and `content`, as chat templates read them.

    Args:
        messages: Each with `role` and `content`, or `from` and `value`; the assistant's may have `tool_calls` instead.
        where: Name of the conversation in errors.

    Raises:
        UsageError: a message has no role, or neither a content nor tool calls.
    """
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
    return turns


def encode_chat(tokenizer: Any, messages: Sequence[Any], **settings: Any) -> tuple[list[int], list[int]]:
    """Return tokens and labels of a conversation; the arguments are those of `rendered_chat`.

    Raises:
        UsageError: as `rendered_chat`, or the tokenizer has no offsets.
    """
    chat = rendered_chat(tokenizer, messages, **settings)
    if not tokenizer.is_fast:
        rule = "a tokenizer without offsets cannot locate the assistant's tokens"
        fix = "use a model with a fast tokenizer"
        raise UsageError(ConfigError(where=settings.get("where", "messages"), rule=rule, fix=fix))
    encoded = tokenizer(chat.text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    return ids, chat.labels(ids, encoded["offset_mapping"])


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """The text of a conversation, and the characters of the assistant's answers."""

    text: str
    answers: Sequence[tuple[int, int]]
    are_marked: bool
    """Whether the template marks the answers; then a token with any character of an answer belongs to it."""

    def labels(self, ids: Sequence[int], offsets: Iterable[tuple[int, int]]) -> list[int]:
        """Return the label of each token, from its characters; special tokens without characters have none."""
        labels = []
        for token, (start, stop) in zip(ids, offsets, strict=True):
            inside = stop > start and any(
                (start < right and left < stop) if self.are_marked else (left <= start and stop <= right)
                for left, right in self.answers
            )
            labels.append(token if inside else IGNORED_LABEL)
        return labels


def rendered_chat(
    tokenizer: Any,
    messages: Sequence[Any],
    *,
    first_labelled: int = 0,
    tools: Sequence[Any] | None = None,
    where: str = "messages",
    counts: Counter[str] | None = None,
    image_token: str = "",
) -> RenderedChat:
    """Render a conversation with the tokenizer's chat template, and locate the assistant's answers.

    The messages of the assistant have labels, with the token that ends each. A template can mark them with
    ``{% generation %}``; otherwise they are what rendering one more message adds to the prompt. A template that changes
    earlier messages, such as one that drops earlier thoughts, is searched for each answer in the complete rendering.
    Only the template adds special tokens.

    Args:
        messages: Each with `role` and `content`, or `from` and `value`; the assistant's may have `tool_calls` instead.
        first_labelled: Messages before this index are the prompt, whatever their role.
        tools: Functions that the assistant can call, as the template expects them.
        where: Name of the conversation in errors.
        counts: Counts of `rendered` conversations, of `rewritten` ones, whose template changes earlier messages, and of
            `unlabelled answers`, which the complete rendering does not have.
        image_token: Text of an image for a template that reads no lists of parts.

    Raises:
        UsageError: there is no template, or it cannot render the conversation.
    """
    name = repr(tokenizer.name_or_path)

    def render(messages: list[dict[str, Any]], **settings: Any) -> Any:
        try:
            return rendered(tokenizer, messages, image_token=image_token, tools=tools, **settings)
        except Exception as error:
            rule = f"the chat template of {name} rejects it: {' '.join(str(error).split())}"
            raise UsageError(ConfigError(where=where, rule=rule)) from None

    template = tokenizer.chat_template
    if not template:
        rule = "conversations need a chat template, which the tokenizer does not have"
        fix = "pass --chat-template, such as chatml, or use the tokenizer of a chat model"
        raise UsageError(ConfigError(where=where, rule=rule, fix=fix))
    turns = turns_of(messages, where=where)
    counts, text = Counter() if counts is None else counts, str(render(turns))
    counts["rendered"] += 1
    source = template if isinstance(template, str) else tokenizer.get_chat_template()
    if _MARKS_ASSISTANT.search(source):
        from transformers.utils.chat_template_utils import render_jinja_template

        read = with_contents(tokenizer, turns, image_token)
        special = tokenizer.special_tokens_map
        _, (spans,) = render_jinja_template([read], tools, None, source, return_assistant_tokens_mask=True, **special)
        if first_labelled:
            prompt = str(render(turns[:first_labelled]))
            if not text.startswith(prompt):
                # The template renders the prompt in another way when messages follow.
                counts["rewritten"] += 1
                part = _dependent_part(render, turns, first_labelled - 1, text)
                end = turn_end(tokenizer)[0]
                stop = len(text) if part is None else part[1]
                prompt = text[: stop + len(end)] if text.startswith(end, stop) else text[:stop]
            spans = [(max(start, len(prompt)), stop) for start, stop in spans if stop > len(prompt)]
        return RenderedChat(text=text, answers=spans, are_marked=True)

    spans = []
    ends = [end for end in (tokenizer.eos_token, turn_end(tokenizer)[0]) if end]
    is_rewritten = False
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant" or index < first_labelled:
            continue
        span = _added_span(render, turns, index, text, ends)
        if span is None:
            is_rewritten = is_rewritten or index > 0
            span = _rewritten_span(render, turns, index, text, ends[-1:])
        if span is None or (spans and span[0] < spans[-1][1]):
            counts["unlabelled answers"] += 1
        else:
            spans.append(span)
    counts["rewritten"] += is_rewritten
    return RenderedChat(text=text, answers=spans, are_marked=False)


def rendered(tokenizer: Any, turns: Sequence[Mapping[str, Any]], *, image_token: str = "", **settings: Any) -> str:
    """Return messages as the chat template renders them."""
    read = with_contents(tokenizer, turns, image_token)
    return str(tokenizer.apply_chat_template(read, **({"tokenize": False} | settings)))


def with_contents(tokenizer: Any, turns: Sequence[Mapping[str, Any]], image_token: str) -> list[dict[str, Any]]:
    """Return messages whose content has a form that the chat template reads: text, or a list of parts."""
    template = tokenizer.chat_template
    source = template if isinstance(template, str) or not template else tokenizer.get_chat_template()
    special = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    forms = _content_forms(source, tuple(special.items()))
    read = []
    for turn in turns:
        content = turn.get("content")
        if isinstance(content, str) and forms == {list}:
            turn = {**turn, "content": [{"type": "text", "text": content}]}
        elif isinstance(content, list) and list not in forms:
            turn = {**turn, "content": "".join(part.get("text") or image_token for part in content)}
        read.append(dict(turn))
    return read


@cache
def _content_forms(template: str, special: tuple[tuple[str, str], ...]) -> frozenset[type]:
    """Return `str` if a template renders text contents, and `list` if it renders lists of parts."""
    from transformers.utils.chat_template_utils import render_jinja_template

    text, forms = _OTHER_CONTENTS[0], set()
    content: Any
    for content in (text, [{"type": "text", "text": text}]):
        with suppress(Exception):
            chat = [{"role": "user", "content": content}]
            ((shown,), _) = render_jinja_template([chat], chat_template=template, **dict(special))
            # A template of text may write a list as Python shows it.
            if text in shown and "'type'" not in shown:
                forms.add(type(content))
    return frozenset(forms)


def _added_span(
    render: Callable[..., Any], turns: list[dict[str, Any]], index: int, text: str, ends: Sequence[str]
) -> tuple[int, int] | None:
    """Return the characters that an answer adds to its prompt; `None` if the template changes earlier text."""
    if not index:
        # Without a prompt, the header of the answer and an injected system prompt would count as the answer.
        return None
    try:
        prompt = str(render(turns[:index], add_generation_prompt=True))
        answered = str(render(turns[: index + 1]))
    except UsageError:
        return None
    if not answered.startswith(prompt) or not text.startswith(answered):
        return None
    answer = answered[len(prompt) :]
    for end in ends:
        if end in answer and not answer.rpartition(end)[2].strip():
            answer = answer[: answer.rindex(end) + len(end)]
            break
    return len(prompt), len(prompt) + len(answer)


def _rewritten_span(
    render: Callable[..., Any], turns: list[dict[str, Any]], index: int, text: str, ends: Sequence[str]
) -> tuple[int, int] | None:
    """Return the characters of an answer in the complete rendering, from renderings with other answers.

    The answer starts after the generation prompt, if the rendering has one before it, and includes what ends the turn.
    """
    before = _dependent_part(render, turns, index - 1, text) if index else None
    after = _dependent_part(render, turns, index + 1, text) if index + 1 < len(turns) else None
    first, last = before[1] if before else 0, after[0] if after else len(text)
    part = _dependent_part(render, turns, index, text, within=(first, last))
    if part is None:
        return None
    start, stop = part
    question, opening = [{"role": "user", "content": "a"}], ""
    with suppress(UsageError):
        opening = str(render(question, add_generation_prompt=True)).removeprefix(str(render(question)))
    if opening and (header := text.rfind(opening, first, start)) >= 0:
        start = header + len(opening)
    for end in ends:
        if (position := text.find(end, stop, last)) >= 0:
            stop = position + len(end)
    return start, stop


def _dependent_part(
    render: Callable[..., Any],
    turns: list[dict[str, Any]],
    index: int,
    text: str,
    *,
    within: tuple[int, int] | None = None,
) -> tuple[int, int] | None:
    """Return the characters that depend on a message; `None` if the template does not render it, or not `within`."""
    first, last = within or (0, len(text))
    # Without its tool calls and thoughts, or, where the template needs them, only its content.
    for message in ({"role": turns[index]["role"]}, turns[index]):
        try:
            others = [
                str(render([*turns[:index], {**message, "content": content}, *turns[index + 1 :]]))
                for content in _OTHER_CONTENTS
            ]
        except UsageError:
            continue
        start = _shared_length(text, *others)
        stop = len(text) - _shared_length(*(rendered[::-1] for rendered in (text, *others)))
        if others[0] != others[1] and first <= start <= stop <= last:
            return start, stop
    return None


def _shared_length(*texts: str) -> int:
    columns = enumerate(zip(*texts, strict=False))
    return next((index for index, column in columns if len(set(column)) > 1), min(map(len, texts)))


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


CHAT_TEMPLATES = ("alpaca", "chatml", "llama3", "zephyr")
"""Names of templates. `alpaca` and `zephyr` end a turn with the tokenizer's end-of-sequence token."""

_MARKER = re.compile(r"<\|\w+\|>")
_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

logger = logging.getLogger(__name__)


def set_chat_template(tokenizer: Any, name: str | None) -> None:
    """Make a tokenizer use a named template, or that of a file; it is saved with the tokenizer. `None` changes nothing.

    Warns of markers, such as `<|im_end|>`, that the tokenizer splits into several tokens.

    Raises:
        UsageError: there is no such name or file, or the template cannot render a question and its answer.
    """
    if name is None:
        return
    where = "chat_template"
    file = Path(__file__).parent / "templates" / f"{name}.jinja" if name in CHAT_TEMPLATES else Path(name)
    if not file.is_file():
        rule = f"is neither a file nor one of {', '.join(CHAT_TEMPLATES)}"
        raise UsageError(ConfigError(where=where, value=name, rule=rule, fix="pass a Jinja file or one of these"))
    before, tokenizer.chat_template = tokenizer.chat_template, read_utf8(file, where=where)
    try:
        shown = rendered(tokenizer, _PROBE)
    except Exception as error:
        tokenizer.chat_template = before
        rule = f"cannot render a question and its answer: {one_line(error)}"
        fix = "correct the file; templates are Jinja in the sandbox of Transformers"
        raise UsageError(ConfigError(where=where, value=name, rule=rule, fix=fix)) from None
    if not shown.strip():
        tokenizer.chat_template = before
        rule, fix = "renders nothing for a question and its answer", "pass a template that reads `messages`"
        raise UsageError(ConfigError(where=where, value=name, rule=rule, fix=fix))
    split = sorted({marker for marker in _MARKER.findall(shown) if marker not in tokenizer.get_vocab()})
    if split:
        logger.info(
            f"--chat-template {name}: {', '.join(split)} {'is no token' if len(split) == 1 else 'are no tokens'} of "
            "the tokenizer, and are split into several; alpaca uses only its end-of-sequence token"
        )


def turn_end(tokenizer: Any) -> tuple[str, int | None]:
    """Return what the chat template writes after an answer, up to the token that ends it, and the id of that token.

    The id is `None` if the template ends an answer with no token, or with text of several tokens.
    """
    answer = "\u27e6b\u27e7"
    try:
        messages = [_PROBE[0], {"role": "assistant", "content": answer}]
        after = rendered(tokenizer, messages).rsplit(answer, 1)[1]
    except Exception:
        # Templates that render no such answer, or need other roles.
        return "", None
    if not after.strip():
        return "", None
    ids = tokenizer(after.strip(), add_special_tokens=False)["input_ids"]
    token = tokenizer.convert_ids_to_tokens(ids[0])
    if token in {*tokenizer.get_added_vocab(), tokenizer.eos_token} and after.lstrip().startswith(token):
        return after[: after.index(token) + len(token)], ids[0]
    is_known = len(ids) == 1 and ids[0] != tokenizer.unk_token_id
    return after.rstrip(), ids[0] if is_known else None


def end_turns(tokenizer: Any) -> int | None:
    """Make generation with a tokenizer end where its chat template ends an answer, and return that token.

    The end-of-sequence token of the tokenizer becomes the token that ends a turn, unless the template writes both.
    `None`, with a log line, if no single token ends a turn.
    """
    text, end = turn_end(tokenizer)
    if end is None:
        shown = f"{text.strip()!r}, which is no single token" if text.strip() else "no token"
        logger.info(f"the chat template ends an answer with {shown}: generation does not stop at the end of an answer")
        return None
    if end == tokenizer.eos_token_id:
        return end
    before, shown = tokenizer.eos_token, rendered(tokenizer, _PROBE)
    # Padding was the end-of-sequence token.
    tokenizer.pad_token = tokenizer.pad_token or before
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    if rendered(tokenizer, _PROBE) != shown:
        tokenizer.eos_token = before
    logger.info(f"{text.strip()} ends an answer of the chat template: the saved model stops generating at it")
    return end


def with_turn_end(known: int | list[int] | None, end: int) -> int | list[int]:
    """Return the `eos_token_id` of generation settings with the token that ends a turn added."""
    own = [] if known is None else [known] if isinstance(known, int) else list(known)
    together = list(dict.fromkeys([*own, end]))
    return together[0] if len(together) == 1 else together
