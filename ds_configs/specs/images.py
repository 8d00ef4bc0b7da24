"""Images of a sample, in the sizes that determine memory, and the parts of a model that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ImagePart = Literal["vision_tower", "projector"]
_PROJECTORS = frozenset({"multi_modal_projector", "connector", "image_newline", "merger", "deepstack_merger_list"})
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


@dataclass(frozen=True, kw_only=True)
class ImageSizes:
    """Numbers of one sequence, whatever the micro-batch."""

    images: int
    """Images of a sequence."""
    patches: int
    """Rows of the vision tower: patches of all images of a sequence, before they are merged or pooled."""
    tokens: int
    """Tokens of the text that images become, after patches are merged or pooled."""
