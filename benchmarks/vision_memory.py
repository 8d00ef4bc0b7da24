"""Predicted beside metered memory of models that read images: `python benchmarks/vision_memory.py [--write]`.

Each case trains through the Trainer on CPU ranks with the byte meter on; every sequence has images.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import memory_accuracy
import memory_cases
from memory_accuracy import Row, case_table
from memory_grid import Grid, error_table
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.model import ModelSpec

TARGET_MEAN, TARGET_WORST = 0.01, 0.04
SEQ_LEN = 128

_TEXT = {
    **{"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 512, "tie_word_embeddings": False},
    "pad_token_id": 0,
}
_CLIP = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
_TILE = {**_CLIP, "image_size": 56, "patch_size": 14}
_GRIDS = [[56 * rows, 56 * columns] for rows in (1, 2) for columns in (1, 2)]
_PATCHES = {"depth": 4, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
_MARKS = {"image_token_id": 4095, "video_token_id": 4094, "vision_start_token_id": 4093, "vision_end_token_id": 4092}

MODELS: Mapping[str, dict[str, Any]] = {
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_CLIP, "model_type": "clip_vision_model", "image_size": 112, "patch_size": 14},
        "image_token_index": 4095,
        "image_seq_length": 64,
    },
    "qwen2_vl": {
        "text_config": {**_TEXT, **_ROPE},
        "vision_config": {**_PATCHES, "embed_dim": 128, "hidden_size": 256},
        **_MARKS,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, **_ROPE},
        "vision_config": {
            **_PATCHES,
            **{"hidden_size": 128, "intermediate_size": 344, "out_hidden_size": 256},
            **{"window_size": 112, "fullatt_block_indexes": [3]},
        },
        **_MARKS,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, **_ROPE, "head_dim": 32},
        "vision_config": {
            **_PATCHES,
            **{"patch_size": 16, "hidden_size": 128, "intermediate_size": 384, "out_hidden_size": 256},
            **{"num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2, 3]},
        },
        **_MARKS,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_CLIP, "image_size": [112, 112], "patch_size": [14, 14]},
        "image_token_id": 4095,
        "image_seq_length": 16,
        "downsample_ratio": 0.5,
    },
    "gemma3": {
        "text_config": {**_TEXT, "head_dim": 32, "sliding_window": 512, "model_type": "gemma3_text"},
        "vision_config": {**_CLIP, "model_type": "siglip_vision_model", "image_size": 112, "patch_size": 14},
        "image_token_index": 4095,
        "mm_tokens_per_image": 16,
    },
    "llava_next": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_TILE, "model_type": "clip_vision_model"},
        "image_token_index": 4095,
        "image_grid_pinpoints": _GRIDS,
    },
    "llava_onevision": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_TILE, "model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_index": 4095,
        "image_grid_pinpoints": _GRIDS,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            **{"head_dim": 32, "intermediate_size": 192, "intermediate_size_mlp": 704, "num_local_experts": 4},
            "interleave_moe_layer_step": 2,
        },
        "vision_config": {
            **_TILE,
            **{"intermediate_size": 512, "projector_input_dim": 256, "projector_output_dim": 256},
            "vision_output_dim": 256,
        },
        "image_token_index": 4095,
    },
}
IMAGE_SIZE = "112x112"


@dataclass(frozen=True, kw_only=True)
class Case(memory_cases.Case):
    """One training run with images."""

    tower: str
    """Whether the vision tower and the projector are frozen or trained."""

    @property
    def name(self) -> str:
        return f"{super().name}-{self.tower}"

    @property
    def config(self) -> dict[str, Any]:
        return {"model_type": self.model, **MODELS[self.model]}

    def spec(self, release: str | None = None) -> ModelSpec:
        return self.job().freeze(super().spec(release))

    def job(self) -> TrainingJob:
        parts: Any = {"vision_tower": self.tower, "projector": self.tower}
        return replace(super().job(), seq_len_tokens=SEQ_LEN, images_per_sample=1, image_size=IMAGE_SIZE, **parts)


def grid() -> list[Case]:
    """Return every family with every engine, frozen and trained, recomputed in half of the cases."""
    every = product(enumerate(MODELS), enumerate(("zero2", "zero3", "fsdp2")), enumerate(("frozen", "trained")))
    cases = [
        Case(
            model=model,
            layout=layout,
            tower=tower,
            precision="bf16",
            accumulation=1,
            checkpointing=(one + two + three) % 2 == 0,
            offload="none",
            ranks=2,
            method="full",
        )
        for (one, model), (two, layout), (three, tower) in every
    ]
    return sorted(cases, key=lambda case: case.name)


def group_table(found: Sequence[Row]) -> str:
    """Return the errors of each family, engine and tower."""
    names = {getattr(row.case, name): name for row in found for name in ("model", "layout", "tower")}
    groups = {
        value: [abs(row.error) for row in found if getattr(row.case, name) == value] for value, name in names.items()
    }
    return error_table("group", groups)


def verdict(found: Sequence[Row]) -> tuple[bool, str]:
    """Return whether the targets are met, and a sentence with the figures."""
    errors = [abs(row.error) for row in found]
    passed = mean(errors) <= TARGET_MEAN and max(errors) <= TARGET_WORST
    return passed, (
        f"{len(found)} cases: MAPE {mean(errors):.2%} (target {TARGET_MEAN:.0%}), worst {max(errors):.2%} "
        f"(target {TARGET_WORST:.0%})"
    )


def rows(records: Any) -> list[Row]:
    """Predict every measured case."""
    return memory_accuracy.rows(records, Case)


GRID = Grid(
    name="vision_memory",
    document=Path(__file__).parents[1] / "docs" / "measurements" / "vision.md",
    cases=grid,
    case_of=Case,
    rows=rows,
    tables=lambda found: {"groups": group_table(found), "cases": case_table(found)},
    verdict=verdict,
)

if __name__ == "__main__":
    sys.exit(GRID.main(__doc__))
