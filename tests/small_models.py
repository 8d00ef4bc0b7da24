"""Small models with random weights, the same in every process that asks for the same."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
"""Two layers with grouped-query attention; MLPs are twice as wide as what they read, unless a test says otherwise."""


def llama(*, seed: int = 0, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**_sizes(changes)))


def mixtral(*, seed: int = 0, **changes: Any) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM, set_seed

    set_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**_sizes({"num_local_experts": 4} | changes)))


def _sizes(changes: dict[str, Any]) -> dict[str, Any]:
    sizes = SIZES | changes
    return {"intermediate_size": 2 * sizes["hidden_size"]} | sizes


_EXPERTS = {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
MIXTURE_SIZES: dict[str, dict[str, int]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "gpt_oss": {"num_local_experts": 4},
    "glm4_moe": {"n_routed_experts": 4, "n_shared_experts": 1, **_EXPERTS},
    "deepseek_v3": {"n_routed_experts": 4, "n_shared_experts": 1, **_EXPERTS},
    "afmoe": {"num_experts": 4, "num_dense_layers": 1, **_EXPERTS},
}


def mixture(model_type: str) -> Any:
    """Return two layers with four fused experts; in some families the first layer is dense."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    latent = {"num_key_value_heads": 4} if model_type == "deepseek_v3" else {"num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(
        model_type, vocab_size=64, pad_token_id=0, num_experts_per_tok=2, **sizes, **latent, **MIXTURE_SIZES[model_type]
    )
    return AutoModelForCausalLM.from_config(config)


def scaled_llama(factor: float, dtype: Any = None, **changes: Any) -> Any:
    """Return a bf16 Llama with a vocabulary of 64, whose weights are multiplied so that rounding shows."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**({"vocab_size": 64, "num_hidden_layers": 2} | sizes | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def token_ids(count: int) -> list[Any]:
    """Return batches for it."""
    import torch

    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (2, 16), generator=draw) for _ in range(count)]
