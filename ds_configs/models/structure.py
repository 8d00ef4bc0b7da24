"""`ModelSpec` of a decoder that only code of its own could build, which is not run: from what its files say of it.

The shapes in safetensors headers give every parameter exactly. Without them the sizes in `config.json` are counted as a
decoder of Llama's kind, with fused experts where it names any.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..specs.errors import Fault, RefusedInputError
from ..specs.model import Group, ModelSpec, ParameterKind, ParameterShape
from .families import model_spec_from_config
from .model_config import config_faults

_ALSO_CALLED: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("ffn_hidden_size", "n_inner", "ffn_dim", "d_ff"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("multi_query_group_num", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("kv_channels",),
    "vocab_size": ("padded_vocab_size",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k", "num_selected_experts"),
    "moe_intermediate_size": ("expert_intermediate_size",),
}
"""Names that decoders outside of transformers have for the standard fields."""
_COPIED = ("tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window")
_CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")
LAYER_INDEX = re.compile(r"\.\d+\.")
"""Where the name of a parameter counts its layer."""


def model_spec_from_structure(
    config: Mapping[str, Any],
    *,
    name: str,
    revision: str | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> ModelSpec | None:
    """Return the `ModelSpec` of a causal decoder by its files alone; `None` where they name none.

    Args:
        config: A validated `config.json`.
        name: What the user named.
        revision: Commit of a Hub repository.
        shapes: Of the tensors of its checkpoint, by name; without any, sizes are counted as Llama's.

    Raises:
        RefusedInputError: a size is missing or absurd.
    """
    architecture = _causal_class(config)
    if architecture is None:
        return None
    sizes = _standard_sizes(config)
    faults = config_faults(sizes, source=name)
    spec = None if faults else model_spec_from_config(sizes, name=name, revision=revision)
    if spec is None:
        rule = "is code of its repository, which is not run, and its sizes do not say enough to plan by its structure"
        missing = Fault(where=f"{name}: architectures", value=architecture, rule=rule)
        raise RefusedInputError([missing, *faults])
    spec = replace(
        spec,
        model_type=str(config["model_type"]),
        architecture=architecture,
        layer_classes=(),
        weight_conversion=False,
        source="structure",
    )
    if not shapes:
        return spec
    parameters = _stored_parameters(shapes, spec.dimensions.vocab_size)
    dimensions = spec.dimensions
    held = max((parameter.shape[0] for parameter in parameters if parameter.kind == "experts"), default=0)
    if held and not dimensions.num_experts:
        # Experts that the configuration names otherwise count as visited by all tokens.
        width = dimensions.intermediate_size
        more = {"num_experts": held, "experts_per_token": held, "expert_intermediate_size": width}
        dimensions = replace(dimensions, **more)
    tied = not any(parameter.group == "head" for parameter in parameters)
    return replace(spec, parameters=parameters, dimensions=dimensions, tied_embeddings=tied)


def _causal_class(config: Mapping[str, Any]) -> str | None:
    code = config.get("auto_map")
    named = code.get("AutoModelForCausalLM") if isinstance(code, dict) else None
    if isinstance(named, str) and named:
        return named.rpartition(".")[2]
    return next((one for one in config.get("architectures") or [] if one.endswith(_CAUSAL_ENDINGS)), None)


def _standard_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a Llama, or of a Qwen3-MoE where there are experts, with the same sizes."""
    sizes = {field: config[field] for field in _COPIED if field in config}
    for field, others in _ALSO_CALLED.items():
        value = next((config[key] for key in (field, *others) if config.get(key) is not None), None)
        if value is not None:
            sizes[field] = value
    sizes.setdefault("num_key_value_heads", sizes.get("num_attention_heads"))
    experts = sizes.get("num_experts")
    if experts and not isinstance(experts, bool):
        sizes.setdefault("num_experts_per_tok", experts)
        sizes.setdefault("moe_intermediate_size", sizes.get("intermediate_size"))
        return sizes | {"model_type": "qwen3_moe"}
    if isinstance(hidden := sizes.get("hidden_size"), int):
        sizes.setdefault("intermediate_size", 4 * hidden)
    return sizes | {"model_type": "llama"}


def _stored_parameters(shapes: Mapping[str, tuple[int, ...]], vocabulary: int) -> tuple[ParameterShape, ...]:
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for name, shape in shapes.items():
        counts[LAYER_INDEX.sub(".*.", name, count=1), tuple(shape)] += 1
    found = []
    for (name, shape), count in counts.items():
        kind = _stored_kind(name, shape, vocabulary)
        is_head = kind == "linear" and ".*." not in name and shape[0] == vocabulary
        group: Group = "head" if is_head else parameter_group(name, kind)
        found.append(ParameterShape(name=name, shape=shape, count=count, group=group, kind=kind))
    return tuple(found)


def _stored_kind(name: str, shape: tuple[int, ...], vocabulary: int) -> ParameterKind:
    if name.endswith(".bias"):
        return "bias"
    module = name.lower().rpartition(".")[0]
    if "norm" in module.rpartition(".")[2] or len(shape) < 2:
        return "norm"
    if len(shape) == 3 and "expert" in module:
        return "experts"
    if len(shape) == 2 and ".*." not in name and ("emb" in module or "wte" in module) and shape[0] >= vocabulary:
        return "embedding"
    return "linear" if len(shape) == 2 else "other"


def parameter_group(name: str, kind: ParameterKind) -> Group:
    """Return the part of a model that a parameter belongs to, by its name; heads are told apart elsewhere."""
    if kind in ("norm", "embedding", "experts"):
        return kind
    lowered = name.lower()
    if "attn" in lowered or "attention" in lowered:
        return "attention"
    mlp_names = ("mlp", "ffn", "feed_forward", "fc1", "fc2", "intermediate", "densereludense", ".output.")
    return "mlp" if any(part in lowered for part in mlp_names) else "other"
