"""Sizes of small models that read images in a text, and of the images."""

from __future__ import annotations

import random
from dataclasses import dataclass

from shardwright.ds_configs.models.images import RULES

from .kind_sizes import Values, draw_cohere, draw_delta_rule, draw_llama4, draw_qwen3_next, draw_vit


@dataclass(frozen=True, kw_only=True)
class Image:
    """One image, in patches of the tower."""

    rows: int
    columns: int
    tokens: int
    """Tokens of the text that it becomes."""
    tiles: int = 1
    """Images that the tower reads."""
    sides: tuple[int, int] = (0, 0)
    """Height and width in pixels before it is resized, of an image of tiles."""


SPECIAL_TOKENS = 8
"""The last ones of the vocabulary stand for images and videos; random text has none of them."""


def _text(choose: random.Random) -> Values:
    """Draw a language model with grouped heads, the residual stream of another width than the queries."""
    drawn = draw_cohere(choose) | {"pad_token_id": 0}
    return drawn | {"hidden_size": 8 * drawn["num_attention_heads"] * choose.randint(1, 4)}


def _with_head_dim(text: Values, choose: random.Random) -> Values:
    return text | {"head_dim": choose.choice([8, 16, 24, 32])}


def draw_square(choose: random.Random, values: Values) -> Image:
    """Return the image that a tower with a table of positions reads, a token for each patch."""
    side = values["vision_config"]["image_size"] // values["vision_config"]["patch_size"]
    return Image(rows=side, columns=side, tokens=side**2)


def draw_llava(choose: random.Random) -> Values:
    """Draw sizes of LLaVA: Llama, and the tower of CLIP."""
    text, vision = _with_head_dim(_text(choose), choose), draw_vit(choose)
    del vision["num_labels"]
    return {
        "text_config": text | {"model_type": "llama"},
        "vision_config": vision | {"model_type": "clip_vision_model", "projection_dim": 8},
        "image_token_index": text["vocab_size"] - 1,
    }


def draw_llava_next(choose: random.Random) -> Values:
    """Draw sizes of LLaVA-NeXT, which splits an image into four or six tiles."""
    return _tiled(draw_llava(choose), choose)


def draw_llava_next_mistral(choose: random.Random) -> Values:
    """Draw sizes of LLaVA-NeXT with Mistral."""
    drawn = draw_llava_next(choose)
    return drawn | {"text_config": drawn["text_config"] | {"model_type": "mistral", "sliding_window": None}}


def draw_llava_onevision(choose: random.Random) -> Values:
    """Draw sizes of LLaVA-OneVision: Qwen2, and the tower of SigLIP."""
    text, vision = draw_cohere(choose) | {"pad_token_id": 0}, draw_vit(choose)
    del vision["num_labels"]
    drawn = {
        "text_config": text | {"model_type": "qwen2"},
        "vision_config": vision | {"model_type": "siglip_vision_model", "vision_use_head": False},
        **{"image_token_index": text["vocab_size"] - 1, "video_token_index": text["vocab_size"] - 2},
    }
    return _tiled(drawn, choose)


_GRIDS = ((2, 2), (2, 3), (3, 2))


def _tiled(values: Values, choose: random.Random) -> Values:
    # Few patches, as an image has up to seven tiles. In one row or column, these are joined with one copy less.
    vision = values["vision_config"] | {"image_size": choose.choice([2, 3, 4]) * values["vision_config"]["patch_size"]}
    side = vision["image_size"]
    grids = [[rows * side, columns * side] for rows, columns in _GRIDS]
    return values | {"vision_config": vision, "image_grid_pinpoints": grids}


def draw_tiles(choose: random.Random, values: Values) -> Image:
    """Return an image of tiles and a thumbnail, of which padding is cut off."""
    vision = values["vision_config"]
    across = vision["image_size"] // vision["patch_size"]
    settings = {f"vision_config.{name}": value for name, value in vision.items()}
    settings["image_grid_pinpoints"] = " ".join(f"{rows}x{columns}" for rows, columns in values["image_grid_pinpoints"])
    rule = RULES["llava_next" if vision["model_type"] == "clip_vision_model" else "llava_onevision"]
    whole = {across**2 * (rows * columns + 1) + across * rows for rows, columns in _GRIDS}
    while True:
        height, width = (choose.randint(vision["image_size"] // 2, 3 * vision["image_size"]) for _ in range(2))
        drawn = rule(settings, height, width, 0, None)
        if drawn.features not in whole:
            return Image(
                rows=drawn.tiles * across,
                columns=across,
                tokens=drawn.features,
                tiles=drawn.tiles,
                sides=(height, width),
            )


def draw_llama4_vl(choose: random.Random) -> Values:
    """Draw sizes of Llama 4 with its tower, of whose patches 2 x 2 become a token."""
    text, vision = draw_llama4(choose) | {"pad_token_id": 0}, draw_vit(choose)
    del vision["num_labels"]
    projected = dict.fromkeys(
        ("projector_input_dim", "projector_output_dim", "vision_output_dim"), 8 * choose.randint(5, 40)
    )
    vision |= {
        "intermediate_size": 4 * vision["hidden_size"],
        "image_size": vision["patch_size"] * choose.choice([4, 6, 8]),
    }
    return {
        "text_config": text,
        "vision_config": vision | projected,
        "image_token_index": text["vocab_size"] - 1,
    }


def draw_shuffled_square(choose: random.Random, values: Values) -> Image:
    """Return a tile of Llama 4."""
    side = values["vision_config"]["image_size"] // values["vision_config"]["patch_size"]
    return Image(rows=side, columns=side, tokens=(side // 2) ** 2)


def _tower_of_patches(choose: random.Random) -> Values:
    heads, head_dim = choose.choice([2, 3, 4, 6, 9]), choose.choice([8, 16, 24, 32])
    return {
        "hidden_size": heads * head_dim,
        "intermediate_size": 8 * choose.randint(12, 50),
        "num_heads": heads,
        "patch_size": choose.choice([2, 4, 6]),
        "spatial_merge_size": choose.choice([2, 3]),
    }


def _text_of_axes(text: Values) -> Values:
    """Return a language model whose rotary angles have three axes."""
    half = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"]) // 2
    axes = [half // 4, half // 4, half - 2 * (half // 4)]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": axes}
    return text | {"rope_parameters": rope, "pad_token_id": 0}


def _special_tokens(text: Values) -> Values:
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {name: text["vocab_size"] - number for number, name in enumerate(names, 1)}


def draw_qwen2_vl(choose: random.Random) -> Values:
    """Draw sizes of Qwen2-VL, whose tower has the width of the text only after its merger."""
    text, vision = _text_of_axes(draw_cohere(choose)), _tower_of_patches(choose)
    width, _ = vision.pop("hidden_size"), vision.pop("intermediate_size")
    return {
        "text_config": text,
        "vision_config": vision | {"embed_dim": width, "hidden_size": text["hidden_size"]},
        **_special_tokens(text),
    }


def draw_patches(choose: random.Random, values: Values) -> Image:
    """Return an image of several merged patches."""
    side, rows, columns = values["vision_config"]["spatial_merge_size"], *choose.choices([2, 3, 4], k=2)
    return Image(rows=side * rows, columns=side * columns, tokens=rows * columns)


def draw_glm4v(choose: random.Random) -> Values:
    """Draw sizes of GLM-4V, of whose head dimensions half are rotated."""
    text, vision = draw_cohere(choose) | {"pad_token_id": 0}, _tower_of_patches(choose)
    quarter = text["hidden_size"] // text["num_attention_heads"] // 4
    axes = [quarter // 2, quarter // 2 - quarter // 4, quarter - 2 * (quarter // 2) + quarter // 4]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": axes}
    position_table = {"image_size": vision["patch_size"] * choose.choice([3, 5, 7])}
    return {
        "text_config": text | {"rope_parameters": rope},
        "vision_config": vision | position_table | {"out_hidden_size": text["hidden_size"]},
        **{name.replace("vision", "image"): token for name, token in _special_tokens(text).items()},
    }


def draw_qwen3_vl(choose: random.Random) -> Values:
    """Draw sizes of Qwen3-VL."""
    text, vision = _with_head_dim(_text(choose), choose), _tower_of_patches(choose)
    return {
        "text_config": _text_of_axes(text),
        "vision_config": vision | {"out_hidden_size": text["hidden_size"], "num_position_embeddings": 25},
        **_special_tokens(text),
    }


def draw_qwen3_5_vl(choose: random.Random) -> Values:
    """Draw sizes of Qwen3.5, of whose head dimensions a quarter is rotated."""
    drawn = draw_qwen3_vl(choose)
    return drawn | {"text_config": _quarter_rotated(drawn["text_config"] | draw_delta_rule(choose), choose)}


def draw_qwen3_5_moe_vl(choose: random.Random) -> Values:
    """Draw sizes of Qwen3.5 with experts."""
    drawn, experts = draw_qwen3_vl(choose), draw_qwen3_next(choose)
    same = ("vocab_size", "hidden_size")
    text = drawn["text_config"] | {name: value for name, value in experts.items() if name not in same}
    del text["intermediate_size"]
    return drawn | {"text_config": _quarter_rotated(text, choose)}


def _quarter_rotated(text: Values, choose: random.Random) -> Values:
    text |= {"head_dim": choose.choice([32, 64])}
    pairs = text["head_dim"] // 8
    axes = [pairs // 2, pairs // 4, pairs - pairs // 2 - pairs // 4]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": axes}
    return text | {"rope_parameters": rope, "pad_token_id": 0}


def draw_internvl(choose: random.Random) -> Values:
    """Draw sizes of InternVL: Qwen2, and a tower with a table of positions."""
    text, vision = draw_cohere(choose) | {"pad_token_id": 0}, draw_vit(choose)
    del vision["num_labels"]
    size = vision["patch_size"] * choose.choice([4, 6, 8])
    return {
        "text_config": text | {"model_type": "qwen2"},
        "vision_config": vision | {"image_size": [size, size], "patch_size": [vision["patch_size"]] * 2},
        "image_token_id": text["vocab_size"] - 1,
    }


def draw_halved_square(choose: random.Random, values: Values) -> Image:
    """Return the image of a tower with a table of positions, of whose patches 2 x 2 become a token."""
    side = values["vision_config"]["image_size"][0] // values["vision_config"]["patch_size"][0]
    return Image(rows=side, columns=side, tokens=(side // 2) ** 2)


def draw_smolvlm(choose: random.Random) -> Values:
    """Draw sizes of SmolVLM: Llama, and a tower of whose patches a square becomes a token."""
    text, vision = _with_head_dim(_text(choose), choose), draw_vit(choose)
    del vision["num_labels"]
    scale = choose.choice([2, 3])
    return {
        "text_config": text | {"model_type": "llama"},
        "vision_config": vision | {"image_size": vision["patch_size"] * scale * choose.choice([2, 3])},
        "scale_factor": scale,
        "image_token_id": text["vocab_size"] - 1,
        "pad_token_id": 0,
    }


def draw_scaled_square(choose: random.Random, values: Values) -> Image:
    """Return the image of SmolVLM's tower."""
    side = values["vision_config"]["image_size"] // values["vision_config"]["patch_size"]
    return Image(rows=side, columns=side, tokens=(side // values["scale_factor"]) ** 2)


def draw_pooled_square(choose: random.Random, values: Values) -> Image:
    """Return the image of Gemma 3's tower."""
    side = values["vision_config"]["image_size"] // values["vision_config"]["patch_size"]
    return Image(rows=side, columns=side, tokens=values["mm_tokens_per_image"])


def draw_mistral3(choose: random.Random) -> Values:
    """Draw sizes of Mistral 3: Mistral, and the tower of Pixtral."""
    text, tower = _with_head_dim(_text(choose), choose), _tower_of_patches(choose)
    heads, merged = tower.pop("num_heads"), tower.pop("spatial_merge_size")
    return {
        "text_config": text | {"model_type": "mistral", "sliding_window": None},
        "vision_config": tower | {"model_type": "pixtral", "num_attention_heads": heads, "image_size": 96},
        "spatial_merge_size": merged,
        "image_token_index": text["vocab_size"] - 1,
    }


def draw_merged_patches(choose: random.Random, values: Values) -> Image:
    """Return an image of Mistral 3, which merges patches after the tower."""
    side, rows, columns = values["spatial_merge_size"], *choose.choices([2, 3], k=2)
    return Image(rows=side * rows, columns=side * columns, tokens=rows * columns)


def draw_qwen2_5_vl(choose: random.Random) -> Values:
    """Draw sizes of Qwen2.5-VL, whose windows have 4 or 9 tokens."""
    text, vision = _text_of_axes(draw_cohere(choose)), _tower_of_patches(choose)
    window = vision["patch_size"] * vision["spatial_merge_size"] * choose.choice([2, 3])
    return {
        "text_config": text,
        "vision_config": vision | {"out_hidden_size": text["hidden_size"], "window_size": window},
        **_special_tokens(text),
    }


def draw_windows(choose: random.Random, values: Values) -> Image:
    """Return an image of two windows."""
    vision = values["vision_config"]
    side = vision["window_size"] // vision["patch_size"]
    return Image(rows=side, columns=2 * side, tokens=2 * (side // vision["spatial_merge_size"]) ** 2)
