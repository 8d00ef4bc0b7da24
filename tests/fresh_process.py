"""A process as if it had not trained yet: several Trainers of different engines can train in it one after the other."""

from __future__ import annotations

import os
import sys

from shardwright.plugins.deepspeed.auto_tp import forget_tensor_parallel
from shardwright.plugins.deepspeed.ulysses import forget_sequence_parallelism


def forget_last_run() -> None:
    """Bring the singletons of Accelerate, Transformers and DeepSpeed back to a fresh process; the process group stays.

    ZeRO-3 replaces ``torch.nn.functional.linear`` for the whole process and leaves it so (deepspeed 0.19.8,
    partition_parameters.py).
    """
    import gc

    import torch
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    forget_sequence_parallelism()
    forget_tensor_parallel()
    _forget_parallel_groups()
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        os.environ.pop(name, None)
    torch.nn.functional.linear = torch._C._nn.linear
    gc.collect()


def _forget_parallel_groups() -> None:
    """Let the next engine form its own groups of ranks; deepspeed 0.19.8 keeps those of the last in utils/groups.py."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.utils import groups

    groups.mpu = groups.mesh_device = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    for kept in (
        groups._EXPERT_PARALLEL_GROUP,
        groups._EXPERT_PARALLEL_GROUP_RANKS,
        groups._EXPERT_DATA_PARALLEL_GROUP,
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
        groups._ALL_TO_ALL_GROUP,
    ):
        kept.clear()
