"""The smallest configuration of a family that its class can be built from."""

from __future__ import annotations

import dataclasses
from typing import Any

VOCAB_SIZE = 260
"""Bytes and the end of a text, as the byte tokenizer has them."""
LARGEST = 20_000_000
"""Parameters; what stays larger with the sizes below is not swept."""

_VALUES: tuple[tuple[int | bool | float | str | None, str], ...] = (
    (VOCAB_SIZE, "vocab_size decoder_vocab_size encoder_vocab_size vocab_size_per_layer_input"),
    (32, "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim decoder_hidden_size lru_width"),
    (32, "expert_hidden_size hidden_size_per_layer_input block_size lm_head_dim attention_hidden_size"),
    (64, "intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size feed_forward_size"),
    (32, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"),
    (2, "num_encoder_layers decoder_num_hidden_layers encoder_num_hidden_layers"),
    (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (2, "num_key_value_heads multi_query_group_num num_kv_heads n_kv_head"),
    (8, "head_dim d_kv attention_head_dim key_length global_head_dim"),
    (160, "max_position_embeddings n_positions max_source_positions max_target_positions max_sequence_length n_ctx"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_topk top_k_experts moe_top_k num_selected_experts moe_k"),
    (1, "n_group topk_group n_shared_experts first_k_dense_replace num_shared_experts"),
    (16, "q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim rank sliding_window window_size"),
    (16, "attention_window_size conv_L_cache index_head_dim time_step_rank mamba_d_ssm_unused"),
    (8, "mamba_d_state state_size ssm_state_size mamba_state_dim"),
    (4, "mamba_n_heads mamba_num_heads linear_num_value_heads linear_num_key_heads index_n_heads"),
    (8, "linear_key_head_dim linear_value_head_dim"),
    (16, "mamba_d_head mamba_head_dim"),
    (1, "mamba_n_groups n_groups bos_token_id eos_token_id decoder_start_token_id"),
    (0, "pad_token_id"),
    (0.1, "initializer_range init_std initializer_factor_unused"),
    (False, "use_cache"),
    (0.0, "residual_dropout embedding_dropout dropout attention_dropout activation_dropout attn_pdrop resid_pdrop"),
    (0.0, "embd_pdrop hidden_dropout"),
    (
        0.0,
        "hidden_dropout_prob attention_probs_dropout_prob dropout_rate layerdrop encoder_layerdrop decoder_layerdrop",
    ),
    (None, "forced_eos_token_id forced_bos_token_id"),
)
SMALL: dict[str, Any] = {name: value for value, names in _VALUES for name in names.split()}
_OF_FAMILIES: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 4},
}
"""What a family needs besides, where sizes follow from one another."""


NOT_OF_TEXT_ALONE: dict[str, str] = {
    "GitForCausalLM": "takes its loss of text behind an image",
    "MusicgenForCausalLM": "reads codebooks of sound",
    "MusicgenMelodyForCausalLM": "reads codebooks of sound",
    "XLNetLMHeadModel": "trains on permutations that its batches name",
    "XmodForCausalLM": "needs a language, which set_default_language names",
}
"""Classes that a batch of token ids does not train, and why."""


def small_values(config_class: Any) -> dict[str, Any]:
    """Return the keys of a configuration class that sizes are taken from, with small values."""
    if dataclasses.is_dataclass(config_class):
        known = {field.name for field in dataclasses.fields(config_class)}
    else:
        known = set(vars(config_class()))
    latent = {"head_dim": 16, "num_key_value_heads": 4} if "kv_lora_rank" in known else {}
    own = latent | _OF_FAMILIES.get(config_class.model_type, {})
    return {name: value for name, value in (SMALL | own).items() if name in known}


def small_config(config_class: Any) -> Any:
    """Return a small configuration; parts of several models are made small one by one."""
    values = small_values(config_class)
    parts = getattr(config_class, "sub_configs", {}) or {}
    for name, part in parts.items():
        if isinstance(part, type) and hasattr(part, "model_type") and part.model_type:
            values[name] = small_config(part).to_dict()
    config = config_class(**values)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def tiny_model(class_name: str, *, seed: int = 0) -> Any:
    """Return a model of a class with random weights.

    Raises:
        ValueError: it stays large.
    """
    import torch
    import transformers
    from transformers import set_seed

    if class_name in NOT_OF_TEXT_ALONE:
        raise ValueError(NOT_OF_TEXT_ALONE[class_name])
    model_class = getattr(transformers, class_name)
    config = small_config(model_class.config_class)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(config).parameters())
    if count > LARGEST:
        raise ValueError(f"has {count:,} parameters with the smallest sizes that are known here")
    set_seed(seed)
    return model_class(config).float().eval()


def every_class() -> dict[str, bool]:
    """Return the causal language models and encoder-decoders of Transformers, and whether each is the latter."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    found = dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), False)
    return found | dict.fromkeys(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values(), True)
