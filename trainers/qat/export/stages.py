"""A model in pipeline stages as a whole one, for its export: empty, with what the stages write for the first rank."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....plugins.deepspeed.gathering import is_first_rank
from ....plugins.deepspeed_pipeline.checkpoint import save_pipeline_checkpoint
from ....plugins.safetensors.reading import each_tensor, read_checkpoint
from ..rounding.attach import attach
from ..rounding.attachment import Attachment

if TYPE_CHECKING:
    from torch import Tensor


def whole_model(pipeline: Any, attachment: Attachment) -> tuple[Any, Attachment]:
    """Return the model that stages were cut from, without weights, and what rounds in it as in the stages.

    Args:
        pipeline: Module of the stages.
        attachment: What rounds in those of this rank.
    """
    import torch
    import transformers

    dtype = next(pipeline.parameters()).dtype
    with torch.device("meta"):
        model = getattr(transformers, pipeline.source.model_class)._from_config(pipeline.config, dtype=dtype)
    if pipeline.source.generation_config is not None:
        model.generation_config = pipeline.source.generation_config
    made = attach(model, attachment.config, stored_dtype=attachment.stored_dtype)
    made.state.enabled, made.state.bits = attachment.state.enabled, attachment.state.bits
    made.state.trained_steps = attachment.state.trained_steps
    for quantizer in made.quantizers():
        quantizer.forward_dtype = dtype
    return model, made


def stage_tensors(pipeline: Any, output: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all stages on the first rank, by the model's names; every rank must exhaust the iterator.

    The stages write them beside the output, in a directory that all ranks see and that goes again.
    """
    directory = output.parent / f".{output.name}.stages"
    save_pipeline_checkpoint(pipeline, directory)
    if not is_first_rank():
        return
    try:
        yield from each_tensor(read_checkpoint(directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
