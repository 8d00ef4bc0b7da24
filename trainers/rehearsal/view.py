"""View of the user's working directory for a rehearsed script: it reads what lies there, and changes nothing of it.

Directories are made anew and files are links to the user's. What the script writes takes the place of a link, so that
it lands in the view, which ends with the rehearsal.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ShardwrightError

MOST_FILES = 20_000
"""Files that a view shows at most; a link takes about 50 microseconds."""
LARGEST_COPY_BYTES = 64 * 2**20
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".onnx", ".gguf"})
"""Files that libraries write without Python, through a link: they are copied, and left out where they are large."""
_LEFT_OUT = frozenset({"__pycache__", "node_modules"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.truncate": 1, "os.rename": 2}
"""Audit events of Python that change files, and how many of their arguments are paths."""


def make_view(here: Path, view: Path, exchanged: Mapping[Path, Path], *, apart: Path) -> bool:
    """Show a directory as it is, and return whether all of it is shown.

    Hidden directories, environments, caches and weights over 64 MiB are left out.

    Args:
        here: What is shown.
        view: Where; a new directory.
        exchanged: Files and directories in whose place others are shown, by their absolute path.
        apart: Directory that is never shown: the rehearsal's own.
    """
    view.mkdir()
    for shown, (source, target) in enumerate(_entries(here.absolute(), view, exchanged, apart)):
        if shown >= MOST_FILES:
            return False
        if source.suffix in _WEIGHTS and source not in exchanged.values():
            if source.stat().st_size <= LARGEST_COPY_BYTES:
                shutil.copyfile(source, target)
        else:
            target.symlink_to(source)
    return True


def _entries(here: Path, view: Path, exchanged: Mapping[Path, Path], apart: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each file with its place in the view, whose directories it makes."""
    for name, directories, files in os.walk(here):
        directory = Path(name)
        place = view / directory.relative_to(here)
        place.mkdir(exist_ok=True)
        for one in list(directories):
            source = directory / one
            if source in exchanged or source.is_symlink():
                yield exchanged.get(source, source), place / one
            elif not (one.startswith(".") or one in _LEFT_OUT or source == apart or (source / "pyvenv.cfg").is_file()):
                continue
            directories.remove(one)
        for one in files:
            source = directory / one
            yield exchanged.get(source, source), place / one


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewGuard:
    """Audit hook that keeps the user's files: it takes links out of the way of writers, and refuses other writes."""

    view: Path
    """Where the script runs."""
    kept: tuple[Path, ...]
    """Directories in which nothing may change: the user's working directory and the script's own."""
    free: tuple[Path, ...]
    """Directories below them in which anything may: the rehearsal's own."""

    @classmethod
    def of(cls, view: Path, *kept: Path, free: Path) -> ViewGuard:
        """Return a guard; a directory that holds all temporary files is not kept."""
        temporary = Path(tempfile.gettempdir()).resolve()
        places = {place.resolve() for place in kept}
        held = tuple(place for place in sorted(places) if not temporary.is_relative_to(place))
        return cls(view=view.resolve(), kept=held, free=(free.resolve(),))

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Hear of one event before it happens, as `sys.addaudithook` tells it."""
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes | os.PathLike) and flags & _WRITES:
                self._written(Path(os.fsdecode(path)).absolute(), keeps=not flags & os.O_TRUNC)
        elif event in _CHANGES:
            for path in arguments[: _CHANGES[event]]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._refuse_kept(Path(os.fsdecode(path)).absolute())

    def _written(self, path: Path, *, keeps: bool) -> None:
        if path.is_symlink() and path.is_relative_to(self.view):
            source = path.resolve()
            path.unlink(missing_ok=True)
            if keeps and source.is_file():
                shutil.copyfile(source, path)
        else:
            self._refuse_kept(path)

    def _refuse_kept(self, path: Path) -> None:
        """Refuse a change where the user's files lie; caches of libraries and Python are theirs to fill."""
        place = path.parent.resolve() / path.name
        if any(place.is_relative_to(free) for free in self.free):
            return
        for kept in self.kept:
            if place.is_relative_to(kept):
                parts = place.relative_to(kept).parts
                if not any(part.startswith(".") or part in _LEFT_OUT for part in parts):
                    raise ShardwrightError(
                        f"the script writes {place}, and a rehearsal changes none of your files: write to output_dir, "
                        "or relative to the working directory"
                    )
