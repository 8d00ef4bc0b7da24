"""Writes a quantization-aware trained model as a compressed-tensors checkpoint bit for bit, and verifies it.

The codes that training computed with are packed unchanged. Quantizing the trained weights again could give other codes,
because a division in another dtype, or scales that are not yet rounded to the stored dtype, round differently.

Verification builds a reference from scratch in the checkpoint's dtype, as loaders do, with the trained weights in the
training's dtype and the same rounding layers as in training. It shares only unquantized tensors with the checkpoint.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.plan.output import output_errors, write_files
from ....ds_configs.quantization.layers import LinearLayer, quantization_config
from ....ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ....plugins import patches
from ....plugins.compressed_tensors.codes import dequantize, unpack_tensors
from ....plugins.compressed_tensors.layout import layout_differences
from ....plugins.deepspeed.parameters import first_rank, gathered_parameters, training_device
from ....plugins.launching.messages import note_on_first_rank
from ....plugins.safetensors.reading import StoredTensor, each_tensor, read_checkpoint
from ....plugins.safetensors.writing import appearing_directory, save_checkpoint
from ....plugins.transformers.checkpoint_tensors import empty_model, model_class, plain_linear
from ...formats.model_directory import COMPANIONS, copy_companions
from ...verify.checkpoint import UNPROVEN, Verification, arbitrary_rows, discard_failed, fail_output, reference_logits
from ..rounding.attach import Attachment, checkpoint_name
from ..rounding.experts import fake_quantize_experts
from ..rounding.layers import LEARNED, FakeQuantizedLinear, QuantizationState, forward_weight
from ..rounding.rounding import round_weight
from .tensors import Collected, dense_layers, module_names, quantized_layers, quantizer_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

REPORT = "qat_report.json"
_PACKAGES = ("torch", "transformers", "compressed-tensors")
_VERIFICATION_MEMORY = 2.5
"""Free accelerator memory for the verification, in reference sizes: reference, reloaded model and activations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """A written checkpoint, and its difference from the trained model."""

    output_dir: Path
    quantized_layers: int
    """Number of packed matrices."""
    stored_bytes: int
    """Bytes of all tensors."""
    largest_weight_difference: float | None
    """max |ΔW| between the files and the trained model; `None` without verification."""
    verification: Verification | None
    """Result of reloading in a fresh process; `None` without verification."""
    notes: tuple[str, ...]
    """Warnings about omitted parts and limits of the verification."""

    @property
    def largest_logit_difference(self) -> float | None:
        """max |Δlogit| between the reloaded checkpoint and the trained model; `None` without verification."""
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

    The first rank holds the trained weights and the checkpoint in memory.

    Args:
        model: Trained model, with or without the wrapper of DDP or DeepSpeed.
        attachment: Its attachment.
        output_dir: Directory of the checkpoint.
        tokenizer: Tokenizer to write; default: the one in `source`.
        source: Directory or Hub id of the starting model, for tokenizer and generation settings.
        dtype: Dtype of unquantized tensors; must be the one that scales were rounded to in training.
        verify: Whether to check that files and trained model are equal.
        probe: Rows of token ids for comparing logits; default: arbitrary tokens.
        tolerance: Largest allowed difference of a logit; weights must always be equal.
        force: Replace the model in a directory that is not empty.

    Raises:
        UsageError: the model was not trained with these number formats, or the directory is in use; all errors
            together.
        RefusedInputError: weights or scales are NaN or infinite.
        ShardwrightError: verification failed; the checkpoint is renamed to `*.failed`.
    """
    import torch
    from accelerate.utils import extract_model_from_parallel

    output = Path(output_dir)
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    root = _transformers_model(model)

    def check() -> None:
        errors = readiness_errors(attachment)
        if dtype not in (None, attachment.stored_dtype):
            rule = f"scales were rounded to {attachment.stored_dtype} in training"
            fix = "train with QATCallback(stored_dtype=...)"
            errors.append(ConfigError(where="dtype", value=str(dtype), rule=rule, fix=fix))
        sources = {"the model that was trained": str(source or root.config._name_or_path or type(root).__name__)}
        errors += output_errors(output, force=force, sources=sources, fix="use force=True to replace the model in it")
        if errors:
            raise UsageError(errors)

    with first_rank() as ranks:
        ranks.does(check)
        tensors = {name: tensor for name, tensor in gathered_parameters(model) if tensor is not None}

        def write() -> dict[str, Any]:
            collected = Collected(attachment=attachment, root=root, device=training_device(model), keep_trained=verify)
            with torch.no_grad():
                collected.add_all(tensors, model)
            tensors.clear()
            started, layers = time.perf_counter(), quantized_layers(attachment, root)
            contents = collected.contents()
            with appearing_directory(output) as staging:
                write_companions(root, staging, tokenizer=tokenizer, source=source)
                write_config(root, attachment, staging, layers)
                save_checkpoint(contents, staging)
                result: dict[str, Any] = {
                    "quantized_layers": len(layers),
                    "stored_bytes": sum(tensor.nbytes for tensor in contents.values()),
                    "largest_weight_difference": None,
                    "verification": None,
                    "notes": _notes(collected, verify=verify),
                }
                contents.clear()
                if verify:
                    difference, verification = verified(collected, staging, layers, probe, tolerance)
                    if not verification.passed:
                        failed = fail_output(staging, output, verification)
                        raise ShardwrightError(
                            f"the checkpoint did not pass verification: {verification.reason}; it was moved to {failed}"
                        )
                    result |= {"largest_weight_difference": difference, "verification": asdict(verification)}
                _write_json(staging / REPORT, _report(attachment, result, time.perf_counter() - started))
            discard_failed(output, note_on_first_rank)
            return result

        # All ranks build the result: what one rank sends to the others is JSON.
        answer = ranks.does(write)
    verification = answer["verification"]
    if verification is not None:
        verification = Verification(**(verification | {"errors": tuple(verification["errors"])}))
    changes = {"output_dir": output, "verification": verification, "notes": tuple(answer["notes"])}
    return ExportResult(**(answer | changes))


def readiness_errors(attachment: Attachment) -> list[ConfigError]:
    """Return why a model is not trained for export."""
    errors = []
    if not attachment.state.trained_steps:
        rule = f"was never trained with the {attachment.scheme.weights.bits} bits of {attachment.scheme.name}"
        fix = "train first; start_step must come before the last step"
        errors.append(ConfigError(where="model", value="0 steps", rule=rule, fix=fix))
    required = [quantizer.input_range for quantizer in attachment.quantizers() if quantizer.input_range is not None]
    empty = [input_range.name for input_range in required if input_range.scale is None]
    if empty:
        rule = f"{len(empty)} of {len(required)} have no value, such as {empty[0]}"
        fix = "train at least one step"
        errors.append(ConfigError(where="ranges", rule=rule, fix=fix))
    return errors


def write_companions(root: PreTrainedModel, directory: Path, *, tokenizer: Any, source: str | Path | None) -> None:
    """Write tokenizer and generation settings, by default those of the starting model."""
    name = root.config._name_or_path if source is None else str(source)
    if name and Path(name).expanduser().is_dir():
        copy_companions(Path(name).expanduser(), directory)
    elif source is not None:
        from huggingface_hub import snapshot_download

        try:
            copy_companions(Path(snapshot_download(name, allow_patterns=list(COMPANIONS))), directory)
        except Exception as error:
            # Connection, cache and disk raise many types.
            raise ShardwrightError(f"source = {name!r}: cannot be fetched ({type(error).__name__}: {error})") from None
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    if root.can_generate() and not (directory / "generation_config.json").is_file():
        try:
            root.generation_config.save_pretrained(directory)
        except ValueError as error:
            # Transformers rejects contradictory settings, which some models on the Hub have.
            rule, fix = f"cannot be saved ({str(error).splitlines()[0]})", "correct model.generation_config"
            raise UsageError(ConfigError(where="generation_config", rule=rule, fix=fix)) from None


def write_config(root: PreTrainedModel, attachment: Attachment, directory: Path, layers: Sequence[LinearLayer]) -> None:
    """Write `config.json` with the same `quantization_config` as post-training quantization."""
    config = copy.deepcopy(root.config)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = attachment.stored_dtype
    config.architectures = [model_class(root).__name__]
    config.save_pretrained(directory)
    path = directory / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    ignore = dense_layers(attachment, root)
    content["quantization_config"] = quantization_config(attachment.scheme, layers, ignore=ignore)
    _write_json(path, content)


def _notes(collected: Collected, *, verify: bool) -> list[str]:
    """Return warnings about omitted parts and limits of the verification."""
    notes = []
    if collected.dropped:
        notes.append(f"inactive adapters were omitted: {', '.join(collected.dropped[:3])}")
    if verify and not reads_tokens(collected.root):
        notes.append("only weights were compared: this model needs inputs other than the tokens of one text")
    elif verify and collected.root.get_output_embeddings() is None:
        notes.append("the outputs of the model's own head were compared, on single rows without padding")
    return notes


def verified(
    collected: Collected,
    directory: Path,
    layers: Sequence[LinearLayer],
    probe: Sequence[Sequence[int]] | None,
    tolerance: float,
) -> tuple[float, Verification]:
    """Return max |ΔW| of a written checkpoint, and the result of reloading it in a fresh process.

    Args:
        collected: Trained parameters and the tensors that were written.
        directory: The checkpoint.
        layers: Its packed matrices.
        probe: Rows of token ids; default: arbitrary ones.
        tolerance: Largest allowed difference of a logit.
    """
    import torch
    from accelerate.utils import patch_environment

    root, scheme, device = collected.root, collected.attachment.scheme, collected.device
    difference = largest_weight_difference(collected, directory)
    if reads_tokens(root):
        if probe is None:
            config = root.config.get_text_config()
            probe = arbitrary_rows(int(config.vocab_size), getattr(config, "max_position_embeddings", None))
        reference = _reference(collected, directory)
        if device.type == "cuda":
            # Blocks cached by torch's allocator would count as used memory.
            torch.cuda.empty_cache()
            needed_bytes = _VERIFICATION_MEMORY * sum(parameter.nbytes for parameter in reference.parameters())
            if torch.cuda.mem_get_info(device)[0] < needed_bytes:
                device = torch.device("cpu")
        with plain_linear():
            logits = reference_logits(reference.to(device), probe)
        del reference
        threads = torch.get_num_threads()
        # The process that loads the checkpoint must split sums over as many threads, to round them equally.
        with patch_environment(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads):
            result = logits.verify(directory, layers=layers, scheme=scheme, tolerance=tolerance)
    else:
        errors = tuple(layout_differences(directory, scheme, layers))
        result = replace(UNPROVEN, errors=errors, packed_layers=0 if errors else len(layers))
    if difference != 0.0:
        error = f"written matrices differ from the trained ones by {difference:g}"
        result = replace(result, errors=(error, *result.errors))
    return difference, result


def _reference(collected: Collected, directory: Path) -> Any:
    """Return a model in evaluation mode that computes what training computed, from the collected tensors.

    Args:
        collected: Trained parameters and dense tensors.
        directory: Directory with the checkpoint's `config.json`.
    """
    import torch

    attachment, root = collected.attachment, collected.root
    config = type(root.config).from_pretrained(str(directory))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = empty_model(model_class(root), config, attachment.stored_dtype)
    state = QuantizationState(enabled=True)
    for name, parameters in collected.trained.items():
        module, target = attachment.modules[name], model.get_submodule(checkpoint_name(name))
        if hasattr(module, "quantizers"):
            for relative, tensor in parameters.items():
                setattr(target, relative, torch.nn.Parameter(tensor))
            copies = {quantizer.name: replace(quantizer, state=state) for quantizer in module.quantizers.values()}
            fake_quantize_experts(target, name, copies)
            continue
        # Products with adapters differ in the last bit on a device other than that of the training run.
        placed = {relative: tensor.to(collected.device) for relative, tensor in parameters.items()}
        patches.swap_class("qat-linear", target, FakeQuantizedLinear)
        target.quantizer = replace(module.quantizer, state=state)
        target.weight = torch.nn.Parameter(forward_weight(module, placed).cpu())
        for learned in LEARNED:
            if learned in placed:
                target.register_parameter(learned, torch.nn.Parameter(placed[learned].cpu()))
    # Missing tensors are reported by the fresh process.
    model.load_state_dict(dict(collected.dense), strict=False, assign=True)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def largest_weight_difference(collected: Collected, directory: Path) -> float:
    """Return max |ΔW| over all packed matrices, between the written files and a forward pass, or stored experts."""
    import torch

    names = module_names(collected.attachment, collected.root)
    stored_tensors: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in read_checkpoint(directory).items():
        stored_tensors.setdefault(name.rpartition(".")[0], {})[name] = tensor
    largest = []
    for name, parameters in collected.trained.items():
        module = collected.attachment.modules[name]
        placed = {relative: tensor.to(collected.device) for relative, tensor in parameters.items()}
        for key, trained in module.stored_layers(placed).items():
            quantizer = quantizer_of(module, key)
            layer, weights = names[quantizer.name], quantizer.scheme.weights
            tensors = dict(each_tensor(stored_tensors.get(layer, {})))
            written = unpack_tensors(layer, tensors, quantizer.scheme)
            pair = [dequantize(each.codes, each.scale, each.zero_point, weights).cpu() for each in (written, trained)]
            if not hasattr(module, "quantizers"):
                rounding = quantizer.rounding().weight
                learned = (placed.get(name) for name in LEARNED)
                pair[1] = round_weight(forward_weight(module, placed), rounding, *learned).value(rounding).cpu()
            largest.append((pair[0] - pair[1]).abs().max().float())
    # Python's max would ignore a NaN that is not the first.
    return float(torch.stack(largest).max())


def reads_tokens(root: PreTrainedModel) -> bool:
    """Return whether the tokens of one text are a complete input of a model."""
    return root.main_input_name == "input_ids" and not root.config.is_encoder_decoder


def _report(attachment: Attachment, result: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    config = attachment.config
    return {
        "schema_version": 1,
        "scheme": attachment.scheme.name,
        "weight_rule": config.weight_rule,
        "ranges": config.ranges if attachment.scheme.activations_are_static else None,
        "stored_dtype": str(attachment.stored_dtype).removeprefix("torch."),
        "trained_steps": attachment.state.trained_steps,
        **result,
        "seconds": round(seconds, 3),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def _transformers_model(model: Any) -> Any:
    from transformers import PreTrainedModel

    root = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if root is None:
        rule = "contains no Transformers model, so that its checkpoint would have no configuration"
        raise UsageError(ConfigError(where="model", value=type(model).__name__, rule=rule))
    return root


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_files({path.name: json.dumps(content, indent=2) + "\n"}, path.parent, force=True)
