"""From text files to samples of a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import Fault, UsageError, collecting


def read_documents(files: Sequence[Path] | None) -> list[str]:
    """Return the texts to train on: one document per file, or the topics of Python's own help.

    Raises:
        UsageError: files cannot be read, or are not UTF-8; names all of them.
    """
    if files:
        faults: list[Fault] = []
        documents = []
        for path in files:
            with collecting(faults):
                documents.append(read_utf8(path, where="--text"))
        if faults:
            raise UsageError(faults)
        return documents
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def read_utf8(path: Path, *, where: str) -> str:
    """Return the text of a file; `where` names what it is for.

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        rule = f"is not UTF-8 text ({error.reason} at byte {error.start})"
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
    raise UsageError(Fault(where=where, value=str(path), rule=rule, fix="give UTF-8 text"))


def pack(documents: Sequence[str], tokenizer: Any, seq_len: int) -> list[dict[str, Any]]:
    """Join the documents' tokens and cut them into samples of ``seq_len`` tokens; the rest is left out.

    Raises:
        UsageError: The text is shorter than one sample.
    """
    import torch

    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = [[*document, *end] for document in tokenizer(list(documents), add_special_tokens=False)["input_ids"]]
    blocks = list(joined_pieces(encoded, seq_len))
    if not blocks:
        rule = f"the text has {sum(map(len, encoded))} tokens, fewer than one sample"
        raise UsageError(Fault(where="--seq-len", value=seq_len, rule=rule, fix="give more --text or lower --seq-len"))
    return [{"input_ids": block_T, "labels": block_T} for block_T in torch.tensor(blocks)]


def joined_pieces(documents: Iterable[list[int]], seq_len: int) -> Iterator[list[int]]:
    """Yield the joined tokens of documents in pieces of ``seq_len``; what is left at the end is left out."""
    waiting: list[int] = []
    for document in documents:
        waiting += document
        whole = len(waiting) // seq_len * seq_len
        for start in range(0, whole, seq_len):
            yield waiting[start : start + seq_len]
        waiting = waiting[whole:]
