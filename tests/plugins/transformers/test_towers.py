"""Recomputation of models with a vision tower: which layers, and no backward pass of a frozen one."""

from __future__ import annotations

from typing import Any

import pytest
from image_models import FAMILIES
from shardwright.ds_configs.specs.images import IMAGE_PARTS, image_part
from shardwright.plugins.transformers.gradient_checkpointing import (
    checkpoint_first_layers,
    decoder_layers,
    keep_towers,
    unmark_frozen_towers,
)
from shardwright.trainers.runs.ranks import freeze


def recomputed(model: Any) -> dict[str, bool]:
    return {
        name: part.gradient_checkpointing
        for name, part in model.named_modules()
        if name.endswith(".1") and hasattr(part, "gradient_checkpointing")
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_the_text_are_the_decoder_and_towers_can_be_kept(family: str) -> None:
    model = FAMILIES[family]()
    text = {id(layer) for name, layer in model.named_modules() if image_part(name) is None}
    assert {id(layer) for layer in decoder_layers(model)} <= text
    model.gradient_checkpointing_enable()
    checkpoint_first_layers(model, 0)
    assert {bool(image_part(name)): on for name, on in recomputed(model).items()} == {True: True, False: False}
    keep_towers(model)
    assert not any(recomputed(model).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_towers_have_no_marked_inputs(family: str) -> None:
    model = FAMILIES[family]()
    freeze(model, IMAGE_PARTS)
    model.gradient_checkpointing_enable()

    def marked() -> list[str]:
        return [
            name
            for name, part in model.named_modules()
            if any(
                getattr(hook, "__name__", "") == "make_inputs_require_grads" for hook in part._forward_hooks.values()
            )
        ]

    # Transformers marks them: without this, `unmark_frozen_towers` is no longer needed.
    assert any(image_part(name) for name in marked())
    unmark_frozen_towers(model)
    assert marked() and not any(image_part(name) for name in marked())
