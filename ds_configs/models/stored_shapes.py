"""`ModelSpec` of a class from its stored parameter shapes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Any, Literal

from ..specs.images import RESOLUTIONS, image_part
from ..specs.model import Dimensions, ModelConfig, ModelSpec, ParameterShape, newest_tested_release, stored_facts

Task = Literal["causal_lm", "masked_lm", "seq2seq", "contrastive", "encoder", "other"]

_RESIDUAL_DROPOUTS = ("resid_pdrop", "residual_dropout", "hidden_dropout_prob", "hidden_dropout", "dropout")
"""Names of the dropout on the residual stream in GPT-2, StarCoder2, BERT, Falcon and OPT."""
OTHER_SETTINGS = ("_token_id", "_version", "_token_index", "_range", "_name_or_path", "_hidden_states", "_attentions")
"""Endings of fields that do not affect a model's sizes or operators."""
_POSITION_TABLES = ("wpe", "position_embeddings", "position_embedding", "embed_positions")


def described_spec(
    *,
    config: Any,
    text: Any,
    values: ModelConfig,
    name: str,
    revision: str | None,
    model_type: str,
    architecture: str,
    parameters: tuple[ParameterShape, ...],
    buffer_bytes: int,
    layer_classes: tuple[str, ...],
    tied_embeddings: bool,
    attention: str | None,
    release: str,
    source: Literal["config", "meta"],
) -> ModelSpec:
    # Rows of the text model's position table; some tables have a few more rows than positions (OPT).
    rows = [
        parameter.shape[0]
        for parameter in parameters
        if not image_part(parameter.name) and any(table in parameter.module for table in _POSITION_TABLES)
    ]
    limit = getattr(text, "max_position_embeddings", None)
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    tasks: tuple[tuple[str, Task], ...] = (
        ("ForCausalLM", "causal_lm"),
        ("LMHeadModel", "causal_lm"),
        ("ForMaskedLM", "masked_lm"),
        ("ForConditionalGeneration", "seq2seq" if encoder_decoder else "causal_lm"),
        ("CLIPModel", "contrastive"),
        ("SiglipModel", "contrastive"),
        ("Model", "encoder"),
    )
    dropout_masks = 0
    if getattr(config, "dropout_rate", 0) and getattr(config, "d_ff", 0):
        # T5's MLP also has a mask of its inner width.
        dropout_masks = 3 + ceil(config.d_ff / config.d_model)
    elif any(getattr(config, name, 0) for name in _RESIDUAL_DROPOUTS):
        dropout_masks = 3 if encoder_decoder else 2
    return ModelSpec(
        name=name,
        revision=revision,
        model_type=model_type,
        architecture=architecture,
        task=next((task for ending, task in tasks if architecture.endswith(ending)), "other"),
        dimensions=_dimensions(text, parameters),
        parameters=parameters,
        buffer_bytes=buffer_bytes,
        layer_classes=layer_classes,
        tied_embeddings=tied_embeddings,
        learned_positions=(min(max(rows), limit or max(rows)) if rows else None),
        # Llama 4 attends within chunks, which needs a mask as a window does.
        sliding_window=(
            _size(text, "sliding_window", "attention_chunk_size") or None
            if getattr(text, "use_sliding_window", True)
            else None
        ),
        attention=attention,
        release=release,
        residual_dropout_masks=dropout_masks,
        weight_conversion=any(p.kind == "experts" for p in parameters),
        # Every saved configuration has labels, but only classifiers read them.
        settings=tuple(
            (setting, value)
            for setting, value in plain_settings(values)
            if not setting.endswith(LABELS) or architecture.endswith("Classification")
        ),
        source=source,
    )


def plain_settings(config: ModelConfig, prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield the scalar values of a configuration and its parts, by which activation coefficients are selected."""
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            yield from plain_settings(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str) and not name.endswith(OTHER_SETTINGS):
            yield prefix + name, value
        elif name == "id2label" and isinstance(value, dict):
            yield prefix + LABELS, len(value)
        elif name in ("image_size", "patch_size") and isinstance(value, list) and len(set(value)) == 1:
            # Both sides.
            yield prefix + name, value[0]
        elif name == "image_grid_pinpoints" and isinstance(value, list):
            pairs = [pair for pair in value if isinstance(pair, list | tuple) and list(map(type, pair)) == [int, int]]
            resolutions = " ".join(f"{height}x{width}" for height, width in pairs if min(height, width) > 0)
            if resolutions != RESOLUTIONS.get(str(config.get("model_type"))):
                yield prefix + name, resolutions
        elif name == "layer_types" and isinstance(value, list):
            yield from ((f"{prefix}{name}={kind}", count) for kind, count in Counter(value).items())


def _dimensions(text: Any, parameters: tuple[ParameterShape, ...]) -> Dimensions:
    hidden = _size(text, "hidden_size", "d_model")
    heads = _size(text, "num_attention_heads") or 1
    held = max((parameter.shape[0] for parameter in parameters if parameter.kind == "experts"), default=0)
    experts = _size(text, "num_local_experts", "num_experts", "n_routed_experts") or held
    intermediate = _size(text, "intermediate_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim") or 4 * hidden
    # LFM2 rounds the width of its MLP.
    intermediate = next((p.shape[0] for p in parameters if p.name.endswith("feed_forward.w1.weight")), intermediate)
    has_dense_mlp = not experts or any(p.group == "mlp" and p.kind == "linear" for p in parameters)
    # With `multi_query`, Falcon and GPT-BigCode have one head and ignore other fields. Falcon's newer decoder reads
    # `num_kv_heads` instead (transformers/models/falcon/modeling_falcon.py).
    key_value_heads = _size(text, "num_key_value_heads", "num_kv_heads")
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        key_value_heads = 1
    return Dimensions(
        num_layers=_size(text, "num_hidden_layers") or max((p.count for p in parameters if p.in_layer), default=0),
        hidden_size=hidden,
        intermediate_size=intermediate if has_dense_mlp else 0,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads or heads,
        head_dim=_size(text, "head_dim", "d_kv") or hidden // heads,
        vocab_size=_size(text, "vocab_size"),
        num_experts=experts,
        # If the config has no known name for the active experts, count all experts as active.
        experts_per_token=(_size(text, "num_experts_per_tok", "moe_topk") or experts) if experts else 0,
        expert_intermediate_size=_size(text, "moe_intermediate_size") or intermediate if experts else 0,
    )


def _size(config: Any, *fields: str) -> int:
    """Return the first field that is a size, or its largest value if it is a list; 0 if there is none."""
    for field in fields:
        value = getattr(config, field, None)
        sizes = [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, int)]
        if sizes and max(sizes) > 0:
            return max(sizes)
    return 0


SHAPES_FILE = "parameter_shapes.json"
Class = Mapping[str, Any]
"""A stored class, as `load_shapes` describes it."""
Values = dict[str, Any]
"""Values of a configuration by dotted name."""

_CODE_FIELDS = frozenset({"auto_map", "attn_implementation", "experts_implementation", "quantization_config"})
_PLAIN_ACTIVATIONS = frozenset(
    {"gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "swish", "tanh"}
)
"""Activation functions without parameters (transformers/activations.py)."""
_ACTIVATION_FIELDS = ("_act", "activation", "activation_function")
NO_SHAPE = re.compile(
    r"dropout|drop|_eps$|epsilon|_std$|_range$|theta$|dtype$|_coef$|token|version|label|problem_type|softcapping$"
    r"|use_cache$|return_dict$|output_|residual_in_fp32$|norm_topk_prob$|(n|topk)_group$|topk_method$|scoring_func$|experts_per_tok$|max_window_layers$|rope_interleave$|scaling_factor$|_scale$|_multiplier$|_nextn_predict_layers$|^time_step|architectures$|task_specific_params$"
    r"|initializer|grid_pinpoints$|^temperature$|^top_|^bias_logits|generation|^max_length$|^prefix$|_loss"
)
"""Fields that do not affect the shape of any tensor."""
LABELS = "num_labels"
"""Outputs of a classifier, which a `config.json` states by the length of `id2label`."""
_ROTARY_FIELDS = ("rope_parameters", "rope_scaling")
_PARTLY_ROTATED = ("phi3",)
"""Model types whose rotary tables have `int(partial_rotary_factor * head_dim)` angles (Phi-4-mini: 0.75)."""
_RATIOS = (
    *(("hidden_size", "num_attention_heads"), ("n_embd", "n_head"), ("n_embd", "num_heads"), ("d_model", "n_heads")),
    *(("hidden_size", "num_heads"), ("embed_dim", "num_heads")),
    ("image_size", "patch_size"),
)
_FACTOR = re.compile(r"(?P<rounding>ceil |round |min )?(?P<number>.+?)//(?P<divisor>.+)")


def load_shapes(release: str) -> Mapping[str, Any]:
    """Return the classes of a release of Transformers: the traced `versions`, and `classes` by name.

    A class has these keys:

    - `model_type`, `values` (defaults of its configuration) and `names` (of the standard fields)
    - `varied`: fields with the kinds of values that were traced
    - `required` fields, `implied` fields (by others, if they are not set), `derived` fields, and `computed` fields
      (which the class never reads)
    - `layer_types` of some layers, and those that a stack may lack (`sometimes`)
    - `rotary_factor`: the fraction of a head that is rotated
    - `apart`: switches of which at most one may differ from its default
    - `read`: other fields that its code reads
    - `parameters`, `buffers` and `tied`: expressions, with the kinds of values (`when`) for which they apply
    - `part_types`: model types of its parts, where other ones have other tensors
    - `texts`, if its text part has the tensors of another class: `types` with the model type, the class and the
      defaults of each text part, the `usual` one, the `prefix` of its tensors, the name of the `head`, and whether a
      configuration may have the text part's fields at the top level (`flat`). The other keys then describe the rest of
      the model.
    - `unnamed`, if Transformers builds this class for a configuration without `architectures`

    A variant of a class, with `required` values of other fields, has a second word in its name.
    """
    return stored_facts(SHAPES_FILE, release)


def model_spec_from_config(
    config: ModelConfig, *, name: str, revision: str | None = None, release: str | None = None
) -> ModelSpec | None:
    """Return the `ModelSpec` of a validated `config.json`; `None` if its class is not stored or does not cover it.

    `release` is a release of Transformers, by default the newest tested one.
    """
    release = release or newest_tested_release()
    wanted = (config.get("architectures") or [None])[0]
    for key, stored in load_shapes(release)["classes"].items():
        # A class may have variants, whose names follow its own.
        architecture = key.partition(" ")[0]
        is_wanted = architecture == wanted if wanted else stored.get("unnamed", False)
        if is_wanted and config["model_type"] == stored["model_type"]:
            spec = spec_of(stored, config, architecture=architecture, name=name, revision=revision, release=release)
            if spec is not None:
                return spec
    return None


def model_type_of(architecture: str, *, release: str) -> str | None:
    """Return the model type of a class of Transformers by its name; `None` for a class that is not stored."""
    stored = {key.partition(" ")[0]: kept["model_type"] for key, kept in load_shapes(release)["classes"].items()}
    return stored.get(architecture)


def spec_of(
    stored: Class,
    config: ModelConfig,
    *,
    architecture: str,
    name: str,
    revision: str | None = None,
    release: str,
) -> ModelSpec | None:
    """Return the specification of a stored class for a configuration; `None` if the class does not cover it."""
    text = None
    texts: Mapping[str, Any] = stored.get("texts") or {}
    part = stored["text"]
    if texts:
        if part not in config and texts["flat"]:
            # Older files have the fields of the text part at the top level.
            own = {*stored["values"], "model_type", "architectures"}
            moved = {
                name: value
                for name, value in config.items()
                if name not in own and not name.endswith(("_config", "_token_id"))
            }
            config = {name: value for name, value in config.items() if name not in moved} | {part: moved}
        text = text_spec(texts, config, part, release=release)
        if text is None:
            return None
    stated = _stated(config, stored)
    if stated is None:
        return None
    if text is not None:
        # What the configuration of the text part does not state.
        set_here = ("model_type", "tie_word_embeddings")
        unset = [pair for pair in text.settings if pair[0] not in set_here and f"{part}.{pair[0]}" not in stated]
        stated |= {f"{part}.{name}": value for name, value in unset}
    if not stated.keys() >= set(stored["required"]):
        return None
    values = stored["values"] | stated
    kinds = {field: value_kind(values[field]) for field in stored["varied"]}
    if sum(kinds[field] != value_kind(stored["values"][field]) for field in stored["apart"]) > 1:
        return None
    sizes = countable_sizes(values)
    derived = {
        field: evaluated(rule, sizes) if isinstance(rule, str) else rule["literal"]
        for field, rule, when in stored["derived"]
        if _holds(when, kinds) and ("=" not in field or field.partition("=")[0] not in stated)
    }
    sizes |= {field: value for field, value in derived.items() if type(value) is int}
    values |= {field: size for field, size in derived.items() if "=" not in field}
    for field in stored["layer_types"]:
        values[field] = [kind for kind in stored["layer_types"][field] for _ in range(sizes.get(f"{field}={kind}", 0))]
        counts = {f"{field}={kind}": values[field].count(kind) for kind in stored["layer_types"][field]}
        if any(not count and name not in stored.get("sometimes", ()) for name, count in counts.items()):
            return None
        kinds |= {name: value_kind(count) for name, count in counts.items()}
    parameters = tuple(
        ParameterShape(
            name=pattern, shape=tuple(evaluated(size, sizes) for size in shape), count=number, group=group, kind=kind
        )
        for pattern, shape, count, group, kind, when in stored["parameters"]
        if _holds(when, kinds) and (number := evaluated(count, sizes))
    )
    if any(p.count < 0 or min(p.shape, default=1) < 1 for p in parameters):
        return None
    # No branch applies to switches that were never traced together.
    buffer_bytes, tied = (
        next((evaluated(rule, sizes) for rule, when in stored[field] if _holds(when, kinds)), None)
        for field in ("buffers", "tied")
    )
    if buffer_bytes is None or tied is None:
        return None
    layer_classes = set(stored["layer_classes"])
    if (config.get("vision_config") or {}).get("vision_use_head") is False:
        # SigLIP's pooling head, which published Gemma 3 and LLaVA-OneVision do not have.
        parameters = tuple(p for p in parameters if not (image_part(p.name) and ".head." in p.name))
        layer_classes.discard("SiglipMultiheadAttentionPoolingHead")
    if text is not None:
        parameters += text_parameters(text, texts, tied=bool(tied))
        buffer_bytes += text.buffer_bytes
        if text.model_type == texts["types"][text.model_type][0]:
            layer_classes |= {*text.layer_classes}
    top, fields = (_Fields(values, stored, name) for name in ("", part))
    heads = getattr(fields, "num_attention_heads", 1)
    if not getattr(fields, "head_dim", 0) and getattr(fields, "hidden_size", 0) % heads:
        return None
    if stored["model_type"] in _PARTLY_ROTATED:
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        factor = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        head_dim = getattr(fields, "head_dim", None) or fields.hidden_size // heads
        # Two tables in fp32: the current angles, and the original ones.
        buffer_bytes = 2 * 4 * ceil(int(factor * head_dim) / 2)
    nested: Values = {}
    for field, value in values.items():
        *parents, leaf = field.split(".")
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        level[leaf] = value
    return described_spec(
        config=top,
        text=fields,
        values=nested,
        name=name,
        revision=revision,
        model_type=stored["model_type"],
        architecture=architecture,
        parameters=parameters,
        buffer_bytes=buffer_bytes,
        layer_classes=tuple(sorted(layer_classes)),
        tied_embeddings=bool(tied),
        attention=stored["attention"],
        release=release,
        source="config",
    )


def text_spec(texts: Mapping[str, Any], config: ModelConfig, part: str, *, release: str) -> ModelSpec | None:
    """Return the text part of a configuration as a model with an untied head; `None` if it is not covered."""
    stated = config.get(part) or {}
    kind = stated.get("model_type", texts["usual"])
    if kind not in texts["types"]:
        return None
    model_type, architecture, defaults = texts["types"][kind]
    values = {name: value for name, value in defaults.items() if value is not None} | dict(stated)
    values |= {"model_type": model_type, "architectures": [architecture], "tie_word_embeddings": False}
    # Files of SmolVLM have parts of other models.
    values = {name: value for name, value in values.items() if not name.endswith("_config")}
    spec = model_spec_from_config(values, name="text", release=release)
    if spec is None:
        return None
    settings = dict(spec.settings) | {"head_dim": spec.dimensions.head_dim}
    return replace(spec, model_type=kind, settings=tuple(settings.items()))


def text_parameters(text: ModelSpec, texts: Mapping[str, Any], *, tied: bool) -> tuple[ParameterShape, ...]:
    """Return the parameters of a text part by their names in the combined model."""
    return tuple(
        replace(p, name=texts["head"] if p.group == "head" else texts["prefix"] + p.name.removeprefix("model"))
        for p in text.parameters
        if not (tied and p.group == "head")
    )


def value_kind(value: object) -> str:
    """Return the kind of a value: `null`, `true`, `false`, `number` or `zero`, otherwise the value itself."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return "number" if value > 0 else "zero"
    return str(value)


def countable_sizes(values: ModelConfig) -> dict[str, int]:
    """Return the integers of flat values, quotients such as the head width, and the number of layers by type."""
    sizes = {name: value for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
    for number, divisor in _RATIOS:
        for name in [name for name in sizes if name == number or name.endswith(f".{number}")]:
            if size := sizes.get(name.removesuffix(number) + divisor):
                sizes[f"{name} per {divisor}"] = sizes[name] // size
    for name, value in values.items():
        if name.endswith("layer_types") and isinstance(value, list):
            sizes |= {f"{name}={kind}": count for kind, count in Counter(value).items()}
    return sizes


def evaluated(expression: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a sum of products, such as `2*head_dim*num_key_value_heads + hidden_size//2`.

    A quotient is rounded down, with `ceil` up, and with `round` to the nearest integer; `min` is the smaller of both.
    """
    total = 0
    for term in expression.split(" + "):
        value = 1
        for factor in term.split("*"):
            if quotient := _FACTOR.fullmatch(factor):
                number, divisor = _stored_size(quotient["number"], sizes), _stored_size(quotient["divisor"], sizes)
                up = {"ceil ": divisor - 1, "round ": divisor // 2}.get(quotient["rounding"], 0)
                value *= min(number, divisor) if quotient["rounding"] == "min " else (number + up) // divisor
            else:
                value *= _stored_size(factor, sizes)
        total += value
    return total


def _stored_size(name: str, sizes: Mapping[str, int]) -> int:
    return int(name) if name.lstrip("-").isdigit() else sizes.get(name, 0)


def flattened(config: ModelConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a configuration and its parts by dotted name."""
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config") and name not in _CODE_FIELDS:
            yield from flattened(value, f"{prefix}{name}.")
        elif not name.startswith("_") and name not in _CODE_FIELDS:
            yield prefix + name, value


def _stated(config: ModelConfig, stored: Class) -> Values | None:
    """Return the fields of a configuration by the names of the class; `None` if one is not covered."""
    stated: Values = {}
    parts = {field.rpartition(".")[0] for field in stored["values"]}
    for field, value in flattened(config):
        part, _, name = field.rpartition(".")
        own = f"{part}." * bool(part) + stored["names"].get(part, {}).get(name, name)
        if LABELS in stored["varied"] and own == "id2label" and isinstance(value, dict):
            own, value = LABELS, len(value)
        if name == "model_type" and value != stored.get("part_types", {}).get(part, value):
            return None
        if part.partition(".")[0] == stored["text"] and "texts" in stored:
            # Its own class decides about it.
            if value is None or isinstance(value, bool | int | float | str):
                stated[own] = value
            continue
        if part not in parts or stated.get(own, value) != value or not _is_covered(own, value, config, stored):
            return None
        if not name.endswith(_ROTARY_FIELDS):
            stated[own] = value
    return stated


def _is_covered(field: str, value: Any, config: ModelConfig, stored: Class) -> bool:
    name = field.rpartition(".")[2]
    if field in stored["computed"]:
        return True
    if field in stored["varied"]:
        return value_kind(value) in stored["varied"][field] and (value is not None or field not in stored["implied"])
    if stored["model_type"] in _PARTLY_ROTATED and name in (*_ROTARY_FIELDS, "partial_rotary_factor"):
        return True
    if name in _ROTARY_FIELDS:
        rotary_factor = value.get("partial_rotary_factor") if isinstance(value, dict) else None
        return rotary_factor in (None, stored["rotary_factor"])
    if name == "mlp_layer_types" and isinstance(value, list):
        # What GLM-4.7-Flash derives, and writes into the files of a saved model.
        dense = config.get("first_k_dense_replace", 1)
        return value == [*["dense"] * dense, *["sparse"] * (config.get("num_hidden_layers", 0) - dense)]
    if name.endswith("layer_types"):
        if field not in stored["layer_types"]:
            return name not in stored["read"]
        known = stored["layer_types"][field]
        return value is None or (isinstance(value, list) and len(value) > 0 and set(value) <= set(known))
    if name.endswith(_ACTIVATION_FIELDS) and value in _PLAIN_ACTIVATIONS:
        return True
    if NO_SHAPE.search(name) or name.endswith(OTHER_SETTINGS):
        return not isinstance(value, dict) or name in ("id2label", "label2id")
    if name == "no_rope_layers" and "layer_types" in config:
        return True
    if name == "sliding_window" and not config.get(
        "use_sliding_window", stored["values"].get("use_sliding_window", True)
    ):
        return True
    if name == "moe_layer_end_index":
        return value in (-1, config.get("num_hidden_layers", 0) - 1)
    if name == "moe_layers" and isinstance(value, list):
        # What Llama 4 derives, and writes into the files of a saved model.
        step, layers = config.get("interleave_moe_layer_step", 1), config.get("num_hidden_layers", 0)
        return bool(step > 0 and value == list(range(step - 1, layers, step)))
    if field == "vision_config.vocab_size" or (field == "vocab_size" and "texts" in stored):
        # Files of LLaVA and SmolVLM have one, which only text parts read.
        return True
    if name == "mamba_d_head":
        inner = config.get("mamba_expand", 2) * config.get("hidden_size", 0)
        return value == "auto" or bool(value * config.get("mamba_n_heads", 0) == inner)
    if name == "attention_head_size":
        return bool(value == config.get("hidden_size", 0) // config.get("num_attention_heads", 1))
    if field not in stored["values"]:
        return name not in stored["read"]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = "|".join(value) or None
    usual = stored["values"][field]
    if isinstance(value, list) and isinstance(usual, list):
        # Numbers of layers, of which some have more modules.
        return len(value) == len(usual)
    return bool(usual == value)


def _holds(when: Mapping[str, str], kinds: Mapping[str, str]) -> bool:
    return all(kinds.get(field) == kind for field, kind in when.items())


class _Fields:
    """Values of one part of a configuration as attributes, also under the standard names."""

    def __init__(self, values: Values, stored: Class, part: str) -> None:
        self._values, self._prefix = values, f"{part}." * bool(part)
        self._names: Mapping[str, str] = stored["names"].get(part, {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[self._prefix + self._names.get(name, name)]
        except KeyError:
            raise AttributeError(name) from None
