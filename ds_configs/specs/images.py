"""Images of a sample, in the sizes that determine memory, and the parts of a model that read them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

ImagePart = Literal["vision_tower", "projector"]
IMAGE_PARTS: tuple[ImagePart, ...] = get_args(ImagePart)
_PROJECTORS = frozenset({"multi_modal_projector", "connector", "image_newline", "merger", "deepstack_merger_list"})
EMBEDS_PATCHES = re.compile(r"\.patch_(embed|conv).*weight$")
"""Names of the matrix or convolution that embeds patches, with a column for each value of a patch."""
_TOWERS = frozenset({"vision_tower", "vision_model", "visual"})


def image_part(name: str) -> ImagePart | None:
    """Return the part of a vision-language model to which a parameter or module belongs; `None` for the text model.

    >>> image_part("model.visual.merger.mlp.0.weight"), image_part("model.visual.blocks.0.norm1.weight")
    ('projector', 'vision_tower')
    """
    parts = set(name.split("."))
    if parts & _PROJECTORS:
        return "projector"
    return "vision_tower" if parts & _TOWERS else None


def names_of_parts(parts: Collection[ImagePart]) -> str:
    """Return the regular expression of the modules of some parts, for `fullmatch`.

    >>> import re
    >>> bool(re.fullmatch(names_of_parts({"vision_tower"}), "model.visual.merger.mlp.0"))
    False
    """
    tower, projector = (rf"(.*\.)?({'|'.join(sorted(names))})(\..*)?" for names in (_TOWERS, _PROJECTORS))
    patterns = {"vision_tower": rf"(?!{projector}$){tower}", "projector": projector}
    return "|".join(f"({patterns[part]})" for part in sorted(parts))


@dataclass(frozen=True, kw_only=True)
class ImageSizes:
    """Numbers of one sequence, whatever the micro-batch."""

    images: int
    """Images of a sequence."""
    patches: int
    """Rows of the vision tower: patches of all images of a sequence, before they are merged or pooled."""
    tokens: int
    """Tokens of the text that images become, after patches are merged or pooled."""
