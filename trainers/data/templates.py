"""Chat templates of `--chat-template`: named ones, and files.

Transformers renders all of them in Jinja's immutable sandbox, where a template can neither read private attributes nor
change objects (`transformers.utils.chat_template_utils`). Named templates mark the assistant's turns and the text that
ends them with ``{% generation %}``, which decides the labels.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from .sources import one_line, read_utf8

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
        rendered = str(tokenizer.apply_chat_template(_PROBE, tokenize=False))
    except Exception as error:
        tokenizer.chat_template = before
        rule = f"cannot render a question and its answer: {one_line(error)}"
        fix = "correct the file; templates are Jinja in the sandbox of Transformers"
        raise UsageError(ConfigError(where=where, value=name, rule=rule, fix=fix)) from None
    if not rendered.strip():
        tokenizer.chat_template = before
        rule, fix = "renders nothing for a question and its answer", "pass a template that reads `messages`"
        raise UsageError(ConfigError(where=where, value=name, rule=rule, fix=fix))
    split = sorted({marker for marker in _MARKER.findall(rendered) if marker not in tokenizer.get_vocab()})
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
        after = str(tokenizer.apply_chat_template(messages, tokenize=False)).rsplit(answer, 1)[1]
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
    before, rendered = tokenizer.eos_token, tokenizer.apply_chat_template(_PROBE, tokenize=False)
    # Padding was the end-of-sequence token.
    tokenizer.pad_token = tokenizer.pad_token or before
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    if tokenizer.apply_chat_template(_PROBE, tokenize=False) != rendered:
        tokenizer.eos_token = before
    logger.info(f"{text.strip()} ends an answer of the chat template: the saved model stops generating at it")
    return end


def with_turn_end(known: int | list[int] | None, end: int) -> int | list[int]:
    """Return the `eos_token_id` of generation settings with the token that ends a turn added."""
    own = [] if known is None else [known] if isinstance(known, int) else list(known)
    together = list(dict.fromkeys([*own, end]))
    return together[0] if len(together) == 1 else together
