"""Sizes of small models that are traced: widths are multiples of 8, so that no activation is shaped like a weight."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Values = dict[str, Any]
"""Fields of a configuration."""


def _heads(choose: random.Random, *, head_dims: tuple[int, ...] = (8, 16, 24, 32)) -> tuple[int, int]:
    return choose.choice([2, 3, 4, 6, 9]), choose.choice(head_dims)


def _multi_head(heads: str, width: str, inner: str) -> Callable[[random.Random], Values]:
    """Draw sizes of attention whose heads divide the residual stream."""

    def draw(choose: random.Random) -> Values:
        count, head_dim = _heads(choose)
        return {heads: count, width: count * head_dim, inner: 8 * choose.randint(12, 50), **_vocabulary(choose)}

    return draw


def _vocabulary(choose: random.Random) -> Values:
    return {"vocab_size": 8 * choose.randint(30, 70), "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def draw_bert(choose: random.Random) -> Values:
    """Draw sizes of BERT and RoBERTa."""
    drawn = _multi_head("num_attention_heads", "hidden_size", "intermediate_size")(choose)
    return drawn | _NO_DROPOUT | {"max_position_embeddings": 4104, "pad_token_id": 0}


def draw_distilbert(choose: random.Random) -> Values:
    """Draw sizes of DistilBERT."""
    drawn = _multi_head("n_heads", "dim", "hidden_dim")(choose)
    return drawn | {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 4104, "pad_token_id": 0}


def labelled(draw: Callable[[random.Random], Values]) -> Callable[[random.Random], Values]:
    """Draw what `draw` does, and a number of labels."""
    return lambda choose: draw(choose) | {"num_labels": choose.choice([4, 7, 9, 11])}


def draw_electra(choose: random.Random) -> Values:
    """Draw sizes of ELECTRA, whose embeddings have another width than its layers, and a projection."""
    drawn = draw_bert(choose)
    return drawn | {"embedding_size": drawn["hidden_size"] + 8 * choose.randint(1, 9)}


def draw_modernbert(choose: random.Random) -> Values:
    """Draw sizes of ModernBERT, its window shorter than each sequence and pooling as published."""
    drawn = _multi_head("num_attention_heads", "hidden_size", "intermediate_size")(choose)
    return drawn | {"local_attention": 8, "classifier_pooling": "mean", "pad_token_id": 0}


def draw_opt(choose: random.Random) -> Values:
    """Draw sizes of OPT."""
    drawn = _multi_head("num_attention_heads", "hidden_size", "ffn_dim")(choose)
    return drawn | {
        "word_embed_proj_dim": drawn["hidden_size"],
        "dropout": 0.0,
        "max_position_embeddings": 4096,
        "pad_token_id": 1,
    }


def draw_gpt_neox(choose: random.Random) -> Values:
    """Draw sizes of GPT-NeoX."""
    return _multi_head("num_attention_heads", "hidden_size", "intermediate_size")(choose)


def draw_falcon(choose: random.Random) -> Values:
    """Draw sizes of Falcon."""
    return _multi_head("num_attention_heads", "hidden_size", "ffn_hidden_size")(choose)


def draw_bloom(choose: random.Random) -> Values:
    """Draw sizes of BLOOM."""
    drawn = _multi_head("n_head", "hidden_size", "inner")(choose)
    del drawn["inner"]
    return drawn


def draw_cohere(choose: random.Random) -> Values:
    """Draw sizes of Cohere, with grouped heads."""
    groups = choose.choice([2, 3, 4])
    heads, head_dim = groups * choose.choice([2, 3, 4]), choose.choice([8, 16, 24, 32])
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": heads * head_dim,
        "intermediate_size": 8 * choose.randint(12, 50),
        **_vocabulary(choose),
    }


def draw_lfm2(choose: random.Random) -> Values:
    """Draw sizes of LFM2, whose MLP is narrower than its configuration's and rounded up."""
    return draw_cohere(choose) | {"block_multiple_of": 8}


def draw_vit(choose: random.Random) -> Values:
    """Draw sizes of ViT, images of an odd number of patches a side."""
    drawn = _multi_head("num_attention_heads", "hidden_size", "intermediate_size")(choose)
    del drawn["vocab_size"]
    patch = choose.choice([2, 4, 6])
    return drawn | {"patch_size": patch, "image_size": patch * choose.choice([3, 5, 7]), "num_labels": 4}


def draw_t5(choose: random.Random) -> Values:
    """Draw sizes of T5."""
    heads, head_dim = _heads(choose)
    return {
        "num_heads": heads,
        "d_kv": head_dim,
        "d_model": 8 * choose.randint(9, 30),
        "d_ff": 8 * choose.randint(12, 50),
        "dropout_rate": 0.0,
        "vocab_size": 8 * choose.randint(30, 70),
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }


def draw_whisper(choose: random.Random) -> Values:
    """Draw sizes of Whisper, an odd number of frames."""
    heads, head_dim = _heads(choose)
    return {
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "d_model": heads * head_dim,
        "encoder_ffn_dim": 8 * choose.randint(12, 30),
        "decoder_ffn_dim": 8 * choose.randint(31, 50),
        "num_mel_bins": 8 * choose.randint(2, 5),
        "max_source_positions": choose.choice([27, 29, 31, 33, 35]),
        "max_target_positions": 4104,
        "vocab_size": 8 * choose.randint(30, 70),
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }


def draw_clip(choose: random.Random) -> Values:
    """Draw sizes of CLIP's two towers."""
    text = _multi_head("num_attention_heads", "hidden_size", "intermediate_size")(choose)
    vision = draw_vit(choose)
    projection = 8 * choose.randint(3, 9)
    return {
        "text_config": text | {"projection_dim": projection, "max_position_embeddings": 4104, "eos_token_id": 2},
        "vision_config": vision | {"projection_dim": projection},
        "projection_dim": projection,
    }


def draw_gemma3(choose: random.Random) -> Values:
    """Draw sizes of Gemma 3 and of its tower, whose patches are pooled to a square of tokens."""
    text, vision = draw_cohere(choose), draw_vit(choose)
    side, patch = choose.choice([2, 3]), choose.choice([2, 4, 6])
    del vision["num_labels"]
    width = 8 * text["num_attention_heads"] * choose.randint(1, 3)
    return {
        "text_config": text | {"head_dim": choose.choice([8, 16, 24, 32]), "hidden_size": width, "pad_token_id": 0},
        "vision_config": vision | {"patch_size": patch, "image_size": patch * side * choose.choice([3, 5])},
        "mm_tokens_per_image": side**2,
        # The last of the vocabulary, which random text has none of.
        "image_token_index": text["vocab_size"] - 1,
    }


def _experts(choose: random.Random, *, count: str) -> Values:
    return {count: choose.choice([4, 6, 10, 12]), "num_experts_per_tok": choose.choice([2, 3, 4])}


def draw_deepseek(choose: random.Random) -> Values:
    """Draw sizes of DeepSeek-V2; values are narrower than queries, as in its published sizes."""
    heads = choose.choice([2, 3, 4, 6])
    rotated, plain = choose.choice([8, 16, 24]), choose.choice([16, 24, 32])
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": 8 * heads * choose.randint(3, 10),
        "intermediate_size": 8 * choose.randint(12, 50),
        "moe_intermediate_size": 8 * choose.randint(6, 30),
        "kv_lora_rank": 8 * choose.randint(2, 9),
        "q_lora_rank": 8 * choose.randint(2, 9),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": plain,
        "v_head_dim": choose.choice([8, 16, plain]),
        "head_dim": rotated,
        "n_shared_experts": choose.choice([1, 2, 3]),
        **_experts(choose, count="n_routed_experts"),
        **_vocabulary(choose),
    }


def draw_deepseek_v3(choose: random.Random) -> Values:
    """Draw sizes of DeepSeek-V3, its experts in groups."""
    groups = choose.choice([2, 4])
    return draw_deepseek(choose) | {
        "n_routed_experts": groups * choose.choice([4, 5, 6, 7]),
        "n_group": groups,
        "topk_group": choose.choice([1, 2]),
    }


def draw_grouped_experts(choose: random.Random) -> Values:
    """Draw sizes of mixtures with grouped heads."""
    return draw_cohere(choose) | {
        "head_dim": choose.choice([8, 16, 24, 32]),
        "hidden_size": 24 * choose.randint(3, 10),
        **_experts(choose, count="num_local_experts"),
    }


def draw_shared_experts(choose: random.Random) -> Values:
    """Draw sizes of mixtures with grouped heads, dense layers and experts that every token passes through."""
    drawn = draw_grouped_experts(choose)
    drawn["n_routed_experts"] = drawn.pop("num_local_experts")
    return drawn | {"moe_intermediate_size": 8 * choose.randint(6, 30), "n_shared_experts": choose.choice([1, 2, 3])}


def draw_ernie_moe(choose: random.Random) -> Values:
    """Draw sizes of ERNIE 4.5, whose heads divide its hidden size."""
    drawn = draw_cohere(choose) | _experts(choose, count="num_experts")
    experts = {"moe_intermediate_size": 8 * choose.randint(6, 30), "moe_num_shared_experts": choose.choice([1, 2, 3])}
    return drawn | experts


def draw_llama4(choose: random.Random) -> Values:
    """Draw sizes of Llama 4, its dense layers wider than its experts."""
    return draw_grouped_experts(choose) | {"intermediate_size_mlp": 8 * choose.randint(51, 80)}


def draw_delta_rule(choose: random.Random) -> Values:
    """Draw sizes of gated delta rules, each key for several values."""
    keys = choose.choice([2, 3, 4])
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * choose.choice([2, 3]),
        "linear_key_head_dim": choose.choice([8, 16, 24, 32]),
        "linear_value_head_dim": choose.choice([8, 16, 24, 32]),
    }


def draw_qwen3_next(choose: random.Random) -> Values:
    """Draw sizes of Qwen3-Next, all of whose layers have experts."""
    drawn = draw_grouped_experts(choose)
    drawn["num_experts"] = drawn.pop("num_local_experts")
    experts = {name: 8 * choose.randint(6, 30) for name in ("moe_intermediate_size", "shared_expert_intermediate_size")}
    return drawn | experts | draw_delta_rule(choose) | {"head_dim": choose.choice([16, 32])}


def draw_qwen3_5(choose: random.Random) -> Values:
    """Draw sizes of Qwen3.5 without its tower, of whose head dimensions a quarter is rotated."""
    drawn = draw_cohere(choose) | draw_delta_rule(choose)
    return drawn | {"hidden_size": 24 * choose.randint(3, 10), "head_dim": choose.choice([32, 64])}


def draw_lfm2_moe(choose: random.Random) -> Values:
    """Draw sizes of LFM2 with experts."""
    return (
        draw_cohere(choose)
        | _experts(choose, count="num_experts")
        | {"moe_intermediate_size": 8 * choose.randint(6, 30)}
    )


def draw_granite(choose: random.Random) -> Values:
    """Draw sizes of Granite 4 without experts or Mamba layers, an MLP of another width than its configuration's."""
    drawn = draw_cohere(choose) | {"shared_intermediate_size": 8 * choose.randint(51, 80), "logits_scaling": 8.0}
    return drawn | {"num_local_experts": 0, "mamba_n_heads": 8, "position_embedding_type": "rope"}


def draw_granite_hybrid(choose: random.Random) -> Values:
    """Draw sizes of Granite 4 with Mamba layers, twice as wide as the others."""
    drawn, heads = draw_granite(choose), choose.choice([2, 4, 8])
    return drawn | {
        "position_embedding_type": "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": 2 * drawn["hidden_size"] // heads,
        "mamba_n_groups": choose.choice([1, 2]),
        "mamba_d_state": 8 * choose.randint(2, 6),
        "mamba_chunk_size": choose.choice([32, 40, 48]),
    }


def draw_granite_experts(choose: random.Random) -> Values:
    """Draw sizes of Granite 4 with Mamba layers and experts, whose width is that of its configuration's MLP."""
    return draw_granite_hybrid(choose) | _experts(choose, count="num_local_experts")


def draw_nemotron_h(choose: random.Random) -> Values:
    """Draw sizes of Nemotron-H."""
    drawn = draw_grouped_experts(choose) | {"head_dim": choose.choice([8, 16, 24, 32])}
    drawn["n_routed_experts"] = drawn.pop("num_local_experts")
    names = ("moe_intermediate_size", "moe_shared_expert_intermediate_size")
    return (
        drawn
        | {name: 8 * choose.randint(6, 30) for name in names}
        | {
            "mamba_num_heads": 2 * choose.choice([3, 4, 5]),
            "mamba_head_dim": choose.choice([8, 16, 24]),
            "n_groups": 2,
            "ssm_state_size": 8 * choose.randint(2, 6),
            "chunk_size": choose.choice([32, 40, 48]),
        }
    )
