"""Adapters of vision-language models belong to the language model, unless the parts for images are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import FAMILIES
from shardwright.ds_configs.specs.images import IMAGE_PARTS, ImagePart, image_part
from shardwright.plugins.patches import remove
from shardwright.plugins.peft import add_lora, check_adapter_fits, merge_adapter, read_adapter
from shardwright.trainers.runs.ranks import freeze


@pytest.mark.parametrize("trained", [(), ("projector",), ("vision_tower",), IMAGE_PARTS])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [None, "q_proj,linear_1,mlp.0,qkv"])
def test_only_parts_that_train_have_adapters(targets: str | None, family: str, trained: tuple[ImagePart, ...]) -> None:
    frozen = [part for part in IMAGE_PARTS if part not in trained]
    model: Any = add_lora(FAMILIES[family](), rank=2, targets=targets, fp32_adapters=True, frozen=frozen)
    adapted = {image_part(name) for name, weight in model.named_parameters() if weight.requires_grad}
    assert adapted == {None, *trained}


@pytest.mark.parametrize("whole", [("projector",), ("vision_tower",), IMAGE_PARTS])
@pytest.mark.parametrize("family", FAMILIES)
def test_complete_parts_are_trained_saved_and_merged(family: str, whole: tuple[ImagePart, ...], tmp_path: Path) -> None:
    base = FAMILIES[family]().to(torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    frozen = [part for part in IMAGE_PARTS if part not in whole]
    model: Any = add_lora(base, rank=2, targets=None, fp32_adapters=True, frozen=frozen, whole=whole)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert all((image_part(name) is None) == (".lora_" in name) for name in trained)
    of_parts = {name: weight for name, weight in trained.items() if image_part(name)}
    assert of_parts.keys() == {name for name, _ in model.named_parameters() if image_part(name) in whole}
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    for weight in of_parts.values():
        torch.nn.init.ones_(weight)
    model.save_pretrained(tmp_path / "adapter")
    adapter, again = read_adapter(tmp_path / "adapter"), type(base).from_pretrained(tmp_path / "base")
    check_adapter_fits(adapter, FAMILIES[family](), "base", fix="")
    merged, _ = merge_adapter(again, adapter)
    ones = {name for name, weight in merged.named_parameters() if image_part(name) and bool((weight == 1).all())}
    assert {name.removeprefix("base_model.model.") for name in of_parts} <= ones


def test_peft_still_saves_no_other_trained_weights() -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from peft.tuners.lora import LoraModel

    remove("trained-parts-beside-adapters")
    model: Any = get_peft_model(FAMILIES["llava"](), LoraConfig(target_modules=["q_proj"]))
    name = next(name for name, _ in model.named_parameters() if image_part(name) == "projector")
    model.get_parameter(name).requires_grad_(True)
    assert "_get_adapter_state_dict" in vars(LoraModel)
    assert name not in get_peft_model_state_dict(model)


@pytest.mark.parametrize("trained", [(), ("projector",), ("vision_tower",), IMAGE_PARTS])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_parts_that_train_require_gradients(family: str, trained: tuple[ImagePart, ...]) -> None:
    model = FAMILIES[family]()
    freeze(model, {part for part in IMAGE_PARTS if part not in trained})
    assert {image_part(name) for name, weight in model.named_parameters() if weight.requires_grad} == {None, *trained}
