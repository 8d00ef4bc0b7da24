"""Small models of families whose layers are of several kinds, or whose sizes have names of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.ds_configs.memory.activations import Adapter
from shardwright.ds_configs.specs.images import image_part

from .fit import SHALLOW_LAYERS
from .image_sizes import (
    Image,
    draw_glm4v,
    draw_halved_square,
    draw_internvl,
    draw_llama4_vl,
    draw_llava,
    draw_llava_next,
    draw_llava_next_mistral,
    draw_llava_onevision,
    draw_merged_patches,
    draw_mistral3,
    draw_patches,
    draw_pooled_square,
    draw_qwen2_5_vl,
    draw_qwen2_vl,
    draw_qwen3_5_moe_vl,
    draw_qwen3_5_vl,
    draw_qwen3_vl,
    draw_scaled_square,
    draw_shuffled_square,
    draw_smolvlm,
    draw_square,
    draw_tiles,
    draw_windows,
)
from .kind_sizes import (
    Values,
    draw_bert,
    draw_bloom,
    draw_clip,
    draw_cohere,
    draw_deepseek,
    draw_deepseek_v3,
    draw_distilbert,
    draw_electra,
    draw_ernie_moe,
    draw_falcon,
    draw_gemma3,
    draw_gpt_neox,
    draw_granite,
    draw_granite_experts,
    draw_granite_hybrid,
    draw_grouped_experts,
    draw_lfm2,
    draw_lfm2_moe,
    draw_llama4,
    draw_modernbert,
    draw_nemotron_h,
    draw_opt,
    draw_qwen3_5,
    draw_qwen3_next,
    draw_shared_experts,
    draw_t5,
    draw_vit,
    draw_whisper,
    labelled,
)


@dataclass(frozen=True, kw_only=True)
class KindFamily:
    """A family as it is drawn in small sizes, and what its activation bytes may depend on."""

    model_type: str
    """Of its configuration."""
    sizes: Callable[[random.Random], Values]
    """Draws the configuration's sizes: widths are multiples of 8, so that no activation is shaped like a weight."""
    widths: tuple[str, ...]
    """What a token keeps a multiple of."""
    more: tuple[str, ...] = ()
    """Features that are not a token times a width."""
    based_on: str = ""
    """A class with the same layers; what differs from its coefficients is stored."""
    depth: Callable[[Values, Mapping[str, int]], Values]
    """The configuration with a number of layers of each kind."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """For each kind of layer, in the order of execution, a parameter that every layer of it holds once; or
    `layer_types=NAME` where `config.json` alone tells them apart; `ONE - OTHER` where another kind holds it too."""
    interleaved: bool = False
    """Whether kinds take turns, after those of a tower."""
    settings: tuple[str, ...] = ()
    """Values of the configuration that change which operators run: others than the traced ones have the bound."""
    inputs: str = "text"
    """What the model reads: `text`, `text pair`, `image`, `image and text`, `sound`; or, in a text, `images`,
    `padded images`, `sized images`, `patches`."""
    labels: str = "text"
    """What has a label: the next or masked words of a `text`, a `sequence`, or a `token`."""
    image: Callable[[random.Random, Values], Image] | None = None
    """Draws an image of a model that reads images in a text. As some operators run for each image, every traced shape
    has two equal ones."""
    image_mask: str = ""
    """Name of the input that has 1 for each token of an image."""
    loops_over_sequences: tuple[str, ...] = ()
    """Functions that run operators for each sequence: traces meter what they return, but not what they free."""
    lengths: tuple[int, ...] = tuple(range(9, 24, 2))
    """Tokens of a sequence: odd numbers, some larger than a chunk of linear attention if its states are kept."""
    shallow_layers: int = SHALLOW_LAYERS
    """Layers of each kind in the shallow models."""
    attentions: tuple[str, ...] = ("fused", "eager")
    adapters: tuple[Adapter, ...] = ("none", "lora_all_linear")
    """PEFT 0.21 adapts routed experts too, and bytes then grow with the weights: mixtures have the first alone."""

    @property
    def text_kinds(self) -> list[str]:
        """Kinds of layers that run without images."""
        return [kind for kind, mark in self.kinds.items() if not (self.image and image_part(mark))]


def _one_stack(name: str) -> Callable[[Values, Mapping[str, int]], Values]:
    return lambda values, depths: values | {name: depths["layer"]}


_BERT_WIDTHS = ("hidden_size", "intermediate_size", "attention_heads", "vocab_size")
_TEXT = ("constant", "sequence", "position", "token", "position*position", "token*position")


def _encoder(model_type: str, stack: str, **options: Any) -> KindFamily:
    defaults: dict[str, Any] = {
        "sizes": draw_bert,
        "widths": _BERT_WIDTHS,
        "more": (*_TEXT, "token*position*attention_heads"),
        "depth": _one_stack("num_hidden_layers"),
        "settings": ("hidden_act", "is_decoder"),
    }
    kinds = {"layer": f"{stack}.*.output.dense.weight"}
    return KindFamily(model_type=model_type, **(defaults | {"kinds": kinds} | options))


_TYPES = {"full": "full_attention", "sliding": "sliding_attention", "linear": "linear_attention"}


def _layer_types(values: Values, depths: Mapping[str, int]) -> Values:
    kinds = taking_turns(depths)
    return values | {"num_hidden_layers": len(kinds), "layer_types": [_TYPES.get(kind, kind) for kind in kinds]}


def _encoders() -> dict[str, KindFamily]:
    """Return encoders with a head for masked tokens, for classes of sequences and for those of tokens."""
    bert = _encoder("bert", "bert.encoder.layer")
    masked = {
        "Bert": bert,
        "Roberta": _encoder("roberta", "roberta.encoder.layer", based_on="BertForMaskedLM"),
        "XLMRoberta": _encoder("xlm-roberta", "roberta.encoder.layer", based_on="RobertaForMaskedLM"),
        "Electra": _encoder(
            "electra",
            "electra.encoder.layer",
            sizes=draw_electra,
            more=(*bert.more, "token*embedding_size"),
            based_on="BertForMaskedLM",
        ),
        "DistilBert": _encoder(
            "distilbert",
            "distilbert",
            sizes=draw_distilbert,
            widths=("hidden_size", "hidden_dim", "attention_heads", "vocab_size"),
            depth=_one_stack("n_layers"),
            kinds={"layer": "distilbert.transformer.layer.*.ffn.lin2.weight"},
            settings=("activation",),
        ),
        "DebertaV2": _encoder("deberta-v2", "deberta.encoder.layer", attentions=("eager",)),
        "ModernBert": _encoder(
            "modernbert",
            "model",
            sizes=draw_modernbert,
            more=(*bert.more, "position*head_dim"),
            depth=_layer_types,
            kinds={"full": "layer_types=full_attention", "sliding": "layer_types=sliding_attention"},
            interleaved=True,
            settings=("hidden_activation", "sparse_prediction", "classifier_pooling", "classifier_activation"),
            attentions=("masked",),
        ),
    }
    families: dict[str, KindFamily] = {}
    for name, family in masked.items():
        families[f"{name}ForMaskedLM"] = family
        for head in ("sequence", "token"):
            families[f"{name}For{head.title()}Classification"] = replace(
                family,
                based_on=family.based_on or f"{name}ForMaskedLM",
                sizes=labelled(family.sizes),
                more=(*family.more, "sequence*hidden_size", f"{head}*num_labels"),
                labels=head,
                attentions=family.attentions[:1],
            )
    return families


def _towers(values: Values, depths: Mapping[str, int]) -> Values:
    return values | {
        "text_config": values["text_config"] | {"num_hidden_layers": depths["text"]},
        "vision_config": values["vision_config"] | {"num_hidden_layers": depths["vision"]},
    }


def _dense_then_routed(values: Values, depths: Mapping[str, int]) -> Values:
    return values | {"first_k_dense_replace": depths["dense"], "num_hidden_layers": depths["dense"] + depths["routed"]}


def _dense_then_sparse(values: Values, depths: Mapping[str, int]) -> Values:
    kinds = ["dense"] * depths["dense"] + ["sparse"] * depths["routed"]
    return values | {"num_hidden_layers": len(kinds), "mlp_layer_types": kinds}


def _lfm2_moe(values: Values, depths: Mapping[str, int]) -> Values:
    kinds = ["conv"] * (depths["dense"] + depths["conv"]) + ["full_attention"] * depths["full"]
    return values | {"num_hidden_layers": len(kinds), "layer_types": kinds, "num_dense_layers": depths["dense"]}


def _gpt_oss(values: Values, depths: Mapping[str, int]) -> Values:
    kinds = ["sliding_attention", "full_attention"] * depths["layer"]
    return values | {"num_hidden_layers": depths["layer"], "layer_types": kinds[: depths["layer"]]}


def _llama4(values: Values, depths: Mapping[str, int]) -> Values:
    kinds = taking_turns(depths)
    return values | {
        "num_hidden_layers": len(kinds),
        "layer_types": ["full_attention" if kind == "full" else "chunked_attention" for kind in kinds],
        "no_rope_layers": [int(kind != "full") for kind in kinds],
        "moe_layers": [number for number, kind in enumerate(kinds) if kind != "dense"],
    }


def _gemma3(values: Values, depths: Mapping[str, int]) -> Values:
    found = _towers(values, depths)
    # Both stand in published models, and each has its own rotation.
    kinds = (["sliding_attention", "full_attention"] * depths["text"])[: depths["text"]]
    return found | {"text_config": found["text_config"] | {"layer_types": kinds}}


def _qwen_vl(values: Values, depths: Mapping[str, int]) -> Values:
    text, vision = (values[part] for part in ("text_config", "vision_config"))
    return values | {
        "text_config": text | {"num_hidden_layers": depths["text"]},
        "vision_config": vision | {"depth": depths["vision"]},
    }


def _qwen3_5_vl(values: Values, depths: Mapping[str, int]) -> Values:
    text = _layer_types(values["text_config"], {kind: depths[kind] for kind in ("linear", "full")})
    return values | {"text_config": text, "vision_config": values["vision_config"] | {"depth": depths["vision"]}}


def _qwen3_vl(values: Values, depths: Mapping[str, int]) -> Values:
    found = _qwen_vl(values, depths)
    return found | {"vision_config": found["vision_config"] | {"deepstack_visual_indexes": [0, 1, 2]}}


def _qwen2_5_vl(values: Values, depths: Mapping[str, int]) -> Values:
    found = _qwen_vl(values, depths)
    # The last layer reads all patches of an image, as in published models, and windows take turns with it.
    whole = [number for number in range(depths["vision"]) if (depths["vision"] - number) % 2]
    return found | {"vision_config": found["vision_config"] | {"fullatt_block_indexes": whole}}


def taking_turns(depths: Mapping[str, int]) -> list[str]:
    """Return kinds of layers in turns, the last ones one of each in the order of the mapping.

    >>> taking_turns({"linear": 3, "full": 2})
    ['linear', 'linear', 'full', 'linear', 'full']
    """
    turns = min(depths.values())
    more = [kind for kind, depth in depths.items() for _ in range(depth - turns)]
    return more + list(depths) * turns


_ROUTED = (
    *(
        "experts",
        "experts*hidden_size",
        "token*experts",
        "token*experts_per_token",
        "token*experts_per_token*hidden_size",
    ),
    *("token*experts_per_token*expert_intermediate_size", "token*experts_per_token*experts"),
)
_IMAGE_TEXT: dict[str, Any] = {
    "attentions": ("fused", "math"),
    "adapters": ("none", "frozen_tower", "none_liger", "lora_language", "lora_full_tower"),
}
_QWEN_VL: dict[str, Any] = _IMAGE_TEXT | {
    "inputs": "patches",
    "image_mask": "mm_token_type_ids",
    "loops_over_sequences": ("get_rope_index",),
}
_GROUPED_WIDTHS = ("hidden_size", "query_size", "key_value_size", "attention_heads", "key_value_heads", "vocab_size")
_LATENT: dict[str, Any] = {
    "widths": (
        *("hidden_size", "intermediate_size", "attention_heads", "vocab_size", "kv_lora_rank", "q_lora_rank"),
        *("qk_rope_head_dim", "attention_heads*qk_nope_head_dim", "attention_heads*qk_rope_head_dim"),
        *("attention_heads*v_head_dim",),
        "n_shared_experts*expert_intermediate_size",
    ),
    "more": (*_TEXT, "token*position*attention_heads", "position*qk_rope_head_dim", *_ROUTED),
    "depth": _dense_then_routed,
    "kinds": {
        "dense": "model.layers.*.mlp.down_proj.weight",
        "routed": "model.layers.*.mlp.shared_experts.down_proj.weight",
    },
    "attentions": ("fused",),
}
"""Latent attention, its first layers dense (DeepSeek)."""
_SHARED_EXPERTS: dict[str, Any] = {
    "widths": (*_GROUPED_WIDTHS, "intermediate_size", "n_shared_experts*expert_intermediate_size"),
    "more": (*_TEXT, "token*position*attention_heads", "position*head_dim", *_ROUTED),
    "depth": _dense_then_routed,
    "kinds": _LATENT["kinds"],
    "attentions": ("fused", "math"),
}
"""Grouped heads, its first layers dense (GLM-4.5)."""
_EXAONE4: dict[str, Any] = {
    "widths": (*_GROUPED_WIDTHS, "intermediate_size"),
    "more": (*_TEXT, "token*position*attention_heads", "position*head_dim"),
}
"""Full layers have positions only where none has a window (EXAONE 4)."""

_LLAMA4_WIDTHS = (
    *(*_GROUPED_WIDTHS, "intermediate_size_mlp", "expert_intermediate_size", "expert_intermediate_size*experts"),
)
_LLAMA4_KINDS = {
    "dense": "model.layers.*.feed_forward.down_proj.weight",
    "chunked": "layer_types=chunked_attention - model.layers.*.feed_forward.down_proj.weight",
    "full": "layer_types=full_attention",
}


def _delta_rule(prefix: str = "") -> tuple[str, ...]:
    """Return the widths of a gated delta rule: heads, queries, repeated queries, values."""
    keys, values = f"{prefix}linear_num_key_heads", f"{prefix}linear_num_value_heads"
    key, value = f"{prefix}linear_key_head_dim", f"{prefix}linear_value_head_dim"
    return (values, f"{keys}*{key}", f"{values}*{key}", f"{values}*{value}")


_DELTA_RULE, _DELTA_RULE_OF_TEXT = _delta_rule(), _delta_rule("text_config.")
_DELTA_RULE_STATES = f"chunk*{_DELTA_RULE[2]}*linear_value_head_dim"
_HYBRID: dict[str, Any] = {"depth": _layer_types, "interleaved": True, "attentions": ("fused", "math")}
_DELTA_HYBRID: dict[str, Any] = _HYBRID | {
    "kinds": {
        "linear": "model.layers.*.linear_attn.out_proj.weight",
        "full": "model.layers.*.self_attn.q_proj.weight",
    }
}
_DELTA_EXPERTS: dict[str, Any] = _DELTA_HYBRID | {
    "sizes": draw_qwen3_next,
    "widths": (*_GROUPED_WIDTHS, "shared_expert_intermediate_size", *_DELTA_RULE),
    "more": (*_TEXT, "token*position*attention_heads", "position*head_dim", *_ROUTED, _DELTA_RULE_STATES),
}


def _mamba(heads: str, width: str, state: str, groups: str, chunk: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the widths of Mamba 2 for each token, and its features for each chunk, by the names of its sizes."""
    return (
        (heads, f"{heads}*{width}", f"{groups}*{state}", groups),
        (f"chunk*{heads}*{chunk}", f"chunk*{heads}*{width}*{state}", f"chunk*{groups}*{chunk}*{chunk}"),
    )


_GRANITE_MAMBA, _GRANITE_CHUNKS = _mamba(
    "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_chunk_size"
)
_NEMOTRON_MAMBA, _NEMOTRON_CHUNKS = _mamba(
    "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "chunk_size"
)
_GRANITE: dict[str, Any] = _HYBRID | {
    "widths": (*_GROUPED_WIDTHS, "shared_intermediate_size"),
    "settings": ("hidden_act", "position_embedding_type", "num_local_experts", "mamba_expand"),
}
_VISION = "sequence*vision_config.patches"
_VISION_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads")
_TOWER = (
    *(f"sequence*vision_config.{width}" for width in _VISION_WIDTHS),
    *(f"{_VISION}*vision_config.{width}" for width in _VISION_WIDTHS),
    *(_VISION, f"{_VISION}*vision_config.patches*vision_config.num_attention_heads", "vision_config.patches"),
    "sequence*vision_config.image_size*vision_config.image_size",
)


def _image_text(*widths: str, classes: bool = False) -> tuple[str, ...]:
    """Return the features of text, of a vision tower with widths in `vision_config`, and of the tokens of images.

    With `classes`, each image has a further row in the tower.
    """
    tower = [f"patch*vision_config.{width}" for width in widths]
    further = ["image", *(f"image*vision_config.{width}" for width in widths)] if classes else []
    return (
        *(*_TEXT, "token*position*attention_heads", "position*head_dim", "patch", "patch*patch_pixels", *tower),
        *(*further, "image_token", "image_token*hidden_size", "image_token*vision_config.hidden_size"),
    )


def _llava(
    model_type: str,
    sizes: Callable[[random.Random], Values],
    image: Callable[[random.Random, Values], Image] = draw_tiles,
    settings: tuple[str, ...] = (),
    **options: Any,
) -> KindFamily:
    """Return LLaVA, or its successors that split an image into tiles."""
    tiled = image is draw_tiles
    # Liger replaces no layers of the successors.
    adapters = [name for name in _IMAGE_TEXT["adapters"] if name != "none_liger" or not tiled]
    tower = _image_text("hidden_size", "intermediate_size", "num_attention_heads", classes=True)
    return KindFamily(
        model_type=model_type,
        sizes=sizes,
        widths=(*_GROUPED_WIDTHS, "intermediate_size"),
        # The projector also reads patches of padding, which become no tokens.
        more=(*tower, "patch*hidden_size") if tiled else tower,
        depth=_towers,
        kinds={
            "vision": "model.vision_tower.encoder.layers.*.mlp.fc2.weight",
            "text": "model.language_model.layers.*.mlp.down_proj.weight",
        },
        settings=(
            *("text_config.model_type", "text_config.hidden_act", "vision_config.model_type"),
            *("vision_config.hidden_act", "projector_hidden_act", "vision_feature_layer"),
            *("vision_feature_select_strategy", *settings),
        ),
        inputs="tiles" if tiled else "images",
        image=image,
        # The last layer of CLIP's tower has no gradient.
        shallow_layers=3,
        **(_IMAGE_TEXT | {"adapters": tuple(adapters)} | options),
    )


_FRAMES = "sequence*max_source_positions"


def _smolvlm(model_type: str) -> KindFamily:
    return KindFamily(
        model_type=model_type,
        sizes=draw_smolvlm,
        widths=(*_GROUPED_WIDTHS, "intermediate_size"),
        # A mask of pixels marks what was padded; a patch has three values for each.
        more=(
            *("patch*vision_config.patch_size*vision_config.patch_size", "image"),
            *_image_text("hidden_size", "intermediate_size", "num_attention_heads"),
        ),
        depth=_towers,
        kinds={
            "vision": "model.vision_model.encoder.layers.*.mlp.fc2.weight",
            "text": "model.text_model.layers.*.mlp.down_proj.weight",
        },
        settings=(
            "text_config.model_type",
            "text_config.hidden_act",
            "vision_config.hidden_act",
            "vision_config.num_channels",
        ),
        inputs="padded images",
        image=draw_scaled_square,
        **_IMAGE_TEXT,
    )


def _qwen3_5(
    model_type: str,
    sizes: Callable[[random.Random], Values],
    inner: str,
    more: tuple[str, ...] = (),
    settings: tuple[str, ...] = (),
) -> KindFamily:
    heads, keys, _, values = _DELTA_RULE_OF_TEXT
    states = f"{heads}*text_config.linear_key_head_dim*text_config.linear_value_head_dim"
    return KindFamily(
        model_type=model_type,
        sizes=sizes,
        widths=(*_GROUPED_WIDTHS, inner, "head_dim", *_DELTA_RULE_OF_TEXT),
        more=(
            *_image_text("hidden_size", "intermediate_size", "num_heads", "head_dim"),
            # The Trainer leaves the cache of the text model on: states after a sequence, and inputs of convolutions.
            *(f"chunk*{states}", f"sequence*{states}", f"sequence*{keys}", f"sequence*{values}", *more),
        ),
        depth=_qwen3_5_vl,
        kinds={
            "vision": "model.visual.blocks.*.mlp.linear_fc2.weight",
            "linear": "model.language_model.layers.*.linear_attn.out_proj.weight",
            "full": "model.language_model.layers.*.self_attn.q_proj.weight",
        },
        interleaved=True,
        settings=(
            *("text_config.hidden_act", "text_config.linear_conv_kernel_dim", "vision_config.hidden_act", *settings),
        ),
        image=draw_patches,
        lengths=(9, 13, 17, 67, 71, 135),
        **_QWEN_VL,
    )


KIND_FAMILIES: Mapping[str, KindFamily] = {
    **_encoders(),
    "OPTForCausalLM": _encoder(
        "opt",
        "opt",
        sizes=draw_opt,
        kinds={"layer": "model.decoder.layers.*.fc2.weight"},
        settings=("activation_function", "do_layer_norm_before", "enable_bias", "_remove_final_layer_norm"),
    ),
    "GPTNeoXForCausalLM": _encoder(
        "gpt_neox",
        "gpt_neox",
        sizes=draw_gpt_neox,
        widths=(*_BERT_WIDTHS, "head_dim"),
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim"),
        kinds={"layer": "gpt_neox.layers.*.mlp.dense_4h_to_h.weight"},
        settings=("hidden_act", "use_parallel_residual"),
    ),
    "FalconForCausalLM": _encoder(
        "falcon",
        "falcon",
        sizes=draw_falcon,
        widths=("hidden_size", "ffn_hidden_size", "attention_heads", "vocab_size", "head_dim"),
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim"),
        kinds={"layer": "transformer.h.*.mlp.dense_4h_to_h.weight"},
        settings=("activation", "alibi", "new_decoder_architecture", "multi_query", "parallel_attn", "bias"),
    ),
    "BloomForCausalLM": _encoder(
        "bloom",
        "bloom",
        sizes=draw_bloom,
        widths=("hidden_size", "attention_heads", "vocab_size"),
        depth=_one_stack("n_layer"),
        kinds={"layer": "transformer.h.*.mlp.dense_4h_to_h.weight"},
        settings=("apply_residual_connection_post_layernorm",),
        attentions=("eager",),
    ),
    "CohereForCausalLM": _encoder(
        "cohere",
        "cohere",
        sizes=draw_cohere,
        widths=(*_BERT_WIDTHS, "key_value_heads", "key_value_size", "head_dim"),
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim"),
        kinds={"layer": "model.layers.*.mlp.down_proj.weight"},
        settings=("hidden_act", "use_qk_norm"),
        attentions=("fused", "eager", "math"),
    ),
    "Lfm2ForCausalLM": KindFamily(
        model_type="lfm2",
        sizes=draw_lfm2,
        widths=(*_GROUPED_WIDTHS, "intermediate_size"),
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim", "sequence*hidden_size"),
        depth=_layer_types,
        kinds={"conv": "model.layers.*.conv.in_proj.weight", "full": "model.layers.*.self_attn.q_proj.weight"},
        interleaved=True,
        settings=("conv_L_cache",),
        attentions=("fused", "math"),
    ),
    "Lfm2MoeForCausalLM": KindFamily(
        model_type="lfm2_moe",
        sizes=draw_lfm2_moe,
        widths=(*_GROUPED_WIDTHS, "intermediate_size"),
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim", "sequence*hidden_size", *_ROUTED),
        depth=_lfm2_moe,
        kinds={
            "dense": "model.layers.*.feed_forward.w1.weight",
            "conv": "model.layers.*.conv.in_proj.weight - model.layers.*.feed_forward.w1.weight",
            "full": "model.layers.*.self_attn.q_proj.weight",
        },
        settings=("conv_L_cache", "norm_topk_prob", "use_expert_bias"),
        attentions=("fused", "math"),
    ),
    "Olmo3ForCausalLM": KindFamily(
        model_type="olmo3",
        sizes=draw_cohere,
        widths=(*_GROUPED_WIDTHS, "intermediate_size"),
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim"),
        depth=_layer_types,
        kinds={"sliding": "layer_types=sliding_attention", "full": "layer_types=full_attention"},
        interleaved=True,
        settings=("hidden_act",),
        attentions=("fused", "masked", "math"),
    ),
    "Exaone4ForCausalLM": KindFamily(
        model_type="exaone4",
        sizes=draw_cohere,
        depth=_layer_types,
        kinds={"sliding": "layer_types=sliding_attention", "full": "layer_types=full_attention"},
        interleaved=True,
        settings=("hidden_act", "sliding_window"),
        attentions=("fused", "masked"),
        **_EXAONE4,
    ),
    "Exaone4ForCausalLM full": KindFamily(
        model_type="exaone4",
        sizes=lambda choose: draw_cohere(choose) | {"sliding_window": None},
        depth=lambda values, depths: _layer_types(values, {"full": depths["layer"]}),
        kinds={"layer": "model.layers.*.mlp.down_proj.weight"},
        settings=("hidden_act", "sliding_window_pattern"),
        attentions=("fused",),
        **_EXAONE4,
    ),
    "ViTForImageClassification": KindFamily(
        model_type="vit",
        sizes=draw_vit,
        widths=(),
        more=(
            *("constant", "sequence", "sequence*hidden_size", "sequence*intermediate_size", "sequence*attention_heads"),
            *("sequence*patches", "sequence*patches*hidden_size", "sequence*patches*intermediate_size"),
            *("sequence*patches*attention_heads", "sequence*patches*patches*attention_heads", "patches"),
            "sequence*image_size*image_size",
        ),
        depth=_one_stack("num_hidden_layers"),
        kinds={"layer": "vit.layers.*.mlp.fc2.weight"},
        settings=("hidden_act", "num_channels"),
        inputs="image",
    ),
    "DeepseekV2ForCausalLM": KindFamily(
        model_type="deepseek_v2",
        sizes=draw_deepseek,
        settings=("hidden_act", "topk_method", "norm_topk_prob", "output_router_logits"),
        **_LATENT,
    ),
    "DeepseekV3ForCausalLM": KindFamily(
        model_type="deepseek_v3",
        sizes=draw_deepseek_v3,
        settings=("hidden_act", "norm_topk_prob", "output_router_logits"),
        adapters=("none", "lora_all_linear", "lora_experts"),
        **(_LATENT | {"more": (*_LATENT["more"], "token*n_group", "token*topk_group")}),
    ),
    "GptOssForCausalLM": KindFamily(
        model_type="gpt_oss",
        sizes=draw_grouped_experts,
        widths=_GROUPED_WIDTHS,
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim", *_ROUTED),
        depth=_gpt_oss,
        kinds={"layer": "model.layers.*.mlp.router.weight"},
        settings=("attention_bias", "output_router_logits"),
        attentions=("eager",),
        adapters=("none", "lora_all_linear", "lora_experts"),
    ),
    "Glm4MoeLiteForCausalLM": KindFamily(
        model_type="glm4_moe_lite",
        sizes=draw_deepseek,
        settings=("hidden_act", "norm_topk_prob", "n_group", "topk_group"),
        **(_LATENT | {"depth": _dense_then_sparse}),
    ),
    "Glm4MoeForCausalLM": KindFamily(
        model_type="glm4_moe",
        sizes=draw_shared_experts,
        settings=("hidden_act", "use_qk_norm", "norm_topk_prob", "n_group", "topk_group"),
        **_SHARED_EXPERTS,
    ),
    "Glm4MoeForCausalLM use_qk_norm": KindFamily(
        model_type="glm4_moe",
        sizes=lambda choose: draw_shared_experts(choose) | {"use_qk_norm": True},
        settings=("hidden_act", "use_qk_norm", "norm_topk_prob", "n_group", "topk_group"),
        **_SHARED_EXPERTS,
    ),
    "Ernie4_5_MoeForCausalLM": KindFamily(
        model_type="ernie4_5_moe",
        sizes=draw_ernie_moe,
        settings=("hidden_act", "output_router_logits"),
        **(
            _SHARED_EXPERTS
            | {
                "widths": (
                    *(*_GROUPED_WIDTHS, "intermediate_size"),
                    "moe_num_shared_experts*expert_intermediate_size",
                ),
                "depth": lambda values, depths: (
                    values | {"moe_layer_start_index": depths["dense"], "num_hidden_layers": sum(depths.values())}
                ),
            }
        ),
    ),
    "Qwen3_5ForCausalLM": KindFamily(
        model_type="qwen3_5_text",
        sizes=draw_qwen3_5,
        widths=(*_GROUPED_WIDTHS, "intermediate_size", "head_dim", *_DELTA_RULE),
        more=(*_TEXT, "token*position*attention_heads", "sequence*head_dim", _DELTA_RULE_STATES),
        settings=("hidden_act",),
        **_DELTA_HYBRID,
    ),
    "Qwen3NextForCausalLM": KindFamily(
        model_type="qwen3_next",
        settings=("hidden_act", "norm_topk_prob", "output_router_logits", "decoder_sparse_step"),
        **_DELTA_EXPERTS,
    ),
    "Qwen3_5MoeForCausalLM": KindFamily(
        model_type="qwen3_5_moe_text",
        settings=("hidden_act", "output_router_logits"),
        **(
            _DELTA_EXPERTS
            | {
                "widths": (*_DELTA_EXPERTS["widths"], "head_dim"),
                "more": (*_DELTA_EXPERTS["more"], "sequence*head_dim"),
            }
        ),
    ),
    "GraniteMoeHybridForCausalLM attention": KindFamily(
        model_type="granitemoehybrid",
        sizes=draw_granite,
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim"),
        kinds={"full": "model.layers.*.self_attn.q_proj.weight"},
        **_GRANITE,
    ),
    "GraniteMoeHybridForCausalLM mamba": KindFamily(
        model_type="granitemoehybrid",
        sizes=draw_granite_hybrid,
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim", *_GRANITE_CHUNKS),
        kinds={"linear": "model.layers.*.mamba.in_proj.weight", "full": "model.layers.*.self_attn.q_proj.weight"},
        **(_GRANITE | {"widths": (*_GRANITE["widths"], *_GRANITE_MAMBA)}),
    ),
    "GraniteMoeHybridForCausalLM experts": KindFamily(
        model_type="granitemoehybrid",
        sizes=draw_granite_experts,
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim", *_ROUTED, *_GRANITE_CHUNKS),
        kinds={"linear": "model.layers.*.mamba.in_proj.weight", "full": "model.layers.*.self_attn.q_proj.weight"},
        **(
            _GRANITE
            | {
                "widths": (*_GRANITE["widths"], *_GRANITE_MAMBA),
                "settings": ("hidden_act", "position_embedding_type", "mamba_expand", "output_router_logits"),
            }
        ),
    ),
    "NemotronHForCausalLM": KindFamily(
        model_type="nemotron_h",
        sizes=draw_nemotron_h,
        widths=(*_GROUPED_WIDTHS, "intermediate_size", "moe_shared_expert_intermediate_size", *_NEMOTRON_MAMBA),
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim", *_ROUTED, *_NEMOTRON_CHUNKS),
        kinds={
            "linear": "model.layers.*.mixer.in_proj.weight",
            "moe": "model.layers.*.mixer.gate.weight",
            "full": "model.layers.*.mixer.q_proj.weight",
            "mlp": "model.layers.*.mixer.down_proj.weight",
        },
        settings=("mlp_hidden_act", "n_group", "residual_in_fp32", "moe_latent_size"),
        adapters=("none",),
        **_HYBRID,
    ),
    "MiniMaxM2ForCausalLM": KindFamily(
        model_type="minimax_m2",
        sizes=draw_grouped_experts,
        widths=_GROUPED_WIDTHS,
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim", *_ROUTED),
        depth=_one_stack("num_hidden_layers"),
        kinds={"layer": "model.layers.*.mlp.gate.weight"},
        settings=("hidden_act", "output_router_logits", "router_jitter_noise"),
        attentions=("fused", "math"),
    ),
    "Llama4ForCausalLM": KindFamily(
        model_type="llama4_text",
        sizes=draw_llama4,
        widths=_LLAMA4_WIDTHS,
        more=(*_TEXT, "token*position*attention_heads", "position*head_dim", "token*experts*hidden_size", *_ROUTED),
        depth=_llama4,
        kinds=_LLAMA4_KINDS,
        interleaved=True,
        settings=("hidden_act", "use_qk_norm", "attn_temperature_tuning"),
        attentions=("fused", "math"),
        adapters=("none",),
    ),
    "T5ForConditionalGeneration": KindFamily(
        model_type="t5",
        sizes=draw_t5,
        widths=("hidden_size", "query_size", "intermediate_size", "attention_heads", "vocab_size"),
        more=(
            *_TEXT,
            *("token*position*attention_heads", "position*position*attention_heads"),
            "relative_attention_num_buckets*attention_heads",
        ),
        depth=lambda values, depths: (
            values | {"num_layers": depths["encoder"], "num_decoder_layers": depths["decoder"]}
        ),
        kinds={
            "encoder": "encoder.block.*.layer.0.SelfAttention.q.weight",
            "decoder": "decoder.block.*.layer.1.EncDecAttention.q.weight",
        },
        settings=("feed_forward_proj", "scale_decoder_outputs"),
    ),
    "WhisperForConditionalGeneration": KindFamily(
        model_type="whisper",
        sizes=draw_whisper,
        widths=("hidden_size", "decoder_ffn_dim", "attention_heads", "vocab_size"),
        more=(
            *_TEXT,
            *("token*position*attention_heads", _FRAMES, "max_source_positions", "max_source_positions*hidden_size"),
            *(f"{_FRAMES}*{width}" for width in ("hidden_size", "encoder_ffn_dim", "attention_heads", "num_mel_bins")),
            f"{_FRAMES}*max_source_positions*attention_heads",
            "token*max_source_positions*attention_heads",
        ),
        depth=lambda values, depths: (
            values | {"encoder_layers": depths["encoder"], "decoder_layers": depths["decoder"]}
        ),
        kinds={
            "encoder": "model.encoder.layers.*.fc2.weight",
            "decoder": "model.decoder.layers.*.encoder_attn.q_proj.weight",
        },
        settings=("activation_function", "apply_spec_augment"),
        inputs="sound",
    ),
    "CLIPModel": KindFamily(
        model_type="clip",
        sizes=draw_clip,
        widths=("hidden_size", "intermediate_size", "attention_heads"),
        more=(
            *_TEXT,
            *("token*position*attention_heads", "sequence*hidden_size", "sequence*projection_dim", "sequence*sequence"),
            *_TOWER,
        ),
        depth=_towers,
        kinds={
            "vision": "vision_model.encoder.layers.*.mlp.fc2.weight",
            "text": "text_model.encoder.layers.*.mlp.fc2.weight",
        },
        settings=("text_config.hidden_act", "vision_config.hidden_act"),
        inputs="image and text",
    ),
    "Gemma3ForConditionalGeneration": KindFamily(
        model_type="gemma3",
        sizes=draw_gemma3,
        widths=(*_GROUPED_WIDTHS, "intermediate_size"),
        more=_image_text("hidden_size", "intermediate_size", "num_attention_heads"),
        depth=_gemma3,
        kinds={
            "vision": "model.vision_tower.encoder.layers.*.mlp.fc2.weight",
            "text": "model.language_model.layers.*.mlp.down_proj.weight",
        },
        settings=(
            *("text_config.hidden_activation", "text_config.use_bidirectional_attention", "text_config.model_type"),
            *("vision_config.hidden_act", "vision_config.num_channels", "vision_config.model_type"),
        ),
        inputs="images",
        image=draw_pooled_square,
        image_mask="token_type_ids",
        attentions=("masked",),
        adapters=("none", "frozen_tower", "none_liger", "lora_language", "lora_full_tower", "lora_all_linear"),
    ),
    "Qwen2_5_VLForConditionalGeneration": KindFamily(
        model_type="qwen2_5_vl",
        sizes=draw_qwen2_5_vl,
        widths=(*_GROUPED_WIDTHS, "intermediate_size", "head_dim"),
        more=_image_text("hidden_size", "intermediate_size", "num_heads", "head_dim"),
        depth=_qwen2_5_vl,
        kinds={
            "vision": "model.visual.blocks.*.mlp.down_proj.weight",
            "text": "model.language_model.layers.*.mlp.down_proj.weight",
        },
        settings=("text_config.hidden_act", "text_config.use_sliding_window", "vision_config.hidden_act"),
        image=draw_windows,
        **_QWEN_VL,
    ),
    "Qwen2VLForConditionalGeneration": KindFamily(
        model_type="qwen2_vl",
        sizes=draw_qwen2_vl,
        widths=(*_GROUPED_WIDTHS, "intermediate_size", "head_dim"),
        more=_image_text("embed_dim", "num_heads", "head_dim"),
        depth=_qwen_vl,
        kinds={
            "vision": "model.visual.blocks.*.mlp.fc2.weight",
            "text": "model.language_model.layers.*.mlp.down_proj.weight",
        },
        settings=(
            *("text_config.hidden_act", "text_config.use_sliding_window", "vision_config.hidden_act"),
            "vision_config.mlp_ratio",
        ),
        image=draw_patches,
        **_QWEN_VL,
    ),
    "Qwen3VLForConditionalGeneration": KindFamily(
        model_type="qwen3_vl",
        sizes=draw_qwen3_vl,
        widths=(*_GROUPED_WIDTHS, "intermediate_size", "head_dim"),
        more=_image_text("hidden_size", "intermediate_size", "num_heads", "head_dim"),
        depth=_qwen3_vl,
        kinds={
            "vision": "model.visual.blocks.*.mlp.linear_fc2.weight",
            "text": "model.language_model.layers.*.mlp.down_proj.weight",
        },
        settings=("text_config.hidden_act", "vision_config.hidden_act"),
        image=draw_patches,
        # Three layers of the tower feed as many layers of the text.
        shallow_layers=3,
        **_QWEN_VL,
    ),
    "Qwen3_5ForConditionalGeneration": _qwen3_5("qwen3_5", draw_qwen3_5_vl, "intermediate_size"),
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5(
        "qwen3_5_moe",
        draw_qwen3_5_moe_vl,
        "text_config.shared_expert_intermediate_size",
        more=_ROUTED,
        settings=("text_config.output_router_logits",),
    ),
    "Glm4vForConditionalGeneration": KindFamily(
        model_type="glm4v",
        sizes=draw_glm4v,
        widths=(*_GROUPED_WIDTHS, "intermediate_size", "head_dim"),
        more=(
            *_image_text("hidden_size", "out_hidden_size", "num_heads", "head_dim"),
            *("image_token*vision_config.intermediate_size", "tower*vision_config.patches*vision_config.hidden_size"),
        ),
        depth=_qwen_vl,
        kinds={
            "vision": "model.visual.blocks.*.mlp.down_proj.weight",
            "text": "model.language_model.layers.*.mlp.down_proj.weight",
        },
        settings=("text_config.hidden_act", "vision_config.hidden_act", "vision_config.attention_bias"),
        image=draw_patches,
        # liger-kernel also replaces the MLPs of its tower, which `with_liger_layers` does not.
        **(_QWEN_VL | {"adapters": tuple(name for name in _QWEN_VL["adapters"] if name != "none_liger")}),
    ),
    "InternVLForConditionalGeneration": KindFamily(
        model_type="internvl",
        sizes=draw_internvl,
        widths=(*_GROUPED_WIDTHS, "intermediate_size"),
        more=_image_text("hidden_size", "intermediate_size", "num_attention_heads", classes=True),
        depth=_towers,
        kinds={
            "vision": "model.vision_tower.encoder.layer.*.mlp.fc2.weight",
            "text": "model.language_model.layers.*.mlp.down_proj.weight",
        },
        settings=(
            *("text_config.model_type", "text_config.hidden_act", "text_config.use_sliding_window"),
            *("vision_config.model_type", "vision_config.hidden_act", "vision_config.use_qk_norm"),
            *("vision_config.norm_type", "vision_config.use_absolute_position_embeddings", "downsample_ratio"),
            *("vision_config.use_mean_pooling", "vision_feature_layer", "vision_feature_select_strategy"),
            "projector_hidden_act",
        ),
        inputs="images",
        image=draw_halved_square,
        **_IMAGE_TEXT,
    ),
    "SmolVLMForConditionalGeneration": _smolvlm("smolvlm"),
    "Idefics3ForConditionalGeneration": _smolvlm("idefics3"),
    "Mistral3ForConditionalGeneration": KindFamily(
        model_type="mistral3",
        sizes=draw_mistral3,
        widths=(*_GROUPED_WIDTHS, "intermediate_size"),
        more=(
            *_image_text("hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
            # The mask that separates the images of a micro-batch.
            *("patch*patch", "patch*patch*vision_config.num_attention_heads"),
        ),
        depth=_towers,
        kinds={
            "vision": "model.vision_tower.transformer.layers.*.feed_forward.down_proj.weight",
            "text": "model.language_model.layers.*.mlp.down_proj.weight",
        },
        settings=(
            *("text_config.model_type", "text_config.hidden_act", "vision_config.model_type"),
            *("vision_config.hidden_act", "projector_hidden_act", "vision_feature_layer"),
        ),
        inputs="sized images",
        image=draw_merged_patches,
        **_IMAGE_TEXT,
    ),
    "LlavaForConditionalGeneration": _llava("llava", draw_llava, draw_square, attentions=("fused",)),
    "LlavaNextForConditionalGeneration": _llava("llava_next", draw_llava_next),
    "LlavaNextForConditionalGeneration mistral": _llava(
        "llava_next", draw_llava_next_mistral, based_on="LlavaNextForConditionalGeneration"
    ),
    "LlavaOnevisionForConditionalGeneration": _llava(
        "llava_onevision",
        draw_llava_onevision,
        settings=("text_config.use_sliding_window", "vision_config.vision_use_head"),
    ),
    "Llama4ForConditionalGeneration": KindFamily(
        model_type="llama4",
        sizes=draw_llama4_vl,
        widths=tuple(
            name.replace("intermediate_size_mlp", "text_config.intermediate_size_mlp") for name in _LLAMA4_WIDTHS
        ),
        more=(
            *_image_text("hidden_size", "num_attention_heads", "head_dim", "projector_input_dim", classes=True),
            *("image_token*vision_config.projector_input_dim", "token*experts*hidden_size", *_ROUTED),
        ),
        depth=lambda values, depths: (
            values
            | {
                "text_config": _llama4(values["text_config"], {kind: depths[kind] for kind in _LLAMA4_KINDS}),
                "vision_config": values["vision_config"] | {"num_hidden_layers": depths["vision"]},
            }
        ),
        kinds={
            "vision": "vision_model.model.layers.*.mlp.fc2.weight",
            "dense": "language_model.model.layers.*.feed_forward.down_proj.weight",
            "chunked": "text_config.layer_types=chunked_attention - "
            "language_model.model.layers.*.feed_forward.down_proj.weight",
            "full": "text_config.layer_types=full_attention",
        },
        interleaved=True,
        settings=(
            *("text_config.hidden_act", "text_config.use_qk_norm", "text_config.attn_temperature_tuning"),
            *("vision_config.hidden_act", "vision_config.pixel_shuffle_ratio"),
        ),
        inputs="images",
        image=draw_shuffled_square,
        attentions=("fused", "math"),
        adapters=("none", "frozen_tower", "none_liger"),
    ),
}
"""By the class that is traced."""
