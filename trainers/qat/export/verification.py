"""Whether an exported checkpoint is the trained model: matrix by matrix, and by what a fresh process answers with it.

The reference is built from scratch in the checkpoint's type, as loaders build theirs, with the trained weights in the
training's own type and the very layers that rounded them while training. It shares no number with the checkpoint but
the tensors that are not quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.quantization.layers import LinearLayer
from ....plugins.compressed_tensors.codes import StoredLayer, dequantize, unpack_tensors
from ....plugins.compressed_tensors.layout import layout_differences
from ....plugins.safetensors.reading import StoredTensor, each_tensor, read_checkpoint
from ....plugins.transformers.checkpoint_model import empty_model, model_class, plain_linear
from ...verify.checkpoint import (
    UNPROVEN,
    ReferenceLogits,
    Verification,
    arbitrary_rows,
    reference_logits,
)
from ..rounding.attachment import Attachment, QuantizationState
from ..rounding.experts import fake_quantize_experts
from ..rounding.layers import LEARNED, FakeQuantizedLinear, LayerQuantizer
from ..rounding.rounding import round_weight
from .tensors import Collected, forward_weight, module_names, plain_name, quantizer_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

_ROOM = 2.5
"""Free memory that an accelerator needs to verify, in sizes of the reference: it, the reloaded model, and work."""


def trained_reference(
    found: Collected, attachment: Attachment, root: Any, directory: Path, device: torch.device
) -> Any:
    """Return a model in evaluation mode that computes what training computed, made of what was gathered.

    Args:
        found: Gathered tensors, trained ones included.
        attachment: What rounds.
        root: The Transformers model that was trained.
        directory: Where the checkpoint's `config.json` lies already.
        device: The training's, on which adapters are added to their weights: products differ in the last bit elsewhere.
    """
    config = type(root.config).from_pretrained(str(directory))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = empty_model(model_class(root), config, attachment.stored_dtype)
    state = QuantizationState(enabled=True)
    for name, parameters in found.trained.items():
        module, target = attachment.modules[name], model.get_submodule(plain_name(name))
        if hasattr(module, "quantizers"):
            _swap_experts(target, name, module, parameters, state)
        else:
            placed = {relative: one.to(device) for relative, one in parameters.items()}
            _swap_linear(target, module, placed, state)
    _load(model, found.dense)
    _round_cache(model, root, state)
    return model.eval().requires_grad_(False)


def probe_rows(root: Any, probe: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Return rows of token ids that checkpoint and trained model must answer alike: the ones given, or any."""
    if probe is not None:
        return [list(row) for row in probe]
    config = root.config.get_text_config()
    return arbitrary_rows(int(config.vocab_size), getattr(config, "max_position_embeddings", None))


def trained_logits(model: Any, rows: Sequence[Sequence[int]], device: torch.device) -> ReferenceLogits:
    """Return the logits of the trained model, on the training's device where two models have room there."""
    import torch

    if device.type == "cuda":
        # Blocks that torch's allocator keeps would count as taken where free memory is asked for.
        torch.cuda.empty_cache()
        bytes_needed = _ROOM * sum(parameter.nbytes for parameter in model.parameters())
        if torch.cuda.mem_get_info(device)[0] < bytes_needed:
            device = torch.device("cpu")
    with plain_linear():
        return reference_logits(model.to(device), rows)


def largest_weight_difference(
    found: Collected, attachment: Attachment, root: Any, directory: Path, device: torch.device
) -> float:
    """Return max |ΔW| over all packed matrices: those in the written files against those of a forward pass."""
    import torch

    names, tensors = module_names(attachment, root), _written(directory)
    largest = []
    for name, parameters in found.trained.items():
        module = attachment.modules[name]
        placed = {relative: one.to(device) for relative, one in parameters.items()}
        for quantizer, seen in _rounded_weights(module, placed):
            stored = unpack_tensors(names[quantizer.name], tensors(names[quantizer.name]), quantizer.scheme)
            written = _dequantized(stored, quantizer)
            assert written.dtype == seen.dtype, f"{written.dtype} of {quantizer.name} is not {seen.dtype}"
            largest.append((written - seen.cpu()).abs().max().float())
    # Not Python's max, which skips a NaN that is not the first.
    return float(torch.stack(largest).max())


def proven(
    found: Collected,
    attachment: Attachment,
    root: Any,
    directory: Path,
    *,
    layers: Sequence[LinearLayer],
    device: torch.device,
    probe: Sequence[Sequence[int]] | None,
    tolerance: float,
) -> tuple[float, Verification]:
    """Return max |ΔW| of a written checkpoint, and everything wrong with it once a fresh process has loaded it.

    Args:
        found: Gathered tensors, trained ones included.
        attachment: What rounds.
        root: The Transformers model that was trained.
        directory: The checkpoint.
        layers: Its packed matrices.
        device: The training's.
        probe: Rows of token ids; default: any.
        tolerance: Largest allowed difference of a logit.
    """
    import torch
    from accelerate.utils import patch_environment

    difference = largest_weight_difference(found, attachment, root, directory, device)
    if reads_tokens(root):
        model = trained_reference(found, attachment, root, directory, device)
        logits = trained_logits(model, probe_rows(root, probe), device)
        del model
        threads = torch.get_num_threads()
        # The process that loads the checkpoint splits its sums over as many threads, so that they round alike.
        with patch_environment(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads):
            proof = logits.verify(directory, layers=layers, scheme=attachment.scheme, tolerance=tolerance)
    else:
        faults = tuple(layout_differences(directory, attachment.scheme, layers))
        proof = replace(UNPROVEN, faults=faults, packed_layers=0 if faults else len(layers))
    if difference != 0.0:
        fault = f"written matrices differ from the trained ones by {difference:g}"
        proof = replace(proof, faults=(fault, *proof.faults))
    return difference, proof


def reads_tokens(root: Any) -> bool:
    """Return whether a model answers to the tokens of one text alone."""
    return root.main_input_name == "input_ids" and not root.config.is_encoder_decoder


def _swap_linear(target: Any, module: Any, parameters: Mapping[str, Tensor], state: QuantizationState) -> None:
    import torch

    target.__class__ = FakeQuantizedLinear
    target.quantizer = replace(module.quantizer, state=state)
    target.weight = torch.nn.Parameter(forward_weight(module, parameters).cpu())
    for name in LEARNED:
        if name in parameters:
            target.register_parameter(name, torch.nn.Parameter(parameters[name].cpu()))


def _swap_experts(
    target: Any, name: str, module: Any, parameters: Mapping[str, Tensor], state: QuantizationState
) -> None:
    import torch

    for relative, tensor in parameters.items():
        setattr(target, relative, torch.nn.Parameter(tensor))
    copies = {quantizer.name: replace(quantizer, state=state) for quantizer in module.quantizers.values()}
    fake_quantize_experts(target, name, copies)


def _load(model: Any, dense: Mapping[str, Tensor]) -> None:
    """Load what is not quantized; everything that a loader would miss is told by the fresh process."""
    model.load_state_dict(dict(dense), strict=False, assign=True)
    model.tie_weights()


def _round_cache(model: Any, root: Any, state: QuantizationState) -> None:
    from ....plugins.compressed_tensors.quantized_cache import change_keys_and_values

    for name, module in root.named_modules():
        quantizer = getattr(module, "cache_quantizer", None)
        if quantizer is not None:
            target = model.get_submodule(plain_name(name))
            target.cache_quantizer = replace(quantizer, module=target, state=state)
            change_keys_and_values(target, target.cache_quantizer.change)


def _rounded_weights(module: Any, parameters: Mapping[str, Tensor]) -> list[tuple[LayerQuantizer, Tensor]]:
    """Return every matrix of a module as its forward pass rounds it."""
    if hasattr(module, "quantizers"):
        stored = module.stored_layers(parameters)
        found = [(quantizer_of(module, key), layer) for key, layer in stored.items()]
        return [(quantizer, _dequantized(layer, quantizer).cpu()) for quantizer, layer in found]
    quantizer: LayerQuantizer = module.quantizer
    rounding = quantizer.rounding().weight
    weight = forward_weight(module, parameters)
    rounded = round_weight(weight, rounding, *(parameters.get(name) for name in LEARNED[:2]))
    return [(quantizer, rounded.value(rounding))]


def _dequantized(stored: StoredLayer, quantizer: LayerQuantizer) -> Tensor:
    return dequantize(stored.codes, stored.scale, stored.zero_point, quantizer.scheme.weights)


def _written(directory: Path) -> Callable[[str], dict[str, Tensor]]:
    """Return what reads all tensors of one layer from the files of a checkpoint."""
    layers: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in read_checkpoint(directory).items():
        layers.setdefault(name.rpartition(".")[0], {})[name] = tensor
    return lambda layer: dict(each_tensor(layers.get(layer, {})))
