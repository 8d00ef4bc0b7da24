"""Files of a model directory other than its weights and configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

CHAT_TEMPLATE = "chat_template.jinja"
"""File of a chat template, which takes precedence over one in `tokenizer_config.json`."""
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    CHAT_TEMPLATE,
    "processor_config.json",
    "preprocessor_config.json",
    "generation_config.json",
)
"""Tokenizer, processors and generation settings."""


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, processors and generation settings."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
