"""Model directories that appear whole: made beside their place under another name, and moved there when complete."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...ds_configs.specs.errors import Fault

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COMPANIONS = (
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
    "processor_config.json",
    "preprocessor_config.json",
    "generation_config.json",
)
"""Files that go with a model whatever becomes of its weights: tokenizer, processors and generation settings."""


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, processors and generation settings."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def output_faults(output: Path, source: str, *, force: bool, what: str) -> list[Fault]:
    """Return why a model made of `source` cannot be written to `output`; `what` names the source in messages."""
    where, value = "--output-dir", str(output)
    if output.exists() and not output.is_dir():
        return [Fault(where=where, value=value, rule="is a file", fix="name a directory")]
    if output.is_dir() and output.resolve() == Path(source).expanduser().resolve():
        return [Fault(where=where, value=value, rule=f"is {what} itself", fix="name another directory")]
    if not force and output.is_dir() and any(output.iterdir()):
        fix = "use --force to replace the model in it"
        return [Fault(where=where, value=value, rule="exists and is not empty", fix=fix)]
    return []


@contextmanager
def appearing_directory(output: Path) -> Iterator[Path]:
    """Yield an empty directory whose files appear in `output` together at the end, or not at all.

    Of a model that lies there, weight files that the new one does not replace are removed.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        yield temporary
        publish(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, output: Path) -> None:
    """Move a finished directory to its place, or its files into a directory that is there already."""
    if output.is_dir() and any(output.iterdir()):
        for stale in (*output.glob("model*.safetensors"), output / INDEX):
            stale.unlink(missing_ok=True)
        for entry in temporary.iterdir():
            if entry.is_dir():
                shutil.rmtree(output / entry.name, ignore_errors=True)
            entry.replace(output / entry.name)
        temporary.rmdir()
    else:
        temporary.chmod(0o755)
        temporary.replace(output)
