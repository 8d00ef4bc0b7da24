"""Names of experts in checkpoints that llm-compressor writes (seen with 0.14.0.1 and transformers 5.17.0)."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from ..safetensors.writing import rename_tensors
from ..transformers.expert_layers import EXPERT_WEIGHT

_WRITTEN_EXPERT = re.compile(r"(.+\.experts\.\d+)\.(gate_proj|down_proj|up_proj)\.(\w+)")
_MIXTRAL_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def restore_expert_names(directory: Path, stored: Collection[str]) -> int:
    """Give the experts of a written checkpoint the names that the original has, and return how many tensors changed.

    llmcompressor 0.14.0.1 writes the experts of Mixtral as `gate_proj`, `down_proj` and `up_proj`. Transformers 5.17.0
    and vLLM look for `w1`, `w2` and `w3`, find none, and Transformers runs with random experts after a mere warning.

    Args:
        directory: The checkpoint, changed in place.
        stored: Names of the tensors of the checkpoint that it was made from.
    """
    endings = {match[1].rpartition(".")[2] for match in map(EXPERT_WEIGHT.fullmatch, stored) if match}
    if endings != set(_MIXTRAL_NAMES.values()):
        return 0
    return rename_tensors(directory, _original_name)


def _original_name(name: str) -> str:
    match = _WRITTEN_EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}.{_MIXTRAL_NAMES[match[2]]}.{match[3]}"
