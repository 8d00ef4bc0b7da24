"""Model cards of outputs: their metadata, and the usage snippet run as a reader would run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData


def read_card(directory: Path, *, run: bool = True) -> ModelCardData:
    """Return the metadata of a card after its snippet ran in the directory."""
    card = ModelCard.load(directory / "README.md")
    assert card.data.library_name in ("transformers", "peft") and "shardwright" in card.data.tags
    (snippet,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL) if run else [""]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        exec(compile(snippet, "README.md", "exec"), {})  # noqa: S102 - what the card tells its reader to run
    return card.data
