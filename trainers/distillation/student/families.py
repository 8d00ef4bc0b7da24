"""Meaning of each tensor's axes, in the families whose widths can be cut.

Seen with transformers 5.17: linear layers store [out, in], the Conv1D of GPT-2 [in, out]. GPT-2 and BERT have no
`head_dim`: their heads fill the residual stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .request import Widths

Axis = Literal["hidden", "intermediate", "query", "key", "value", "query_key_value", "other"]
Side = Literal["writes", "reads", "norm", ""]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRule:
    """Axes of the tensors with a name."""

    name: re.Pattern[str]
    """Matches the end of a tensor's name."""
    axes: tuple[Axis, ...]
    """Meaning of each axis; axes that are not named are left alone."""
    side: Side = ""
    """Whether the tensor writes to the residual stream, reads from it, or is the gain or bias of a norm on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WidthFamily:
    """Names and shapes of the tensors that are cut in a family."""

    rules: tuple[TensorRule, ...]
    """First match wins; a tensor that none matches is no part of the family."""
    mlp_output: str
    """Module of a layer whose input are the intermediate channels."""
    attention_output: str
    """Module of a layer whose input are the heads."""
    coupled: bool
    """Whether heads · head_dim must be the hidden size."""
    centred: bool
    """Whether norms subtract the mean."""
    fields: Mapping[str, str]
    """Fields of the config for each size of `Widths`."""

    def rule(self, name: str) -> TensorRule | None:
        """Return the rule of a tensor, or `None`."""
        return next((rule for rule in self.rules if rule.name.search(name)), None)


def _rule(name: str, *axes: Axis, side: Side = "") -> TensorRule:
    return TensorRule(name=re.compile(rf"(?:^|\.)(?:{name})$"), axes=axes, side=side)


_SCALE, _SHIFT = "(?:weight|gamma)", "(?:bias|beta)"

_LLAMA = (
    _rule(r"embed_tokens\.weight", "other", "hidden", side="writes"),
    _rule(r"(?:q|k)_norm\.weight", "other"),
    _rule(r"(?:\w+_layernorm|norm)\.weight", "hidden", side="norm"),
    _rule(r"self_attn\.q_proj\.weight", "query", "hidden", side="reads"),
    _rule(r"self_attn\.k_proj\.weight", "key", "hidden", side="reads"),
    _rule(r"self_attn\.v_proj\.weight", "value", "hidden", side="reads"),
    _rule(r"self_attn\.o_proj\.weight", "hidden", "query", side="writes"),
    _rule(r"self_attn\.q_proj\.bias", "query"),
    _rule(r"self_attn\.k_proj\.bias", "key"),
    _rule(r"self_attn\.v_proj\.bias", "value"),
    _rule(r"mlp\.(?:gate|up)_proj\.weight", "intermediate", "hidden", side="reads"),
    _rule(r"mlp\.(?:gate|up)_proj\.bias", "intermediate"),
    _rule(r"mlp\.down_proj\.weight", "hidden", "intermediate", side="writes"),
    _rule(r"(?:mlp\.down_proj|self_attn\.o_proj)\.bias", "hidden", side="writes"),
    _rule(r"(?:lm_head|score|classifier|qa_outputs)\.weight", "other", "hidden", side="reads"),
    _rule(r"(?:lm_head|score|classifier|qa_outputs)\.bias|rotary_emb\.inv_freq", "other"),
)
_GPT2 = (
    _rule(r"w[tp]e\.weight", "other", "hidden", side="writes"),
    _rule(rf"ln_(?:1|2|f)\.(?:{_SCALE}|{_SHIFT})", "hidden", side="norm"),
    _rule(r"attn\.c_attn\.weight", "hidden", "query_key_value", side="reads"),
    _rule(r"attn\.c_attn\.bias", "query_key_value"),
    _rule(r"attn\.c_proj\.weight", "query", "hidden", side="writes"),
    _rule(r"mlp\.c_fc\.weight", "hidden", "intermediate", side="reads"),
    _rule(r"mlp\.c_fc\.bias", "intermediate"),
    _rule(r"mlp\.c_proj\.weight", "intermediate", "hidden", side="writes"),
    _rule(r"(?:attn|mlp)\.c_proj\.bias", "hidden", side="writes"),
    _rule(r"(?:lm_head|score|classifier)\.weight", "other", "hidden", side="reads"),
    _rule(r"classifier\.bias", "other"),
    _rule(r"attn\.(?:masked_)?bias", "other"),
)
_BERT = (
    _rule(r"embeddings\.\w+_embeddings\.weight", "other", "hidden", side="writes"),
    _rule(rf"LayerNorm\.(?:{_SCALE}|{_SHIFT})", "hidden", side="norm"),
    _rule(r"attention\.self\.query\.weight", "query", "hidden", side="reads"),
    _rule(r"attention\.self\.key\.weight", "key", "hidden", side="reads"),
    _rule(r"attention\.self\.value\.weight", "value", "hidden", side="reads"),
    _rule(r"attention\.self\.query\.bias", "query"),
    _rule(r"attention\.self\.key\.bias", "key"),
    _rule(r"attention\.self\.value\.bias", "value"),
    _rule(r"attention\.output\.dense\.weight", "hidden", "query", side="writes"),
    _rule(r"intermediate\.dense\.weight", "intermediate", "hidden", side="reads"),
    _rule(r"intermediate\.dense\.bias", "intermediate"),
    _rule(r"layer\.\d+\.output\.dense\.weight", "hidden", "intermediate", side="writes"),
    _rule(r"output\.dense\.bias", "hidden", side="writes"),
    _rule(r"(?:pooler|transform)\.dense\.weight", "hidden", "hidden", side="reads"),
    _rule(r"(?:pooler|transform)\.dense\.bias", "hidden"),
    _rule(r"(?:decoder|seq_relationship|classifier|qa_outputs)\.weight", "other", "hidden", side="reads"),
    _rule(r"(?:predictions|decoder|seq_relationship|classifier|qa_outputs)\.bias|position_ids", "other"),
)
_USUAL = {name: name for name in ("hidden_size", "intermediate_size")} | {"heads": "num_attention_heads"}
_LLAMA_LIKE = WidthFamily(
    rules=_LLAMA,
    mlp_output="mlp.down_proj",
    attention_output="self_attn.o_proj",
    coupled=False,
    centred=False,
    fields=_USUAL | {"key_value_heads": "num_key_value_heads"},
)

WIDTH_FAMILIES: Mapping[str, WidthFamily] = {
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE,
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
    "gpt2": WidthFamily(
        rules=_GPT2,
        mlp_output="mlp.c_proj",
        attention_output="attn.c_proj",
        coupled=True,
        centred=True,
        fields={"hidden_size": "n_embd", "intermediate_size": "n_inner", "heads": "n_head"},
    ),
    "bert": WidthFamily(
        rules=_BERT,
        mlp_output="output.dense",
        attention_output="attention.output.dense",
        coupled=True,
        centred=True,
        fields=_USUAL,
    ),
}
"""Families by `model_type`."""


def teacher_widths(config: Any) -> Widths:
    """Return the widths that a Transformers config of one of the families states or implies."""
    hidden_size, heads = config.hidden_size, config.num_attention_heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return Widths(
        hidden_size=hidden_size,
        intermediate_size=inner or 4 * hidden_size,
        heads=heads,
        key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden_size // heads,
    )


def width_changes(family: WidthFamily, student: Widths) -> dict[str, int]:
    """Return the fields of the config that hold the student's widths."""
    changes = {field: getattr(student, name) for name, field in family.fields.items()}
    if not family.coupled:
        changes["head_dim"] = student.head_dim
    return changes
