"""Models on the meta device, without memory or weights: their exact `ModelSpec`, and their layers to quantize.

Observed with transformers 5.17: a config.json may name remote code, attention or expert kernels of a Hub repository
(`auto_map`, `attn_implementation`, `experts_implementation`, also inside `text_config`) and a backbone that the
config classes look up on the Hub. The former are dropped here; the latter is rejected, like a model type that
transformers does not know. Building also writes into nested mappings, so it gets a copy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...ds_configs.legality.model_classes import model_class_errors
from ...ds_configs.models.model_config import LAYER_INDEX, parameter_group
from ...ds_configs.models.stored_shapes import described_spec
from ...ds_configs.quantization.layers import LinearLayer
from ...ds_configs.quantization.sizes import TensorShape
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ...ds_configs.specs.model import Dimensions, Group, ModelSpec, ParameterKind, ParameterShape
from .. import patches
from ..huggingface_hub import model_directory, read_model_source
from ..safetensors import read_checkpoint
from .loading import auto_class, check_weights, checkpoint_module_names, refuse_code, refuse_other_formats, text_classes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_MOST_MODULES = 200_000
"""Limit of modules per model, about ten seconds and a gigabyte; the largest public models have a tenth of it."""
_CODE_FIELDS = ("auto_map", "attn_implementation", "experts_implementation", "quantization_config")
_SIZES = frozenset({"hidden_size", "d_model", "n_embd", "num_hidden_layers", "n_layer"})


def build_meta_model(config: Mapping[str, Any], *, source: str) -> Any:
    """Return the model that `config` describes, on the meta device, without running any code but transformers'.

    Raises:
        RefusedInputError: transformers does not know the model type, or cannot build it from these values.
    """
    import torch
    import transformers
    from huggingface_hub.errors import OfflineModeIsEnabled
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = str(config["model_type"])
    if model_type not in CONFIG_MAPPING_NAMES:
        written = config.get("transformers_version")
        if "auto_map" in config:
            fix = "it needs code from its repository, which Shardwright does not run"
        elif isinstance(written, str):
            fix = f"its config was written by transformers {written}, which supports it"
        else:
            fix = "its config names no version that supports it"
        rule = f"is unknown to transformers {transformers.__version__}"
        raise RefusedInputError(ConfigError(where=f"{source}: model_type", value=model_type, rule=rule, fix=fix))
    # Transformers writes infinities, as of state space layers' time steps, as tagged objects.
    values = _without_code(transformers.PreTrainedConfig._decode_special_floats(dict(config)))
    del values["model_type"]
    # Older models have the sizes at the top level, or name the part `text_config_dict`.
    parts = getattr(transformers.CONFIG_MAPPING[model_type], "sub_configs", None) or {}
    stated = [key for key, value in config.items() if key.startswith("text_config") and value is not None]
    if "text_config" in parts and not stated and not _SIZES.intersection(config):
        rule = f"is missing, and transformers would build the text model of a default {model_type}"
        raise RefusedInputError(ConfigError(where=f"{source}: text_config", rule=rule, fix="write its sizes"))
    architecture = (config.get("architectures") or [None])[0]
    try:
        # huggingface_hub reads its offline switch at each request.
        offline = patches.applied("no-network", lambda _: True)
        with offline, _counted_modules(), torch.device("meta"):
            built = transformers.AutoConfig.for_model(model_type, **values)
            model_class = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
            if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
                return model_class(built)
            kind = auto_class(built)
            kind = kind if type(built) in kind._model_mapping else transformers.AutoModel
            return kind.from_config(built, trust_remote_code=False)
    except OfflineModeIsEnabled:
        rule = f"this {model_type} config names another repository, which Shardwright does not look up"
        fix = "write that repository's config as backbone_config"
        raise RefusedInputError(ConfigError(where=source, rule=rule, fix=fix)) from None
    except Exception as error:
        # Model classes raise any exception for absurd values.
        detail = " ".join(str(error).split())[:300] or type(error).__name__
        raise RefusedInputError(
            ConfigError(where=source, rule=f"transformers cannot build this {model_type} config ({detail})")
        ) from None


def _without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy without the fields that name code or kernels to run."""
    return {
        key: _without_code(value) if isinstance(value, dict) else deepcopy(value)
        for key, value in config.items()
        if not key.startswith("_") and key not in _CODE_FIELDS
    }


@contextmanager
def _counted_modules() -> Iterator[None]:
    """Stop building a model with more than `_MOST_MODULES`, which only a malicious or wrong configuration has."""
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > _MOST_MODULES:
            raise ValueError(f"it has more than {_MOST_MODULES:,} modules")

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def model_spec_from_meta(config: Mapping[str, Any], *, name: str, revision: str | None = None) -> ModelSpec:
    """Return the exact `ModelSpec` of a `config.json` by building the model on the meta device.

    Raises:
        RefusedInputError: transformers cannot build it.
    """
    import transformers

    model = build_meta_model(config, source=name)
    head = _embeddings(model, "get_output_embeddings")
    counts: Counter[tuple[str, tuple[int, ...], Group, ParameterKind]] = Counter()
    for path, parameter in model.named_parameters():
        owner = model.get_submodule(path.rpartition(".")[0])
        kind = _kind(owner, path, parameter)
        group: Group = "head" if owner is head else parameter_group(path, kind)
        counts[(LAYER_INDEX.sub(".*.", path, count=1), tuple(parameter.shape), group, kind)] += 1
    text = model.config.get_text_config()
    present = {type(module).__name__ for module in model.modules()}
    input_weight = getattr(_embeddings(model, "get_input_embeddings"), "weight", None)
    output_weight = getattr(head, "weight", None)
    return described_spec(
        config=model.config,
        text=_ConfigWithLayerLists(text),
        values=model.config.to_dict(),
        name=name,
        revision=revision,
        model_type=str(config["model_type"]),
        architecture=type(model).__name__,
        parameters=tuple(
            ParameterShape(name=path, shape=shape, count=count, group=group, kind=kind)
            for (path, shape, group, kind), count in counts.items()
        ),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        layer_classes=tuple(sorted(present.intersection(model._no_split_modules or ()))),
        tied_embeddings=input_weight is not None and input_weight is output_weight,
        attention=None if getattr(model, "_supports_sdpa", False) else "eager",
        release=transformers.__version__,
        source="meta",
    )


class _ConfigWithLayerLists:
    """A configuration whose fields that differ by layer are lists.

    Gemma-4's layers have heads of two widths, which transformers 5.17 returns only per layer.
    """

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, field: str) -> Any:
        from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

        try:
            return getattr(self._config, field)
        except AmbiguousGlobalPerLayerAttributeError:
            return [getattr(layer, field, None) for layer in self._config.per_layer_config]


def _embeddings(model: PreTrainedModel, getter: str) -> Any:
    try:
        return getattr(model, getter)()
    except (NotImplementedError, AttributeError):
        return None


def _kind(owner: torch.nn.Module, name: str, parameter: torch.Tensor) -> ParameterKind:
    """Return the kind of a parameter; matrices as PEFT treats them: some Linear subclasses are routers."""
    import torch
    from transformers.pytorch_utils import Conv1D

    class_name = type(owner).__name__
    if "Norm" in class_name:
        return "norm"
    if class_name == "Embedding" or class_name.endswith("Embedding"):
        return "embedding"
    if "expert" in name.lower() and parameter.dim() == 3:
        return "experts"
    if name.endswith(".bias"):
        return "bias"
    if parameter.dim() != 2 or not isinstance(owner, torch.nn.Linear | Conv1D):
        return "other"
    if type(owner).forward in (torch.nn.Linear.forward, Conv1D.forward):
        return "linear"
    try:
        with torch.no_grad():
            returned = owner(torch.empty(1, owner.in_features, dtype=owner.weight.dtype, device=owner.weight.device))
    except Exception:
        # A forward with other arguments cannot be adapted like a Linear either.
        return "router"
    return "linear" if isinstance(returned, torch.Tensor) else "router"


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
    """Every linear layer by its name in the model; experts by those in the checkpoint."""
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
    stored_names: Mapping[str, str]
    """Names of linear layers in the checkpoint, by those in the model."""

    def stored(self, layers: Iterable[LinearLayer]) -> tuple[LinearLayer, ...]:
        """Return layers with their names in the checkpoint."""
        return tuple(replace(layer, name=self.stored_names.get(layer.name, layer.name)) for layer in layers)


def open_source(model: str, *, revision: str | None = None) -> QuantizationSource:
    """Check a model's files and list its layers; a Hub repository is downloaded first.

    Raises:
        UsageError: the model does not exist, or has no weights.
        RefusedInputError: it is already quantized, needs custom code, or files are corrupt, missing or unsafe.
        ShardwrightError: the Hub cannot be reached.
    """
    import torch
    from transformers.core_model_loading import build_glob_alternation

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
    # As `PreTrainedModel._get_dtype_plan` of transformers 5.17.0 casts while it loads.
    casts = meta._get_dtype_plan(getattr(torch, dtype))
    always_fp32 = build_glob_alternation(list(casts))[0] if casts else None
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
        kept_in_fp32=frozenset(name for name in tensors if always_fp32 and always_fp32.search(name)),
        dimensions=model_spec_from_meta(source.config, name=model, revision=source.revision).dimensions,
        longest=longest if isinstance(longest, int) and longest > 0 else None,
        default_ignore=(*(layer.name for layer in layers if layer.is_head), *router_names(meta, linear=True)),
        stored_names=checkpoint_module_names(meta, [layer.name for layer in layers if not layer.is_expert]),
    )


def class_errors(config: Mapping[str, Any], meta: PreTrainedModel) -> list[ConfigError]:
    """Return why the class of a model cannot be quantized."""
    from transformers.pytorch_utils import Conv1D

    named = config.get("architectures") or [type(meta).__name__]
    return model_class_errors(
        named[0],
        work="quantize",
        is_causal=named[0] in text_classes(),
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
