"""The grid of `long_sequence_memory.py`: what a long sequence costs with and without tiles and host checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memory_cases import spec_of
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout, ZeroOptions
from shardwright.ds_configs.specs.model import ModelSpec

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "wide-head": CONFIG,
    "wide-mlp": CONFIG | {"intermediate_size": 2048, "vocab_size": 512},
}
"""The peak without features is in the loss of the first, and in the MLP of the second."""
LOGITS_BYTES_OF_A_TILE = 2**22
"""A tile has 256 or 2,048 tokens, so that the loss of small sequences has several; models of real size use 1 GiB."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"engine": "single"},
    "ddp": {"engine": "ddp", "dp_replicate": 2},
    "zero3": {"engine": "deepspeed", "zero_stage": 3, "dp_shard": 2},
    "fsdp2": {"engine": "fsdp2", "dp_shard": 2},
    "sp2": {"engine": "deepspeed", "zero_stage": 3, "sp": 2},
}
FEATURES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "tiled-mlp": ("tiled_mlp",),
    "tiled-loss": ("tiled_loss",),
    "offload": ("offload",),
    "all": ("tiled_mlp", "tiled_loss", "offload"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run whose peak is predicted and metered."""

    model: str
    layout: str
    features: str
    tokens: int
    limit_bytes: int | None = None
    """Largest tensor bytes of the rank; the run ends with an out-of-memory error above them."""

    @property
    def run(self) -> str:
        return f"{self.model}-{self.layout}-{self.features}"

    @property
    def name(self) -> str:
        limit = "" if self.limit_bytes is None else f"-within-{self.limit_bytes // 10**6}MB"
        return f"{self.run}-{self.tokens}{limit}"

    @property
    def config(self) -> dict[str, Any]:
        return MODELS[self.model]

    @property
    def ranks(self) -> int:
        return self.strategy().world_size

    def spec(self, release: str | None = None) -> ModelSpec:
        return spec_of(self.config, "llama", release)

    def job(self) -> TrainingJob:
        return TrainingJob(
            seq_len_tokens=self.tokens,
            precision="fp32",
            gradient_checkpointing="on",
            loss="chunked" if "tiled_loss" in FEATURES[self.features] else "eager",
        )

    def strategy(self) -> Layout:
        """Return the layout with buckets as small beside the model as in a real run."""
        spec, features = self.spec(), FEATURES[self.features]
        two_layers = 2 * spec.layer_parameter_count
        return Layout(
            gradient_checkpointing=True,
            tiled_mlp="tiled_mlp" in features,
            offloaded_checkpoints=spec.dimensions.num_layers if "offload" in features else 0,
            zero=ZeroOptions(
                reduce_bucket_size=spec.parameter_count // 10,
                stage3_prefetch_bucket_size=spec.layer_parameter_count // 2,
                stage3_param_persistence_threshold=10 * spec.dimensions.hidden_size,
                stage3_max_live_parameters=two_layers,
                stage3_max_reuse_distance=two_layers,
                sub_group_size=spec.parameter_count,
            ),
            **LAYOUTS[self.layout],
        )


LIMIT_BYTES = 120_000_000
LONGEST_PLAIN = 2048


def grid() -> list[Case]:
    """Return every feature under every engine, long sequences with all of them, and runs under a limit of bytes."""
    layouts = [layout for layout in LAYOUTS if layout != "single"]
    lengths = {
        ("wide-head", "plain"): (2048, 4096),
        ("wide-head", "tiled-loss"): (2048, 4096),
        ("wide-head", "all"): (2048, 8192),
        ("wide-mlp", "plain"): (2048, 4096),
        ("wide-mlp", "tiled-mlp"): (2048, 4096),
        ("wide-mlp", "offload"): (2048, 4096),
        ("wide-mlp", "all"): (2048, 4096),
    }
    cases = [
        Case(model=model, layout=layout, features=features, tokens=tokens)
        for layout in layouts
        for (model, features), both in lengths.items()
        for tokens in both
    ]
    cases += [
        Case(model="wide-head", layout=layout, features="all", tokens=tokens)
        for layout, tokens in zip(layouts, (16384, 32768, 16384, 32768), strict=True)
    ]
    limited = [("plain", LONGEST_PLAIN), ("plain", LONGEST_PLAIN * 5 // 4), ("all", 8 * LONGEST_PLAIN)]
    return cases + [
        Case(model="wide-head", layout="single", features=features, tokens=tokens, limit_bytes=LIMIT_BYTES)
        for features, tokens in limited
    ]
