"""`shardwright quantize`: quantize a model, verify the checkpoint and evaluate it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from ...ds_configs.quantization.settings import QuantizeSettings
from ...ds_configs.specs.settings import RevisionFields
from ..options import ResultDirectory
from ..progress import progress_on_stderr
from ..settings import FILLED, Options, command_line

if TYPE_CHECKING:
    from ...trainers.quantization import Prepared, QuantizationOutcome


class Flags(ResultDirectory, RevisionFields):
    config: str | None = Field(None, description="YAML file with settings, such as those of examples/quantization")
    device: str | None = Field(None, description="Such as cuda:0 or cpu. Default: an accelerator if available")
    evaluate: bool = Field(True, description="Compare the checkpoint with its model afterwards")
    force: bool = Field(False, description="Write into a directory that is not empty")


def quantize_command(
    model: str, *, settings: Options[QuantizeSettings] = FILLED, options: Options[Flags] = FILLED
) -> int:
    """Quantize a model, verify the checkpoint in a new process, and compare it with the model.

    Parameters
    ----------
    model
        Hub id or directory of a model with safetensors weights.
    """
    from ...trainers.quantization import prepare

    output_dir = options.output_dir
    # Some libraries log to stdout, which is for results only.
    with redirect_stdout(sys.stderr):
        prepared = prepare(
            model,
            settings,
            output_dir,
            revision=options.revision,
            force=options.force,
            device=options.device,
        )
    if options.dry_run or output_dir is None:
        _show_prepared(prepared, as_json=options.as_json)
        return 0
    if not options.as_json:
        with redirect_stdout(sys.stderr):
            _show_prepared(prepared, as_json=False)
    from ...trainers.quantization import run_prepared

    with redirect_stdout(sys.stderr), progress_on_stderr("reading the model"):
        outcome = run_prepared(
            prepared,
            output_dir,
            device=options.device,
            evaluate=options.evaluate,
            force=options.force,
            command=command_line(),
        )
    if options.as_json:
        print(json.dumps(outcome.to_dict() | {"output_dir": str(output_dir)}, default=str))
    else:
        show_quantization(outcome, output_dir)
    return 0


def _show_prepared(prepared: Prepared, *, as_json: bool) -> None:
    from ...ds_configs.plan.measurement import printable
    from ...ds_configs.quantization.sizes import bits_per_weight, tensor_bytes
    from ...ds_configs.specs.units import gigabytes
    from ..show import console

    memory, scheme = prepared.memory, prepared.scheme
    dense = tensor_bytes(prepared.source.tensors.values())
    bits = (
        None
        if prepared.resolved.method in ("spqr", "low-rank")
        else bits_per_weight(scheme, prepared.layers, dtype=prepared.source.dtype)
    )
    if as_json:
        described = {
            "schema_version": 1,
            "model": prepared.source.name,
            "scheme": asdict(scheme) | {"format": scheme.format},
            "method": prepared.resolved.method,
            "method_reason": prepared.resolved.method_reason,
            "settings": prepared.settings.model_dump(),
            "layers": [layer.name for layer in prepared.layers],
            "calibration_samples": len(prepared.calibration),
            "memory": asdict(memory) | {"peak_host_bytes": memory.peak_host_bytes,
                                        "peak_device_bytes": memory.peak_device_bytes},
            "dense_bytes": dense,
            "checkpoint_bytes": prepared.checkpoint_bytes,
            "bits_per_weight": bits,
        }  # fmt: skip
        print(json.dumps(described, default=str))
        return
    out = console()
    reason = prepared.resolved.method_reason
    chosen = "" if reason == "named" else f" ({reason})"
    width = "" if bits is None else f", {bits:.2f} bits per weight"
    lines = [
        f"{printable(prepared.source.name)}  {scheme.name} by {prepared.resolved.method}{chosen}",
        f"{len(prepared.layers)} of {len(prepared.source.layers)} linear layers{width}",
        f"checkpoint {gigabytes(prepared.checkpoint_bytes)} GB, {gigabytes(dense)} GB before",
        f"peak host memory {gigabytes(memory.peak_host_bytes)} GB, while {memory.phase}: "
        + _largest(memory.host_terms),
    ]
    if memory.device_terms:
        lines.append(
            f"peak accelerator memory {gigabytes(memory.peak_device_bytes)} GB: {_largest(memory.device_terms)}"
        )
    for line in lines:
        out.print(line, markup=False)


def _largest(terms: Mapping[str, int]) -> str:
    from ...ds_configs.specs.units import gigabytes

    ranked = sorted(terms.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name.replace('_', ' ')} {gigabytes(size)}" for name, size in ranked)


def show_quantization(outcome: QuantizationOutcome, output_dir: Path) -> None:
    from rich.text import Text

    from ...ds_configs.plan.measurement import printable
    from ...ds_configs.quantization.scheme import METHODS
    from ...trainers.quantization import QUANTIZATION_FILES
    from ...trainers.reports.runs import evaluation_table, verdict
    from ..show import console, print_figures, show_next

    out, evaluation = console(), outcome.evaluation
    out.print(Text(printable(outcome.prepared.source.name), style="bold"), f"as {outcome.prepared.scheme.name}")
    for name, value in outcome.verification.facts():
        out.print(f"  {name}: {value}", markup=False)
    if evaluation is not None:
        out.print()
        data = evaluation.to_dict()
        print_figures(out, ("", "quantized", "before", "difference"), evaluation_table(data).rows)
        out.print()
        out.print(Text(verdict(data)))
    names = ", ".join(QUANTIZATION_FILES)
    out.print(Text(f"Checkpoint in {printable(str(output_dir))}, with {names}"))
    if METHODS[outcome.prepared.resolved.method].engine == "llm-compressor":
        show_next("vllm", "serve", output_dir)
