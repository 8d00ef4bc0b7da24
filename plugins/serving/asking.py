"""Questions to vLLM in its own environment: log-probabilities and continuations of rows of tokens, and its speed."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ShardwrightError

_WORKER = Path(__file__).with_name("vllm_worker.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A checkpoint that vLLM is to answer on."""

    name: str
    """Key of its answers."""
    path: str
    """Directory, without brackets: vLLM takes those for a pattern."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A prompt that is read, and tokens that are written behind it, with nothing beside it."""

    prompt: list[int]
    """Tokens to read."""
    decoded_tokens: int
    """Tokens to write."""
    repeats: int
    """Timed runs, of which the median counts."""


def ask_vllm(
    python: Path | str,
    checkpoints: Sequence[Asked],
    rows: Sequence[Sequence[int]],
    *,
    options: Mapping[str, Any],
    answer_tokens: int = 1,
    timed: Timed | None = None,
    python_path: Path | None = None,
    seconds: float | None = None,
) -> dict[str, dict[str, Any]]:
    """Return what one process of vLLM says of each checkpoint, by name; what it refuses has its `error`.

    Args:
        python: Interpreter of the engine's environment.
        checkpoints: What it loads, one after another.
        rows: Tokens that it reads.
        options: Arguments of `vllm.LLM` for all of them.
        answer_tokens: Tokens of the most likely continuation of each row.
        timed: What is timed.
        python_path: Directory on the path of the process, for the small format's loader.
        seconds: Longest time that it may take.

    Raises:
        ShardwrightError: the process ended before it had answered on all of them; ends with what it printed last.
    """
    manifest = {
        "rows": [list(row) for row in rows],
        "checkpoints": [asdict(each) for each in checkpoints],
        "options": dict(options),
        "answer_tokens": answer_tokens,
        "timed": None if timed is None else asdict(timed),
    }
    environment = dict(os.environ)
    # What this interpreter imports is not what the engine's is to import.
    environment.pop("PYTHONPATH", None)
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    with tempfile.TemporaryDirectory() as made:
        question, results, heard = (Path(made) / name for name in ("manifest.json", "results.json", "heard.txt"))
        question.write_text(json.dumps(manifest), encoding="utf-8")
        command = [str(python), str(_WORKER), str(question), str(results)]
        with heard.open("wb") as stream:
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
            words = [line.strip() for line in heard.read_text(errors="replace").splitlines() if line.strip()]
            last = f": {words[-1][:500]}" if words else ""
            raise ShardwrightError(
                f"vLLM ended with {ended} after {len(found)} of {len(checkpoints)} checkpoints{last}"
            )
    return found
