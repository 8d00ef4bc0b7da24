"""What the images of a sample become: rows of the vision tower, and tokens of the text.

Each rule is that of the family's image processor in Transformers 5.17, with the defaults of its published models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isqrt, sqrt

from ..specs.errors import ConfigError, UsageError
from ..specs.images import IMAGE_PARTS, RESOLUTIONS, ImageSizes
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """What one image, or one video, becomes."""

    tiles: int
    """Images that the tower reads: crops and a thumbnail, or frames."""
    patches: int
    """Rows of the tower, without class tokens."""
    features: int
    """Outputs of the projector, each in the place of one token."""
    text_tokens: int
    """Features, and the tokens around and between them."""
    formula: str
    has_fixed_size: bool = False
    """Whether an image of any size becomes the same."""


Settings = Mapping[str, bool | int | float | str]
Rule = Callable[[Settings, int, int, int, "int | None"], ImageTokens]
"""From settings of the model, height, width, frames (0: an image) and `max_pixels`."""

LONGEST_RATIO = 1000
"""Processors that scale the shorter side to 336 pixels, as CLIP's, make 340 MB of such an image before they crop it."""
_LONGEST_NATIVE_RATIO = 200
"""Of `smart_resize`, which keeps the ratio of Qwen-VL's and GLM-4V's images."""
_FRAME_PIXELS = 768
"""Largest area of a frame, in merged patches."""


def _scaled_to_area(height: int, width: int, unit: int, smallest: float, largest: float) -> tuple[int, int]:
    """Return sides in multiples of `unit`, with an area from `smallest` to `largest` (`smart_resize`)."""
    rows, columns = round(height / unit) * unit, round(width / unit) * unit
    if rows * columns > largest:
        scale = sqrt(height * width / largest)
        rows, columns = (max(unit, floor(side / scale / unit) * unit) for side in (height, width))
    elif rows * columns < smallest:
        scale = sqrt(smallest / (height * width))
        rows, columns = (ceil(side * scale / unit) * unit for side in (height, width))
    return rows, columns


def _native(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    """Qwen2-VL, Qwen2.5-VL: any resolution, `merge` x `merge` patches per token, two frames per patch."""
    patch, merge = int(settings["vision_config.patch_size"]), int(settings["vision_config.spatial_merge_size"])
    unit, pairs = patch * merge, max(1, ceil(frames / int(settings["vision_config.temporal_patch_size"])))
    # The published preprocessor_config.json: 4 to 16,384 merged patches.
    smallest, largest = 4 * unit**2, max_pixels or 16_384 * unit**2
    if frames:
        smallest, largest = 128 * unit**2, min(largest, _FRAME_PIXELS * unit**2)
    return _merged(settings, _scaled_to_area(height, width, unit, smallest, largest), pairs, 2)


def _qwen3(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    """Qwen3-VL: as Qwen2-VL with other limits, those of a video for all frames; a time stands before each pair."""
    patch, merge = int(settings["vision_config.patch_size"]), int(settings["vision_config.spatial_merge_size"])
    unit, pairs = patch * merge, max(1, ceil(frames / int(settings["vision_config.temporal_patch_size"])))
    # The published preprocessor_config.json and video_preprocessor_config.json.
    smallest, largest = 65_536.0, float(max_pixels or 16_777_216)
    if frames:
        smallest, largest = 4096 / frames, float(max_pixels or 25_165_824) / frames
    return _merged(settings, _scaled_to_area(height, width, unit, smallest, largest), pairs, 10 if frames else 2)


def _merged(settings: Settings, sides: tuple[int, int], pairs: int, around: int) -> ImageTokens:
    """Return what an image or a video of these sides becomes, with `around` tokens of text for each pair of frames."""
    patch, merge = int(settings["vision_config.patch_size"]), int(settings["vision_config.spatial_merge_size"])
    (rows, columns), unit = sides, patch * merge
    patches = pairs * (rows // patch) * (columns // patch)
    features = patches // merge**2
    formula = f"{rows} x {columns} pixels / {unit}²" + (f" x {pairs} pairs of frames" if pairs > 1 else "")
    return ImageTokens(
        tiles=pairs,
        patches=patches,
        features=features,
        text_tokens=features + around * pairs,
        formula=f"{formula} = {features}",
    )


def _glm(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    """GLM-4V, GLM-4.6V: as Qwen2-VL, but the limits count the pixels of two equal frames."""
    patch, merge = int(settings["vision_config.patch_size"]), int(settings["vision_config.spatial_merge_size"])
    unit = patch * merge
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    largest = (max_pixels or 2 * 6144 * unit**2) / 2
    rows, columns = _scaled_to_area(height, width, unit, 112 * 112 / 2, largest)
    patches = (rows // patch) * (columns // patch)
    features = patches // merge**2
    formula = f"{rows} x {columns} pixels / {unit}² = {features}"
    return ImageTokens(tiles=1, patches=patches, features=features, text_tokens=features + 2, formula=formula)


def _side(settings: Settings) -> tuple[int, int]:
    """Return image and patch side of a tower with a fixed resolution."""
    return int(settings["vision_config.image_size"]), int(settings["vision_config.patch_size"])


def _llava(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    if settings.get("vision_config.model_type") == "pixtral":
        return _pixtral({**settings, "spatial_merge_size": 1}, height, width, frames, max_pixels)
    side, patch = _side(settings)
    patches = (side // patch) ** 2
    has_class_row = settings.get("vision_config.model_type") == "clip_vision_model"
    first_row_is_cut = settings.get("vision_feature_select_strategy", "default") == "default"
    features = patches + has_class_row - first_row_is_cut
    formula = f"({side} / {patch})²" + (f" {features - patches:+d}" if features != patches else "") + f" = {features}"
    return ImageTokens(
        tiles=1, patches=patches, features=features, text_tokens=features, formula=formula, has_fixed_size=True
    )


def _every_patch(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    """PaliGemma, DeepSeek-VL: a token for each patch of one resolution."""
    return _llava({**settings, "vision_feature_select_strategy": "full"}, height, width, frames, max_pixels)


def _best_resolution(height: int, width: int, choices: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the resolution that keeps most pixels, and of these the one that wastes least."""

    def kept_and_wasted(choice: tuple[int, int]) -> tuple[int, int]:
        rows, columns = choice
        scale = min(columns / width, rows / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - rows * columns

    return max(choices, key=kept_and_wasted)


def _any_resolution(
    settings: Settings, height: int, width: int, model_type: str, most_tiles: int | None
) -> ImageTokens:
    """Tiles in the best of some resolutions, of which padding is cut off, and a thumbnail; a token ends each row."""
    side, patch = _side(settings)
    across = side // patch
    stated = str(settings.get("image_grid_pinpoints") or RESOLUTIONS[model_type])
    pairs = [pair.split("x") for pair in stated.split()]
    choices = [(max(side, int(rows)), max(side, int(columns))) for rows, columns in pairs]
    rows, columns = _best_resolution(height, width, choices)
    high, wide = across * (rows // side), across * (columns // side)
    if width / height > wide / high:
        high -= 2 * ((high - int(round(height * (wide / width), 7))) // 2)
    else:
        wide -= 2 * ((wide - int(round(width * (high / height), 7))) // 2)
    if most_tiles and (ratio := sqrt(high * wide / (most_tiles * across**2))) > 1.1:
        high, wide = int(high // ratio), int(wide // ratio)
    tiles = 1 + (rows // side) * (columns // side)
    thumbnail = _llava(settings, height, width, 0, None).features
    features = high * wide + high + thumbnail
    formula = f"{high} x {wide} + {high} line ends + {thumbnail} = {features}"
    return ImageTokens(tiles=tiles, patches=tiles * across**2, features=features, text_tokens=features, formula=formula)


def _llava_next(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    return _any_resolution(settings, height, width, "llava_next", None)


def _llava_onevision(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    side, patch = _side(settings)
    across = side // patch
    if frames:
        features = frames * ceil(across / 2) ** 2 + 1
        return ImageTokens(
            tiles=frames,
            patches=frames * across**2,
            features=features,
            text_tokens=features,
            formula=f"{frames} frames x {ceil(across / 2)}² + 1 = {features}",
        )
    most_tiles = int(re.sub(r"\D", "", str(settings.get("vision_aspect_ratio"))) or 9)
    full = {**settings, "vision_feature_select_strategy": "full"}
    return _any_resolution(full, height, width, "llava_onevision", most_tiles)


def _llava_onevision_padded(
    settings: Settings, height: int, width: int, frames: int, max_pixels: int | None
) -> ImageTokens:
    """One of several images of a sequence, padded to a square without tiles, and a token that ends it."""
    side, patch = _side(settings)
    patches = (side // patch) ** 2
    return ImageTokens(
        tiles=1,
        patches=patches,
        features=patches + 1,
        text_tokens=patches + 1,
        formula=f"({side} / {patch})² + 1 = {patches + 1}",
        has_fixed_size=True,
    )


def _tiles_of_grid(side: int, height: int, width: int) -> int:
    """Return up to 12 tiles in the grid with the closest ratio, and a thumbnail beside more than one."""
    ratio, best, closest = width / height, (1, 1), float("inf")
    grids = [(columns, rows) for columns in range(1, 13) for rows in range(1, 13) if columns * rows <= 12]
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(ratio - columns / rows)
        covers = distance == closest and width * height > 0.5 * side**2 * columns * rows
        if distance < closest or covers:
            closest, best = distance, (columns, rows)
    tiles = best[0] * best[1]
    return tiles + (tiles > 1)


def _equal_tiles(settings: Settings, tiles: int, per_tile: int, around: int) -> ImageTokens:
    side, patch = _side(settings)
    return ImageTokens(
        tiles=tiles,
        patches=tiles * (side // patch) ** 2,
        features=tiles * per_tile,
        text_tokens=tiles * per_tile + around,
        formula=f"{tiles} tiles x {per_tile} = {tiles * per_tile}",
    )


def _internvl(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    tiles = frames or _tiles_of_grid(_side(settings)[0], height, width)
    return _equal_tiles(settings, tiles, int(settings["image_seq_length"]), 2 * (frames or 1))


def _aya(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    """As InternVL, with a token before each tile."""
    side, patch = _side(settings)
    tiles = _tiles_of_grid(side, height, width)
    return _equal_tiles(settings, tiles, (side // (patch * int(settings["downsample_factor"]))) ** 2, tiles + 2)


def _gemma(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    side, patch = _side(settings)
    features = int(settings["mm_tokens_per_image"])
    patches = (side // patch) ** 2
    pooled = (side // patch) // isqrt(features)
    # Two tokens mark the image, and a blank line stands before and after it.
    return ImageTokens(
        tiles=1,
        patches=patches,
        features=features,
        text_tokens=features + 4,
        formula=f"({side} / {patch})² patches / {pooled}² = {features}",
        has_fixed_size=True,
    )


def _idefics(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    """Idefics3 and SmolVLM: the longer side becomes four tiles, and a thumbnail follows them."""
    side, patch = _side(settings)
    longest = 4 * side
    if width >= height:
        columns, rows = longest, int(longest / (width / height))
        rows += rows % 2
    else:
        rows, columns = longest, int(longest * (width / height))
        columns += columns % 2
    down, across = ceil(max(1, rows) / side), ceil(max(1, columns) / side)
    per_tile = (side // patch) ** 2 // int(settings["scale_factor"]) ** 2
    return _equal_tiles(settings, down * across + 1, per_tile, 3 + down * (2 * across + 1))


def _pixtral(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    """Mistral 3: any resolution up to the tower's, merged patches, a token at the end of each row."""
    side, patch = _side(settings)
    unit = patch * int(settings["spatial_merge_size"])
    ratio = max(height / side, width / side)
    if ratio > 1:
        height, width = floor(height / ratio), floor(width / ratio)
    rows, columns = ceil(height / unit), ceil(width / unit)
    return ImageTokens(
        tiles=1,
        patches=rows * columns * (unit // patch) ** 2,
        features=rows * columns,
        text_tokens=rows * (columns + 1),
        formula=f"{rows} x {columns} = {rows * columns}",
    )


def _llama4(settings: Settings, height: int, width: int, frames: int, max_pixels: int | None) -> ImageTokens:
    """Up to 16 tiles in the canvas that enlarges the image least, and a thumbnail beside more than one."""
    side, patch = _side(settings)
    canvases = [
        (rows, count // rows) for count in range(16, 0, -1) for rows in range(1, count + 1) if count % rows == 0
    ]
    scales = {canvas: min(canvas[0] * side / height, canvas[1] * side / width) for canvas in canvases}
    larger = [scale for scale in scales.values() if scale >= 1]
    chosen = min(larger) if larger else max(scales.values())
    down, across = min((c for c, scale in scales.items() if scale == chosen), key=lambda canvas: canvas[0] * canvas[1])
    cells = down * across if (down, across) != (1, 1) else 0
    per_tile = round((side // patch) ** 2 * float(settings["vision_config.pixel_shuffle_ratio"]) ** 2)
    return _equal_tiles(settings, cells + 1, per_tile, cells + 3)


_GLM = ("glm4v", "glm4v_moe", "glm46v")
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _native),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen3),
    **dict.fromkeys(_GLM, _glm),
    **dict.fromkeys(("llava", "vipllava"), _llava),
    **dict.fromkeys(("paligemma", "deepseek_vl"), _every_patch),
    **dict.fromkeys(("llava_next", "llava_next_video"), _llava_next),
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "aya_vision": _aya,
    "gemma3": _gemma,
    **dict.fromkeys(("idefics3", "smolvlm"), _idefics),
    "mistral3": _pixtral,
    "llama4": _llama4,
}
"""By model type."""
_OF_SEVERAL_IMAGES: Mapping[str, Rule] = {"llava_onevision": _llava_onevision_padded}
"""Instead of these, if a sequence has several images."""
_NATIVE_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_READ_FRAMES = (*_NATIVE_QWEN, "internvl", "llava_onevision")
_READ_MAX_PIXELS = (*_NATIVE_QWEN, *_GLM)


def image_tokens(model: ModelSpec, job: TrainingJob) -> ImageTokens | None:
    """Return what one image (or video) of a job becomes in a model; `None` without images.

    Raises:
        UsageError: the model has no rule, or its rule cannot read what the job states.
    """
    errors = [
        ConfigError(where=part, value=getattr(job, part), rule=f"is no part of {model.model_type}", fix="omit it")
        for part in IMAGE_PARTS
        if not model.reads_images and getattr(job, part) != "frozen"
    ]
    if errors:
        raise UsageError(errors)
    if not job.images_per_sample:
        return None
    height, width = job.image_sides
    if model.model_type not in RULES:
        rule = "has no images" if not model.reads_images else "has no rule for the tokens of an image"
        fix = f"omit it, or plan one of {', '.join(sorted(RULES))}"
        raise UsageError(ConfigError(where="images_per_sample", value=model.model_type, rule=rule, fix=fix))
    if job.frames and model.model_type not in _READ_FRAMES:
        rule, fix = f"is not supported for {model.model_type}", f"omit it, or plan one of {', '.join(_READ_FRAMES)}"
        errors.append(ConfigError(where="frames", value=job.frames, rule=rule, fix=fix))
    if job.max_pixels and model.model_type not in _READ_MAX_PIXELS:
        rule = f"is not read by the image processor of {model.model_type}, which resizes to its own sizes"
        errors.append(ConfigError(where="max_pixels", value=job.max_pixels, rule=rule, fix="omit it"))
    longest = _LONGEST_NATIVE_RATIO if model.model_type in _READ_MAX_PIXELS else LONGEST_RATIO
    if max(height, width) > longest * min(height, width):
        rule = f"must not be more than {longest:,} times as long as wide"
        errors.append(ConfigError(where="image_size", value=job.image_size, rule=rule, fix="crop such images"))
    if errors:
        raise UsageError(errors)
    rule_of = RULES[model.model_type]
    if job.images_per_sample > 1 and not job.frames:
        rule_of = _OF_SEVERAL_IMAGES.get(model.model_type, rule_of)
    found = rule_of(dict(model.settings), height, width, job.frames, job.max_pixels)
    needed = job.images_per_sample * found.text_tokens
    if needed >= job.seq_len_tokens:
        rule = f"become {needed} tokens, but a sequence has {job.seq_len_tokens}, with the text"
        smaller = "" if found.has_fixed_size else ", smaller ones"
        smaller += ", or --max-pixels" if model.model_type in _READ_MAX_PIXELS else ""
        fix = f"use --seq-len {2 ** (needed + 1).bit_length()}, or fewer images{smaller}"
        raise UsageError(ConfigError(where="images_per_sample", value=job.images_per_sample, rule=rule, fix=fix))
    return found


def image_sizes(model: ModelSpec, job: TrainingJob) -> ImageSizes | None:
    """Return the numbers of images, patches and features of one sequence; `None` without images."""
    found = image_tokens(model, job)
    if found is None:
        return None
    count = job.images_per_sample
    return ImageSizes(images=count * found.tiles, patches=count * found.patches, tokens=count * found.features)
