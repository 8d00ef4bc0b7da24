"""A pipeline's weights as a normal Hugging Face checkpoint, written by all stages together.

Each stage's first data-parallel rank writes its tensors next to the checkpoint, in a directory that all of these ranks
must see. The first rank then names the files, writes the index and publishes everything (`plugins/safetensors.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.output import write_files
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError, UsageError
from ...ds_configs.specs.layout import PipelineStage
from ..deepspeed.engine import with_all_columns_and_rows
from ..safetensors import SHARD_BYTES, name_shards, publish, save_tensors
from ..transformers.loading import gathered

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CUT = "pipeline_cut.json"
"""File in a training checkpoint that records its stages."""
_FIX = "resume with the stages of the checkpoint, or start a new run from its weights: PipelineTrainer(model=directory)"


def pipeline_tensors(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of this rank's stages under the names of the model's checkpoint, tied ones once.

    With tensor parallelism each tensor is gathered, and every rank of a group must exhaust the iterator.
    """
    for stage in module.stages:
        for path, tensor in stage.state_dict(keep_vars=True).items():
            if path != stage.tied_name:
                yield path, with_all_columns_and_rows(tensor, tensor.detach())


def save_pipeline_checkpoint(module: torch.nn.Module, directory: str | Path, *, config: Any = None) -> None:
    """Write a checkpoint that `from_pretrained` loads; every rank must call it.

    Existing weights in the directory are replaced, and kept if a rank could not write; other files are kept. `config`
    is written instead of the model's own.

    Raises:
        ShardwrightError: A rank could not write. Old weights are kept unless files were already being moved.
    """
    from torch import distributed

    module = getattr(module, "module", module)
    output = Path(directory)
    unfinished = output.parent / f".{output.name}.unfinished"
    first = distributed.get_rank() == 0
    prefix = f"stage-{module.stage_id:05d}"
    writes = module.data_parallel_rank == 0

    def make_empty() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)

    def finish() -> None:
        name_shards(sorted(unfinished.glob("stage-*.safetensors")))
        parts = module.source
        written = deepcopy(parts.config if config is None else config)
        written.architectures = [parts.model_class]
        written.dtype = next(module.stages[0].parameters()).dtype
        written.save_pretrained(unfinished)
        if parts.generation_config is not None:
            parts.generation_config.save_pretrained(unfinished)
        publish(unfinished, output)

    try:
        _together(make_empty, here=first, what=f"{unfinished} cannot be made")
        _together(lambda: _write_tensors(module, unfinished, prefix), here=writes, what=f"{output} cannot be written")
        _together(finish, here=first, what=f"{output} cannot be written")
    finally:
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)


def save_cut(directory: Path, stages: Sequence[PipelineStage], *, tensor_parallel_size: int) -> None:
    """Record the stages of a training in its checkpoint directory."""
    cut = _cut(stages, tensor_parallel_size)
    write_files({CUT: json.dumps(cut) + "\n"}, directory, force=True)


def check_cut(directory: Path, stages: Sequence[PipelineStage], *, tensor_parallel_size: int) -> None:
    """Check that a checkpoint has the same stages as this run: DeepSpeed saves tensors and states per rank.

    A checkpoint without recorded stages is accepted.

    Raises:
        UsageError: it has other stages; the errors name the differences.
        RefusedInputError: the file with the stages is not a JSON object.
    """
    path = directory / CUT
    if not path.exists():
        return
    try:
        saved = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise RefusedInputError(ConfigError(where=str(path), rule=f"is not a JSON object ({error!r})")) from None
    now = _cut(stages, tensor_parallel_size)
    if errors := [
        ConfigError(
            where=f"{path.name}: {name}",
            value=saved.get(name),
            rule=f"must equal the value of this run, {value}",
            fix=_FIX,
        )
        for name, value in now.items()
        if saved.get(name) != value
    ]:
        raise UsageError(errors)


def _cut(stages: Sequence[PipelineStage], tensor_parallel_size: int) -> dict[str, Any]:
    borders = ", ".join(f"{stage.first_layer}-{stage.end_layer}" for stage in stages)
    return {"stages": borders, "tensor_parallel_size": tensor_parallel_size}


def _together(work: Callable[[], None], *, here: bool, what: str) -> None:
    """Run `work` on the ranks with `here`, and raise an error on all ranks if one fails."""
    failure = None
    if here:
        try:
            work()
        except Exception as error:
            # Otherwise the others would wait for this rank.
            failure = error
    failed = gathered(failure is not None)
    if failure is not None:
        raise ShardwrightError(f"{what}: {failure}") from failure
    if any(failed):
        raise ShardwrightError(f"{what} on another rank")


def _write_tensors(module: torch.nn.Module, directory: Path, prefix: str) -> None:
    """Write this rank's tensors in files of at most `SHARD_BYTES`, one of which is in memory at a time."""
    part: dict[str, Tensor] = {}
    failure = None
    number = 0

    def write() -> None:
        nonlocal failure, number
        try:
            if part and failure is None:
                save_tensors(part, directory / f"{prefix}-{number:05d}.safetensors")
        except Exception as error:
            # The other ranks of the group still gather with this rank.
            failure = error
        part.clear()
        number += 1

    for name, tensor in pipeline_tensors(module):
        # Only the first tensor-parallel rank writes; the others take part in gathering.
        if module.tensor_parallel_rank == 0:
            if part and sum(other.nbytes for other in part.values()) + tensor.nbytes > SHARD_BYTES:
                write()
            part[name] = tensor.cpu().contiguous()
    write()
    if failure is not None:
        raise failure
