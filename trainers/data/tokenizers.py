"""Comparison of two tokenizers."""

from __future__ import annotations

from typing import Any

from ...ds_configs.specs.errors import ConfigError, UsageError

PROBE_TEXT = "Ünïcode, 日本語 and 🤗: x = {'a': 1};\n\tif x != 0:  return [3.14, -2]\n"


def agreed_vocab_size(
    own_tokenizer: Any,
    other_tokenizer: Any,
    *,
    roles: tuple[str, str] = ("student", "teacher"),
    fix: str = "use models of one family",
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
