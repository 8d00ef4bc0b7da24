"""Proves a written checkpoint: a fresh process loads it, and it must answer as the model in memory did."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from ...ds_configs.quantization.layers import LinearLayer
from ...ds_configs.quantization.scheme import QuantizationScheme
from ...plugins.compressed_tensors.layout import layout_differences
from ...plugins.launching.elastic import signal_name
from ...plugins.launching.launch import interpreter
from ...plugins.launching.notes import Notify
from ...plugins.safetensors.reading import load_tensors
from .reload_worker import FACTS, LOGITS

TOLERANCE = 1e-3
"""Largest difference of a logit; both sides compute in the checkpoint's own type on the same device."""
REASON_FILE = "FAILED.txt"
PROBE_TOKENS, PROBE_ROWS = 128, 4
"""Tokens of each row, and rows, that a checkpoint and the model in memory must answer alike."""
_SHOWN_KEYS = 5
# Large models load slowly from network disks onto CPU hosts; only a process that hangs takes longer.
_LONGEST_SECONDS = 6 * 3600.0


def arbitrary_rows(vocab_size: int, longest: int | None) -> list[list[int]]:
    """Return rows of token ids for models without a text, of at most the `longest` tokens that they have places for."""
    length = min(PROBE_TOKENS, longest or PROBE_TOKENS)
    # A stride that shares no divisor with usual vocabularies visits tokens all over them, the same ones everywhere.
    return [[(7919 * (row * length + place) + 31) % vocab_size for place in range(length)] for row in range(PROBE_ROWS)]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Findings about a written checkpoint."""

    faults: tuple[str, ...]
    """Everything wrong with it; empty when it passed."""
    largest_logit_difference: float | None
    """Against the model in memory; `None` when it did not load."""
    compared_tokens: int
    """Tokens whose logits were compared."""
    packed_layers: int
    """Layers whose stored tensors are as the scheme says."""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    @property
    def reason(self) -> str:
        """Everything wrong in one line."""
        return "; ".join(self.faults)

    def facts(self) -> list[tuple[str, str]]:
        """Return what was checked, for tables."""
        difference = self.largest_logit_difference
        if difference is None:
            return [("reloaded in a fresh process", "no: Transformers needs optimum or gptqmodel for this format")]
        return [
            ("reloaded in a fresh process", "no key missing or left over"),
            (
                "largest difference of a logit",
                f"{difference:g} on {self.compared_tokens:,} tokens (allowed {TOLERANCE:g})",
            ),
            ("matrices stored as the scheme says", f"{self.packed_layers:,}" if self.packed_layers else "dense export"),
        ]


UNPROVEN = Verification(faults=(), largest_logit_difference=None, compared_tokens=0, packed_layers=0)
"""For formats that Transformers does not load without further packages."""


@dataclass(frozen=True, kw_only=True)
class ReferenceLogits:
    """Logits of the model in memory for a few tokens."""

    tokens: tuple[tuple[int, ...], ...]
    """Token ids of each row."""
    logits: tuple[Any, ...]
    """fp32 [S, V] of each row."""
    device: str
    """Where they were computed."""

    def verify(
        self,
        directory: Path,
        *,
        layers: Sequence[LinearLayer],
        scheme: QuantizationScheme | None,
        expected_bytes: int | None = None,
        tolerance: float = TOLERANCE,
        timeout_seconds: float = _LONGEST_SECONDS,
    ) -> Verification:
        """Load a checkpoint in a fresh process and compare keys, stored layout and logits with those in memory.

        Args:
            directory: The checkpoint.
            layers: The layers that were quantized.
            scheme: How they are stored; `None` for a dense checkpoint.
            expected_bytes: Bytes of all tensors as computed before; `None` leaves the sum unchecked.
            tolerance: Largest allowed difference of a logit.
            timeout_seconds: When the fresh process is given up.
        """
        faults = layout_differences(directory, scheme, layers, expected_bytes=expected_bytes)
        packed = 0 if scheme is None or faults else len(layers)
        difference = None
        with tempfile.TemporaryDirectory(prefix="shardwright-verify-") as work:
            failure = _reload(directory, Path(work), self, timeout_seconds)
            if failure:
                faults.append(failure)
            else:
                found = json.loads((Path(work) / FACTS).read_text(encoding="utf-8"))
                for key, names in found.items():
                    if names:
                        shown = ", ".join(names[:_SHOWN_KEYS])
                        faults.append(f"{len(names)} {key.replace('_', ' ')} when reloaded: {shown}")
                difference = _largest_difference(Path(work) / LOGITS, self)
                if not difference <= tolerance:
                    faults.append(f"reloaded logits differ by {difference:g}, more than {tolerance:g}")
        return Verification(
            faults=tuple(faults),
            largest_logit_difference=difference,
            compared_tokens=sum(map(len, self.tokens)),
            packed_layers=packed,
        )


def reference_logits(model: Any, token_rows: Sequence[Sequence[int]]) -> ReferenceLogits:
    """Let the model in memory answer."""
    import torch

    device = next(model.parameters()).device
    logits = []
    with torch.inference_mode():
        for row in token_rows:
            ids_1S = torch.tensor([list(row)], device=device)
            logits.append(model(input_ids=ids_1S).logits[0].float().cpu().contiguous())
    return ReferenceLogits(tokens=tuple(map(tuple, token_rows)), logits=tuple(logits), device=str(device))


def _reload(directory: Path, work: Path, reference: ReferenceLogits, timeout_seconds: float) -> str | None:
    import torch
    from safetensors.torch import save_file

    probe = {str(index): torch.tensor(row) for index, row in enumerate(reference.tokens)}
    save_file(probe, str(work / "probe.safetensors"))
    command = [interpreter(), "-m", f"{__package__}.reload_worker", str(directory), str(work), reference.device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"it was not loaded and run within {timeout_seconds:.0f} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"the process that loads it was ended by {signal_name(-done.returncode)}"
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return f"it cannot be loaded and run: {lines[-1] if lines else f'exit code {done.returncode}'}"


def _largest_difference(file: Path, reference: ReferenceLogits) -> float:
    import torch

    answers = load_tensors(file)
    largest = [(answers[str(index)] - logits).abs().max() for index, logits in enumerate(reference.logits)]
    # Not Python's max, which skips a NaN that is not the first.
    return float(torch.stack(largest).max())


def fail_output(staging: Path, output_dir: Path, verification: Verification) -> Path:
    """Keep a checkpoint that did not pass under a name that says so, with the reason in it; return where."""
    output = output_dir.resolve()
    place = output.with_name(f"{output.name}.failed")
    number = 2
    while place.exists():
        place = output.with_name(f"{output.name}.failed-{number}")
        number += 1
    (staging / REASON_FILE).write_text("\n".join(verification.faults) + "\n", encoding="utf-8")
    try:
        staging.rename(place)
    except OSError:
        # The output is a mount of its own.
        place = staging.rename(output / "failed")
    place.chmod(0o755)
    return place


def discard_failed(output_dir: Path, notify: Notify) -> None:
    """Remove what `fail_output` kept of earlier runs, once one has passed."""
    output = output_dir.resolve()
    for place in (*output.parent.glob(f"{escape(output.name)}.failed*"), output / "failed"):
        if (place / REASON_FILE).is_file():
            shutil.rmtree(place, ignore_errors=True)
            notify(f"removed {place}, which an earlier run left")
