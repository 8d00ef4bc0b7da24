"""Settings of a smaller student, and their checks against a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from ....ds_configs.specs.errors import ConfigError
from ....ds_configs.specs.settings import Numbers, Paths, Settings

StoredDtype = Literal["float32", "bfloat16", "float16"]


class StudentRequest(Settings):
    """Sizes of a student; `None` keeps the teacher's size."""

    group = "Student"

    layers: int | None = Field(None, description="Layers to keep, evenly spread, first and last included")
    keep_layers: Numbers | None = Field(
        None, description="Layers to keep by number, ascending from 0 (e.g. 0,3,7); excludes --layers"
    )
    hidden_size: int | None = Field(None, alias="hidden", description="Width of the residual stream")
    intermediate_size: int | None = Field(None, alias="intermediate", description="Channels inside the MLP")
    heads: int | None = Field(None, description="Query heads of each layer")
    key_value_heads: int | None = Field(
        None,
        alias="kv_heads",
        description="Key/value heads of each layer. Default: the teacher's query heads per key/value head",
    )
    text: Paths = Field(
        (), description="Text files on which channels and heads are compared. Default: Python's help topics"
    )
    dtype: StoredDtype | None = Field(None, description="Stored dtype. Default: the dtype of each tensor")

    @property
    def cuts_width(self) -> bool:
        sizes = (self.hidden_size, self.intermediate_size, self.heads, self.key_value_heads)
        return any(size is not None for size in sizes)

    @property
    def cuts_layers(self) -> bool:
        return self.layers is not None or self.keep_layers is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Sizes of a layer."""

    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Channels inside the MLP."""
    heads: int
    key_value_heads: int
    head_dim: int
    """Width of one head; never changed."""


def request_errors(request: StudentRequest) -> list[ConfigError]:
    """Return the errors that do not depend on the teacher."""
    errors = []
    if request.layers is not None and request.keep_layers is not None:
        errors.append(ConfigError(where="--keep-layers", rule="cannot be combined with --layers"))
    sizes = {
        "--layers": request.layers,
        "--hidden": request.hidden_size,
        "--intermediate": request.intermediate_size,
        "--heads": request.heads,
        "--kv-heads": request.key_value_heads,
    }
    errors += [
        ConfigError(where=name, value=n, rule="must be at least 1")
        for name, n in sizes.items()
        if n is not None and n < 1
    ]
    if request.text and not request.cuts_width:
        rule = "is only used to compare channels and heads"
        errors.append(ConfigError(where="--text", rule=rule, fix="add --hidden, --intermediate or --heads"))
    if not (request.cuts_layers or request.cuts_width):
        fix = "pass --layers, --hidden, --intermediate or --heads"
        errors.append(ConfigError(where="student", rule="no setting makes it smaller", fix=fix))
    return errors


def layer_errors(request: StudentRequest, teacher_layers: int) -> list[ConfigError]:
    limit = f"the teacher has {teacher_layers} layers"
    if request.layers is not None and request.layers > teacher_layers:
        return [ConfigError(where="--layers", value=request.layers, rule=limit, fix="request fewer layers")]
    layers = request.keep_layers
    if layers is None:
        return []
    errors = [
        ConfigError(where="--keep-layers", value=layer, rule=f"{limit}, numbered from 0 to {teacher_layers - 1}")
        for layer in layers
        if not 0 <= layer < teacher_layers
    ]
    if not layers or list(layers) != sorted(set(layers)):
        rule = "must be one or more ascending numbers, each once"
        errors.append(ConfigError(where="--keep-layers", value=layers, rule=rule))
    return errors


def student_widths(request: StudentRequest, teacher: Widths) -> tuple[Widths, list[ConfigError]]:
    """Return the student's widths and their errors.

    If only one of heads and key/value heads is set, each key/value head keeps its number of query heads.
    """
    limits = (
        ("--hidden", request.hidden_size, teacher.hidden_size),
        ("--intermediate", request.intermediate_size, teacher.intermediate_size),
        ("--heads", request.heads, teacher.heads),
        ("--kv-heads", request.key_value_heads, teacher.key_value_heads),
    )
    errors = [
        ConfigError(
            where=name,
            value=size,
            rule=f"the teacher has {limit}",
            fix="use a smaller value; a student cannot be larger than its teacher",
        )
        for name, size, limit in limits
        if size is not None and size > limit
    ]
    group = teacher.heads // teacher.key_value_heads
    heads, key_value_heads = request.heads, request.key_value_heads
    hidden_size = teacher.hidden_size if request.hidden_size is None else request.hidden_size
    if heads is None:
        heads = teacher.heads if key_value_heads is None else key_value_heads * group
    if key_value_heads is None:
        key_value_heads = heads // group
        if heads % group:
            rule = f"must be a multiple of {group}, the teacher's query heads per key/value head"
            fix = f"use {heads // group * group or group}, or pass --kv-heads"
            errors.append(ConfigError(where="--heads", value=heads, rule=rule, fix=fix))
    elif heads % max(1, key_value_heads):
        rule = f"must divide --heads = {heads}"
        errors.append(ConfigError(where="--kv-heads", value=key_value_heads, rule=rule))
    elif heads // max(1, key_value_heads) > group:
        rule = f"{heads} query heads are {heads // key_value_heads} per key/value head; the teacher has {group}"
        errors.append(ConfigError(where="--kv-heads", value=key_value_heads, rule=rule, fix="use fewer query heads"))
    if heads and hidden_size % heads and not any(error.where in ("--heads", "--kv-heads") for error in errors):
        rule = f"must be a multiple of the {heads} query heads"
        fix = f"use {hidden_size // heads * heads}"
        errors.append(ConfigError(where="--hidden", value=hidden_size, rule=rule, fix=fix))
    student = Widths(
        hidden_size=hidden_size,
        intermediate_size=request.intermediate_size or teacher.intermediate_size,
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=teacher.head_dim,
    )
    return student, errors
