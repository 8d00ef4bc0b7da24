"""Images in the rows of a dataset: each of their forms becomes parts of messages."""

from __future__ import annotations

import base64
import binascii
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
_SOURCES = ("image", "path", "url", "bytes", "base64", "image_url")
"""Keys of a part of a message that can hold its image."""
_CONVERSATIONS = ("messages", "conversations", "prompt", "completion")
_CONTENTS = ("content", "value")


def with_image_parts(row: Mapping[str, Any], directory: Path | None, where: str) -> Mapping[str, Any]:
    """Return a row whose conversation has its images as parts of messages; a row without images is returned as it is.

    Images are parts of a message's content, or in a column `images` or `image`, with `<image>` in texts or parts
    without a source where they belong.

    Args:
        row: A row of a dataset.
        directory: Where relative paths start; `None` if the row has none.
        where: Name of the row in errors.

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
    given = row[column] if column else ()
    waiting = list(given) if isinstance(given, list | tuple) else [given]
    count, places = len(waiting), 0

    def placed(source: Any) -> Part:
        nonlocal places
        if source is not None:
            return _image(source, directory, where)
        places += 1
        return _image(waiting.pop(0), directory, where) if waiting else {"type": "image"}

    converted = {
        name: [_with_parts(message, placed, where, splits=column is not None) for message in chat]
        for name, chat in chats.items()
    }
    if places != count:
        rule = f"has {count} images, but {places} places for them"
        fix = f"write {PLACEHOLDER}, or a part of type image, once for each image"
        raise UsageError(ConfigError(where=where, value=column, rule=rule, fix=fix))
    return {name: value for name, value in row.items() if name not in COLUMNS} | converted


def _with_parts(message: Any, placed: Callable[[Any], Part], where: str, *, splits: bool) -> Any:
    """Return a message with its content as parts; `placed` makes that of an image from its source."""
    name = next((name for name in _CONTENTS if isinstance(message, Mapping) and message.get(name)), None)
    if name is None:
        return message
    content, parts = message[name], []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image", "image_url"):
            parts.append(placed(next((part[key] for key in _SOURCES if part.get(key) is not None), None)))
        elif kind == "text" and isinstance(part.get("text"), str):
            pieces = part["text"].split(PLACEHOLDER) if splits else [part["text"]]
            for index, piece in enumerate(pieces):
                # Templates write a line end after an image themselves.
                text = piece.removeprefix("\n") if index else piece
                parts += [placed(None)] if index else []
                parts += [{"type": "text", "text": text}] if text else []
        else:
            rule, fix = "has a part of a message that is neither text nor an image", 'write {"type": "text", "text": …}'
            raise UsageError(ConfigError(where=where, value=kind, rule=rule, fix=fix))
    return {**message, name: parts}


def _image(source: Any, directory: Path | None, where: str) -> Part:
    """Return a part with the `path` or the `bytes` of an image."""
    if isinstance(source, Mapping):
        source = next((source[key] for key in ("bytes", "path", "url") if source.get(key)), None)
    if hasattr(source, "convert") and hasattr(source, "save"):
        # Datasets of the Hub decode images.
        with io.BytesIO() as file:
            source.save(file, "PNG")
            source = file.getvalue()
    if isinstance(source, str) and source.startswith("data:"):
        try:
            source = base64.b64decode(source.partition(",")[2], validate=True)
        except binascii.Error:
            rule = "has an image whose data: URL is no base64"
            raise UsageError(ConfigError(where=where, rule=rule)) from None
    if isinstance(source, bytes | bytearray):
        return {"type": "image", "bytes": bytes(source)}
    if isinstance(source, str) and "://" in source:
        rule, fix = "images are not downloaded while training", "download it, and write its path"
        raise UsageError(ConfigError(where=where, value=source, rule=rule, fix=fix))
    if not isinstance(source, str) or not source:
        rule = "an image must be a path, bytes, or an image of a Hub dataset"
        raise UsageError(ConfigError(where=where, value=type(source).__name__, rule=rule))
    path = Path(source).expanduser()
    return {"type": "image", "path": str(path if directory is None else (directory / path).absolute())}


def images_of(turns: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Return the images of messages in their order."""
    contents = [turn.get("content") for turn in turns if isinstance(turn, Mapping)]
    return [part for parts in contents if isinstance(parts, list) for part in parts if part.get("type") == "image"]
