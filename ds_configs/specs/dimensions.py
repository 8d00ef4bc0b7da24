"""The sizes of a transformer that memory and legality depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimensions:
    """Sizes of one transformer stack, as its `config.json` states them."""

    num_layers: int
    """Transformer layers in the stack."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the dense MLP; 0 when every layer is a mixture of experts."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key/value heads; equals `num_attention_heads` without grouped-query attention."""
    head_dim: int
    """Width of one head."""
    vocab_size: int
    """Rows of the token embedding; 0 for a stack without tokens (a vision tower)."""
    num_experts: int = 0
    """Routed experts in each mixture-of-experts layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Routed experts that process each token; 0 for a dense model."""
    expert_intermediate_size: int = 0
    """MLP width of one routed expert; 0 for a dense model."""

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, which equals that of all value heads."""
        return self.num_key_value_heads * self.head_dim
