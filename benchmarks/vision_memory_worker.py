"""Runs on every rank of `vision_memory.py`: trains each case for a few steps with the byte meter on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from memory_grid import run_cases
from metered_training import plan_of, train_metered
from shardwright.ds_configs.models.images import image_sizes
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.plugins.metering import ByteMeter
from transformers import AutoConfig
from vision_memory import Case


def measure(case: Case) -> dict[str, Any]:
    """Train one case through the stock Trainer and return what lived on this rank."""
    plan = plan_of(case.full_layout(), case.spec(), parse_hardware(f"{case.ranks}xCPU"), case.job())
    try:
        reading = train_metered(plan, case.config, ByteMeter(), batch=batch_of(plan, case))
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return asdict(reading) | {"peak_bytes": reading.peak_bytes}


def batch_of(plan: Plan, case: Case) -> dict[str, torch.Tensor]:
    """Return a micro-batch of random text, with images in each sequence, as the family's processor returns it."""
    config = AutoConfig.for_model(**case.config)
    sizes, count, vision = image_sizes(plan.model, plan.job), plan.chosen.layout.micro_batch_size, config.vision_config
    assert sizes is not None
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 4000, (count, plan.job.seq_len_tokens), generator=generator)
    types = torch.zeros_like(tokens)
    types[:, 1 : 1 + sizes.tokens] = 1
    labels = tokens.masked_fill(types == 1, -100)
    tokens[types == 1] = config.image_token_id
    batch = {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
    if "spatial_merge_size" in vision.to_dict():
        patch = vision.patch_size
        side = round(sizes.patches**0.5)
        width = vision.in_channels * vision.temporal_patch_size * patch**2
        batch["pixel_values"] = torch.randn(count * sizes.patches, width, generator=generator)
        batch["image_grid_thw"] = torch.tensor([[1, side, side]] * count)
        return batch | {"mm_token_type_ids": types}
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    batch["pixel_values"] = torch.randn(count * sizes.images, 3, size, size, generator=generator)
    return batch | ({"token_type_ids": types} if case.model == "gemma3" else {})


if __name__ == "__main__":
    run_cases(Case, measure)
