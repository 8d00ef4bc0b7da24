"""Quantized vision-language models keep the parts for images in 16 bit, unless a target names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import chat_sample, processor, save_image_model
from shardwright.ds_configs.specs.images import image_part
from shardwright.plugins.transformers.loading import load_causal_lm
from shardwright.trainers.data.samples import collate
from shardwright.trainers.quantization import quantize


@pytest.mark.parametrize("targets", [None, "re:.*(self_attn|vision_tower.*fc1).*"])
def test_the_tower_stays_dense_unless_a_target_names_it(targets: str | None, tmp_path: Path) -> None:
    source, output = save_image_model(tmp_path / "llava"), tmp_path / "quantized"
    chosen: dict[str, Any] = {} if targets is None else {"targets": [targets]}
    quantize(str(source), output, scheme="W8A16", group_size=-1, evaluate=False, device="cpu", **chosen)
    model = load_causal_lm(str(output))
    packed = {name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    of_images = {name for name in packed if image_part(name)}
    assert bool(of_images) == (targets is not None) and packed - of_images
    assert all("fc1" in name or "self_attn" in name for name in of_images)
    assert (output / "processor_config.json").is_file()
    assert json.loads((output / "config.json").read_text())["quantization_config"]["quant_method"]
    batch = collate([chat_sample(processor("llava"), ["red"], answer="red")], processor=processor("llava"))
    with torch.no_grad():
        own, other = (each(**batch).logits for each in (model, load_causal_lm(str(source))))
    assert torch.allclose(own, other, atol=0.05)
