"""Closed-form `ModelSpec` of the common decoder families, equal to the models that Transformers builds.

`tests/ds_configs/models/test_model.py` compares each family with Transformers on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from ..specs.model import (
    Dimensions,
    Group,
    ModelConfig,
    ModelSpec,
    ParameterKind,
    ParameterShape,
    is_within,
    newest_tested_release,
    stored_facts,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """Differences of a decoder family from Llama."""

    name: str
    """Beginning of the names of its classes in Transformers."""
    tied_by_default: bool = False
    default_head_dim: int | None = None
    """Default head width; `None` for `hidden_size / num_attention_heads`."""
    key_value_heads_required: bool = True
    """Whether the config must set `num_key_value_heads`; otherwise the default is `num_attention_heads`."""
    query_key_value_bias: bool | None = None
    """`None`: `attention_bias` decides, also for the output projection."""
    mlp_bias: bool = False
    """Whether `mlp_bias` is read."""
    null_head_dim: bool = False
    """Whether a `head_dim` of null means `hidden_size / num_attention_heads`."""
    sliding_window: int | None = None
    """Default attention window."""
    sliding_window_switch: bool = False
    """Whether the window requires `use_sliding_window`."""
    head_norm: bool = False
    """RMSNorm over each query and key head."""
    fused_projections: bool = False
    """`qkv_proj` and `gate_up_proj` as single matrices (Phi-3)."""
    norms_per_layer: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    rotary_table_per_layer_type: bool = False
    """Whether local and global layers have separate rotary tables."""
    partial_rotary: bool = False
    """Whether `partial_rotary_factor` is read."""
    embedding_scale: bool = False
    eager_releases: str | None = None
    """Releases of Transformers without SDPA for the family, such as `>=5.21`; `None` for none."""

    @property
    def architecture(self) -> str:
        return f"{self.name}ForCausalLM"


_FOUR_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        name="Llama",
        key_value_heads_required=False,
        mlp_bias=True,
        null_head_dim=True,
    ),
    "mistral": _Family(
        name="Mistral",
        query_key_value_bias=False,
        null_head_dim=True,
        sliding_window=4096,
    ),
    "qwen2": _Family(
        name="Qwen2",
        sliding_window=4096,
        sliding_window_switch=True,
        query_key_value_bias=True,
    ),
    "qwen3": _Family(
        name="Qwen3",
        sliding_window=4096,
        sliding_window_switch=True,
        default_head_dim=128,
        head_norm=True,
    ),
    "qwen3_moe": _Family(
        name="Qwen3Moe",
        sliding_window=4096,
        sliding_window_switch=True,
        head_norm=True,
    ),
    "mixtral": _Family(
        name="Mixtral",
        query_key_value_bias=False,
        null_head_dim=True,
    ),
    "gemma2": _Family(
        name="Gemma2",
        tied_by_default=True,
        default_head_dim=256,
        norms_per_layer=_FOUR_NORMS,
        sliding_window=4096,
        embedding_scale=True,
        eager_releases=">=5.21",
    ),
    "gemma3_text": _Family(
        name="Gemma3",
        tied_by_default=True,
        default_head_dim=256,
        head_norm=True,
        norms_per_layer=_FOUR_NORMS,
        sliding_window=4096,
        rotary_table_per_layer_type=True,
        embedding_scale=True,
    ),
    "phi3": _Family(
        name="Phi3",
        key_value_heads_required=False,
        query_key_value_bias=False,
        fused_projections=True,
        partial_rotary=True,
    ),
}

FAST_FAMILIES: tuple[str, ...] = (*_FAMILIES, "gpt2")
"""Model types that are counted without torch."""

ARCHITECTURES: Mapping[str, str] = {
    **{family.architecture: model_type for model_type, family in _FAMILIES.items()},
    "GPT2LMHeadModel": "gpt2",
}
"""Model types of these families by class."""

CONFIG_FIELDS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    }
}
"""Names of the standard fields in a family's `config.json`."""


def model_spec_from_config(
    config: ModelConfig, *, name: str, revision: str | None = None, release: str | None = None
) -> ModelSpec | None:
    """Return the `ModelSpec` of a validated `config.json`; `None` if no closed form applies.

    `None` means an unknown family, a class other than the family's causal language model, or a missing field whose
    default only Transformers knows. `release` is a release of Transformers, by default the newest tested one.
    """
    release = release or newest_tested_release()
    model_type = config.get("model_type")
    architecture = (config.get("architectures") or [None])[0]
    if model_type == "gpt2" and architecture in (None, "GPT2LMHeadModel"):
        return _gpt2(config, name=name, revision=revision, release=release)
    family = _FAMILIES.get(str(model_type))
    if family is None or architecture not in (None, family.architecture):
        return None
    dimensions = _decoder_dimensions(config, family)
    mixed = config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers")
    if dimensions is None or (dimensions.num_experts and mixed):
        return None
    tied = bool(config.get("tie_word_embeddings", family.tied_by_default))
    # Bytes of the rotary tables: current and original fp32 inverse frequencies.
    tables, rotary_dim = 1, dimensions.head_dim
    if family.rotary_table_per_layer_type:
        # Every n-th layer is global (transformers/models/gemma3/configuration_gemma3.py), so a short stack has none.
        pattern = config.get("sliding_window_pattern") or 6
        tables = len(set(config.get("layer_types") or ())) or 1 + (dimensions.num_layers >= pattern > 1)
    if family.partial_rotary:
        rope: ModelConfig = config.get("rope_parameters") or config.get("rope_scaling") or {}
        factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        rotary_dim = int(rotary_dim * factor)
    uses_window = config.get("use_sliding_window", not family.sliding_window_switch)
    return ModelSpec(
        name=name,
        revision=revision,
        model_type=str(model_type),
        architecture=family.architecture,
        dimensions=dimensions,
        parameters=tuple(_decoder_parameters(config, family, dimensions, tied=tied)),
        buffer_bytes=(tables * 2 * 4 * ceil(rotary_dim / 2) + (4 if family.embedding_scale else 0)),
        layer_classes=(f"{family.name}DecoderLayer",),
        sliding_window=config.get("sliding_window", family.sliding_window) if uses_window else None,
        tied_embeddings=tied,
        weight_conversion=bool(dimensions.num_experts),
        attention=family_attention(str(model_type), release),
        release=release,
        source="config",
    )


def family_attention(model_type: str, release: str) -> str | None:
    """Return `eager` if a release of Transformers has no SDPA for a family, else `None`."""
    family = _FAMILIES.get(model_type)
    is_eager = family is not None and family.eager_releases and is_within(release, family.eager_releases)
    return "eager" if is_eager else None


def _decoder_dimensions(config: ModelConfig, family: _Family) -> Dimensions | None:
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads") is None and family.key_value_heads_required:
        return None
    head_dim = config.get("head_dim")
    if head_dim is None:
        if "head_dim" in config and not family.null_head_dim:
            return None
        head_dim = family.default_head_dim or config["hidden_size"] // heads
    experts = config.get("num_local_experts", config.get("num_experts", 0)) or 0
    sparse = config.get("model_type") in ("mixtral", "qwen3_moe")
    sized_by = "intermediate_size" if config.get("model_type") == "mixtral" else "moe_intermediate_size"
    if sparse and not (experts and config.get("num_experts_per_tok") and config.get(sized_by)):
        return None
    return Dimensions(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=0 if sparse else config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=config["vocab_size"],
        num_experts=experts if sparse else 0,
        experts_per_token=config["num_experts_per_tok"] if sparse else 0,
        expert_intermediate_size=config[sized_by] if sparse else 0,
    )


def _decoder_parameters(
    config: ModelConfig, family: _Family, dimensions: Dimensions, *, tied: bool
) -> Iterator[ParameterShape]:
    hidden, layers = dimensions.hidden_size, dimensions.num_layers
    yield _outside("model.embed_tokens.weight", (dimensions.vocab_size, hidden), "embedding", "embedding")
    query, key_value = dimensions.query_size, dimensions.key_value_size
    attention_bias = bool(config.get("attention_bias", False))
    input_bias = attention_bias if family.query_key_value_bias is None else family.query_key_value_bias
    output_bias = attention_bias and family.query_key_value_bias is None
    widths = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    if family.fused_projections:
        widths = {"qkv_proj": query + 2 * key_value}
    for projection, width in widths.items():
        yield from _linear(f"self_attn.{projection}", width, hidden, layers, "attention", input_bias)
    yield from _linear("self_attn.o_proj", hidden, query, layers, "attention", output_bias)
    for norm in ("q_norm", "k_norm") if family.head_norm else ():
        yield _layer(f"self_attn.{norm}.weight", (dimensions.head_dim,), layers, "norm", "norm")
    if experts := dimensions.num_experts:
        width = dimensions.expert_intermediate_size
        yield _layer("mlp.gate.weight", (experts, hidden), layers, "mlp", "other")
        yield _layer("mlp.experts.gate_up_proj", (experts, 2 * width, hidden), layers, "experts", "experts")
        yield _layer("mlp.experts.down_proj", (experts, hidden, width), layers, "experts", "experts")
    else:
        bias, width = family.mlp_bias and bool(config.get("mlp_bias")), dimensions.intermediate_size
        widths = {"gate_up_proj": 2 * width} if family.fused_projections else {"gate_proj": width, "up_proj": width}
        for projection, rows in widths.items():
            yield from _linear(f"mlp.{projection}", rows, hidden, layers, "mlp", bias)
        yield from _linear("mlp.down_proj", hidden, width, layers, "mlp", bias)
    for norm in family.norms_per_layer:
        yield _layer(f"{norm}.weight", (hidden,), layers, "norm", "norm")
    yield _outside("model.norm.weight", (hidden,), "norm", "norm")
    if not tied:
        yield _outside("lm_head.weight", (dimensions.vocab_size, hidden), "head", "linear")


def _linear(
    module: str, out_features: int, in_features: int, layers: int, group: Group, bias: bool
) -> Iterator[ParameterShape]:
    yield _layer(f"{module}.weight", (out_features, in_features), layers, group, "linear")
    if bias:
        yield _layer(f"{module}.bias", (out_features,), layers, group, "bias")


def _layer(
    name: str, shape: tuple[int, ...], count: int, group: Group, kind: ParameterKind, stack: str = "model.layers"
) -> ParameterShape:
    return ParameterShape(name=f"{stack}.*.{name}", shape=shape, count=count, group=group, kind=kind)


def _outside(name: str, shape: tuple[int, ...], group: Group, kind: ParameterKind) -> ParameterShape:
    return ParameterShape(name=name, shape=shape, count=1, group=group, kind=kind)


def _gpt2(config: ModelConfig, *, name: str, revision: str | None, release: str) -> ModelSpec | None:
    if not {"n_embd", "n_layer", "n_head", "n_positions", "vocab_size"} <= config.keys():
        return None
    if config.get("add_cross_attention"):
        return None
    hidden, layers = config["n_embd"], config["n_layer"]
    inner = config.get("n_inner") or 4 * hidden
    tied = bool(config.get("tie_word_embeddings", True))

    def layer(module: str, shape: tuple[int, ...], group: Group, kind: ParameterKind) -> Iterator[ParameterShape]:
        yield _layer(f"{module}.weight", shape, layers, group, kind, "transformer.h")
        width = (shape[-1],)
        yield _layer(f"{module}.bias", width, layers, group, "norm" if kind == "norm" else "bias", "transformer.h")

    parameters = [
        _outside("transformer.wte.weight", (config["vocab_size"], hidden), "embedding", "embedding"),
        _outside("transformer.wpe.weight", (config["n_positions"], hidden), "embedding", "embedding"),
        *layer("ln_1", (hidden,), "norm", "norm"),
        *layer("attn.c_attn", (hidden, 3 * hidden), "attention", "linear"),
        *layer("attn.c_proj", (hidden, hidden), "attention", "linear"),
        *layer("ln_2", (hidden,), "norm", "norm"),
        *layer("mlp.c_fc", (hidden, inner), "mlp", "linear"),
        *layer("mlp.c_proj", (inner, hidden), "mlp", "linear"),
        _outside("transformer.ln_f.weight", (hidden,), "norm", "norm"),
        _outside("transformer.ln_f.bias", (hidden,), "norm", "norm"),
    ]
    if not tied:
        parameters.append(_outside("lm_head.weight", (config["vocab_size"], hidden), "head", "linear"))
    return ModelSpec(
        name=name,
        revision=revision,
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        dimensions=Dimensions(
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=inner,
            num_attention_heads=config["n_head"],
            num_key_value_heads=config["n_head"],
            head_dim=hidden // config["n_head"],
            vocab_size=config["vocab_size"],
        ),
        parameters=tuple(parameters),
        learned_positions=config["n_positions"],
        residual_dropout_masks=2 if config.get("resid_pdrop", 0.1) else 0,
        layer_classes=("GPT2Block",),
        tied_embeddings=tied,
        release=release,
        source="config",
    )


LIGER_FILE = "liger_kernels.json"
FUSED_LOSS = "fused_linear_cross_entropy"
TEXT_MODEL = "text_model"
"""The kernels of a nested text model, which its family enables; configurations of the Trainer do not reach them."""

Kernels = Mapping[str, Mapping[str, bool]]
"""The kernels of liger-kernel's tested release for each model type, with their defaults."""


def liger_kernels() -> Kernels:
    """Return the kernels of each model type; liger-kernel silently ignores other types."""
    kernels: Kernels = stored_facts(LIGER_FILE, "0")["kernels"]
    return kernels


def has_liger_loss(model_type: str, *, alone: bool) -> bool:
    """Return whether Liger computes head and loss of a model type together, as it does unless it is disabled.

    `alone` is without its other kernels.
    """
    kernels = liger_kernels().get(model_type, {})
    return kernels.get(FUSED_LOSS, False) and not (alone and TEXT_MODEL in kernels)
