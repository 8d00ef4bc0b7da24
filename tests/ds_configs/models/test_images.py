"""Tokens of images, against the image processors of Transformers."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from planning import RELEASE
from shardwright.ds_configs.memory.rank_parameters import trained_parameters
from shardwright.ds_configs.models.images import RULES, image_sizes, image_tokens
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config, plain_settings
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.images import IMAGE_PARTS, image_part, names_of_parts
from shardwright.ds_configs.specs.job import TrainingJob, job_errors
from shardwright.ds_configs.specs.model import lora_parameter_count
from shardwright.plugins.transformers.meta_model import model_spec_from_meta
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.deepseek_vl.processing_deepseek_vl import DeepseekVLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

SIDES = st.integers(40, 3000)

SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "qwen3_vl": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "qwen3_5": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "glm4v": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "glm46v": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
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


GLM = {"glm4v": (Glm4vProcessor, Glm4vImageProcessorPil), "glm46v": (Glm46VProcessor, Glm46VImageProcessorPil)}
GLM_SIZE = {"shortest_edge": 12544, "longest_edge": 9633792}
"""Of the published preprocessor_config.json of GLM-4.1V, GLM-4.5V and GLM-4.6V."""


@pytest.mark.parametrize("model_type", GLM)
@given(SIDES, SIDES)
def test_glm(model_type: str, height: int, width: int) -> None:
    processor = GLM[model_type][1](size=GLM_SIZE)
    assert planned(model_type, height, width).patches == processor.get_number_of_image_patches(height, width, {})


@pytest.mark.parametrize("model_type", GLM)
@pytest.mark.parametrize("sides", [(20, 20), (27, 2000), (480, 640), (1111, 77), (2400, 3100)])
def test_glm_processors_make_the_planned_tokens_and_patches(model_type: str, sides: tuple[int, int]) -> None:
    kind, image_kind = GLM[model_type]
    tokens = ["<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"]
    processor = _with_tokenizer(kind, image_kind(size=GLM_SIZE), None, tokens=tokens)
    height, width = sides
    text, picture = f"<|begin_of_image|>{processor.image_token}<|end_of_image|>", Image.new("RGB", (width, height))
    made = processor(text=[text], images=[picture], return_tensors="np", add_special_tokens=False)
    (ids,) = made["input_ids"]
    found = planned(model_type, height, width)
    assert (len(made["pixel_values"]), len(ids)) == (found.patches, found.text_tokens)
    assert (ids == processor.image_token_id).sum() == found.features


@pytest.mark.parametrize("model_type", GLM)
def test_position_table_of_a_tower_does_not_limit_the_text(model_type: str) -> None:
    architecture = GLM[model_type][0].__name__.replace("Processor", "ForConditionalGeneration")
    config = {"model_type": model_type, "architectures": [architecture]}
    sizes = {"text_config": {"num_hidden_layers": 1}, "vision_config": {"depth": 1}}
    assert model_spec_from_meta(config | sizes, name=model_type).learned_positions is None


# No shapes of this class are stored for Transformers 5.24, which changed it.
@pytest.mark.once
@pytest.mark.parametrize("has_head", [True, False])
def test_stored_shapes_have_the_pooling_head_of_siglip_only_if_the_model_has(has_head: bool) -> None:
    tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "model_type": "siglip_vision_model"}
    text = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": "llava_onevision", "architectures": ["LlavaOnevisionForConditionalGeneration"]}
    config |= {"text_config": text, "vision_config": tower | {"vision_use_head": has_head}}
    stored = model_spec_from_config(config, name="stored", release=RELEASE)
    built = model_spec_from_meta(config, name="built")
    assert stored is not None
    assert (stored.parameter_count, stored.layer_classes) == (built.parameter_count, built.layer_classes)
    assert ("SiglipMultiheadAttentionPoolingHead" in stored.layer_classes) == has_head


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
def test_pixtral(height: int, width: int) -> None:
    tower = {"vision_config.model_type": "pixtral", "vision_config.image_size": 1024, "vision_config.patch_size": 16}
    rows, columns = (
        side // 16 for side in get_resize_output_image_size(np.zeros((height, width, 3)), (1024, 1024), (16, 16))
    )
    assert RULES["llava"](tower, height, width, 0, None).text_tokens == rows * (columns + 1)
    resized = get_resize_output_image_size(np.zeros((height, width, 3)), (1540, 1540), (28, 28))
    rows, columns = (side // 28 for side in resized)
    found = planned("mistral3", height, width)
    assert (found.features, found.text_tokens, found.patches) == (
        rows * columns,
        (columns + 1) * rows,
        4 * rows * columns,
    )


def _llama4_functions() -> Any:
    """Return the pure functions of a module that needs torchvision."""
    wanted = ("get_factors", "find_supported_resolutions", "get_best_fit")
    tree = ast.parse((Path(transformers.__file__).parent / "models/llama4/image_processing_llama4.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    names: dict[str, Any] = {"torch": torch, "defaultdict": defaultdict, "SizeDict": SimpleNamespace}
    for function in functions:
        function.decorator_list = []
    exec(compile(ast.Module(functions, []), "llama4", "exec"), names)  # noqa: S102
    found = SimpleNamespace(**{name: names[name] for name in wanted})
    found.canvases = torch.tensor(found.find_supported_resolutions(16, SimpleNamespace(height=336, width=336)))
    return found


LLAMA4 = _llama4_functions()


@given(SIDES, SIDES)
def test_llama4(height: int, width: int) -> None:
    rows, columns = (int(side) // 336 for side in LLAMA4.get_best_fit((height, width), LLAMA4.canvases))
    text = Llama4Processor._prompt_split_image(None, (rows, columns), 144)
    found = planned("llama4", height, width)
    assert found.tiles == rows * columns + (rows * columns > 1)
    assert (found.features, found.text_tokens) == (text.count("<|patch|>"), text.count("<"))


MODEL = model_spec_from_config(
    {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}, name="vl", release=RELEASE
)


def _with_tokenizer(kind: Any, *arguments: Any, tokens: Sequence[str] = (), **keywords: Any) -> Any:
    """Return a processor with a tokenizer of bytes and special tokens, and none of videos, which needs torchvision."""
    names = {
        **{"image_token": "<image>", "video_token": "<video>", "context_image_token": "<image>"},
        **{"start_image_token": "<img>", "end_image_token": "</img>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
    }
    tokenizer = byte_tokenizer(400)
    # Tokenizers of Gemma 3 and SmolLM have a token of a blank line.
    tokenizer.add_tokens(["\n\n", *dict.fromkeys(names.values()), *tokens], special_tokens=True)
    tokenizer.pad_token = tokenizer.bos_token = tokenizer.eos_token
    for name, token in names.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    made = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    # SmolVLM's names the seconds of videos.
    with mock.patch.object(processing_smolvlm, "num2words", str):
        return made(arguments[0], tokenizer, *arguments[1:], **keywords)


SQUARE = {"height": 28, "width": 28}
CLIP = {"patch_size": 7, "num_additional_image_tokens": 1}
RESOLUTIONS = {
    "llava_next": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
    "llava_onevision": [[28 * row, 28 * column] for row in range(1, 7) for column in range(1, 7)],
}
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
PROCESSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        f"llava_next {strategy}": (
            _with_tokenizer(
                LlavaNextProcessor,
                LlavaNextImageProcessorPil(
                    size={"shortest_edge": 28}, crop_size=SQUARE, image_grid_pinpoints=RESOLUTIONS["llava_next"]
                ),
                **CLIP,
                vision_feature_select_strategy=strategy,
            ),
            {
                "image_grid_pinpoints": RESOLUTIONS["llava_next"],
                "vision_feature_select_strategy": strategy,
                "vision_config": {"model_type": "clip_vision_model"},
            },
        )
        for strategy in ("default", "full")
    },
    **{
        f"llava_onevision {most_tiles}": (
            _with_tokenizer(
                LlavaOnevisionProcessor,
                LlavaOnevisionImageProcessorPil(
                    size=SQUARE, image_grid_pinpoints=RESOLUTIONS["llava_onevision"][:most_tiles]
                ),
                None,
                num_image_tokens=16,
                vision_feature_select_strategy="full",
                vision_aspect_ratio=f"anyres_max_{most_tiles}",
            ),
            {
                "image_grid_pinpoints": RESOLUTIONS["llava_onevision"][:most_tiles],
                "vision_aspect_ratio": f"anyres_max_{most_tiles}",
            },
        )
        for most_tiles in (9, 36)
    },
    "internvl": (
        _with_tokenizer(
            InternVLProcessor, GotOcr2ImageProcessorPil(size=SQUARE, max_patches=12), None, image_seq_length=4
        ),
        {"image_seq_length": 4},
    ),
    "aya_vision": (
        _with_tokenizer(
            AyaVisionProcessor,
            GotOcr2ImageProcessorPil(size=SQUARE, max_patches=12),
            patch_size=7,
            img_size=28,
            downsample_factor=2,
            tokens=["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE_GLOBAL"]
            + [f"TILE_{tile}" for tile in range(1, 13)],
        ),
        {"downsample_factor": 2},
    ),
    **{
        name: (
            _with_tokenizer(
                kind,
                image_kind(size={"longest_edge": 112}, max_image_size={"longest_edge": 28}),
                *more,
                image_seq_len=4,
                tokens=["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES],
            ),
            {"scale_factor": 2},
        )
        for name, kind, image_kind, *more in (
            ("idefics3", Idefics3Processor, Idefics3ImageProcessorPil),
            ("smolvlm", SmolVLMProcessor, SmolVLMImageProcessorPil, None),
        )
    },
    "gemma3": (
        _with_tokenizer(Gemma3Processor, Gemma3ImageProcessorPil(size=SQUARE), image_seq_length=4),
        {"mm_tokens_per_image": 4},
    ),
    "paligemma": (
        _with_tokenizer(PaliGemmaProcessor, SiglipImageProcessorPil(size=SQUARE, image_seq_length=16)),
        {},
    ),
    "vipllava": (
        _with_tokenizer(
            LlavaProcessor,
            CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=SQUARE),
            **CLIP,
            vision_feature_select_strategy="default",
        ),
        {"vision_config": {"model_type": "clip_vision_model"}},
    ),
    "deepseek_vl": (
        _with_tokenizer(DeepseekVLProcessor, DeepseekVLImageProcessorPil(size=SQUARE), num_image_tokens=16),
        {},
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("images", [1, 2])
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 250), st.integers(2, 250))
def test_processors_make_the_planned_tokens_and_tiles(name: str, images: int, height: int, width: int) -> None:
    processor, values = PROCESSORS[name]
    tower = {"image_size": 28, "patch_size": 7} | values.get("vision_config", {})
    assert MODEL is not None
    model_type = name.partition(" ")[0]
    model = replace(MODEL, model_type=model_type, settings=tuple(plain_settings(values | {"vision_config": tower})))
    job = TrainingJob(images_per_sample=images, image_size=f"{width}x{height}", seq_len_tokens=8192)
    found = image_tokens(model, job)
    assert found is not None
    text = (processor.tokenizer.boi_token if model_type == "gemma3" else processor.image_token) * images
    pictures = [[Image.new("RGB", (width, height))] * images]
    made = processor(text=[text], images=pictures, return_tensors="np", add_special_tokens=False)
    (ids,) = made["input_ids"]
    counted = processor.tokenizer.image_token_id if model_type == "gemma3" else processor.image_token_id
    features = int((ids == counted).sum())
    shape = made["pixel_values"].shape
    tiles = prod(shape[:-3])
    # PaliGemma's begins its text after the images, and ends it with a line end.
    around = len(ids) - 2 * (model_type == "paligemma")
    assert (images * found.features, images * found.tiles, images * found.patches) == (features, tiles, 16 * tiles)
    assert images * found.text_tokens == around


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
