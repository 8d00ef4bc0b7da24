"""Models to be quantized: their files checked and their layers listed before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.legality.model_classes import model_class_faults
from ...ds_configs.quantization.layers import LinearLayer
from ...ds_configs.quantization.sizes import SAFETENSORS_DTYPES, TensorShape
from ...ds_configs.specs.dimensions import Dimensions
from ...ds_configs.specs.errors import Fault, RefusedInputError, UsageError
from ..huggingface_hub.hub import ModelSource, read_model_source
from ..huggingface_hub.model_directory import model_directory
from ..safetensors.reading import checkpoint_files, read_checkpoint
from .expert_layers import expert_layers, router_patterns
from .meta_model import build_meta_model, model_spec_from_meta
from .sound_model import check_weights, refuse_code

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf")


@dataclass(frozen=True, kw_only=True)
class QuantizationSource:
    """A model whose files were checked, with what planning needs to know of it."""

    name: str
    """Hub id or path, as given."""
    revision: str | None
    """Commit of a Hub model."""
    directory: Path
    """Where its files lie."""
    config: Mapping[str, Any]
    """Contents of `config.json`."""
    layers: tuple[LinearLayer, ...]
    """Every linear layer by its name in the checkpoint."""
    tensors: Mapping[str, TensorShape]
    """Shape and type of every stored tensor."""
    dtype: str
    """Type that the weights are loaded in."""
    kept_in_fp32: frozenset[str]
    """Tensors that the model's class loads in fp32 all the same, such as the routing bias of DeepSeek-V3."""
    dimensions: Dimensions
    """Sizes of the decoder."""
    longest: int | None
    """Tokens that it has positions for."""
    default_ignore: tuple[str, ...]
    """Layers that must stay dense: heads, routers, and what shares its weight."""


def open_source(model: str, *, revision: str | None = None) -> QuantizationSource:
    """Check a model's files and list its layers; a Hub repository is fetched first.

    Raises:
        UsageError: nothing of that name exists, or it has no weights.
        RefusedInputError: it is quantized already, needs code of its own, or files are corrupt, missing or unsafe.
        ShardwrightError: the Hub cannot be reached.
    """
    source = read_model_source(model, revision=revision)
    refuse_code(source.config, source.name)
    faults = unquantizable_faults(source)
    if faults:
        raise RefusedInputError(faults)
    directory = model_directory(source.name, revision=source.revision)
    faults = weight_faults(directory)
    if faults:
        raise RefusedInputError(faults)
    check_weights(directory)
    meta = build_meta_model(source.config, source=model)
    if faults := class_faults(source.config, meta):
        raise UsageError(faults)
    if not hasattr(meta, "get_output_embeddings") or meta.get_output_embeddings() is None:
        rule, fix = f"{type(meta).__name__} has no output head over tokens", "give a causal language model"
        raise UsageError(Fault(where="model", value=model, rule=rule, fix=fix))
    tensors = stored_tensors(directory)
    dtype = _dtype(source.config, tensors)
    text = meta.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    layers = linear_layers(meta, tensors)
    return QuantizationSource(
        name=model,
        revision=source.revision,
        directory=directory,
        config=source.config,
        layers=layers,
        tensors=tensors,
        dtype=dtype,
        kept_in_fp32=_kept_in_fp32(meta, tensors, dtype),
        dimensions=model_spec_from_meta(source.config, name=model, revision=source.revision).dimensions,
        longest=longest if isinstance(longest, int) and longest > 0 else None,
        default_ignore=(*(layer.name for layer in layers if layer.is_head), *router_patterns(meta)),
    )


def unquantizable_faults(source: ModelSource) -> list[Fault]:
    """Return why a configuration rules quantization out: quantized already, or code of its own."""
    config, where, faults = source.config, source.name, []
    stated = config.get("quantization_config") or config.get("compression_config")
    if stated:
        method = stated.get("quant_method", "unknown") if isinstance(stated, dict) else "unknown"
        rule, fix = f"is quantized already ({method})", "quantize the model that it was made from"
        faults.append(Fault(where=where, rule=rule, fix=fix))
    if config.get("auto_map"):
        rule = "needs code of its own (auto_map), which is not run"
        faults.append(Fault(where=where, rule=rule, fix="use a model whose class Transformers has"))
    return faults


def class_faults(config: Mapping[str, Any], meta: Any) -> list[Fault]:
    """Return why the class of a model cannot be quantized."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.pytorch_utils import Conv1D

    named = config.get("architectures") or [type(meta).__name__]
    return model_class_faults(
        named[0],
        work="quantize",
        is_causal=named[0] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        is_encoder_decoder=bool(getattr(meta.config, "is_encoder_decoder", False)),
        model_type=meta.config.get_text_config().model_type,
        transposed_layers=[name for name, module in meta.named_modules() if isinstance(module, Conv1D)],
    )


def weight_faults(directory: Path) -> list[Fault]:
    """Return what is wrong with the weight files of a directory, from their names and headers."""
    where = str(directory)
    if directory.is_file():
        return [Fault(where=where, rule="is a configuration without weights", fix="name the model's directory")]
    if not checkpoint_files(directory):
        others = sorted(path.name for pattern in _OTHER_WEIGHTS for path in directory.glob(pattern))
        if others:
            rule = f"has weights in {', '.join(others[:3])} alone, and such files can run code when they are read"
            return [
                Fault(where=where, rule=rule, fix="load and save it with save_pretrained, which writes safetensors")
            ]
        # Of a Hub repository other formats were not even fetched.
        rule = "has no safetensors weights; other formats can run code when they are read"
        return [Fault(where=where, rule=rule, fix="give a trained model, saved with save_pretrained")]
    return []


def stored_tensors(directory: Path) -> dict[str, TensorShape]:
    """Return shape and type of every tensor of a checkpoint, from its headers.

    Raises:
        RefusedInputError: a shard is missing, damaged, or outside of the directory.
    """
    names = {name: stored for stored, name in SAFETENSORS_DTYPES.items()}
    return {
        name: (tensor.shape, names.get(tensor.dtype, tensor.dtype.lower()))
        for name, tensor in read_checkpoint(directory).items()
    }


def linear_layers(meta: Any, tensors: Mapping[str, TensorShape]) -> tuple[LinearLayer, ...]:
    """Return every linear layer of a model on the meta device; experts one by one, by their names in the checkpoint."""
    import torch

    head = meta.get_output_embeddings()
    tied = bool(getattr(meta.config.get_text_config(), "tie_word_embeddings", False))
    layers = [
        LinearLayer(
            name=name,
            out_features=module.out_features,
            in_features=module.in_features,
            is_tied=module is head and tied,
            is_head=module is head,
            has_bias=module.bias is not None,
        )
        for name, module in meta.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    return (*layers, *expert_layers(tensors, known={layer.name for layer in layers}))


def _dtype(config: Mapping[str, Any], tensors: Mapping[str, TensorShape]) -> str:
    stated = config.get("dtype") or config.get("torch_dtype")
    if isinstance(stated, str):
        return stated
    floats = [dtype for _, dtype in tensors.values() if "float" in dtype]
    return max(set(floats), key=floats.count) if floats else "float32"


def _kept_in_fp32(meta: Any, tensors: Mapping[str, TensorShape], dtype: str) -> frozenset[str]:
    """Return the tensors that transformers 5.17.0 casts up while it loads (`PreTrainedModel._get_dtype_plan`)."""
    import torch
    from transformers.core_model_loading import build_glob_alternation

    plan = meta._get_dtype_plan(getattr(torch, dtype))
    if not plan:
        return frozenset()
    pattern = build_glob_alternation(list(plan))[0]
    return frozenset(name for name in tensors if pattern.search(name))
