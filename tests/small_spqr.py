"""What tests of SpQR and of low-rank corrections share: weights with correlated inputs, and a model to quantize."""

from __future__ import annotations

import torch

_PROJECTIONS = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
LAYERS = [f"model.layers.{index}.{name}" for index in range(2) for name in _PROJECTIONS]
"""Linear layers of `small_model` but its head."""


def correlated(rows: int, columns: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights with a few large ones, and second moments of correlated inputs."""
    draw = torch.Generator().manual_seed(seed)
    weight_OI = torch.randn(rows, columns, generator=draw)
    large_OI = torch.rand(rows, columns, generator=draw) < 0.005
    weight_OI[large_OI] *= 8
    mixing_II = torch.randn(columns, columns, generator=draw) / columns**0.5
    inputs_TI = torch.randn(4 * columns, columns, generator=draw) @ (mixing_II + torch.eye(columns))
    inputs_TI *= torch.rand(columns, generator=draw) + 0.1
    return weight_OI.bfloat16(), inputs_TI.t() @ inputs_TI / len(inputs_TI)


def small_model(*, tied: bool = False):
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=tied, initializer_range=0.2)
    # Casting a finished model would round its rotary frequencies too, which no checkpoint holds.
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def samples() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(0, 97, (24,), generator=draw).tolist()} for _ in range(6)]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([samples()[0]["input_ids"]])).logits
