"""Images of a sample, in the sizes that determine memory, and the parts of a model that read them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

ImagePart = Literal["vision_tower", "projector"]
IMAGE_PARTS: tuple[ImagePart, ...] = get_args(ImagePart)
_PROJECTORS = (
    r"(multi_modal|mm)_projector|projector|connector|aligner|merger|deepstack_merger_list|image_newline|embed_vision|"
    r"resampler_model|qformer|query_tokens|\w*(vision|visual|image|language)\w*_(projection|proj|adapter|neck|alpha|table)"
)
_TOWERS = r"\w*(vision|visual)\w*|(image|video)_tower"
_TEXT = r"language_model|text_model|generation_\w+|layers"
"""Modules of which none belongs to images, such as experts of the text for patches."""
EMBEDS_PATCHES = re.compile(r"\.patch_(embed|conv).*weight$")
"""Names of the matrix or convolution that embeds patches, with a column for each value of a patch."""

_TOWER, _PROJECTOR = (rf"((?!({_TEXT})\.)\w+\.)*?({names})(\..*)?" for names in (_TOWERS, _PROJECTORS))
_MODULES: Mapping[ImagePart, re.Pattern[str]] = {
    "vision_tower": re.compile(rf"(?!{_PROJECTOR}$){_TOWER}"),
    "projector": re.compile(_PROJECTOR),
}

_NEXT = "336x672 672x336 672x672 1008x336 336x1008"
RESOLUTIONS: Mapping[str, str] = {
    "llava_next": _NEXT,
    "llava_next_video": _NEXT,
    "llava_onevision": " ".join(f"{384 * row}x{384 * column}" for row in range(1, 7) for column in range(1, 7)),
}
"""Default of `image_grid_pinpoints` by model type: heights and widths in pixels."""


@cache
def image_part(name: str) -> ImagePart | None:
    """Return the part of a vision-language model to which a parameter or module belongs; `None` for the text model.

    >>> image_part("model.visual.merger.mlp.0.weight"), image_part("model.visual.blocks.0.norm1.weight")
    ('projector', 'vision_tower')
    """
    return next((part for part in reversed(IMAGE_PARTS) if _MODULES[part].fullmatch(name)), None)


def names_of_parts(parts: Collection[ImagePart]) -> str:
    """Return the regular expression of the modules of some parts, for `fullmatch`.

    >>> import re
    >>> bool(re.fullmatch(names_of_parts({"vision_tower"}), "model.visual.merger.mlp.0"))
    False
    """
    return "|".join(f"({_MODULES[part].pattern})" for part in sorted(parts))


@dataclass(frozen=True, kw_only=True)
class ImageSizes:
    """Numbers of one sequence, whatever the micro-batch."""

    images: int
    patches: int
    """Rows of the vision tower: patches of all images of a sequence, before they are merged or pooled."""
    tokens: int
    """Tokens of the text that images become, after patches are merged or pooled."""
