"""Shared memory that DeepSpeed leaves behind on CPU ranks: released once all ranks have it, removed where a rank died.

Seen with deepspeed 0.19.8 (`ops/csrc/cpu/comm/shm.cpp`): where `LOCAL_SIZE` is the world size, as DeepSpeed's own
launcher sets it, each rank creates `/dev/shm/deepspeed_allreduce_buffer_<uid>_<address>_<port>_<rank>` of 69 MB, maps
those of all ranks, and never unlinks it. A mapping outlives its name, so the name can go as soon as every rank has
mapped every file.
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = Path("/dev/shm")  # noqa: S108
_PREFIX = "deepspeed_allreduce_buffer"


def release_buffer() -> None:
    """Unlink this rank's file after a barrier, behind which every rank has mapped it; call it once DeepSpeed is up."""
    import torch.distributed

    own = DIRECTORY / "_".join(
        [_PREFIX, str(os.getuid()), *(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))]
    )
    # The variable is the same on all ranks, so that all of them come here or none does.
    if os.environ.get("LOCAL_SIZE") != os.environ.get("WORLD_SIZE"):
        return
    torch.distributed.barrier()
    own.unlink(missing_ok=True)


def remove_buffers(port: int) -> None:
    """Remove what the ranks that met at `port` left, after they have ended, however they did."""
    for file in DIRECTORY.glob(f"{_PREFIX}_{os.getuid()}_*_{port}_*"):
        file.unlink(missing_ok=True)
