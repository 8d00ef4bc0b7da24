"""`ModelSpec` of any model that transformers can build, from the meta device: exact, without memory or weights.

Seen with transformers 5.17: a config.json may name remote code, attention or expert kernels of a Hub repository
(`auto_map`, `attn_implementation`, `experts_implementation`, also inside `text_config`) and a backbone that the
config classes look up on the Hub. The first are dropped here, the last is refused, as is a model type that
transformers does not know. Building also writes into nested mappings, so it gets a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from math import ceil
from typing import Any, Literal

from ...ds_configs.models.structure import LAYER_INDEX, parameter_group
from ...ds_configs.specs.dimensions import Dimensions
from ...ds_configs.specs.errors import Fault, RefusedInputError
from ...ds_configs.specs.model import Group, ModelSpec, ParameterKind, ParameterShape

Task = Literal["causal_lm", "masked_lm", "seq2seq", "contrastive", "encoder", "other"]

_MOST_MODULES = 200_000
"""Modules of a model that is built here, some ten seconds and a gigabyte; the largest public ones have a tenth."""
_CODE_FIELDS = ("auto_map", "attn_implementation", "experts_implementation", "quantization_config")
_RESIDUAL_DROPOUTS = ("resid_pdrop", "residual_dropout", "hidden_dropout_prob", "hidden_dropout", "dropout")
"""Dropout of what attention and MLP add to the residual stream, as GPT-2, StarCoder2, BERT, Falcon and OPT call it."""
_OTHER_SETTINGS = ("_token_id", "_version", "_token_index", "_range", "_name_or_path", "_hidden_states", "_attentions")
"""Ends of names that say nothing about a model's sizes or operators."""
_SIZES = frozenset({"hidden_size", "d_model", "n_embd", "num_hidden_layers", "n_layer"})
_POSITION_TABLES = ("wpe", "position_embeddings", "position_embedding", "embed_positions")


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
            fix = "its own code would be needed, which Shardwright does not run"
        elif isinstance(written, str):
            fix = f"its config was written by transformers {written}, which knows it"
        else:
            fix = "its config names no version that knows it"
        rule = f"is unknown to transformers {transformers.__version__}"
        raise RefusedInputError(Fault(where=f"{source}: model_type", value=model_type, rule=rule, fix=fix))
    # Transformers writes infinities, as of state space layers' time steps, as tagged objects.
    values = _without_code(transformers.PreTrainedConfig._decode_special_floats(dict(config)))
    del values["model_type"]
    _check_text_part(config, model_type, source)
    architecture = (config.get("architectures") or [None])[0]
    try:
        with _no_network(), _counted_modules(), torch.device("meta"):
            built = transformers.AutoConfig.for_model(model_type, **values)
            model_class = _model_class(transformers, architecture)
            if model_class is not None:
                return model_class(built)
            if type(built) in transformers.AutoModelForCausalLM._model_mapping:
                return transformers.AutoModelForCausalLM.from_config(built, trust_remote_code=False)
            return transformers.AutoModel.from_config(built, trust_remote_code=False)
    except OfflineModeIsEnabled:
        rule = f"this {model_type} config names another repository, which is not looked up"
        fix = "write that repository's config as its backbone_config"
        raise RefusedInputError(Fault(where=source, rule=rule, fix=fix)) from None
    except Exception as error:
        # Model classes raise whatever their arithmetic meets on absurd values.
        detail = " ".join(str(error).split())[:300] or type(error).__name__
        raise RefusedInputError(
            Fault(where=source, rule=f"transformers cannot build this {model_type} config ({detail})")
        ) from None


def _check_text_part(config: Mapping[str, Any], model_type: str, source: str) -> None:
    """Refuse a model of several parts that says nothing of its text model: Transformers would take its defaults.

    Older models state the sizes outside of the part, or call it `text_config_dict`.
    """
    from transformers import CONFIG_MAPPING

    parts = getattr(CONFIG_MAPPING[model_type], "sub_configs", None) or {}
    stated = [key for key, value in config.items() if key.startswith("text_config") and value is not None]
    if "text_config" in parts and not stated and not _SIZES.intersection(config):
        rule = f"is missing, and transformers would build the text model of a default {model_type}"
        raise RefusedInputError(Fault(where=f"{source}: text_config", rule=rule, fix="write its sizes"))


def _without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy without the fields that name code or kernels to run."""
    return {
        key: _without_code(value) if isinstance(value, dict) else deepcopy(value)
        for key, value in config.items()
        if not key.startswith("_") and key not in _CODE_FIELDS
    }


@contextmanager
def _no_network() -> Iterator[None]:
    """Make huggingface_hub refuse requests meanwhile; it reads its offline switch at each request."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _counted_modules() -> Iterator[None]:
    """Stop a model that grows beyond `_MOST_MODULES`, which only a hostile or mistaken configuration asks for."""
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


def _model_class(transformers: Any, architecture: object) -> Any:
    candidate = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
    is_model = isinstance(candidate, type) and issubclass(candidate, transformers.PreTrainedModel)
    return candidate if is_model else None


def model_spec_from_meta(config: Mapping[str, Any], *, name: str, revision: str | None = None) -> ModelSpec:
    """Return the exact `ModelSpec` of a `config.json` by building the model on the meta device.

    Raises:
        RefusedInputError: transformers cannot build it.
    """
    model = build_meta_model(config, source=name)
    parameters = _parameter_shapes(model)
    text = model.config.get_text_config()
    present = {type(module).__name__ for module in model.modules()}
    input_weight = getattr(_embeddings(model, "get_input_embeddings"), "weight", None)
    output_weight = getattr(_embeddings(model, "get_output_embeddings"), "weight", None)
    return ModelSpec(
        name=name,
        revision=revision,
        model_type=str(config["model_type"]),
        architecture=type(model).__name__,
        task=_task(type(model).__name__, encoder_decoder=bool(getattr(model.config, "is_encoder_decoder", False))),
        dimensions=_dimensions(text, parameters),
        parameters=parameters,
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        layer_classes=tuple(sorted(present.intersection(model._no_split_modules or ()))),
        tied_embeddings=input_weight is not None and input_weight is output_weight,
        learned_positions=_learned_positions(parameters, text),
        sliding_window=_sliding_window(text),
        attention=None if getattr(model, "_supports_sdpa", False) else "eager",
        residual_dropout_masks=_residual_dropout_masks(model.config),
        weight_conversion=any(p.kind == "experts" for p in parameters),
        settings=tuple(_settings(model.config.to_dict())),
        source="meta",
    )


def _residual_dropout_masks(config: Any) -> int:
    """Dropout masks of hidden size that a layer keeps; T5's MLP (`dropout_rate`) has one of its inner width as well."""
    if getattr(config, "dropout_rate", 0) and getattr(config, "d_ff", 0):
        inner: int = ceil(config.d_ff / config.d_model)
        return 3 + inner
    decodes = 1 if getattr(config, "is_encoder_decoder", False) else 0
    return 2 + decodes if any(getattr(config, name, 0) for name in _RESIDUAL_DROPOUTS) else 0


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield the plain values of a configuration and of those nested in it, which traced coefficients are read with."""
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            yield from _settings(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str) and not name.endswith(_OTHER_SETTINGS):
            yield prefix + name, value
        elif name == "layer_types" and isinstance(value, list):
            yield from ((f"{prefix}{name}={kind}", count) for kind, count in Counter(value).items())


def _embeddings(model: Any, getter: str) -> Any:
    try:
        return getattr(model, getter)()
    except (NotImplementedError, AttributeError):
        return None


def _learned_positions(parameters: tuple[ParameterShape, ...], text: Any) -> int | None:
    """Rows of the text model's position table; some tables hold a few more rows than positions (OPT)."""
    rows = [
        parameter.shape[0]
        for parameter in parameters
        if "vision" not in parameter.name and any(table in parameter.module for table in _POSITION_TABLES)
    ]
    limit = getattr(text, "max_position_embeddings", None)
    return min(max(rows), limit or max(rows)) if rows else None


def _sliding_window(text: Any) -> int | None:
    if not getattr(text, "use_sliding_window", True):
        return None
    # Llama 4 looks back within chunks, which takes a mask as a window does.
    return _size(text, "sliding_window") or _size(text, "attention_chunk_size") or None


def _task(class_name: str, *, encoder_decoder: bool) -> Task:
    endings: tuple[tuple[str, Task], ...] = (
        ("ForCausalLM", "causal_lm"),
        ("LMHeadModel", "causal_lm"),
        ("ForMaskedLM", "masked_lm"),
        ("ForConditionalGeneration", "seq2seq" if encoder_decoder else "causal_lm"),
        ("CLIPModel", "contrastive"),
        ("SiglipModel", "contrastive"),
        ("Model", "encoder"),
    )
    return next((task for ending, task in endings if class_name.endswith(ending)), "other")


def _dimensions(text: Any, parameters: tuple[ParameterShape, ...]) -> Dimensions:
    hidden = _size(text, "hidden_size", "d_model")
    heads = _size(text, "num_attention_heads") or 1
    held = max((parameter.shape[0] for parameter in parameters if parameter.kind == "experts"), default=0)
    experts = _size(text, "num_local_experts", "num_experts", "n_routed_experts") or held
    intermediate = _size(text, "intermediate_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim") or 4 * hidden
    has_dense_mlp = not experts or any(p.group == "mlp" and p.kind == "linear" for p in parameters)
    return Dimensions(
        num_layers=_size(text, "num_hidden_layers") or max((p.count for p in parameters if p.in_layer), default=0),
        hidden_size=hidden,
        intermediate_size=intermediate if has_dense_mlp else 0,
        num_attention_heads=heads,
        num_key_value_heads=_key_value_heads(text) or heads,
        head_dim=_size(text, "head_dim", "d_kv") or hidden // heads,
        vocab_size=_size(text, "vocab_size"),
        num_experts=experts,
        # A config that names it otherwise counts as one whose tokens visit all.
        experts_per_token=(_size(text, "num_experts_per_tok", "moe_topk") or experts) if experts else 0,
        expert_intermediate_size=_size(text, "moe_intermediate_size") or intermediate if experts else 0,
    )


def _key_value_heads(text: Any) -> int:
    """Return key/value heads; Falcon and GPT-BigCode say `multi_query` for a single one, whatever they count beside it.

    Falcon's newer decoder reads `num_kv_heads` instead (transformers/models/falcon/modeling_falcon.py).
    """
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    return _size(text, "num_key_value_heads", "num_kv_heads")


def _size(config: Any, *fields: str) -> int:
    """Return the first of the fields that holds a size, the largest where each layer has its own; 0 for none."""
    from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

    for field in fields:
        try:
            value = getattr(config, field, None)
        except AmbiguousGlobalPerLayerAttributeError:
            # Gemma-4's layers have heads of two widths, which transformers 5.17 tells layer by layer alone.
            value = [getattr(layer, field, None) for layer in config.per_layer_config]
        sizes = [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, int)]
        if sizes and max(sizes) > 0:
            return max(sizes)
    return 0


def _parameter_shapes(model: Any) -> tuple[ParameterShape, ...]:
    head = _embeddings(model, "get_output_embeddings")
    counts: Counter[tuple[str, tuple[int, ...], Group, ParameterKind]] = Counter()
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        kind = _kind(owner, name, parameter)
        group: Group = "head" if owner is head else parameter_group(name, kind)
        counts[(LAYER_INDEX.sub(".*.", name, count=1), tuple(parameter.shape), group, kind)] += 1
    return tuple(
        ParameterShape(name=name, shape=shape, count=count, group=group, kind=kind)
        for (name, shape, group, kind), count in counts.items()
    )


def _kind(owner: Any, name: str, parameter: Any) -> ParameterKind:
    class_name = type(owner).__name__
    if "Norm" in class_name:
        return "norm"
    if class_name == "Embedding" or class_name.endswith("Embedding"):
        return "embedding"
    if "expert" in name.lower() and parameter.dim() == 3:
        return "experts"
    if name.endswith(".bias"):
        return "bias"
    return _matrix_kind(owner) if parameter.dim() == 2 else "other"


def _matrix_kind(owner: Any) -> ParameterKind:
    """Kind of a matrix as PEFT sees it: classes made from Linear are one, and some return more than a product."""
    import torch
    from transformers.pytorch_utils import Conv1D

    if not isinstance(owner, torch.nn.Linear | Conv1D):
        return "other"
    if type(owner).forward in (torch.nn.Linear.forward, Conv1D.forward):
        return "linear"
    try:
        with torch.no_grad():
            returned = owner(torch.empty(1, owner.in_features, dtype=owner.weight.dtype, device=owner.weight.device))
    except Exception:
        # A forward that takes something else cannot be adapted like a Linear either.
        return "router"
    return "linear" if isinstance(returned, torch.Tensor) else "router"
