"""Writes that fail because the disk takes no more, from each library that writes checkpoints."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.trainers.checkpoints import full_disk_errors

TENSOR = torch.zeros(2**20)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files of at most 64 KiB, beyond which a write fails."""
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def raised(number: int) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        raise OSError(number, "of the kernel", str(file))

    return write


@pytest.mark.parametrize(
    "write",
    [
        lambda file: torch.save({"state": TENSOR}, file),
        lambda file: save_file({"weight": TENSOR}, file),
        lambda file: file.write_bytes(bytes(2**20)),
        raised(errno.ENOSPC),
    ],
    ids=["torch", "safetensors", "python", "full"],
)
def test_a_disk_that_takes_no_more_is_named(write: Callable[[Path], None], small_files: None, tmp_path: Path) -> None:
    with pytest.raises(ShardwrightError) as error, full_disk_errors(tmp_path / "run"):
        write(tmp_path / "file")
    text = str(error.value)
    assert str(tmp_path / "run") in text and "GB free" in text and "then resume" in text
    assert "\n" not in text


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), full_disk_errors(tmp_path):
        (tmp_path / "absent").read_text()
