"""Whether two tokenizers are one: the same tokens with the same numbers, and the same split of a text."""

from __future__ import annotations

from typing import Any

from ...ds_configs.specs.errors import Fault, UsageError

PROBE_TEXT = "Ünïcode, 日本語 and 🤗: x = {'a': 1};\n\tif x != 0:  return [3.14, -2]\n"


def agreed_vocab_size(student_tokenizer: Any, teacher_tokenizer: Any) -> int:
    """Return how many ids the tokenizers have, one more than the largest.

    Models may have wider heads: rows beyond belong to no token.

    Raises:
        UsageError: they differ; names the first difference.
    """
    fault = tokenizer_fault(student_tokenizer, teacher_tokenizer)
    if fault is not None:
        raise UsageError(fault)
    largest: int = max(student_tokenizer.get_vocab().values())
    return largest + 1


def tokenizer_fault(student_tokenizer: Any, teacher_tokenizer: Any) -> Fault | None:
    """Return what makes the tokenizers differ; `None` where they agree."""
    fix = "use models of one family, or --cross-tokenizer"
    own = {index: token for token, index in student_tokenizer.get_vocab().items()}
    other = {index: token for token, index in teacher_tokenizer.get_vocab().items()}
    first = next((index for index in sorted(own.keys() | other.keys()) if own.get(index) != other.get(index)), None)
    if first is not None:
        rule = f"token {first} is {own.get(first)!r} for the student and {other.get(first)!r} for the teacher"
        return Fault(where="tokenizer", rule=rule, fix=fix)
    split = [
        tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
        for tokenizer in (student_tokenizer, teacher_tokenizer)
    ]
    if split[0] != split[1]:
        rule = f"the student's splits a text into {len(split[0])} tokens, and the teacher's otherwise, {len(split[1])}"
        return Fault(where="tokenizer", rule=rule, fix=fix)
    return None
