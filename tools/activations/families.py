"""Small models of each family, in many shapes, whose traces determine the activation coefficients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from shardwright.ds_configs.memory.activations import Adapter, Mode, load_coefficients
from shardwright.ds_configs.specs.model import Dimensions
from shardwright.plugins.releases import transformers_release
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from .liger import with_liger_layers
from .run import enable_checkpointing

ATTENTION_TARGETS = {"gpt2": ["c_attn"], "phi3": ["qkv_proj"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One traced case."""

    dimensions: Dimensions
    """Sizes of the model; `num_layers` is set per run."""
    micro_batch_size: int
    """Sequences."""
    seq_len_tokens: int
    """Tokens of each sequence."""
    lora_rank: int
    """Rank of the adapters; 0 without."""


def _grouped(size: Dimensions) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_attention_heads": size.num_attention_heads,
        "num_key_value_heads": size.num_key_value_heads,
        "head_dim": size.head_dim,
        "num_hidden_layers": size.num_layers,
        "vocab_size": size.vocab_size,
        "max_position_embeddings": 4096,
        # Dropout masks are a separate coefficient: CPU attention leaves its fused kernel when dropout is on.
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _gpt2(size: Dimensions) -> dict[str, Any]:
    return {
        "n_embd": size.hidden_size,
        "n_inner": size.intermediate_size,
        "n_head": size.num_attention_heads,
        "n_layer": size.num_layers,
        "vocab_size": size.vocab_size,
        "n_positions": 4096,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _mixtral(size: Dimensions) -> dict[str, Any]:
    return _grouped(size) | {
        "intermediate_size": size.expert_intermediate_size,
        "num_local_experts": size.num_experts,
        "num_experts_per_tok": size.experts_per_token,
        "sliding_window": None,
    }


def _qwen3_moe(size: Dimensions) -> dict[str, Any]:
    return _grouped(size) | {
        "moe_intermediate_size": size.expert_intermediate_size,
        "num_experts": size.num_experts,
        "num_experts_per_tok": size.experts_per_token,
        "intermediate_size": 8,
    }


STANDARD_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
"""Names without which a family's sizes cannot be set as Llama's are."""
FIRST: dict[str, Callable[[Dimensions], dict[str, Any]]] = {
    "llama": _grouped,
    "qwen2": _grouped,
    "qwen3": _grouped,
    "mistral": lambda size: _grouped(size) | {"sliding_window": None},
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _grouped,
    "phi3": _grouped,
    "gemma3_text": _grouped,
}
FAMILIES: dict[str, Callable[[Dimensions], dict[str, Any]]] = (
    dict.fromkeys(load_coefficients(transformers_release())["tables"], _grouped) | FIRST
)
"""Arguments of a family's configuration for given sizes: those above, and what `tools/add_family.py` stored since."""
MIXTURES = frozenset({"mixtral", "qwen3_moe"})

_DEPENDENT = {"token*query_size", "token*key_value_size", "token*key_value_heads", "position*head_dim"}


def feature_names(family: str, adapter: Adapter, attention: str) -> list[str]:
    """Names of the features that vary independently in the shapes of `family`."""
    names = ["constant", "sequence", "position", "token", "token*hidden_size", "token*attention_heads"]
    names += ["token*vocab_size"]
    if family != "gpt2":
        names += sorted(_DEPENDENT)
    if family in MIXTURES:
        names += ["expert", "token*expert", "routed_token", "routed_token*hidden_size"]
        names += ["routed_token*expert_intermediate_size", "routed_token*expert"]
    else:
        names += ["token*intermediate_size"]
    if adapter != "none":
        names += ["token*lora_rank"]
    if adapter in ("lora_all_linear", "lora_experts") and family in MIXTURES:
        names += ["expert*lora_rank*hidden_size", "expert*lora_rank*expert_intermediate_size"]
    if attention in ("masked", "eager"):
        names += ["attention_mask"]
    if attention in ("math", "eager"):
        names += ["attention_scores"]
    if attention != "fused":
        names += ["position*position"]
    return names


def sample_shapes(family: str, count: int, *, adapter: Adapter = "none", seed: int = 20) -> list[Shape]:
    """Draws shapes: widths are multiples of 8, token and expert counts are not, so no activation is shaped
    like a weight; a batch of one and a single expert per token are not used because each skips one small copy."""
    choose = random.Random(f"{family} {seed}")
    mixture = family in MIXTURES
    shapes: list[Shape] = []
    while len(shapes) < count:
        head_dim = choose.choice([8, 16, 24, 32])
        groups = choose.choice([2, 3, 4])
        heads = groups * choose.choice([2, 3, 4])
        # Llama's config wants whole heads in the hidden size, whatever head_dim says.
        step = math.lcm(8, heads)
        free_hidden_size = step * choose.randint(64 // step + 1, 240 // step)
        size = Dimensions(
            num_layers=2,
            hidden_size=heads * head_dim if family == "gpt2" else free_hidden_size,
            intermediate_size=0 if mixture else 8 * choose.randint(12, 50),
            num_attention_heads=heads,
            num_key_value_heads=heads if family == "gpt2" else groups,
            head_dim=head_dim,
            vocab_size=8 * choose.randint(30, 70),
            num_experts=choose.choice([4, 6, 10, 12]) if mixture else 0,
            experts_per_token=choose.choice([2, 3, 4]) if mixture else 0,
            expert_intermediate_size=8 * choose.randint(6, 30) if mixture else 0,
        )
        shape = Shape(
            dimensions=size,
            micro_batch_size=choose.choice([2, 3, 5, 6]),
            seq_len_tokens=choose.choice([9, 11, 13, 15, 17, 19, 21, 23]),
            # No batch size: an adapter's matrix would look like one vector of each sequence.
            lora_rank=0 if adapter == "none" else choose.choice([4, 8, 12, 16]),
        )
        # Labels, one longer than the sequence, must not look like the adapter of a router.
        if (shape.micro_batch_size, shape.seq_len_tokens + 1) != (size.num_experts, shape.lora_rank):
            shapes.append(shape)
    return shapes


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """A model ready to be metered."""

    model: nn.Module
    """What the training step calls."""
    layers: list[nn.Module]
    """Transformer layers in the order of execution."""
    head: nn.Module
    """The output projection."""


def build_subject(
    family: str,
    size: Dimensions,
    *,
    mode: Mode,
    adapter: Adapter,
    lora_rank: int,
    checkpointing: bool,
    implementation: str = "sdpa",
    liger: bool = False,
) -> TracedModel:
    """Builds one randomly initialised model in training mode, with adapters, kernels and checkpointing as asked."""
    config = AutoConfig.for_model(family, num_hidden_layers=size.num_layers, **_arguments(family, size))
    config.use_cache = False  # TrainingArguments.use_cache is False by default (transformers 5.17)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, trust_remote_code=False)
    base = model
    if adapter != "none":
        # PEFT 0.21 upcasts adapters to float32 and leaves the base as it is loaded: that is the autocast case.
        model = _with_lora(model.to(torch.bfloat16), family, adapter, lora_rank)
    if adapter == "none" or mode != "bf16_autocast":
        model = model.to(torch.bfloat16 if mode == "bf16" else torch.float32)
    model = with_liger_layers(model.train()) if liger else model.train()
    if checkpointing:
        enable_checkpointing(model)
    stack = base.transformer.h if family == "gpt2" else base.model.layers
    return TracedModel(model=model, layers=list(stack), head=base.get_output_embeddings())


def has_sdpa(family: str) -> bool:
    """Whether the installed Transformers runs a family with SDPA."""
    model_class: Any = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(family))]
    return bool(model_class._supports_sdpa)


def _arguments(family: str, size: Dimensions) -> dict[str, Any]:
    arguments = FAMILIES.get(family, _grouped)(size)
    arguments.pop("num_hidden_layers", None)
    return arguments


def _with_lora(model: nn.Module, family: str, adapter: Adapter, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    attention = ATTENTION_TARGETS.get(family, ["q_proj", "v_proj"])
    targets: str | list[str] = "all-linear" if adapter == "lora_all_linear" else attention
    targets = [] if adapter == "lora_experts" else targets
    experts = ["experts.gate_up_proj", "experts.down_proj"] if adapter == "lora_experts" else None
    # PEFT 0.21 omits the operator that scales an expert's update if alpha is the rank.
    lora = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=targets,
        target_parameters=experts,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, lora)
    if adapter == "lora_experts":
        # As if an earlier layer were adapted too: all layers compute gradients of their inputs.
        adapted.enable_input_require_grads()
    return adapted


def build_inputs(shape: Shape, *, attention: str) -> dict[str, torch.Tensor]:
    """Random tokens with labels; a masked batch has one padded position in every sequence."""
    size = (shape.micro_batch_size, shape.seq_len_tokens)
    tokens = torch.randint(0, shape.dimensions.vocab_size, size)
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    if attention == "masked":
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][:, -1] = 0
    return inputs


def attention_kernel(attention: str) -> AbstractContextManager[None]:
    """Restricts SDPA to its math kernel where that is what a GPU would run."""
    if attention != "math":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    restricted: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return restricted
