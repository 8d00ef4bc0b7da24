"""Turns an error of a full disk into one line: the disk, its free bytes, and what remains to resume from."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...ds_configs.specs.errors import ShardwrightError
from ...ds_configs.specs.units import gigabytes

_ERRORS = {errno.ENOSPC: "is full", errno.EDQUOT: "has no quota left", errno.EFBIG: "does not take files of this size"}
_TEXTS = {"os error 28": "is full", "os error 122": "has no quota left", "os error 27": _ERRORS[errno.EFBIG]}
"""Of safetensors, which is written in Rust."""
_TORCH_WRITER = ("inline_container.cc", "PytorchStreamWriter failed")
"""`torch.save` reports a failed write without its cause (torch 2.13, caffe2/serialize/inline_container.cc)."""


@contextmanager
def full_disk_errors(directory: Path) -> Iterator[None]:
    """Raise one error for a write that failed inside the block because the disk of a directory takes no more.

    Raises:
        ShardwrightError: the disk is full, the quota is used up, or a file is too large.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        rule = _ERRORS.get(getattr(error, "errno", None) or 0) if isinstance(error, OSError) else None
        rule = rule or next((rule for part, rule in _TEXTS.items() if part in text), None)
        if rule is None and not any(part in text for part in _TORCH_WRITER):
            raise
        where = next(path for path in (directory, *directory.parents) if path.is_dir())
        free = gigabytes(shutil.disk_usage(where).free)
        raise ShardwrightError(
            f"{directory}: the disk {rule or 'did not take a file of the checkpoint'} ({free} GB free). Earlier "
            "complete checkpoints are unchanged: free space, or lower save_total_limit, then resume"
        ) from error
