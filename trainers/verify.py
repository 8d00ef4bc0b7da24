"""Verify a written checkpoint: a fresh process loads it and must compute the logits of the model in memory."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ds_configs.quantization.layers import LinearLayer
from ..ds_configs.quantization.scheme import QuantizationScheme
from ..plugins.compressed_tensors import layout_differences
from ..plugins.launching.elastic import signal_name
from ..plugins.launching.launch import interpreter
from ..plugins.safetensors import load_tensors
from ..plugins.transformers.loading import auto_class, text_classes

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

LOGITS, FACTS = "reloaded.safetensors", "reloaded.json"


def main(directory: str, work: str, device: str) -> None:
    """Load the checkpoint, run the probe, and write logits and keys that do not match."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    probe = load_file(str(Path(work) / "probe.safetensors"))
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    architecture = (config.architectures or [""])[0]
    # Other models, such as classifiers, have no automatic class that fits.
    automatic = auto_class(config)
    model_class = automatic if architecture in text_classes() else getattr(transformers, architecture, automatic)
    model, loading = model_class.from_pretrained(
        directory,
        dtype="auto",
        device_map={"": device},
        # Fused experts sum in another order than the calibrated linear layers, a difference of 5e-3 in bf16.
        experts_implementation="eager",
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    model.eval()
    logits_by_row = {}
    with torch.inference_mode():
        for name, ids_S in probe.items():
            logits_by_row[name] = model(input_ids=ids_S[None].to(device)).logits[0].float().cpu().contiguous()
    save_file(logits_by_row, str(Path(work) / LOGITS))
    facts = {
        key: sorted(map(str, loading.get(key) or ())) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    (Path(work) / FACTS).write_text(json.dumps(facts), encoding="utf-8")


TOLERANCE = 1e-3
"""Largest allowed difference of a logit; both models compute in the checkpoint's dtype on the same device."""
REASON_FILE = "FAILED.txt"
PROBE_TOKENS, PROBE_ROWS = 128, 4
"""Tokens per row and rows for comparing logits."""
_SHOWN_KEYS = 5
# Loading a large model from a network disk onto a CPU host is slow; only a process that hangs takes longer.
_LONGEST_SECONDS = 6 * 3600.0


def arbitrary_rows(vocab_size: int, longest: int | None) -> list[list[int]]:
    """Return rows of arbitrary token ids, with at most `longest` tokens, the positions of the model."""
    length = min(PROBE_TOKENS, longest or PROBE_TOKENS)
    # The stride is a prime, so that rows are reproducible and cover the whole vocabulary.
    return [[(7919 * (row * length + index) + 31) % vocab_size for index in range(length)] for row in range(PROBE_ROWS)]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of verifying a written checkpoint."""

    errors: tuple[str, ...]
    """All errors; empty if it passed."""
    largest_logit_difference: float | None
    """Compared with the model in memory; `None` if it did not load."""
    compared_tokens: int
    """Number of tokens whose logits were compared."""
    packed_layers: int
    """Number of layers whose stored tensors match the scheme."""

    @property
    def passed(self) -> bool:
        """Whether there are no errors."""
        return not self.errors

    @property
    def reason(self) -> str:
        """All errors in one line."""
        return "; ".join(self.errors)

    def facts(self) -> list[tuple[str, str]]:
        """Return rows of a table of the checks."""
        difference = self.largest_logit_difference
        if difference is None:
            return [("reloaded in a fresh process", "no: Transformers needs optimum or gptqmodel for this format")]
        return [
            ("reloaded in a fresh process", "no missing or unexpected keys"),
            (
                "largest difference of a logit",
                f"{difference:g} on {self.compared_tokens:,} tokens (allowed {TOLERANCE:g})",
            ),
            ("matrices stored as in the scheme", f"{self.packed_layers:,}" if self.packed_layers else "dense export"),
        ]


UNPROVEN = Verification(errors=(), largest_logit_difference=None, compared_tokens=0, packed_layers=0)
"""For formats that Transformers cannot load without further packages."""


@dataclass(frozen=True, kw_only=True)
class ReferenceLogits:
    """Logits of the model in memory for a few tokens."""

    tokens: tuple[tuple[int, ...], ...]
    """Token ids of each row."""
    logits: tuple[Tensor, ...]
    """fp32 [S, V] of each row."""
    device: str
    """Device on which they were computed."""

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
            scheme: Scheme of the checkpoint; `None`: dense.
            expected_bytes: Predicted size of all tensors; `None`: not checked.
        """
        import torch
        from safetensors.torch import save_file

        errors = layout_differences(directory, scheme, layers, expected_bytes=expected_bytes)
        packed = 0 if scheme is None or errors else len(layers)
        difference = None
        with tempfile.TemporaryDirectory(prefix="shardwright-verify-") as work:
            probe = {str(index): torch.tensor(row) for index, row in enumerate(self.tokens)}
            save_file(probe, str(Path(work) / "probe.safetensors"))
            command = [interpreter(), "-m", __name__, str(directory), work, self.device]
            failure = ""
            try:
                process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
                if process.returncode < 0:
                    failure = f"the process that loads it was ended by {signal_name(-process.returncode)}"
                elif process.returncode:
                    lines = [line for line in process.stderr.strip().splitlines() if line.strip()]
                    reason = lines[-1] if lines else f"exit code {process.returncode}"
                    failure = f"it cannot be loaded and run: {reason}"
            except subprocess.TimeoutExpired:
                failure = f"it was not loaded and run within {timeout_seconds:.0f} s"
            if failure:
                errors.append(failure)
            else:
                problems = json.loads((Path(work) / FACTS).read_text(encoding="utf-8"))
                for key, names in problems.items():
                    if names:
                        shown = ", ".join(names[:_SHOWN_KEYS])
                        errors.append(f"{len(names)} {key.replace('_', ' ')} when reloaded: {shown}")
                reloaded = load_tensors(Path(work) / LOGITS)
                largest = [(reloaded[str(row)] - logits).abs().max() for row, logits in enumerate(self.logits)]
                # Python's max would ignore a NaN that is not the first.
                difference = float(torch.stack(largest).max())
                if not difference <= tolerance:
                    errors.append(f"reloaded logits differ by {difference:g}, more than {tolerance:g}")
        return Verification(
            errors=tuple(errors),
            largest_logit_difference=difference,
            compared_tokens=sum(map(len, self.tokens)),
            packed_layers=packed,
        )


def reference_logits(model: Any, token_rows: Sequence[Sequence[int]]) -> ReferenceLogits:
    """Compute the logits of the model in memory for rows of token ids."""
    import torch

    device = next(model.parameters()).device
    logits = []
    with torch.inference_mode():
        for row in token_rows:
            ids_1S = torch.tensor([list(row)], device=device)
            logits.append(model(input_ids=ids_1S).logits[0].float().cpu().contiguous())
    return ReferenceLogits(tokens=tuple(map(tuple, token_rows)), logits=tuple(logits), device=str(device))


def fail_output(staging: Path, output_dir: Path, verification: Verification) -> Path:
    """Rename a checkpoint that did not pass to `*.failed`, write the reason into it, and return its path."""
    discard_failed(output_dir)
    (staging / REASON_FILE).write_text("\n".join(verification.errors) + "\n", encoding="utf-8")
    output = output_dir.resolve()
    try:
        failed = staging.rename(output.with_name(f"{output.name}.failed"))
    except OSError:
        # The name is taken, or the output directory is a mount point.
        output.mkdir(exist_ok=True)
        failed = staging.rename(output / "failed")
    failed.chmod(0o755)
    return failed


def discard_failed(output_dir: Path) -> None:
    """Remove the failed checkpoint of an earlier run."""
    output = output_dir.resolve()
    for failed in (output.with_name(f"{output.name}.failed"), output / "failed"):
        if (failed / REASON_FILE).is_file():
            shutil.rmtree(failed, ignore_errors=True)
            logger.info(f"removed {failed}, the failed checkpoint of an earlier run")


if __name__ == "__main__":
    main(*sys.argv[1:])
