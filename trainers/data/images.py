"""Images of samples: reading them, and what a processor makes of them: tokens of a conversation, and pixels of a batch.

Samples keep an image as its path or its encoded bytes; a batch decodes the images of its own rows.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...ds_configs.models.images import LONGEST_RATIO
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from .chat import IGNORED_LABEL, RenderedChat
from .image_rows import PLACEHOLDER, Part

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 89_478_485
"""Pixels of an image above which Pillow warns of a decompression bomb."""
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""JPEG includes MPO. Other decoders of Pillow are not run on data: some start programs."""


def opened(part: Part, where: str) -> Image:
    """Decode an image to RGB, upright.

    Raises:
        UsageError: there is no such file, or the image has several frames, or pixels without a known range.
        RefusedInputError: it is broken, too large, or no image.
    """
    import PIL.Image
    import PIL.ImageOps

    shown = part.get("path") or f"{len(part['bytes'])} bytes"
    source: Any = part["path"] if part.get("path") else io.BytesIO(part["bytes"])
    fix = "convert it to PNG, JPEG, WebP, BMP, GIF or TIFF, or remove the row"
    try:
        with warnings.catch_warnings():
            # The limit below is an error.
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
            image = PIL.Image.open(source, formats=_FORMATS)
        with image:
            if min(image.size) < 1 or image.width * image.height > MOST_PIXELS:
                rule = f"has {image.width} x {image.height} pixels; from 1 to {MOST_PIXELS:,} are allowed"
                raise RefusedInputError(ConfigError(where=where, value=shown, rule=rule, fix="resize it"))
            if max(image.size) > LONGEST_RATIO * min(image.size):
                rule = f"has {image.width} x {image.height} pixels; a side may be {LONGEST_RATIO:,} times the other"
                raise RefusedInputError(ConfigError(where=where, value=shown, rule=rule, fix="crop it"))
            # Phones write MPO: the photo, and then its depth or a preview.
            if (frames := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":
                rule, fix = f"has {frames} frames, and videos are not supported", "save one frame as an image"
                raise UsageError(ConfigError(where=where, value=shown, rule=rule, fix=fix))
            if image.mode in ("I", "F"):
                rule, fix = f"has pixels of 32 bits (mode {image.mode})", "convert it to 8 bits per channel"
                raise UsageError(ConfigError(where=where, value=shown, rule=rule, fix=fix))
            upright = PIL.ImageOps.exif_transpose(image)
            if upright.mode.startswith("I;16"):
                # Pillow would clip 16 bits to the largest of 8.
                upright = upright.convert("I").point(lambda value: value / 256).convert("L")
            return upright.convert("RGB")
    except (FileNotFoundError, IsADirectoryError):
        fix = "check the path, which is relative to the file of the dataset"
        raise UsageError(ConfigError(where=where, value=shown, rule="no such image file", fix=fix)) from None
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        if isinstance(error, UsageError | RefusedInputError):
            raise
        is_unknown = isinstance(error, PIL.UnidentifiedImageError)
        detail = "empty, broken, or of another format" if is_unknown else " ".join(str(error).split())[:120]
        rule = f"is no readable image ({detail})"
        fix = "resize it" if isinstance(error, PIL.Image.DecompressionBombError) else fix
        raise RefusedInputError(ConfigError(where=where, value=shown, rule=rule, fix=fix)) from None


def encode_images(processor: Any, chat: RenderedChat, parts: Sequence[Part], where: str) -> dict[str, Any]:
    """Return the columns of a sample: tokens, labels, what else the processor returns of each token, and the images.

    As in the processor's own `apply_chat_template`, the text begins with the tokenizer's beginning-of-sequence token.
    Tokens of images have no label.

    Raises:
        UsageError: an image is missing, or the template renders other images than the conversation has.
        RefusedInputError: an image is broken, or the processor cannot read it.
    """
    images = [opened(part, where) for part in parts]
    token = processor.image_token
    placeholders = chat.text.count(token) + (chat.text.count(PLACEHOLDER) if token != PLACEHOLDER else 0)
    if placeholders != len(images):
        rule = f"has {len(images)} images, but its rendered text has {placeholders} places for them"
        words = " or ".join(sorted({PLACEHOLDER, token}))
        fix = f"add the images, use the model's chat template, and do not write {words} in texts"
        raise UsageError(ConfigError(where=where, rule=rule, fix=fix))
    bos = processor.tokenizer.bos_token
    with _read_by(processor, where):
        made = processor(
            text=[chat.text],
            images=[images] if images else None,
            add_special_tokens=not (bos and chat.text.startswith(bos)),
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )
        (ids,), (offsets,) = made["input_ids"], made["offset_mapping"]
        (replaced,) = made["text_replacement_offsets"] if images else ([],)

    def moved(position: int) -> int:
        grown = (each for each in replaced if each["span"][1] <= position)
        return position + sum(len(each["replacement"]) - len(each["text"]) for each in grown)

    answers = [(moved(start), moved(stop)) for start, stop in chat.answers]
    labels = RenderedChat(text="", answers=answers, are_marked=chat.are_marked).labels(ids, offsets)
    spans = [each["new_span"] for each in replaced]
    types = {name: list(values[0]) for name, values in made.items() if name.endswith("token_type_ids")}
    of_images = [index for index, (start, _) in enumerate(offsets) if any(a <= start < b for a, b in spans)]
    for index in of_images:
        labels[index] = IGNORED_LABEL
    return {
        "input_ids": list(ids),
        "labels": labels,
        **types,
        "images": [{"path": part.get("path"), "bytes": part.get("bytes")} for part in parts],
        "sizes": [image.size for image in images],
        "image_tokens": len(of_images),
        "last": max(of_images, default=-1),
    }


def reads_max_pixels(processor: Any) -> bool:
    return "max_pixels" in processor.image_processor.valid_kwargs.__annotations__


def image_inputs(processor: Any, rows: Sequence[Sequence[Part]]) -> dict[str, Any]:
    """Return the tensors of the images of a batch; empty if it has none."""
    images = [[opened(part, "image") for part in parts] for parts in rows if parts]
    if not images:
        return {}
    with _read_by(processor, "image"):
        tokenizer_settings = processor.tokenizer.init_kwargs
        merged = processor._merge_kwargs(processor.valid_processor_kwargs, tokenizer_init_kwargs=tokenizer_settings)
        settings = merged["images_kwargs"] | {"return_tensors": "pt"}
        # What `ProcessorMixin.__call__` does with images (transformers 5.17.0).
        made, _ = processor._process_images(processor.prepare_inputs_layout(images=images)[0], **settings)
    return {name: made[name] for name in processor.model_input_names if name in made}


def check_image_inputs(processor: Any, part: Part, where: str) -> None:
    """Check that an image alone becomes what the processor makes of text and image together.

    Raises:
        UsageError: they do not, because the processor computes inputs from both.
    """
    import torch

    text = processor.image_token
    made = processor(text=[text], images=[[opened(part, where)]], return_tensors="pt", add_special_tokens=False)
    own = image_inputs(processor, [[part]])
    text_names = {"input_ids", "attention_mask", *(name for name in made if name.endswith("token_type_ids"))}
    if own.keys() != made.keys() - text_names or not all(torch.equal(own[name], made[name]) for name in own):
        rule, fix = "computes inputs of images from the text", "train it with your own script"
        raise UsageError(ConfigError(where="processor", value=type(processor).__name__, rule=rule, fix=fix))


@contextmanager
def _read_by(processor: Any, where: str) -> Iterator[None]:
    """Convert what a processor raises to one line. Raises: RefusedInputError: it cannot read its input."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, MemoryError) as error:
        if isinstance(error, UsageError | RefusedInputError):
            raise
        detail = " ".join(str(error).split())[:200]
        rule = f"{type(processor).__name__} cannot read it ({type(error).__name__}: {detail})"
        fix = "check the images and the model's processor_config.json"
        raise RefusedInputError(ConfigError(where=where, rule=rule, fix=fix)) from None
