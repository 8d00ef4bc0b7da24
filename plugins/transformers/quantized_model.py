"""Models to quantize, checked before loading, and `QuantizedModel`, the result of every quantization method."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...ds_configs.legality.model_classes import model_class_errors
from ...ds_configs.quantization.layers import LinearLayer
from ...ds_configs.quantization.sizes import TensorShape
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ...ds_configs.specs.model import Dimensions
from ..huggingface_hub import model_directory, read_model_source
from ..safetensors import read_checkpoint
from .meta_model import build_meta_model, model_spec_from_meta
from .sound_model import check_weights, refuse_code, refuse_other_formats

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class QuantizedModel(Protocol):
    """A model in memory that computes the same as its checkpoint."""

    @property
    def model(self) -> Any:
        """The Transformers model; its forward pass rounds like the reloaded checkpoint."""

    @property
    def quantized_layers(self) -> tuple[str, ...]:
        """Checkpoint names of the matrices that were quantized, such as `model.layers.0.self_attn.q_proj`."""

    def save(self, directory: Path) -> None:
        """Write config and weights for `from_pretrained`; may be called once, after the last forward pass."""


EXPERT_WEIGHT = re.compile(r"(.+\.experts\.\d+\.\w+)\.weight")
"""Name of the weight of one expert's matrix in a checkpoint."""
_ROUTER_NAMES = ("gate", "router", "shared_expert_gate")


def router_names(model: PreTrainedModel, *, linear: bool) -> tuple[str, ...]:
    """Return the routers that are linear layers, or those that are not, as in Transformers 5.

    A rounded router selects other experts. vLLM builds all routers as linear layers, and reads their names in `ignore`.
    """
    import torch

    return tuple(
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _ROUTER_NAMES
        and isinstance(module, torch.nn.Linear) == linear
        and isinstance(getattr(module, "weight", None), torch.nn.Parameter)
    )


def linear_layer(model: Any, name: str, module: Any) -> LinearLayer:
    """Return a linear layer of a model under a name of the checkpoint."""
    is_head = hasattr(model, "get_output_embeddings") and module is model.get_output_embeddings()
    return LinearLayer(
        name=name,
        out_features=module.out_features,
        in_features=module.in_features,
        is_tied=is_head and bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False)),
        is_head=is_head,
    )


@dataclass(frozen=True, kw_only=True)
class QuantizationSource:
    """A model whose files were checked, with what a quantization plan needs."""

    name: str
    """Hub id or path, as the user wrote it."""
    revision: str | None
    """Commit of a Hub model."""
    directory: Path
    config: Mapping[str, Any]
    layers: tuple[LinearLayer, ...]
    """Every linear layer by its name in the checkpoint."""
    tensors: Mapping[str, TensorShape]
    """Shape and dtype of every stored tensor."""
    dtype: str
    """Dtype that the weights are loaded in."""
    kept_in_fp32: frozenset[str]
    """Tensors that the model's class always loads in fp32, such as the routing bias of DeepSeek-V3."""
    dimensions: Dimensions
    longest: int | None
    """Maximum sequence length in tokens."""
    default_ignore: tuple[str, ...]
    """Layers that must stay dense: heads and routers."""


def open_source(model: str, *, revision: str | None = None) -> QuantizationSource:
    """Check a model's files and list its layers; a Hub repository is downloaded first.

    Raises:
        UsageError: the model does not exist, or has no weights.
        RefusedInputError: it is already quantized, needs custom code, or files are corrupt, missing or unsafe.
        ShardwrightError: the Hub cannot be reached.
    """
    source = read_model_source(model, revision=revision)
    refuse_code(source.config, source.name)
    errors = []
    if section := source.config.get("quantization_config") or source.config.get("compression_config"):
        method = section.get("quant_method", "unknown") if isinstance(section, dict) else "unknown"
        rule, fix = f"is already quantized ({method})", "quantize the model that it was made from"
        errors.append(ConfigError(where=source.name, rule=rule, fix=fix))
    if source.config.get("auto_map"):
        rule = "needs code from its repository (auto_map), which is never run"
        errors.append(ConfigError(where=source.name, rule=rule, fix="use a model whose class is in Transformers"))
    if errors:
        raise RefusedInputError(errors)
    directory = model_directory(source.name, revision=source.revision)
    if directory.is_file():
        rule, fix = "is a configuration without weights", "pass the model's directory"
        raise RefusedInputError(ConfigError(where=str(directory), rule=rule, fix=fix))
    fix = "load and save it with save_pretrained, which writes safetensors"
    refuse_other_formats(directory, where="model", fix=fix)
    check_weights(directory)
    meta = build_meta_model(source.config, source=model)
    if errors := class_errors(source.config, meta):
        raise UsageError(errors)
    if not hasattr(meta, "get_output_embeddings") or meta.get_output_embeddings() is None:
        rule, fix = f"{type(meta).__name__} has no output head over tokens", "pass a causal language model"
        raise UsageError(ConfigError(where="model", value=model, rule=rule, fix=fix))
    tensors = stored_tensors(directory)
    dtype = source.config.get("dtype") or source.config.get("torch_dtype")
    if not isinstance(dtype, str):
        floats = [stored for _, stored in tensors.values() if "float" in stored]
        dtype = max(set(floats), key=floats.count) if floats else "float32"
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
        default_ignore=(*(layer.name for layer in layers if layer.is_head), *router_names(meta, linear=True)),
    )


def class_errors(config: Mapping[str, Any], meta: PreTrainedModel) -> list[ConfigError]:
    """Return why the class of a model cannot be quantized."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.pytorch_utils import Conv1D

    named = config.get("architectures") or [type(meta).__name__]
    return model_class_errors(
        named[0],
        work="quantize",
        is_causal=named[0] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        is_encoder_decoder=bool(getattr(meta.config, "is_encoder_decoder", False)),
        model_type=meta.config.get_text_config().model_type,
        transposed_layers=[name for name, module in meta.named_modules() if isinstance(module, Conv1D)],
    )


def stored_tensors(directory: Path) -> dict[str, TensorShape]:
    """Return shape and dtype of every tensor of a checkpoint, from its headers.

    Raises:
        RefusedInputError: a shard is missing, damaged, or outside the directory.
    """
    from safetensors.torch import _TYPES

    return {
        name: (tensor.shape, str(_TYPES.get(tensor.dtype, tensor.dtype.lower())).removeprefix("torch."))
        for name, tensor in read_checkpoint(directory).items()
    }


def linear_layers(meta: PreTrainedModel, tensors: Mapping[str, TensorShape]) -> tuple[LinearLayer, ...]:
    """Return every linear layer of a model on the meta device, and single experts by their checkpoint names."""
    import torch

    layers = [
        linear_layer(meta, name, module) for name, module in meta.named_modules() if isinstance(module, torch.nn.Linear)
    ]
    known = {layer.name for layer in layers}
    experts = [
        LinearLayer(name=match[1], out_features=shape[0], in_features=shape[1], is_expert=True)
        for name, (shape, _) in tensors.items()
        if (match := EXPERT_WEIGHT.fullmatch(name)) and len(shape) == 2 and match[1] not in known
    ]
    return (*layers, *experts)


def _kept_in_fp32(meta: PreTrainedModel, tensors: Mapping[str, TensorShape], dtype: str) -> frozenset[str]:
    """Return the tensors that transformers 5.17.0 casts to fp32 while it loads (`PreTrainedModel._get_dtype_plan`)."""
    import torch
    from transformers.core_model_loading import build_glob_alternation

    plan = meta._get_dtype_plan(getattr(torch, dtype))
    if not plan:
        return frozenset()
    pattern = build_glob_alternation(list(plan))[0]
    return frozenset(name for name in tensors if pattern.search(name))
