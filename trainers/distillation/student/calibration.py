"""A teacher in memory and the token batches that its activations are measured on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....plugins.huggingface_hub.hub import ModelSource
from ....plugins.transformers.sound_model import check_config, refused_by_name
from ...data.models import StartingModel, load_tokenizer
from ...data.text import pack, read_documents

if TYPE_CHECKING:
    import torch

LONGEST_SAMPLE_TOKENS = 512
MOST_SAMPLES = 64
_SAMPLES_PER_BATCH = 4


def teacher_with_batches(
    directory: Path, source: ModelSource, text: tuple[Path, ...]
) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """Return the teacher in evaluation mode, on a GPU where there is one, and up to 64 samples of up to 512 tokens.

    The samples are spread over the text, which is Python's help where none is named.

    Raises:
        UsageError: a text cannot be read, or is shorter than one sample.
    """
    import torch
    import transformers

    architecture = (source.config.get("architectures") or ["AutoModel"])[0]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = getattr(transformers, architecture)
    check_config(str(directory))
    with refused_by_name(str(directory)):
        model = loader.from_pretrained(str(directory), trust_remote_code=False, use_safetensors=True, dtype="auto").to(
            device
        )
    model.eval()
    config = model.config
    positions = getattr(config, "max_position_embeddings", None) or LONGEST_SAMPLE_TOKENS
    tokenizer = load_tokenizer(StartingModel(model=str(directory)), config.vocab_size)
    samples = pack(read_documents(text), tokenizer, min(LONGEST_SAMPLE_TOKENS, positions))
    spread = samples[:: -(-len(samples) // MOST_SAMPLES)]
    rows_NT = torch.stack([sample["input_ids"] for sample in spread]).to(device)
    return model, [{"input_ids": part_BT} for part_BT in rows_NT.split(_SAMPLES_PER_BATCH)]
