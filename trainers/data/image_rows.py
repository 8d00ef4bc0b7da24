"""Images in the rows of a dataset: each of their forms becomes parts of messages."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import ConfigError, UsageError

Part = Mapping[str, Any]
"""A part of a message: `text`, or an image as `path` or `bytes`."""
PLACEHOLDER = "<image>"
"""Where a text has an image."""
COLUMNS = ("images", "image")
"""Columns with the images of a row, or with one."""
_SOURCES = ("bytes", "base64", "image", "path", "url", "image_url")
"""Keys of an object that can hold its image; Parquet has the name of a file as `path` beside its `bytes`."""
_CONVERSATIONS = ("messages", "conversations", "prompt", "completion")
_CONTENTS = ("content", "value")


def with_image_parts(row: Mapping[str, Any], directory: Path | None, where: str) -> Mapping[str, Any]:
    """Return a row whose conversation has its images as parts of messages; a row without images is returned as it is.

    Images are parts of a message's content, or in a column `images` or `image`, with `<image>` in texts or parts
    without a source where they belong.

    Raises:
        UsageError: an image is a URL or has no valid source, or images and placeholders differ in number.
    """
    chats = {name: row[name] for name in _CONVERSATIONS if isinstance(row.get(name), list | tuple)}
    column = next((name for name in COLUMNS if row.get(name)), None)
    messages = [message for chat in chats.values() for message in chat if isinstance(message, Mapping)]
    contents = [message.get(name) for message in messages for name in _CONTENTS]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    has_parts = any(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)
    if column is None and not has_parts:
        return row
    if not chats:
        if not any(row.get(name) for name in (*_CONVERSATIONS, "instruction")):
            return row
        rule, fix = "has images, but no messages", "write prompt and completion as lists of messages"
        raise UsageError(ConfigError(where=where, value=column, rule=rule, fix=fix))
    values = row[column] if column else ()
    images = list(values) if isinstance(values, list | tuple) else [values]
    count, placeholders = len(images), 0

    def image_part(part: Any) -> Part:
        nonlocal placeholders
        if any(part.get(key) for key in _SOURCES):
            return _image(part, directory, where)
        placeholders += 1
        return _image(images.pop(0), directory, where) if images else {"type": "image"}

    converted = {
        name: [_with_parts(message, image_part, where, splits=column is not None) for message in chat]
        for name, chat in chats.items()
    }
    if placeholders != count:
        rule = f"has {count} images, but {placeholders} places for them"
        fix = f"write {PLACEHOLDER}, or a part of type image, once for each image"
        raise UsageError(ConfigError(where=where, value=column, rule=rule, fix=fix))
    return {name: value for name, value in row.items() if name not in COLUMNS} | converted


def _with_parts(message: Any, image_part: Callable[[Any], Part], where: str, *, splits: bool) -> Any:
    """Return a message with its content as parts; `image_part` makes that of an image from a part or a placeholder."""
    name = next((name for name in _CONTENTS if isinstance(message, Mapping) and message.get(name)), None)
    if name is None:
        return message
    content, parts = message[name], []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image", "image_url"):
            parts.append(image_part(part))
        elif kind == "text" and isinstance(part.get("text"), str):
            pieces = part["text"].split(PLACEHOLDER) if splits else [part["text"]]
            for index, piece in enumerate(pieces):
                # Templates write a line end after an image themselves.
                text = piece.removeprefix("\n") if index else piece
                parts += [image_part({})] if index else []
                parts += [{"type": "text", "text": text}] if text else []
        else:
            rule, fix = "has a part of a message that is neither text nor an image", 'write {"type": "text", "text": …}'
            raise UsageError(ConfigError(where=where, value=kind, rule=rule, fix=fix))
    return {**message, name: parts}


def _image(source: Any, directory: Path | None, where: str) -> Part:
    """Return a part with the `path` or the `bytes` of an image."""
    while isinstance(source, Mapping):
        key = next((key for key in _SOURCES if source.get(key)), "")
        source = source.get(key)
        # JSON has no bytes.
        if key in ("bytes", "base64") and isinstance(source, str) and not source.startswith("data:"):
            source = f"data:;base64,{source}"
    if hasattr(source, "convert") and hasattr(source, "save"):
        with io.BytesIO() as file:
            # PNG has no CMYK and similar, but reading rejects pixels of 32 bits, which TIFF keeps.
            is_png = source.mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
            image = source if is_png or source.mode in ("I", "F") else source.convert("RGB")
            image.save(file, "TIFF" if image.mode in ("I", "F") else "PNG")
            source = file.getvalue()
    if isinstance(source, str) and source.startswith("data:"):
        try:
            source = base64.b64decode("".join(source.partition(",")[2].split()), validate=True)
        except ValueError:
            rule, fix = "has an image that is no base64", "encode it with base64, or write its path"
            raise UsageError(ConfigError(where=where, rule=rule, fix=fix)) from None
    if isinstance(source, bytes | bytearray):
        return {"type": "image", "bytes": bytes(source)}
    if isinstance(source, str) and "://" in source:
        rule, fix = "images are not downloaded while training", "download it, and write its path"
        raise UsageError(ConfigError(where=where, value=source, rule=rule, fix=fix))
    if not isinstance(source, str) or not source:
        rule = "an image must be a path, bytes, or an image of a Hub dataset"
        fix = 'write for example {"type": "image", "path": "cat.png"}'
        raise UsageError(ConfigError(where=where, value=type(source).__name__, rule=rule, fix=fix))
    # A name such as ~tmp.png is no home directory.
    path = Path(source).expanduser() if source.startswith("~/") else Path(source)
    return {"type": "image", "path": str(path if directory is None else (directory / path).absolute())}


def images_of(turns: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Return the images of messages in their order."""
    contents = [turn.get("content") for turn in turns if isinstance(turn, Mapping)]
    return [part for parts in contents if isinstance(parts, list) for part in parts if part.get("type") == "image"]
