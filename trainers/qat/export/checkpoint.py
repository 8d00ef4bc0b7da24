"""Writes what quantization-aware training trained as a compressed-tensors checkpoint, bit for bit.

The codes that training computed with are packed as they are. Quantizing the trained weights once more would give other
codes: whoever divides in another type, or takes scales before they are rounded to the stored type, rounds elsewhere.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.plan.output import output_faults
from ....ds_configs.quantization.layers import LinearLayer
from ....ds_configs.quantization.mixtures import mixture_remarks
from ....ds_configs.specs.errors import Fault, ShardwrightError, UsageError
from ....plugins.deepspeed.engine_layers import stages_of
from ....plugins.deepspeed.gathering import first_rank, gathered_parameters, training_device
from ....plugins.launching.notes import note_on_first_rank
from ....plugins.safetensors.writing import appearing_directory, save_checkpoint
from ....plugins.transformers.checkpoint_model import model_class
from ...verify.checkpoint import Verification, discard_failed, fail_output
from ..rounding.attachment import Attachment
from ..rounding.kv_cache import PARTS, kv_cache_scheme
from .files import write_adapter, write_companions, write_config, write_export_report
from .stages import stage_tensors, whole_model
from .tensors import (
    Collected,
    Collector,
    active_adapters,
    checkpoint_contents,
    collect,
    dense_layers,
    quantized_layers,
)
from .verification import proven, reads_tokens

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "transformers", "compressed-tensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """A checkpoint that was written, and how far it is from the trained model."""

    output_dir: Path
    """Where it lies."""
    quantized_layers: int
    """Matrices that are packed."""
    stored_bytes: int
    """Bytes of all tensors."""
    largest_weight_difference: float | None
    """max |ΔW| between the files and the trained model; `None` if it was not verified."""
    verification: Verification | None
    """What a fresh process found; `None` if it was not verified."""
    notes: tuple[str, ...]
    """Remarks on what was left out or not covered."""

    @property
    def largest_logit_difference(self) -> float | None:
        """max |Δlogit| between the reloaded checkpoint and the trained model; `None` if it was not verified."""
        return None if self.verification is None else self.verification.largest_logit_difference


def export(
    model: Any,
    attachment: Attachment,
    output_dir: str | Path,
    *,
    tokenizer: Any = None,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    probe: Sequence[Sequence[int]] | None = None,
    tolerance: float = 0.0,
    force: bool = False,
) -> ExportResult:
    """Write a trained model as a checkpoint for vLLM and Transformers; every rank must call it.

    The first rank holds the checkpoint in memory, and with `verify` the trained weights too.

    Args:
        model: As it was trained, in or without the wrapper of DDP or DeepSpeed.
        attachment: What `attach` put into it.
        output_dir: Where the checkpoint goes.
        tokenizer: Goes with it; default: what lies in `source`.
        source: Directory or Hub id of the model that training began with: tokenizer, generation settings.
        dtype: Type of all that is not quantized; only the one that scales were rounded to while training.
        verify: Prove that files and trained model are the same.
        probe: Rows of token ids that both must answer alike; default: any tokens.
        tolerance: Largest allowed difference of a logit; that of a weight is always zero.
        force: Replace the model in a directory that is not empty.

    Raises:
        UsageError: the model was not trained with these numbers, or the directory is in use; all faults at once.
        RefusedInputError: numbers are NaN or infinite.
        ShardwrightError: the checkpoint did not pass; it lies under a `.failed` name.
    """
    from accelerate.utils import extract_model_from_parallel

    place = Path(output_dir)
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    device, tensors = training_device(model), gathered_parameters(model)
    if stages_of(model) is not None:
        tensors = stage_tensors(model, place)
        model, attachment = whole_model(model, attachment)
    root = _transformers_model(model)
    with first_rank() as ranks:
        ranks.does(lambda: _refuse(attachment, root, place, source=source, dtype=dtype, force=force))
        collector = Collector(model, attachment, root=root, device=device, keep_trained=verify)
        found, failure = collect(tensors, collector if ranks.is_here else None)

        def work() -> dict[str, Any]:
            if failure is not None:
                raise failure
            found.raise_faults()
            writer = _Export(
                model=model,
                root=root,
                attachment=attachment,
                found=found,
                device=device,
                output=place,
                tokenizer=tokenizer,
                source=source,
            )
            return writer.write(verify=verify, probe=probe, tolerance=tolerance)

        return _result(ranks.does(work), place)


def readiness_faults(attachment: Attachment) -> list[Fault]:
    """Return why a model is not what was to be trained."""
    state, faults = attachment.state, []
    wanted = attachment.scheme.weights.bits
    if not state.was_enabled:
        rule = f"was never trained with the {wanted} bits of {attachment.scheme.name}"
        fix = "train first, with a start_step (and the end of a bit_schedule) before the last step"
        faults.append(Fault(where="model", value=f"{state.trained_steps} steps", rule=rule, fix=fix))
    if state.bits not in (None, wanted):
        rule = f"has not come to the {wanted} bits of {attachment.scheme.name}"
        fix = "train to the end of the schedule"
        faults.append(Fault(where="bit_schedule", value=f"{state.bits} bits", rule=rule, fix=fix))
    # Learned ranges are parameters by now.
    learned = attachment.config.ranges == "learned"
    own = {quantizer.name for quantizer in attachment.quantizers() if quantizer.input_range is not None and not learned}
    wanted_ranges = [name for name in attachment.ranges if name in own or name.rpartition(".")[2] in PARTS]
    empty = [name for name in wanted_ranges if attachment.ranges[name].scale is None]
    if empty:
        rule = f"{len(empty)} of {len(wanted_ranges)} have no value, such as {empty[0]}"
        fix = "give QATCallback(calibration=batches), or let observers find them"
        faults.append(Fault(where="ranges", rule=rule, fix=fix))
    return faults


@dataclass(frozen=True, kw_only=True, slots=True)
class _Export:
    """One export on the first rank."""

    model: Any
    root: Any
    attachment: Attachment
    found: Collected
    device: torch.device
    output: Path
    tokenizer: Any
    source: str | Path | None

    def write(self, *, verify: bool, probe: Sequence[Sequence[int]] | None, tolerance: float) -> dict[str, Any]:
        """Write, prove and publish; return what `_result` reads."""
        attachment, root, started = self.attachment, self.root, time.perf_counter()
        layers = quantized_layers(attachment, root)
        tensors = checkpoint_contents(self.found, attachment, root)
        with appearing_directory(self.output) as staging:
            self._write_small_files(staging, layers)
            save_checkpoint(tensors, staging)
            answer: dict[str, Any] = {
                "quantized_layers": len(layers),
                "stored_bytes": sum(tensor.nbytes for tensor in tensors.values()),
                "largest_weight_difference": None,
                "verification": None,
                "notes": [*mixture_remarks(attachment.scheme, layers), *self._notes(verify=verify)],
            }
            del tensors
            if verify:
                difference, proof = proven(
                    self.found,
                    attachment,
                    root,
                    staging,
                    layers=layers,
                    device=self.device,
                    probe=probe,
                    tolerance=tolerance,
                )
                if not proof.passed:
                    kept = fail_output(staging, self.output, proof)
                    raise ShardwrightError(f"the checkpoint did not pass: {proof.reason}; it lies in {kept}")
                answer |= {"largest_weight_difference": difference, "verification": asdict(proof)}
            write_export_report(_report(attachment, answer, time.perf_counter() - started), staging)
        discard_failed(self.output, note_on_first_rank)
        return answer

    def _write_small_files(self, staging: Path, layers: Sequence[LinearLayer]) -> None:
        write_companions(self.root, staging, tokenizer=self.tokenizer, source=self.source)
        write_config(
            self.root,
            self.attachment,
            staging,
            architecture=model_class(self.root).__name__,
            layers=layers,
            ignore=dense_layers(self.attachment, self.root),
            kv_cache_scheme=kv_cache_scheme(self.attachment.config),
        )
        if self.found.adapter:
            name = active_adapters(self.model)[0]
            write_adapter(self.model, self.found.adapter, staging, name=name, base=self.output)

    def _notes(self, *, verify: bool) -> list[str]:
        notes = []
        if self.found.dropped:
            notes.append(f"adapters that are not active were left out: {', '.join(self.found.dropped[:3])}")
        if self.found.adapter and verify:
            notes.append("the base was verified, the adapter beside it was written as it is")
        if verify and not reads_tokens(self.root):
            notes.append("only weights were compared: this model answers to more than the tokens of one text")
        elif verify and self.root.get_output_embeddings() is None:
            notes.append("compared were the outputs of the model's own head, on single rows without padding")
        return notes


def _refuse(
    attachment: Attachment, root: Any, output: Path, *, source: Any, dtype: torch.dtype | None, force: bool
) -> None:
    faults = readiness_faults(attachment)
    if dtype not in (None, attachment.stored_dtype):
        rule = f"scales were rounded to {attachment.stored_dtype} while the model was trained"
        fix = "train with QATCallback(stored_dtype=...)"
        faults.append(Fault(where="dtype", value=str(dtype), rule=rule, fix=fix))
    came_from = str(source or root.config._name_or_path or root.__class__.__name__)
    sources = {"the model that was trained": came_from}
    faults += output_faults(output, force=force, sources=sources, fix="use force=True to replace the model in it")
    if faults:
        raise UsageError(faults)


def _report(attachment: Attachment, answer: dict[str, Any], seconds: float) -> dict[str, Any]:
    config = attachment.config
    return {
        "schema_version": 1,
        "scheme": attachment.scheme.name,
        "weight_rule": config.weight_rule,
        "ranges": config.ranges if attachment.scheme.activations_are_static else None,
        "lora": config.lora,
        "kv_cache": config.kv_cache,
        "stored_dtype": str(attachment.stored_dtype).removeprefix("torch."),
        "trained_steps": attachment.state.trained_steps,
        **answer,
        "seconds": round(seconds, 3),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def _result(answer: dict[str, Any], output: Path) -> ExportResult:
    proof = answer["verification"]
    if proof is not None:
        proof = Verification(**(proof | {"faults": tuple(proof["faults"])}))
    return ExportResult(**(answer | {"output_dir": output, "verification": proof, "notes": tuple(answer["notes"])}))


def _transformers_model(model: Any) -> Any:
    from transformers import PreTrainedModel

    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None:
        rule = "is no model of Transformers, so that its checkpoint has no configuration"
        raise UsageError(Fault(where="model", value=type(model).__name__, rule=rule))
    return found
