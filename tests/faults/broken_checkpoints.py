"""Damages of a checkpoint: each takes the directory of a whole one and leaves what a disk or a person might."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

RECORD = "checkpoint_complete.json"


def _largest(directory: Path, *, pattern: str = "*") -> Path:
    return max((one for one in directory.rglob(pattern) if one.is_file()), key=lambda one: one.stat().st_size)


def _state(directory: Path) -> Path:
    """The optimizer's file: DDP's, FSDP2's or the first of DeepSpeed's."""
    for pattern in ("optimizer.pt", "optimizer.bin", "*optim_states.pt"):
        if found := sorted(directory.rglob(pattern)):
            return found[0]
    raise AssertionError(f"no optimizer in {directory}")


def drop_optimizer(directory: Path) -> None:
    _state(directory).unlink()


def drop_scheduler(directory: Path) -> None:
    for path in directory.rglob("scheduler.pt"):
        path.unlink()
    for path in directory.rglob("*model_states.pt"):
        path.unlink()


def drop_trainer_state(directory: Path) -> None:
    (directory / "trainer_state.json").unlink()


def drop_random_state(directory: Path) -> None:
    (directory / "rng_state_1.pth").unlink()


def drop_record(directory: Path) -> None:
    (directory / RECORD).unlink()


def truncate_largest(directory: Path) -> None:
    path = _largest(directory)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty_trainer_state(directory: Path) -> None:
    (directory / "trainer_state.json").write_bytes(b"")


def flip_weights(directory: Path) -> None:
    _flip(_largest(directory, pattern="*.safetensors"))


def flip_optimizer(directory: Path) -> None:
    _flip(_state(directory))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def swap_ranks(directory: Path) -> None:
    first, second = directory / "rng_state_0.pth", directory / "rng_state_1.pth"
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def garbage_record(directory: Path) -> None:
    (directory / RECORD).write_bytes(b'{"schema_version": 1, "files": ')


DAMAGES: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        drop_optimizer,
        drop_scheduler,
        drop_trainer_state,
        drop_random_state,
        drop_record,
        truncate_largest,
        empty_trainer_state,
        flip_weights,
        flip_optimizer,
        swap_ranks,
        garbage_record,
    )
}
