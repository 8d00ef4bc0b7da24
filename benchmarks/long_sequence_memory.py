"""Predicted beside metered memory of long sequences: `python benchmarks/long_sequence_memory.py [--write]`.

Each case trains through `trainer_for`'s Trainer on CPU ranks with the byte meter on. The last cases run under a limit
of bytes: a sequence that fits without tiles and host checkpoints, a longer one that does not, and one 8 times as long
with them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory_cases import metered_release, small_limits, spec_of
from memory_grid import Grid, line, megabytes
from shardwright.ds_configs.memory import activations
from shardwright.ds_configs.memory.estimate import cpu_rank_terms
from shardwright.ds_configs.specs.job import Precision, TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec

LARGEST_ERROR = 0.03

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


def _heads(hidden: int, heads: int, key_value_heads: int, intermediate: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "head_dim": 32, "vocab_size": 512}
    return CONFIG | sizes | {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}


_QWEN3: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
_MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS: dict[str, dict[str, Any]] = {
    "wide-head": CONFIG,
    "wide-mlp": CONFIG | {"intermediate_size": 2048, "vocab_size": 512},
    "heads-4h": _heads(64, 8, 2, 256),
    "heads-2h-norms": _heads(128, 8, 2, 512) | _QWEN3,
    "heads-2h-grouped-by-8": _heads(128, 8, 1, 128) | _QWEN3,
    "heads-h-norms": _heads(128, 4, 4, 384) | _QWEN3,
    "heads-half-h": _heads(256, 4, 2, 512),
    "heads-half-h-norms": _heads(256, 4, 1, 256) | _QWEN3,
    "mixture-heads-4h": _heads(64, 8, 2, 128) | _MIXTURE,
    "mixture-heads-half-h": _heads(256, 4, 2, 128) | _MIXTURE,
}
"""The peak without features is in the loss of the first, and in the MLP of the second. Others have heads whose widths
together are wider than the hidden size h, as wide or narrower; their groups and norms differ."""
LOGITS_BYTES_OF_A_TILE = 2**22
"""A tile has 256 or 2,048 tokens, so that the loss of small sequences has several; models of real size use 1 GiB."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"engine": "single"},
    "ddp": {"engine": "ddp", "dp_replicate": 2},
    "zero3": {"engine": "deepspeed", "zero_stage": 3, "dp_shard": 2},
    "fsdp2": {"engine": "fsdp2", "dp_shard": 2},
    "sp2": {"engine": "deepspeed", "zero_stage": 3, "sp": 2},
    "cp2": {"engine": "fsdp2", "cp": 2},
}
FEATURES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "tiled-mlp": ("tiled_mlp",),
    "tiled-loss": ("tiled_loss",),
    "offload": ("offload",),
    "all": ("tiled_mlp", "tiled_loss", "offload"),
    "reentrant": ("reentrant",),
    "reentrant-tiled-mlp": ("reentrant", "tiled_mlp"),
    "transformers-offload": ("transformers",),
}
"""The last one needs Transformers 5.24, and its lines in the table are from there."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run whose peak is predicted and metered."""

    model: str
    layout: str
    features: str
    tokens: int
    precision: Precision = "fp32"
    micro_batch_size: int = 1
    limit_bytes: int | None = None
    """Largest tensor bytes of the rank; the run ends with an out-of-memory error above them."""

    @property
    def run(self) -> str:
        precision = "" if self.precision == "fp32" else f"-{self.precision}"
        return f"{self.model}-{self.layout}-{self.features}{precision}"

    @property
    def name(self) -> str:
        limit = "" if self.limit_bytes is None else f"-within-{self.limit_bytes // 10**6}MB"
        return f"{self.run}-{self.tokens}{limit}"

    @property
    def config(self) -> dict[str, Any]:
        return MODELS[self.model]

    @property
    def ranks(self) -> int:
        return self.full_layout().world_size

    def spec(self, release: str | None = None) -> ModelSpec:
        return spec_of(self.config, self.config["model_type"], release)

    def job(self) -> TrainingJob:
        return TrainingJob(
            seq_len_tokens=self.tokens,
            precision=self.precision,
            gradient_checkpointing="reentrant" if "reentrant" in FEATURES[self.features] else "on",
            offload_activations="transformers" if "transformers" in FEATURES[self.features] else "auto",
            loss="chunked" if "tiled_loss" in FEATURES[self.features] else "eager",
        )

    def full_layout(self) -> Layout:
        spec, features = self.spec(), FEATURES[self.features]
        return Layout(
            micro_batch_size=self.micro_batch_size,
            gradient_checkpointing=True,
            tiled_mlp="tiled_mlp" in features,
            offloaded_checkpoints=spec.dimensions.num_layers if {"offload", "transformers"} & {*features} else 0,
            zero=small_limits(spec),
            **LAYOUTS[self.layout],
        )


SEQUENCES_OF_SHAPES = 4
"""As many that activations are most of the bytes, as in a real run of long sequences."""
LIMIT_BYTES = 120_000_000
LONGEST_PLAIN = 2048


def grid() -> list[Case]:
    """Return every feature under every engine, long sequences with all of them, and runs under a limit of bytes."""
    layouts = ("ddp", "zero3", "fsdp2", "sp2")
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
    shapes = [name for name in MODELS if name.startswith(("heads", "mixture"))]
    cases += [
        Case(
            model=model,
            layout=layout,
            features=features,
            tokens=2048,
            precision=precision,
            micro_batch_size=SEQUENCES_OF_SHAPES,
        )
        for layout in ("single", "sp2", "cp2")
        for model in shapes
        for features, precision in (("plain", "fp32"), ("all", "bf16"))
        if (layout, precision) != ("single", "bf16")
    ]
    cases += [
        Case(
            model=model,
            layout=layout,
            features=features,
            tokens=tokens,
            precision=precision,
            micro_batch_size=SEQUENCES_OF_SHAPES,
        )
        for layout, tokens in (("zero3", 2048), ("fsdp2", 2048), ("sp2", 4096))
        for model, features, precision in (
            ("wide-mlp", "reentrant", "fp32"),
            ("heads-4h", "reentrant", "bf16"),
            ("heads-half-h", "reentrant", "bf16"),
            ("heads-half-h", "reentrant-tiled-mlp", "bf16"),
            ("wide-mlp", "transformers-offload", "fp32"),
            ("heads-half-h", "transformers-offload", "bf16"),
        )
    ]
    limited = [("plain", LONGEST_PLAIN), ("plain", LONGEST_PLAIN * 5 // 4), ("all", 8 * LONGEST_PLAIN)]
    return cases + [
        Case(model="wide-head", layout="single", features=features, tokens=tokens, limit_bytes=LIMIT_BYTES)
        for features, tokens in limited
    ]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case with its metered peaks and their predictions."""

    case: Case
    metered_bytes: int
    predicted_bytes: int
    host_metered_bytes: int
    host_predicted_bytes: int
    out_of_memory: bool

    @property
    def error(self) -> float:
        """Relative error of the peak on the device, positive when it is predicted too large."""
        return self.predicted_bytes / self.metered_bytes - 1

    @property
    def is_right(self) -> bool:
        """Whether device and host bytes are predicted closely, or the limit's effect is."""
        limit = self.case.limit_bytes
        if limit is not None:
            return self.out_of_memory == (self.predicted_bytes > limit)
        host_difference = abs(self.host_predicted_bytes - self.host_metered_bytes)
        return abs(self.error) <= LARGEST_ERROR and host_difference <= LARGEST_ERROR * self.host_metered_bytes


def rows(records: Iterable[dict[str, object]]) -> list[Row]:
    """Predict every measured case."""
    tile_bytes = activations.LOGITS_BYTES_OF_A_TILE
    activations.LOGITS_BYTES_OF_A_TILE = LOGITS_BYTES_OF_A_TILE
    try:
        return [_row(record) for record in records]
    finally:
        activations.LOGITS_BYTES_OF_A_TILE = tile_bytes


def _row(record: dict[str, object]) -> Row:
    case = Case(**record["case"])  # type: ignore[arg-type]
    spec, job, layout = case.spec(metered_release(record)), case.job(), case.full_layout()
    terms = {name: dict(phase) for name, phase in cpu_rank_terms(layout, spec, job).items()}
    # CPU ranks have both in the same memory, but the meter counts the host's apart.
    host = [phase.pop("offloaded_checkpoints", 0) for phase in terms.values()]
    return Row(
        case=case,
        metered_bytes=record["peak_bytes"],  # type: ignore[arg-type]
        predicted_bytes=max(sum(terms[name].values()) for name in terms if name != "init"),
        host_metered_bytes=record["host_bytes"],  # type: ignore[arg-type]
        host_predicted_bytes=max(host),
        out_of_memory=bool(record["out_of_memory"]),
    )


def case_table(found: Sequence[Row]) -> str:
    """Return one Markdown line for each case without a limit."""
    lines = [
        "| case | metered MB | predicted MB | error | host MB | predicted MB |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        if row.case.limit_bytes is None:
            metered, predicted = megabytes(row.metered_bytes), megabytes(row.predicted_bytes)
            host = megabytes(row.host_metered_bytes), megabytes(row.host_predicted_bytes)
            lines.append(line(row.case.name, metered, predicted, f"{row.error:+.1%}", *host))
    return "\n".join(lines)


def slopes(found: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return the metered and the predicted growth in bytes per token, from the shortest to the longest sequence."""
    growth = {}
    for name in dict.fromkeys(row.case.run for row in found if row.case.limit_bytes is None):
        own = [row for row in found if row.case.run == name and row.case.limit_bytes is None]
        own = sorted(own, key=lambda row: row.case.tokens)
        if len(own) > 1:
            tokens = own[-1].case.tokens - own[0].case.tokens
            metered = (own[-1].metered_bytes - own[0].metered_bytes) / tokens
            growth[name] = metered, (own[-1].predicted_bytes - own[0].predicted_bytes) / tokens
    return growth


def slope_table(found: Sequence[Row]) -> str:
    """Return the growth with the sequence as Markdown."""
    lines = ["| run | metered bytes per token | predicted | error |", "|---|---|---|---|"]
    for name, (metered, predicted) in slopes(found).items():
        lines.append(f"| {name} | {metered:,.0f} | {predicted:,.0f} | {predicted / metered - 1:+.1%} |")
    return "\n".join(lines)


def limit_table(found: Sequence[Row]) -> str:
    """Return the runs under a limit of bytes as Markdown."""
    lines = ["| features | tokens | limit MB | predicted MB | trained |", "|---|---|---|---|---|"]
    for row in found:
        if row.case.limit_bytes is not None:
            trained = "no: out of memory" if row.out_of_memory else f"yes, {megabytes(row.metered_bytes)} MB"
            lines.append(
                f"| {row.case.features} | {row.case.tokens:,} | {megabytes(row.case.limit_bytes)} | "
                f"{megabytes(row.predicted_bytes)} | {trained} |"
            )
    return "\n".join(lines)


def verdict(found: Sequence[Row]) -> tuple[bool, str]:
    """Return whether every case and every slope is predicted closely, and a sentence with the figures."""
    worst = max((abs(row.error) for row in found if row.case.limit_bytes is None), default=0.0)
    steepest = max((abs(predicted / metered - 1) for metered, predicted in slopes(found).values()), default=0.0)
    wrong = [row.case.name for row in found if not row.is_right]
    passed = not wrong and steepest <= LARGEST_ERROR
    return passed, (
        f"{len(found)} cases: worst error {worst:.2%}, of the growth per token {steepest:.2%} (target "
        f"{LARGEST_ERROR:.0%}){'; wrong: ' + ', '.join(wrong) if wrong else ''}"
    )


GRID = Grid(
    name="long_sequence_memory",
    document=Path(__file__).parents[1] / "docs" / "measurements" / "long_sequences.md",
    cases=grid,
    case_of=Case,
    rows=rows,
    tables=lambda found: {"cases": case_table(found), "growth": slope_table(found), "limits": limit_table(found)},
    verdict=verdict,
)

if __name__ == "__main__":
    sys.exit(GRID.main(__doc__))
