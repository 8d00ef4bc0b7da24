"""ZeRO checkpoints of other numbers of ranks: converted to a universal checkpoint when an engine loads them.

Seen with deepspeed 0.19.8: `load_checkpoint` raises for states of another number of ranks (`runtime/engine.py:4748`)
unless they were converted (`checkpoint/ds_to_universal.py`) and `checkpoint.load_universal` is set. Three things are
lost then, of which the first two are put right here and the last refused:

- ZeRO-3 gives every parameter group the weight decay of the first (`runtime/zero/stage3.py:3691`);
- ZeRO-3 gives all its groups one count of steps, a tensor that every group then raises, so that Adam corrects its bias
  for too many steps (`runtime/zero/stage3.py:3681`);
- buffers are not read, since the module's own state is passed over (`runtime/engine.py:4660`).
"""

from __future__ import annotations

import contextlib
import inspect
import io
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ..launching.beside import Beside
from ..transformers.finite_weights import gathered

_START_ANEW = "launch as many ranks as saved it, or start anew from its weights by naming it as the model"


@cache
def load_from_other_ranks() -> None:
    """Let every ZeRO engine of this process load a checkpoint that another number of ranks has saved.

    All ranks must see the directory above the checkpoint, where the converted one lies while it is loaded: about 12
    bytes for each trained parameter, which the first rank writes and every rank reads.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    load_checkpoint: Callable[..., Any] = DeepSpeedEngine.load_checkpoint
    signature = inspect.signature(load_checkpoint)

    @wraps(load_checkpoint)
    def load(engine: Any, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        source = _states(Path(load_dir), tag)
        asked = signature.bind(engine, load_dir, tag, *args, **kwargs).arguments
        wanted = asked.get("load_optimizer_states", True) and not asked.get("load_module_only", False)
        if not wanted or source is None or _saving_ranks(source) in (0, engine.seq_dp_world_size):
            return load_checkpoint(engine, load_dir, tag, *args, **kwargs)
        if faults := _faults(engine, source):
            raise UsageError(faults)
        with _universal(engine, source) as converted, _own_values(engine.optimizer.optimizer):
            return load_checkpoint(engine, str(converted.parent), converted.name, *args, **kwargs)

    DeepSpeedEngine.load_checkpoint = load


def _states(load_dir: Path, tag: str | None) -> Path | None:
    """Return the directory of a checkpoint's states."""
    latest = load_dir / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8").strip()
    return load_dir / tag if tag and (load_dir / tag).is_dir() else None


def _saving_ranks(source: Path) -> int:
    """Return how many ranks divided the optimizer states; 0 where they did not."""
    return len(list(source.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt")))


def _faults(engine: Any, source: Path) -> list[Fault]:
    where, value = "resume: world_size", engine.seq_dp_world_size
    buffers = [
        f"{path}.{name}" if path else name
        for path, module in engine.module.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]
    rules = []
    if engine.zero_nvme_offload_optimizer():
        rules.append("optimizer states on NVMe lie in files of each rank")
    if buffers:
        rules.append(f"DeepSpeed restores no buffers on other ranks, and the model saves {buffers[0]}")
    saved = f"{source.parent.name} was saved by {_saving_ranks(source)} ranks: "
    return [Fault(where=where, value=value, rule=saved + rule, fix=_START_ANEW) for rule in rules]


@contextlib.contextmanager
def _universal(engine: Any, source: Path) -> Iterator[Path]:
    """Convert on the first rank, for which the others wait, and let the engine load it."""
    import torch.distributed as distributed

    directory = source.parent.with_name(f".universal-{source.parent.name}")
    target = directory / source.name
    first = distributed.get_rank() == 0
    conversion = Beside((lambda: _convert(source, target)) if first else None, f"conversion of {source.parent.name}")
    conversion.ended_everywhere(engine.device, wait=True)
    configuration = engine._config
    before = configuration.load_universal_checkpoint
    try:
        if failure := next(filter(None, gathered(_failure(conversion))), None):
            raise ShardwrightError(f"{source.parent.name} could not be converted to other ranks: {failure}")
        configuration.load_universal_checkpoint = True
        yield target
    finally:
        configuration.load_universal_checkpoint = before
        distributed.barrier()
        if first:
            shutil.rmtree(directory, ignore_errors=True)


def _failure(conversion: Beside[None]) -> str | None:
    try:
        conversion.result()
    except Exception as error:
        return repr(error)
    return None


def _convert(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    # Transformers 5.17.0 saves without the `universal_checkpoint_info` that is asked for, which is injected empty.
    asked = Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        ds_to_universal.main(asked)


@contextlib.contextmanager
def _own_values(optimizer: Any) -> Iterator[None]:
    """Give each parameter group its own values back, but for the loaded learning rate, and a count of steps."""
    groups = optimizer.param_groups
    before = [{name: value for name, value in group.items() if name not in ("params", "lr")} for group in groups]
    yield
    for group, own in zip(groups, before, strict=True):
        group |= own
    for state in optimizer.state.values():
        if hasattr(state.get("step"), "clone"):
            state["step"] = state["step"].clone()
