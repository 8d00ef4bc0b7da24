"""A pipeline's weights as a normal Hugging Face checkpoint, written by all stages together.

Every stage's first data-parallel rank writes its own tensors beside the checkpoint, the first rank names them all,
writes the index and moves everything into its place; no rank gathers another stage's. The directory must be one that
all of these ranks see.

An interrupted save is never taken for a whole checkpoint of old and new weights: see `plugins/safetensors/writing.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.write import write_files
from ...ds_configs.specs.errors import Fault, RefusedInputError, ShardwrightError, UsageError
from ...ds_configs.specs.stages import PipelineStage
from ..safetensors.writing import SHARD_BYTES, name_shards, publish, save_tensors
from .tensor_parallel import whole_tensor

if TYPE_CHECKING:
    from torch import Tensor

CUT = "pipeline_cut.json"
"""Beside the state of a training: the stages that it belongs to."""
_GO_ON = "resume with the stages of the checkpoint, or start anew from its weights: PipelineTrainer(model=directory)"


def pipeline_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of this rank's stages under the names of the model's checkpoint, tied ones once.

    With tensor parallelism each is gathered in its turn, and every rank of a group must exhaust the iterator.

    Args:
        module: What `build_pipeline_module` made, without the engine.
    """
    for stage in module.stages:
        for path, tensor in stage.state_dict().items():
            if path != stage.tied_name:
                module_path, _, name = path.rpartition(".")
                yield path, whole_tensor(stage.get_submodule(module_path), name, tensor.detach())


def save_pipeline_checkpoint(module: Any, directory: str | Path, *, config: Any = None) -> None:
    """Write a checkpoint that `from_pretrained` loads; every rank must call it.

    Args:
        module: What `build_pipeline_module` made, or the DeepSpeed engine around it.
        directory: Where to; weights that lie there are replaced, other files stay.
        config: Config to write; `None` for the model's own.

    Raises:
        ShardwrightError: A rank could not write; unless files were already being moved, nothing was replaced.
    """
    from torch import distributed

    module = getattr(module, "module", module)
    output = Path(directory)
    unfinished = output.parent / f".{output.name}.unfinished"
    first = distributed.get_rank() == 0
    prefix = f"stage-{module.stage_id:05d}"
    writes = module.data_parallel_rank == 0
    try:
        _together(lambda: _make_empty(unfinished), here=first, what=f"{unfinished} cannot be made")
        _together(lambda: _write_tensors(module, unfinished, prefix), here=writes, what=f"{output} cannot be written")
        _together(lambda: _finish(module, unfinished, output, config), here=first, what=f"{output} cannot be written")
    finally:
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)


def save_cut(directory: Path, stages: Sequence[PipelineStage], *, tensor_parallel_size: int, dual_pipe: bool) -> None:
    """Write beside the state of a training to which stages it belongs."""
    cut = _cut(stages, tensor_parallel_size, dual_pipe)
    write_files({CUT: json.dumps(cut) + "\n"}, directory, force=True)


def check_cut(directory: Path, stages: Sequence[PipelineStage], *, tensor_parallel_size: int, dual_pipe: bool) -> None:
    """Refuse to go on with a training of other stages: DeepSpeed keeps each rank's tensors and optimizer states.

    A checkpoint that names no stages is taken.

    Raises:
        UsageError: it was cut otherwise; the fault names how.
        RefusedInputError: what names the stages is no JSON object.
    """
    path = directory / CUT
    if not path.exists():
        return
    try:
        saved = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise RefusedInputError(Fault(where=str(path), rule=f"is not a JSON object ({error!r})")) from None
    now = _cut(stages, tensor_parallel_size, dual_pipe)
    if faults := [
        Fault(where=f"{path.name}: {name}", value=saved.get(name), rule=f"this training has {value}", fix=_GO_ON)
        for name, value in now.items()
        if saved.get(name) != value
    ]:
        raise UsageError(faults)


def _cut(stages: Sequence[PipelineStage], tensor_parallel_size: int, dual_pipe: bool) -> dict[str, Any]:
    borders = ", ".join(f"{stage.first_layer}-{stage.end_layer}" for stage in stages)
    return {"stages": borders, "tensor_parallel_size": tensor_parallel_size, "dual_pipe": dual_pipe}


def _together(work: Callable[[], None], *, here: bool, what: str) -> None:
    """Work on the ranks where it is `here`, and fail on all of them when one fails."""
    import torch
    from torch import distributed

    failure = None
    if here:
        try:
            work()
        except Exception as error:
            # The others would wait for this rank otherwise.
            failure = error
    on_cpu = distributed.get_backend() == "gloo"
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    failures = torch.tensor(int(failure is not None), device=device)
    distributed.all_reduce(failures)
    if failure is not None:
        raise ShardwrightError(f"{what}: {failure}") from failure
    if failures.item():
        raise ShardwrightError(f"{what} on another rank")


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _write_tensors(module: Any, directory: Path, prefix: str) -> None:
    if module.tensor_parallel_rank:
        # Takes part in gathering each tensor and keeps none.
        for _ in pipeline_tensors(module):
            pass
        return
    failure = None
    for number, part in enumerate(_files((name, tensor.cpu()) for name, tensor in pipeline_tensors(module))):
        try:
            if failure is None:
                save_tensors(part, directory / f"{prefix}-{number:05d}.safetensors")
        except Exception as error:
            # The group goes on gathering with this rank.
            failure = error
    if failure is not None:
        raise failure


def _files(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Divide tensors, in their order, into files of at most `SHARD_BYTES`; one file is held at a time."""
    part: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if part and sum(each.nbytes for each in part.values()) + tensor.nbytes > SHARD_BYTES:
            yield part
            part = {}
        part[name] = tensor.contiguous()
    if part:
        yield part


def _finish(module: Any, unfinished: Path, output: Path, config: Any) -> None:
    """Give the files their names, write index and config, and move all into their place, the index last."""
    name_shards(sorted(unfinished.glob("stage-*.safetensors")))
    parts = module.source
    written = deepcopy(parts.config if config is None else config)
    written.architectures = [parts.model_class]
    written.dtype = next(module.stages[0].parameters()).dtype
    written.save_pretrained(unfinished)
    if parts.generation_config is not None:
        parts.generation_config.save_pretrained(unfinished)
    publish(unfinished, output)
