"""Tokens of images, against the image processors of Transformers."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from planning import RELEASE
from shardwright.ds_configs.memory.rank_parameters import trained_parameters
from shardwright.ds_configs.models.images import RULES, image_sizes, image_tokens
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.images import IMAGE_PARTS, image_part, names_of_parts
from shardwright.ds_configs.specs.job import TrainingJob, job_errors
from shardwright.ds_configs.specs.model import lora_parameter_count
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

SIDES = st.integers(40, 3000)

SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "qwen3_vl": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "qwen3_5": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "glm4v": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "llava_next": {"image_size": 336, "patch_size": 14},
    "llava_onevision": {"image_size": 384, "patch_size": 14},
    "internvl": {"image_size": 448, "patch_size": 14},
    "idefics3": {"image_size": 364, "patch_size": 14},
    "mistral3": {"image_size": 1540, "patch_size": 14},
    "llama4": {"image_size": 336, "patch_size": 14, "pixel_shuffle_ratio": 0.5},
}
TOP: dict[str, dict[str, Any]] = {
    "internvl": {"image_seq_length": 256},
    "idefics3": {"scale_factor": 2},
    "mistral3": {"spatial_merge_size": 2},
}


def planned(model_type: str, height: int, width: int, frames: int = 0, max_pixels: int | None = None) -> Any:
    settings = {f"vision_config.{name}": value for name, value in SETTINGS[model_type].items()}
    return RULES[model_type](settings | TOP.get(model_type, {}), height, width, frames, max_pixels)


@given(SIDES, SIDES, st.sampled_from([None, 50_176, 1_003_520]))
def test_native_resolutions(height: int, width: int, max_pixels: int | None) -> None:
    # As the published preprocessor_config.json have it.
    for model_type, patch, smallest, largest in (
        ("qwen2_5_vl", 14, 3136, 12_845_056),
        ("qwen3_vl", 16, 65_536, 16_777_216),
        ("qwen3_5", 16, 65_536, 16_777_216),
    ):
        size = {"shortest_edge": smallest, "longest_edge": max_pixels or largest}
        processor = Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, size=size)
        found = planned(model_type, height, width, max_pixels=max_pixels)
        assert found.patches == processor.get_number_of_image_patches(height, width, {})
        assert found.features == found.patches // 4


@given(SIDES, SIDES, st.integers(1, 40))
def test_frames_of_a_video(height: int, width: int, frames: int) -> None:
    rows, columns = smart_resize(height, width, 28, 128 * 28 * 28, 768 * 28 * 28)
    assert planned("qwen2_5_vl", height, width, frames).features == -(-frames // 2) * rows * columns // 28**2


@pytest.mark.parametrize(("frames", "features"), [(16, 7040), (256, 11_648)])
def test_frames_share_the_pixels_of_a_video(frames: int, features: int) -> None:
    # Of Qwen3-VL's `smart_resize(num_frames, ...)` with its published limit of 25,165,824.
    assert planned("qwen3_vl", 720, 1280, frames).features == features


@given(SIDES, SIDES)
def test_glm(height: int, width: int) -> None:
    processor = Glm4vImageProcessorPil(size={"shortest_edge": 12544, "longest_edge": 9633792})
    assert planned("glm4v", height, width).patches == processor.get_number_of_image_patches(height, width, {})


@given(SIDES, SIDES)
def test_any_resolution(height: int, width: int) -> None:
    pinpoints = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    for model_type, side, kind, choices in (
        ("llava_next", 336, LlavaNextProcessor, pinpoints),
        ("llava_onevision", 384, LlavaOnevisionProcessor, LlavaOnevisionImageProcessorPil.image_grid_pinpoints),
    ):
        owner = SimpleNamespace(
            image_processor=SimpleNamespace(image_grid_pinpoints=choices),
            num_image_tokens=(side // 14) ** 2,
            patch_size=14,
            num_additional_image_tokens=0,
            vision_aspect_ratio="anyres_max_9",
        )
        owner._get_unpadded_features = lambda *sizes, kind=kind, owner=owner: kind._get_unpadded_features(owner, *sizes)
        assert planned(model_type, height, width).features == kind._get_number_of_features(
            owner, height, width, side, side
        )


@pytest.mark.parametrize(("tower", "rows"), [("clip_vision_model", 1), ("siglip_vision_model", 0)])
@pytest.mark.parametrize("strategy", ["default", "full"])
def test_llava_counts_the_class_row_as_its_processor_does(tower: str, rows: int, strategy: str) -> None:
    assert MODEL is not None
    owner = SimpleNamespace(
        image_processor=SimpleNamespace(crop_size={"height": 336, "width": 336}),
        patch_size=14,
        num_additional_image_tokens=rows,
        vision_feature_select_strategy=strategy,
        _merge_kwargs=lambda: {"images_kwargs": {}},  # Read by 5.24.
    )
    settings = {"vision_feature_select_strategy": strategy, "vision_config.model_type": tower}
    settings |= {"vision_config.image_size": 336, "vision_config.patch_size": 14}
    model = replace(MODEL, model_type="llava", settings=tuple(settings.items()))
    (features,) = LlavaProcessor._get_num_multimodal_tokens(owner, [(100, 90)]).num_image_tokens
    found = image_tokens(model, TrainingJob(images_per_sample=1, seq_len_tokens=4096, image_size="100x90"))
    assert found is not None and (found.features, found.patches) == (features, 576)


@given(SIDES, SIDES)
def test_internvl(height: int, width: int) -> None:
    processor = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, min_patches=1, max_patches=12)
    tiles = processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
    found = planned("internvl", height, width)
    assert (found.tiles, found.patches, found.features) == (tiles, 1024 * tiles, 256 * tiles)


@given(SIDES, SIDES)
def test_idefics(height: int, width: int) -> None:
    tiles, rows, columns = Idefics3ImageProcessorPil().get_number_of_image_patches(height, width, {})
    found = planned("idefics3", height, width)
    assert found.tiles == tiles
    assert found.text_tokens == 169 + 3 + rows * (columns * (169 + 2) + 1)


@given(SIDES, SIDES)
def test_pixtral(height: int, width: int) -> None:
    resized = get_resize_output_image_size(np.zeros((height, width, 3)), (1540, 1540), (28, 28))
    rows, columns = (side // 28 for side in resized)
    found = planned("mistral3", height, width)
    assert (found.features, found.text_tokens, found.patches) == (
        rows * columns,
        (columns + 1) * rows,
        4 * rows * columns,
    )


def test_llama4() -> None:
    # The module needs torchvision, its pure functions do not.
    wanted = ("get_factors", "find_supported_resolutions", "get_best_fit")
    tree = ast.parse((Path(transformers.__file__).parent / "models/llama4/image_processing_llama4.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    names: dict[str, Any] = {"torch": torch, "defaultdict": defaultdict, "SizeDict": SimpleNamespace}
    for function in functions:
        function.decorator_list = []
    exec(compile(ast.Module(functions, []), "llama4", "exec"), names)  # noqa: S102
    llama4 = SimpleNamespace(**{name: names[name] for name in wanted})
    canvases = torch.tensor(llama4.find_supported_resolutions(16, SimpleNamespace(height=336, width=336)))
    for height, width in ((336, 336), (100, 90), (1000, 500), (720, 1280), (3000, 200), (2000, 3000)):
        rows, columns = (int(side) // 336 for side in llama4.get_best_fit((height, width), canvases))
        found = planned("llama4", height, width)
        assert found.tiles == rows * columns + (rows * columns > 1), (height, width)


MODEL = model_spec_from_config(
    {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}, name="vl", release=RELEASE
)


def test_errors_of_images() -> None:
    assert MODEL is not None
    job = TrainingJob(images_per_sample=2, image_size="1280x720", seq_len_tokens=4096)
    sizes = image_sizes(MODEL, job)
    assert sizes is not None
    # 720 x 1280 pixels are 26 x 46 units of 28.
    assert (sizes.images, sizes.patches, sizes.tokens) == (2, 2 * 4 * 26 * 46, 2 * 26 * 46)
    for wrong, message in (
        (replace(job, seq_len_tokens=2048), r"become 2396 tokens, but a sequence has 2048"),
        (replace(job, image_size="10x9000"), "200 times"),
    ):
        with pytest.raises(UsageError, match=message):
            image_tokens(MODEL, wrong)
    square = (("vision_config.image_size", 336), ("vision_config.patch_size", 14))
    llava = replace(MODEL, model_type="llava", settings=square)
    long = TrainingJob(images_per_sample=1, image_size="2000x5", seq_len_tokens=4096)
    assert image_tokens(llava, long) is not None
    with pytest.raises(UsageError, match="1,000 times"):
        image_tokens(llava, replace(long, image_size="6000x5"))
    text = replace(MODEL, model_type="llama", settings=())
    with pytest.raises(UsageError, match="has no images"):
        image_tokens(text, job)
    with pytest.raises(UsageError, match="vision_tower = 'trained': is no part of llama"):
        image_tokens(text, TrainingJob(vision_tower="trained"))
    distilled = TrainingJob(teacher=text, vision_tower="trained")
    assert [error.where for error in job_errors(distilled)] == ["vision_tower"]
    assert [error.where for error in job_errors(TrainingJob(image_size="1x", frames=4))] == [
        "image_size",
        "image_size",
        "frames",
    ]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.vision_encoder.transformer.layers.0.attention.q_proj.weight", "vision_tower"),
        ("model.image_tower.encoder.layers.0.mlp.fc1.weight", "vision_tower"),
        ("model.high_res_vision_model.vision_encoder.layers.0.attn.qkv.weight", "vision_tower"),
        ("model.vision_projection.patch_merger.merging_layer.weight", "projector"),
        ("model.mm_projector.in_proj.weight", "projector"),
        ("qformer.encoder.layer.0.attention.attention.query.weight", "projector"),
        ("image_to_text_projection.dense.weight", "projector"),
        ("model.visual.blocks.0.attn.proj.weight", "vision_tower"),
        # Experts of a language model for patches, and the head of generated images.
        ("model.language_model.layers.1.mlp.vision_moe.experts.gate_up_proj", None),
        ("model.generation_head.vision_head.weight", None),
    ],
)
def test_parts_of_rarer_models_are_recognized(name: str, part: str | None) -> None:
    assert image_part(name) == part
    module, pattern = name.rpartition(".")[0], {each: names_of_parts({each}) for each in IMAGE_PARTS}
    assert {each for each in IMAGE_PARTS if re.fullmatch(pattern[each], module)} == ({part} if part else set())


def test_adapters_of_modules_with_one_name_pattern_are_counted_once() -> None:
    job = TrainingJob(method="lora", vision_tower="trained", projector="trained")
    model = job.freeze(MODEL)
    counted = lora_parameter_count(model, rank=job.lora_rank, targets=job.lora_targets)
    assert sum(parameter.total for parameter in trained_parameters(model, job).parameters) == counted
