"""The files of a teacher and of a student: tensors stream from one to the other, and a directory appears whole."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.errors import Fault, RefusedInputError, ShardwrightError, UsageError
from ...plugins.hub import ModelSource

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD_BYTES = 5 * 10**9
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "generation_config.json",
)


def teacher_directory(source: ModelSource, where: str) -> Path:
    """Return a local directory with the teacher's weights; those of a Hub repository are fetched first.

    Raises:
        UsageError: a local `config.json` without weights.
        ShardwrightError: the Hub does not give the files.
    """
    local = Path(where).expanduser()
    if local.exists():
        if not local.is_dir():
            raise UsageError(Fault(where="teacher", value=where, rule="is a file", fix="name the model's directory"))
        return local
    from huggingface_hub import snapshot_download

    try:
        patterns = ["config.json", "*.safetensors", INDEX, *_COPIED]
        return Path(snapshot_download(where, revision=source.revision, allow_patterns=patterns))
    except Exception as error:
        # Whatever the connection, the cache or the disk raises.
        raise ShardwrightError(f"teacher = {where!r}: cannot be fetched ({type(error).__name__}: {error})") from None


class TeacherTensors:
    """The tensors of a safetensors checkpoint, read one at a time."""

    def __init__(self, directory: Path) -> None:
        self.files = _files_by_name(directory)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every name with its tensor on the CPU, file by file."""
        from safetensors import SafetensorError, safe_open

        for file in sorted(set(self.files.values())):
            try:
                with safe_open(file, framework="pt") as stored:
                    for name in sorted(stored.keys()):
                        yield name, stored.get_tensor(name)
            except SafetensorError as error:
                rule = f"is not a whole safetensors file ({error})"
                raise RefusedInputError(Fault(where=str(file), rule=rule, fix="download it again")) from None


def _files_by_name(directory: Path) -> dict[str, Path]:
    from safetensors import SafetensorError, safe_open

    index = directory / INDEX
    try:
        if index.is_file():
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        else:
            names = {_SINGLE} if (directory / _SINGLE).is_file() else set()
        files = [directory / name for name in names if Path(name).name == name]
        if not files:
            fix = "load it and save it again with save_pretrained, which writes safetensors"
            raise RefusedInputError(Fault(where=str(directory), rule="has no safetensors weights", fix=fix))
        found: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as stored:
                found |= dict.fromkeys(stored.keys(), file)
        return found
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ShardwrightError):
            raise
        raise RefusedInputError(Fault(where=str(directory), rule=f"has damaged weight files ({error})")) from None


@dataclass(kw_only=True)
class StudentWriter:
    """Collects the files of a student in a directory that nobody else sees yet."""

    directory: Path
    """Where the files are made."""
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of the shard that is being filled."""
    pending_bytes: int = 0
    """Their size."""
    written: list[list[str]] = field(default_factory=list)
    """Names in each finished shard."""
    total_bytes: int = 0
    """Size of all tensors so far."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor; a full shard goes to disk."""
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > _SHARD_BYTES:
            self._flush()
        # Slices of one tensor, and tied ones, may share memory, which the format refuses.
        self.pending[name] = tensor.contiguous().clone()
        self.pending_bytes += size
        self.total_bytes += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self.pending, self.directory / f"shard-{len(self.written)}", metadata={"format": "pt"})
        self.written.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def finish(self) -> None:
        """Write the last shard and give all of them the names that Transformers reads."""
        self._flush()
        count = len(self.written)
        if count == 1:
            (self.directory / "shard-0").rename(self.directory / _SINGLE)
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self.written):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self.directory / f"shard-{index}").rename(self.directory / file)
            weight_map |= dict.fromkeys(names, file)
        self.write_json(INDEX, {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map})

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a JSON file."""
        (self.directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    def copy_from(self, teacher: Path) -> None:
        """Copy the tokenizer and the generation settings."""
        for name in _COPIED:
            if (teacher / name).is_file():
                shutil.copyfile(teacher / name, self.directory / name)


def output_faults(output: Path, teacher: str, *, force: bool) -> list[Fault]:
    """Return why a student cannot be written to `output`."""
    where, value = "--output-dir", str(output)
    if output.exists() and not output.is_dir():
        return [Fault(where=where, value=value, rule="is a file", fix="name a directory")]
    if output.is_dir() and output.resolve() == Path(teacher).expanduser().resolve():
        return [Fault(where=where, value=value, rule="is the teacher itself", fix="name another directory")]
    if not force and output.is_dir() and any(output.iterdir()):
        fix = "use --force to replace the model in it"
        return [Fault(where=where, value=value, rule="exists and is not empty", fix=fix)]
    return []


@contextmanager
def student_writer(output: Path) -> Iterator[StudentWriter]:
    """Yield a writer whose files appear in `output` together at the end, or not at all.

    Of a model that lies there, weight files that the new one does not replace are removed.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        yield StudentWriter(directory=temporary)
        if output.is_dir() and any(output.iterdir()):
            for stale in (*output.glob("model*.safetensors"), output / INDEX):
                stale.unlink(missing_ok=True)
            for file in temporary.iterdir():
                file.replace(output / file.name)
        else:
            temporary.chmod(0o755)
            temporary.replace(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
