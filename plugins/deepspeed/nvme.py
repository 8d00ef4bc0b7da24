"""Resuming a run whose optimizer states lie on NVMe.

Seen with deepspeed 0.19.8. For such a run `load_checkpoint` (`runtime/engine.py:4456`) skips the optimizer's own file
and copies the checkpoint's swap files into place instead. Four things are lost without a word:

- the swapper knows only tensors that exist already, and a fresh engine has no moments, so their files are never read;
- the count of steps, which corrects Adam's bias, starts again;
- learning rates and other values of the parameter groups stay those of the first step until the scheduler's next;
- sub-groups too small to be swapped (norms) keep their initial fp32 weights, which then overwrite the loaded ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any


@cache
def restore_optimizer_states_from_nvme() -> None:
    """Let every DeepSpeed engine of this process restore its whole optimizer from an NVMe checkpoint."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    load_checkpoint: Callable[..., Any] = DeepSpeedEngine.load_checkpoint
    signature = inspect.signature(load_checkpoint)

    @wraps(load_checkpoint)
    def load(engine: Any, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(engine, load_dir, tag, *args, **kwargs).arguments
        wanted = asked.get("load_optimizer_states", True) and not asked.get("load_module_only", False)
        if not (wanted and engine.zero_nvme_offload_optimizer()):
            return load_checkpoint(engine, load_dir, tag, *args, **kwargs)
        _create_states(engine.optimizer)
        path, client_state = load_checkpoint(engine, load_dir, tag, *args, **kwargs)
        if path is not None:
            _restore(engine.optimizer, _saved_optimizer(engine, load_dir, tag or _latest_tag(load_dir)))
        return path, client_state

    DeepSpeedEngine.load_checkpoint = load


def _create_states(zero: Any) -> None:
    """Step once with a learning rate of zero: the weights stay, and the swapper knows every state."""
    import torch

    groups = zero.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    timers: set[str] = set()
    for index, weights in enumerate(zero.fp32_partitioned_groups_flat):
        zero._prepare_sub_group(index, timers)
        gradient, weights.grad = weights.grad, torch.zeros_like(weights)
        zero._optimizer_step(index)
        weights.grad = gradient
        zero._release_sub_group(index, timers)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def _latest_tag(load_dir: str) -> str:
    from pathlib import Path

    return (Path(load_dir) / "latest").read_text(encoding="utf-8").strip()


def _saved_optimizer(engine: Any, load_dir: str, tag: str) -> Any:
    import torch.distributed as dist

    rank = dist.get_rank(group=engine.optimizer.dp_process_group)
    return engine._get_all_zero_checkpoints(load_dir, tag)[rank]


def _restore(zero: Any, saved: Any) -> None:
    """Put back what the swap files do not hold: step counts, parameter groups, and sub-groups that are not swapped."""
    base = saved["optimizer_state_dict"]
    for group, values in zip(zero.optimizer.param_groups, base["param_groups"], strict=True):
        group |= {key: value for key, value in values.items() if key != "params"}
    if zero.persistent_parameters:
        zero.persistent_parameters[0].partition(zero.persistent_parameters)
    for index, weights in enumerate(zero.fp32_partitioned_groups_flat):
        swapped = zero._swappable_optimizer_subgroup(index)
        state = zero.optimizer.state[weights]
        for name, value in base["state"][index].items():
            if not hasattr(value, "copy_"):
                state[name] = value
            elif not swapped:
                state[name].copy_(value)
        if not swapped:
            weights.data.copy_(saved["fp32_flat_groups"][index])
            zero._reassign_or_swap_out_partitioned_parameters(index)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
