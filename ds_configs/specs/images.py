"""Images of a sample, in the sizes that determine memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ImageSizes:
    """Numbers of one sequence, whatever the micro-batch."""

    images: int
    """Images of a sequence."""
    patches: int
    """Rows of the vision tower: patches of all images of a sequence, before they are merged or pooled."""
    tokens: int
    """Tokens of the text that images become, after patches are merged or pooled."""
