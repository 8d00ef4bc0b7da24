"""Predicted beside published memory of Qwen2.5-VL-7B: `python benchmarks/published_vision.py [--write]`.

Comments in ms-swift's example scripts (at 3602360a, 2026-08-22), which read nvidia-smi. They name the dataset, but not
how long its sequences are: of COCO, images of 640 x 480 and 60 tokens of text are assumed; of VideoChatGPT, 12 frames
of 16:9 in the smallest size of qwen-vl-utils, 420 x 224, and 96 tokens of text; of handwritten formulas, images of
512 x 128 and 70 tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from page_parts import with_part
from shardwright.ds_configs.memory.communication import default_zero_options
from shardwright.ds_configs.memory.estimate import estimate_memory, shown_bytes
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import FIRST_RELEASE
from shardwright.ds_configs.step_time.estimate import estimate_step_time

PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "vision.md"
GIB = 2**30

CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000},
    **{"tie_word_embeddings": False, "use_sliding_window": False},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584},
        **{"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112},
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
"""Of Qwen2.5-VL-7B-Instruct."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published figure."""

    name: str
    gib: float
    seconds: float | None = None
    layout: Layout
    fields: dict[str, Any] = field(default_factory=dict)

    def predicted(self) -> tuple[float, float, float]:
        """Return the GiB of tensors, those that nvidia-smi would show, and the seconds of a step."""
        job = TrainingJob(**self.fields)
        spec = model_spec_from_config(CONFIG, name="Qwen2.5-VL-7B", release=FIRST_RELEASE)
        assert spec is not None
        model, layout = job.freeze(spec), self.layout
        if layout.zero_stage:
            zero = default_zero_options(model, job, stage=layout.zero_stage)
            # ms-swift's zero3.json keeps DeepSpeed's limits; its zero2.json has one bucket of 2e8 elements.
            zero = replace(zero, stage3_max_live_parameters=10**9, stage3_max_reuse_distance=10**9)
            if layout.zero_stage == 2:
                zero = replace(zero, reduce_bucket_size=200_000_000, overlap_comm=False)
            layout = layout.changed(zero=zero)
        hardware = parse_hardware(f"{layout.world_size}xA100-80GB")
        gpu = estimate_memory(layout, model, hardware, job).gpu
        shown = shown_bytes(gpu, layout, model, hardware, job)
        return gpu.allocated_bytes / GIB, shown / GIB, estimate_step_time(layout, model, hardware, job).seconds


_VIDEO: dict[str, Any] = {
    # qwen-vl-utils: max(VIDEO_MAX_PIXELS, 1.05 * 128 * 28²), so that the script's limit of 50,176 has no effect.
    **{"images_per_sample": 1, "frames": 12, "image_size": "1280x720", "max_pixels": 105_369},
    **{"seq_len_tokens": 816, "loss": "chunked"},
    **{"vision_tower": "trained", "projector": "trained", "use_liger_kernel": True},
}
_COCO: dict[str, Any] = {"images_per_sample": 1, "seq_len_tokens": 452, "image_size": "640x480"}
_OCR: dict[str, Any] = {"images_per_sample": 1, "seq_len_tokens": 160, "image_size": "512x128"}


def _factorial(layers: bool, tower: bool) -> tuple[Layout, dict[str, Any]]:
    """Return layout and job with layers of the text and of the tower recomputed or not."""
    # Recomputing no layers of the text leaves those of the tower.
    count = None if layers or not tower else 0
    layout = Layout(
        engine="deepspeed",
        zero_stage=3,
        dp_shard=4,
        micro_batch_size=4,
        gradient_checkpointing=layers or tower,
        checkpointed_layers=count,
    )
    return layout, _VIDEO | {"vision_checkpointing": "auto" if tower else "off"}


def published() -> list[Published]:
    """Return every row that is compared."""
    rows = []
    for (layers, tower), gib, seconds in (
        ((True, True), 48, 2.45),
        ((True, False), 62, 2.32),
        ((False, True), 56, 2.16),
        ((False, False), 77, 1.95),
    ):
        layout, fields = _factorial(layers, tower)
        recomputed = " and ".join(name for name, on in (("text", layers), ("tower", tower)) if on) or "nothing"
        rows.append(
            Published(
                name=f"full, ZeRO-3 on 4, recomputing {recomputed}",
                gib=gib,
                seconds=seconds,
                layout=layout,
                fields=fields,
            )
        )
    alone = Layout(engine="single", micro_batch_size=1, gradient_accumulation_steps=16, gradient_checkpointing=True)
    lora: dict[str, Any] = {"method": "lora", "lora_rank": 8}
    beside = _COCO | {"method": "lora", "lora_rank": 16, "vision_tower": "full", "projector": "full"}
    ranks = Layout(
        engine="deepspeed",
        zero_stage=2,
        dp_shard=4,
        micro_batch_size=1,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
    )
    return [
        *rows,
        Published(name="LoRA of rank 8, frozen tower, one GPU (caption.sh)", gib=22, layout=alone, fields=_COCO | lora),
        Published(name="LoRA of rank 8, frozen tower, one GPU (ocr.sh)", gib=20, layout=alone, fields=_OCR | lora),
        Published(name="LoRA of rank 16, complete tower, ZeRO-2 on 4 (sft.sh)", gib=22, layout=ranks, fields=beside),
    ]


def table() -> str:
    """Return one markdown line for each row, and the differences that recomputation makes."""
    lines = ["| run | published GiB | tensors | nvidia-smi, predicted | error | published s | predicted s |"]
    lines += ["|---|---|---|---|---|---|---|"]
    found = {}
    for row in published():
        tensors, shown, seconds = row.predicted()
        found[row.name] = (row.gib, shown)
        measured = "–" if row.seconds is None else f"{row.seconds:.2f}"
        error = f"{shown / row.gib - 1:+.0%}"
        values = (row.name, row.gib, f"{tensors:.1f}", f"{shown:.1f}", error, measured, f"{seconds:.2f}")
        lines.append(f"| {' | '.join(map(str, values))} |")
    names = list(found)
    lines += ["", "| difference | published GiB | predicted |", "|---|---|---|"]
    for what, low, high in (("tower kept", 0, 1), ("text kept", 0, 2), ("both kept", 0, 3)):
        (a, b), (c, d) = found[names[low]], found[names[high]]
        lines.append(f"| {what} | {c - a:.0f} | {d - b:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    if "--write" in sys.argv:
        PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), "published", table()), encoding="utf-8")
