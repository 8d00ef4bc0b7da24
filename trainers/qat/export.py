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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.output import output_errors, write_files
from ...ds_configs.quantization.layers import LinearLayer, quantization_config
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError, UsageError
from ...plugins import patches
from ...plugins.compressed_tensors import layout_differences, pack_tensors, unpack_tensors
from ...plugins.deepspeed.parameters import gathered_parameters, training_device
from ...plugins.launching.background import FirstRank
from ...plugins.safetensors import StoredTensor, appearing_directory, each_tensor, read_checkpoint, save_checkpoint
from ...plugins.transformers.loading import (
    checkpoint_module_names,
    checkpoint_tensors,
    empty_model,
    model_class,
    plain_linear,
    stays_in_fp32,
)
from ..data.models import copy_companions
from ..verify import UNPROVEN, Verification, arbitrary_rows, discard_failed, fail_output, reference_logits
from .attach import Attachment, checkpoint_name
from .experts import fake_quantize_experts, is_fused_experts
from .layers import LEARNED, FakeQuantizedLinear, some_names
from .rounding import round_weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor
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
    verify: bool = True,
    probe: Sequence[Sequence[int]] | None = None,
    force: bool = False,
) -> ExportResult:
    """Write a trained model as a checkpoint for vLLM and Transformers; every rank must call it.

    The first rank holds the trained weights and the checkpoint in memory.

    Raises:
        UsageError: the model was not trained with these number formats, or the directory is in use; all errors
            together.
        RefusedInputError: weights or scales are NaN or infinite.
        ShardwrightError: verification failed; the checkpoint is renamed to `*.failed`.
    """
    import torch
    from accelerate.utils import extract_model_from_parallel
    from transformers import PreTrainedModel

    output = Path(output_dir)
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    root: Any = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if root is None:
        rule = "contains no Transformers model, so that its checkpoint would have no configuration"
        raise UsageError(ConfigError(where="model", value=type(model).__name__, rule=rule))

    def check() -> None:
        errors, weights = [], attachment.scheme.weights
        if not attachment.state.trained_steps:
            rule = f"was never trained with the {weights.bits} bits of {attachment.scheme.name}"
            fix = "train first; start_step must come before the last step"
            errors.append(ConfigError(where="model", value="0 steps", rule=rule, fix=fix))
        if empty := [name for name, input_range in attachment.ranges.items() if input_range.scale is None]:
            rule = f"{len(empty)} of {len(attachment.ranges)} have no value, such as {empty[0]}"
            errors.append(ConfigError(where="ranges", rule=rule, fix="train at least one step"))
        if source is not None and not Path(source).expanduser().is_dir():
            fix = "pass the directory of the starting model, or omit it"
            errors.append(ConfigError(where="source", value=str(source), rule="is not a directory", fix=fix))
        sources = {"the model that was trained": str(source or root.config._name_or_path or type(root).__name__)}
        errors += output_errors(output, force=force, sources=sources, fix="use force=True to replace the model in it")
        if errors:
            raise UsageError(errors)

    with FirstRank() as ranks:
        ranks.does(check)
        tensors = {name: tensor for name, tensor in gathered_parameters(model) if tensor is not None}

        def write() -> ExportResult:
            collected = Collected(attachment=attachment, root=root, device=training_device(model), keep_trained=verify)
            with torch.no_grad():
                collected.add_all(tensors, model)
            tensors.clear()
            started, names = time.perf_counter(), module_names(attachment, root)
            layers = [replace(layer, name=names[layer.name]) for layer in attachment.layers]
            contents = collected.contents()
            with appearing_directory(output) as staging:
                # Tokenizer and generation settings, by default those of the starting model.
                origin = Path(source or root.config._name_or_path or staging).expanduser()
                if origin.is_dir() and origin != staging:
                    copy_companions(origin, staging)
                if tokenizer is not None:
                    tokenizer.save_pretrained(staging)
                if root.can_generate() and not (staging / "generation_config.json").is_file():
                    try:
                        root.generation_config.save_pretrained(staging)
                    except ValueError as error:
                        # Transformers rejects contradictory settings, which some models on the Hub have.
                        rule = f"cannot be saved ({str(error).splitlines()[0]})"
                        fix = "correct model.generation_config"
                        raise UsageError(ConfigError(where="generation_config", rule=rule, fix=fix)) from None
                # The same `quantization_config` as of post-training quantization.
                config = copy.deepcopy(root.config)
                for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
                    if part is not None:
                        part.dtype = attachment.stored_dtype
                config.architectures = [model_class(root).__name__]
                config.save_pretrained(staging)
                content = json.loads((staging / "config.json").read_text(encoding="utf-8"))
                # What loaders must not quantize has the names of the checkpoint, and of the model where they differ.
                stored = checkpoint_module_names(root, attachment.dense)
                ignore = list(dict.fromkeys([*(stored[name] for name in attachment.dense), *attachment.dense]))
                content["quantization_config"] = quantization_config(attachment.scheme, layers, ignore=ignore)
                write_files({"config.json": json.dumps(content, indent=2) + "\n"}, staging, force=True)
                save_checkpoint(contents, staging)
                notes = []
                if verify and not _reads_tokens(root):
                    notes.append("only weights were compared: the model needs more inputs than the tokens of one text")
                elif verify and root.get_output_embeddings() is None:
                    notes.append("the outputs of the model's own head were compared, on single rows without padding")
                result = ExportResult(
                    output_dir=output,
                    quantized_layers=len(layers),
                    stored_bytes=sum(tensor.nbytes for tensor in contents.values()),
                    largest_weight_difference=None,
                    verification=None,
                    notes=tuple(notes),
                )
                contents.clear()
                if verify:
                    difference, verification = verified(collected, staging, layers, probe)
                    if not verification.passed:
                        failed = fail_output(staging, output, verification)
                        raise ShardwrightError(
                            f"the checkpoint did not pass verification: {verification.reason}; it was moved to {failed}"
                        )
                    result = replace(result, largest_weight_difference=difference, verification=verification)
                measured = asdict(result)
                del measured["output_dir"]
                report = {
                    "schema_version": 1,
                    "scheme": attachment.scheme.name,
                    "weight_rule": attachment.config.weight_rule,
                    "stored_dtype": str(attachment.stored_dtype).removeprefix("torch."),
                    "trained_steps": attachment.state.trained_steps,
                    **measured,
                    "seconds": round(time.perf_counter() - started, 3),
                    "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
                }
                write_files({REPORT: json.dumps(report, indent=2) + "\n"}, staging, force=True)
            discard_failed(output)
            return result

        answer: ExportResult = ranks.does(write)
        return answer


@dataclass(kw_only=True)
class Collected:
    """Parameters of a model in the form of its checkpoint."""

    attachment: Attachment
    root: PreTrainedModel
    device: torch.device
    """Device of the training: products and sums differ between accelerator and CPU in the last bit."""
    keep_trained: bool
    """Whether `trained` is filled."""
    packed: dict[str, Tensor] = field(default_factory=dict)
    """Codes, scales and zero points, by their names in the checkpoint."""
    dense: dict[str, Tensor] = field(default_factory=dict)
    """All other tensors in the stored dtype, by their names in the model."""
    trained: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Parameters that packed tensors replace, by module name in the model; for verification."""
    not_finite: list[str] = field(default_factory=list)
    """Tensors with NaN or infinity."""

    def add_all(self, tensors: Mapping[str, Tensor], model: Any) -> None:
        """Collect all parameters and buffers of a model, by their names in it.

        Raises:
            UsageError: a packed module shares parameters with another one, which are gathered once.
            RefusedInputError: tensors with NaN or infinity, or active adapters that cannot be merged; names them.
        """
        import torch

        remaining, missing = dict(tensors), []
        rounded = {id(module): name for name, module in self.attachment.modules.items()}
        names = module_names(self.attachment, self.root)
        for name, module in model.named_modules():
            if id(module) not in rounded:
                continue
            missing += [f"{name}.{relative}" for relative in module.consumed if f"{name}.{relative}" not in remaining]
            if missing:
                continue
            parameters = {relative: remaining.pop(f"{name}.{relative}") for relative in module.consumed}
            if infinite := [f"{name}.{relative}" for relative, tensor in parameters.items() if not _finite(tensor)]:
                self.not_finite += infinite
                continue
            # Learned scales in the dtype of the forward pass: 3.4999 rounds to 3, but in bf16 to 4.
            dtype = next(iter(module.quantizers.values())).forward_dtype
            if dtype is not None:
                parameters = {key: value.to(dtype) if key in LEARNED else value for key, value in parameters.items()}
            placed = {relative: tensor.to(self.device) for relative, tensor in parameters.items()}
            for key, layer in module.stored_layers(placed).items():
                quantizer = module.quantizers[key]
                stored_name = names[quantizer.name]
                scales = {"weight_scale": layer.scale, "input_scale": layer.input_scale}
                infinite = [f"{stored_name}.{part}" for part, scale in scales.items() if not _finite(scale)]
                self.not_finite += infinite
                if not infinite:
                    packed = pack_tensors(stored_name, layer, quantizer.scheme)
                    self.packed |= {part: tensor.cpu() for part, tensor in packed.items()}
            if self.keep_trained:
                self.trained[rounded[id(module)]] = parameters
        if missing:
            rule = f"other modules share {some_names(missing)}, and a packed matrix cannot be shared"
            raise UsageError(ConfigError(where="model", rule=rule, fix="ignore these layers, or untie them"))
        for name, tensor in remaining.items():
            stored_name = checkpoint_name(name)
            stays = tensor.dtype == torch.float32 and stays_in_fp32(self.root, stored_name)
            if tensor.is_floating_point() and not stays:
                tensor = tensor.to(self.attachment.stored_dtype)
            if not _finite(tensor):
                self.not_finite.append(stored_name)
            self.dense[stored_name] = _own_storage(tensor.cpu())
        if self.not_finite:
            count, names_text = len(self.not_finite), some_names(self.not_finite)
            rule = f"has {count} tensors with NaN or infinite numbers: {names_text}"
            fix = "export an earlier checkpoint of the run"
            raise RefusedInputError([ConfigError(where="model", rule=rule, fix=fix)])

    def contents(self) -> dict[str, Tensor]:
        """Return all tensors of the checkpoint by their names in it, ordered by layer."""
        dense = checkpoint_tensors(self.root, self.dense)
        tensors = {name: _own_storage(tensor) for name, tensor in dense.items()} | self.packed

        def natural(name: str) -> list[tuple[int, str]]:
            return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

        return {name: tensors[name] for name in sorted(tensors, key=natural)}


def module_names(attachment: Attachment, root: PreTrainedModel) -> dict[str, str]:
    """Return the checkpoint names of packed matrices by their quantizers' names, which are equal for experts."""
    experts = {layer.name for layer in attachment.layers if layer.is_expert}
    linear = [layer.name for layer in attachment.layers if layer.name not in experts]
    return checkpoint_module_names(root, linear) | {name: name for name in experts}


def _finite(tensor: Tensor | None) -> bool:
    import torch

    return tensor is None or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _own_storage(tensor: Tensor) -> Tensor:
    """Copy views of a shared buffer, such as ZeRO's: safetensors cannot write tensors that share memory."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def verified(
    collected: Collected,
    directory: Path,
    layers: Sequence[LinearLayer],
    probe: Sequence[Sequence[int]] | None,
) -> tuple[float, Verification]:
    """Return max |ΔW| of a written checkpoint, and the result of reloading it in a fresh process."""
    import torch
    from accelerate.utils import patch_environment

    root, scheme, device = collected.root, collected.attachment.scheme, collected.device
    difference = largest_weight_difference(collected, directory)
    if _reads_tokens(root):
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
            result = logits.verify(directory, layers=layers, scheme=scheme, tolerance=0.0)
    else:
        errors = tuple(layout_differences(directory, scheme, layers))
        result = replace(UNPROVEN, errors=errors, packed_layers=0 if errors else len(layers))
    if difference != 0.0:
        error = f"written matrices differ from the trained ones by {difference:g}"
        result = replace(result, errors=(error, *result.errors))
    return difference, result


def _reference(collected: Collected, directory: Path) -> Any:
    """Return a model in evaluation mode that computes what training computed, with the `config.json` of a directory."""
    import torch

    attachment, root = collected.attachment, collected.root
    config = type(root.config).from_pretrained(str(directory))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = empty_model(model_class(root), config, attachment.stored_dtype)
    state = replace(attachment.state, enabled=True)
    for name, parameters in collected.trained.items():
        module, target = attachment.modules[name], model.get_submodule(checkpoint_name(name))
        copies = {quantizer.name: replace(quantizer, state=state) for quantizer in module.quantizers.values()}
        if is_fused_experts(module):
            for relative, tensor in parameters.items():
                setattr(target, relative, torch.nn.Parameter(tensor))
            fake_quantize_experts(target, name, copies)
            continue
        patches.swap_class("qat-linear", target, FakeQuantizedLinear)
        (target.quantizer,) = copies.values()
        target.weight = torch.nn.Parameter(module.forward_weight(parameters).cpu())
        for learned in LEARNED:
            if learned in parameters:
                target.register_parameter(learned, torch.nn.Parameter(parameters[learned].cpu()))
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
            quantizer = module.quantizers[key]
            layer, rounding = names[quantizer.name], quantizer.rounding()
            written = unpack_tensors(layer, dict(each_tensor(stored_tensors.get(layer, {}))), quantizer.scheme)
            if not is_fused_experts(module):
                learned = (placed.get(name) for name in LEARNED)
                trained = round_weight(module.forward_weight(placed), rounding, *learned)
            pair = [each.value(rounding.quantization).cpu() for each in (written, trained)]
            largest.append((pair[0] - pair[1]).abs().max().float())
    # Python's max would ignore a NaN that is not the first.
    return float(torch.stack(largest).max())


def _reads_tokens(root: PreTrainedModel) -> bool:
    """Return whether the tokens of one text are a complete input of a model."""
    return root.main_input_name == "input_ids" and not root.config.is_encoder_decoder
