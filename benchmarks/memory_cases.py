"""The grid of `memory_accuracy.py`: small models of realistic proportions in every kind of layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Any

from shardwright.ds_configs.memory.rank_parameters import rank_parameters
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout, ZeroOptions
from shardwright.ds_configs.specs.model import FIRST_RELEASE, ModelSpec

SEQ_LEN = 128
MICRO_BATCH_SIZE = 2
LORA_RANK = 8
LEAST_CASES = 64

_DECODER = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_DECODER, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "qwen3": {**_DECODER, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {**_DECODER, "architectures": ["Gemma2ForCausalLM"], "head_dim": 32, "sliding_window": 512},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 256,
        "n_layer": 4,
        "n_head": 8,
        "n_positions": 512,
        "vocab_size": 4096,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "mixtral": {
        **_DECODER,
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 384,
        "tie_word_embeddings": False,
    },
}
_MIXTURE = {**_DECODER, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "head_dim": 32}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_MIXTURE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8},
    "gpt_oss": {
        **_DECODER,
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 32,
        "intermediate_size": 192,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 512,
        "pad_token_id": 0,
    },
}
"""GPT-2 trains without dropout: the fused CUDA kernel keeps one byte per element where the CPU keeps more."""

_UNTIED = {**_DECODER, "tie_word_embeddings": False, "pad_token_id": 0}
_GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "n_group": 1,
    "topk_group": 1,
}
NEWER: dict[str, dict[str, Any]] = {
    "llama4_text": {
        **_UNTIED,
        **{"architectures": ["Llama4ForCausalLM"], "head_dim": 32, "intermediate_size": 192},
        **{"intermediate_size_mlp": 704, "num_local_experts": 4, "interleave_moe_layer_step": 2},
    },
    # The fused kernel of a CPU needs values as wide as keys.
    "deepseek_v3": {
        **_UNTIED,
        **_GROUPED,
        **{"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1, "num_key_value_heads": 8},
        **{"q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48},
    },
    "glm4_moe": {
        **_UNTIED,
        **_GROUPED,
        **{"architectures": ["Glm4MoeForCausalLM"], "head_dim": 32, "first_k_dense_replace": 1},
    },
    "qwen3_moe_dense": {
        **_MIXTURE,
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8},
        **{"mlp_only_layers": [0], "tie_word_embeddings": False},
    },
    "ernie4_5_moe": {
        **_UNTIED,
        **{
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 192,
        },
        **{"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 3},
    },
    "granitemoehybrid": {
        **_UNTIED,
        **{"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba", "mamba", "mamba", "attention"]},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 192, "shared_intermediate_size": 384},
        **{"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 64},
        "position_embedding_type": "nope",
    },
    "olmo3": {**_UNTIED, "architectures": ["Olmo3ForCausalLM"], "sliding_window": 64},
}
"""Models whose layers differ, and newer families with adapters."""


def spec_of(config: dict[str, Any], name: str, release: str | None = None) -> ModelSpec:
    """Return the specification of a family: from stored shapes, or what Transformers builds.

    `release` is that of Transformers, by default the installed one.
    """
    from shardwright.plugins.releases import transformers_release
    from shardwright.plugins.transformers.meta_model import model_spec_from_meta

    release = release or transformers_release()
    fast = model_spec_from_config(config, name=name, release=release)
    return fast or replace(model_spec_from_meta(config, name=name), release=release)


def metered_release(record: Mapping[str, Any]) -> str:
    """Return the release of Transformers that a stored case was metered with."""
    return str(record.get("release", FIRST_RELEASE))


def small_limits(spec: ModelSpec, trainable: int | None = None) -> ZeroOptions:
    """Return buckets and thresholds as small beside the model, or what is trained of it, as in a real run."""
    two_layers = 2 * spec.layer_parameter_count
    return ZeroOptions(
        reduce_bucket_size=(spec.parameter_count if trainable is None else trainable) // 10,
        stage3_prefetch_bucket_size=spec.layer_parameter_count // 2,
        stage3_param_persistence_threshold=10 * spec.dimensions.hidden_size,
        stage3_max_live_parameters=two_layers,
        stage3_max_reuse_distance=two_layers,
        sub_group_size=spec.parameter_count,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run whose peak is predicted and metered."""

    model: str
    layout: str
    precision: str
    accumulation: int
    checkpointing: bool
    offload: str
    ranks: int
    method: str
    lora_targets: str = "all-linear"
    lora_variant: str = "lora"

    @property
    def name(self) -> str:
        checkpointing = "ckpt" if self.checkpointing else "full"
        words = (self.model, self.layout, self.precision, f"x{self.accumulation}", checkpointing, self.offload)
        adapters = [] if self.lora_targets == "all-linear" else [self.lora_targets]
        adapters += [] if self.lora_variant == "lora" else [self.lora_variant]
        return "-".join([*words, f"{self.ranks}r", self.method, *adapters])

    @property
    def config(self) -> dict[str, Any]:
        return {"model_type": self.model, **(MODELS | MIXTURES | NEWER)[self.model]}

    def spec(self, release: str | None = None) -> ModelSpec:
        return spec_of(self.config, self.model, release)

    def job(self) -> TrainingJob:
        return TrainingJob(
            seq_len_tokens=SEQ_LEN,
            precision=self.precision,  # type: ignore[arg-type]
            method=self.method,  # type: ignore[arg-type]
            lora_rank=LORA_RANK,
            lora_targets=tuple(self.lora_targets.split(",")),
            lora_variant=self.lora_variant,  # type: ignore[arg-type]
        )

    def full_layout(self) -> Layout:
        stage = int(self.layout[-1]) if self.layout.startswith("zero") else None
        sharded = self.layout != "ddp"
        return Layout(
            engine="deepspeed" if stage is not None else self.layout,  # type: ignore[arg-type]
            zero_stage=stage,
            dp_shard=self.ranks if sharded else 1,
            dp_replicate=1 if sharded else self.ranks,
            offload_optimizer="none" if self.offload == "none" else "cpu",
            offload_param="cpu" if self.offload == "optimizer+param" else "none",
            micro_batch_size=MICRO_BATCH_SIZE,
            gradient_accumulation_steps=self.accumulation,
            gradient_checkpointing=self.checkpointing,
            zero=small_limits(self.spec(), rank_parameters(self.spec(), self.job()).trainable),
        )

    @property
    def is_legal(self) -> bool:
        if self.offload != "none" and self.layout == "ddp":
            return False
        if self.offload == "optimizer+param":
            return self.layout in ("zero3", "fsdp2")
        # FSDP2 moves parameters and optimizer with one flag.
        return not (self.offload == "optimizer" and self.layout == "fsdp2")


VALUES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "layout": ("ddp", "zero1", "zero2", "zero3", "fsdp2"),
    "precision": ("bf16", "fp32"),
    "accumulation": (1, 4),
    "checkpointing": (False, True),
    "offload": ("none", "optimizer", "optimizer+param"),
    "ranks": (2, 4),
    "method": ("full", "lora"),
}


_ADAPTED: dict[str, Any] = {"accumulation": 1, "offload": "none", "ranks": 2, "method": "lora"}


def _adapted(model: str, layout: str, precision: str, targets: str, variant: str = "lora", *, recomputes: bool) -> Case:
    choices = {"lora_targets": targets, "lora_variant": variant, "checkpointing": recomputes}
    return Case(model=model, layout=layout, precision=precision, **_ADAPTED, **choices)


ADAPTED = (
    _adapted("qwen3_moe", "ddp", "fp32", "experts", recomputes=True),
    _adapted("qwen3_moe", "zero2", "bf16", "q_proj,v_proj,experts", recomputes=True),
    _adapted("qwen3_moe", "zero3", "bf16", "experts", recomputes=True),
    _adapted("qwen3_moe", "fsdp2", "bf16", "q_proj,k_proj,v_proj,o_proj,experts", recomputes=False),
    _adapted("mixtral", "ddp", "bf16", "experts", recomputes=True),
    _adapted("mixtral", "zero1", "bf16", "experts.down_proj", recomputes=True),
    _adapted("mixtral", "zero3", "fp32", "experts", recomputes=True),
    _adapted("gpt_oss", "zero2", "bf16", "all-linear,experts", recomputes=False),
    _adapted("gpt_oss", "zero3", "bf16", "experts", recomputes=True),
    _adapted("llama", "ddp", "bf16", "all-linear", "dora", recomputes=False),
    _adapted("llama", "zero2", "bf16", "all-linear", "dora", recomputes=True),
    _adapted("qwen3", "zero3", "bf16", "all-linear", "dora", recomputes=True),
    _adapted("qwen3", "fsdp2", "fp32", "all-linear", "dora", recomputes=False),
    _adapted("llama", "fsdp2", "bf16", "all-linear", "pissa", recomputes=False),
)
"""LoRA with other targets than all Linear modules, and other variants."""

_UNEQUAL: dict[str, Any] = {"precision": "bf16", "accumulation": 1, "offload": "none", "ranks": 2, "method": "full"}
UNEQUAL = tuple(
    Case(model=model, layout=layout, checkpointing=recomputes, **_UNEQUAL)
    for model in ("llama4_text", "deepseek_v3", "glm4_moe", "qwen3_moe_dense")
    for layout, recomputes in (("fsdp2", True), ("zero3", False))
)
"""Full training of models with dense and routed layers."""

FAMILIES = tuple(
    _adapted(model, layout, "bf16", "all-linear", recomputes=False)
    for model in ("glm4_moe", "ernie4_5_moe", "granitemoehybrid", "olmo3")
    for layout in ("zero2", "fsdp2")
)
"""Adapters of newer families."""


@cache
def grid() -> list[Case]:
    """Return the cases of adapters and of newer models, and others in which every legal pair of `VALUES` occurs.

    There are at least `LEAST_CASES` others.
    """
    every = [Case(**dict(zip(VALUES, values, strict=True))) for values in product(*VALUES.values())]
    legal = [case for case in every if case.is_legal]
    held = {case: frozenset(pairs(case)) for case in legal}
    wanted = set().union(*held.values())
    chosen: list[Case] = []
    while wanted:
        most = max(len(wanted & found) for found in held.values())
        ties = [case for case, found in held.items() if len(wanted & found) == most]
        best = min(ties, key=lambda case: _repeats(case, chosen))
        chosen.append(best)
        wanted -= held[best]
    while len(chosen) < LEAST_CASES:
        rest = [case for case in legal if case not in chosen]
        chosen.append(min(rest, key=lambda case: _repeats(case, chosen)))
    return sorted([*chosen, *ADAPTED, *UNEQUAL, *FAMILIES], key=lambda case: case.name)


def pairs(case: Case) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Return every pair of values of a case."""
    return combinations(((name, getattr(case, name)) for name in VALUES), 2)


def _repeats(case: Case, chosen: list[Case]) -> int:
    """How much of a case the chosen ones hold already: cubed, so that no two are nearly equal."""
    values = {name: getattr(case, name) for name in VALUES}
    return sum(sum(value == getattr(other, name) for name, value in values.items()) ** 3 for other in chosen)
