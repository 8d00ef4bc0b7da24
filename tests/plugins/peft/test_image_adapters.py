"""Adapters of vision-language models belong to the language model, unless the parts for images are trained."""

from __future__ import annotations

from typing import Any

import pytest
from image_models import FAMILIES
from shardwright.ds_configs.specs.images import IMAGE_PARTS, ImagePart, image_part
from shardwright.plugins.peft import add_lora
from shardwright.trainers.runs.ranks import freeze


@pytest.mark.parametrize("trained", [(), ("projector",), ("vision_tower",), IMAGE_PARTS])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [None, "q_proj,linear_1,mlp.0,qkv"])
def test_only_parts_that_train_have_adapters(targets: str | None, family: str, trained: tuple[ImagePart, ...]) -> None:
    frozen = [part for part in IMAGE_PARTS if part not in trained]
    model: Any = add_lora(FAMILIES[family](), rank=2, targets=targets, fp32_adapters=True, frozen=frozen)
    adapted = {image_part(name) for name, weight in model.named_parameters() if weight.requires_grad}
    assert adapted == {None, *trained}


@pytest.mark.parametrize("trained", [(), ("projector",), ("vision_tower",), IMAGE_PARTS])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_parts_that_train_require_gradients(family: str, trained: tuple[ImagePart, ...]) -> None:
    model = FAMILIES[family]()
    freeze(model, {part for part in IMAGE_PARTS if part not in trained})
    assert {image_part(name) for name, weight in model.named_parameters() if weight.requires_grad} == {None, *trained}
