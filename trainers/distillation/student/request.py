"""Settings of a smaller student, and their checks against a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ....ds_configs.specs.errors import ConfigError
from ....ds_configs.specs.settings import Numbers, Paths, Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

StoredDtype = Literal["float32", "bfloat16", "float16"]


class StudentRequest(Settings):
    """Sizes of a student; `None` keeps the teacher's size."""

    group = "Student"

    layers: int | None = Field(None, ge=1, description="Layers to keep, evenly spread, first and last included")
    keep_layers: Numbers | None = Field(
        None, description="Layers to keep by number, ascending from 0 (e.g. 0,3,7); excludes --layers"
    )
    hidden_size: int | None = Field(None, ge=1, alias="hidden", description="Width of the residual stream")
    intermediate_size: int | None = Field(None, ge=1, alias="intermediate", description="Channels inside the MLP")
    text: Paths = Field((), description="Text files on which channels are compared. Default: Python's help topics")
    dtype: StoredDtype | None = Field(None, description="Stored dtype. Default: the dtype of each tensor")

    @property
    def cuts_width(self) -> bool:
        return self.hidden_size is not None or self.intermediate_size is not None

    @property
    def cuts_layers(self) -> bool:
        return self.layers is not None or self.keep_layers is not None


def request_errors(request: StudentRequest) -> list[ConfigError]:
    """Return the errors that do not depend on the teacher."""
    errors = []
    if request.layers is not None and request.keep_layers is not None:
        errors.append(ConfigError(where="--keep-layers", rule="cannot be combined with --layers"))
    if request.text and not request.cuts_width:
        rule = "is only used to compare channels"
        errors.append(ConfigError(where="--text", rule=rule, fix="add --hidden or --intermediate"))
    if not (request.cuts_layers or request.cuts_width):
        fix = "pass --layers, --hidden or --intermediate"
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


def width_errors(request: StudentRequest, config: PreTrainedConfig) -> list[ConfigError]:
    errors = [
        ConfigError(
            where=name,
            value=size,
            rule=f"the teacher has {limit}",
            fix="use a smaller value; a student cannot be larger than its teacher",
        )
        for name, size, limit in (
            ("--hidden", request.hidden_size, config.hidden_size),
            ("--intermediate", request.intermediate_size, config.intermediate_size),
        )
        if size is not None and size > limit
    ]
    heads = config.num_attention_heads
    if request.hidden_size is not None and request.hidden_size % heads:
        fix = f"use {request.hidden_size // heads * heads or heads}"
        rule = f"must be a multiple of the {heads} query heads"
        errors.append(ConfigError(where="--hidden", value=request.hidden_size, rule=rule, fix=fix))
    return errors
