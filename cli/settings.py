"""Settings of `plan` from defaults, a YAML file, the environment and flags, in that order of precedence."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..ds_configs.specs.errors import Fault, UsageError
from ..ds_configs.specs.job import (
    AXIS_FIELDS,
    LossImplementation,
    Method,
    OffloadName,
    Precision,
    StrategyName,
    Switch,
    TrainingJob,
)
from ..ds_configs.specs.model import ModelSpec
from ..ds_configs.specs.teacher_placement import TeacherPlacementChoice

ENVIRONMENT_PREFIX = "SHARDWRIGHT_"
_NOT_SETTINGS = frozenset({"SHARDWRIGHT_DEBUG", "SHARDWRIGHT_DATA_DIR"})


class PlanSettings(BaseModel):
    """Every setting of `shardwright plan`, as its YAML file may state them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    hardware: str | None = Field(None, description="8xA100-80GB, 4x8xH100-80GB, a YAML file, or local")
    host_memory: str | None = Field(None, description="memory of one node, such as 1TB")
    nvme: str | None = Field(None, description="NVMe of one node as PATH:SIZE")
    seq_len: int = Field(4096, description="tokens of one training sequence")
    micro_batch_size: int | Literal["auto"] = Field("auto", description="sequences of one forward pass on one rank")
    global_batch_size: int | None = Field(None, description="sequences of one optimizer step over all ranks")
    num_processes: int | None = Field(None, description="accelerators, when the hardware names only their kind")
    precision: Precision = Field("bf16", description="compute precision")
    optimizer: str = Field("adamw_torch_fused", description="a name of the Trainer's optim")
    method: Method = Field("full", description="full training, LoRA or QLoRA")
    lora_rank: int = Field(16, description="rank of the LoRA matrices")
    lora_targets: str = Field("all-linear", description="module names separated by commas, or all-linear")
    gradient_checkpointing: Switch = Field("auto", description="recompute each layer in the backward pass")
    strategy: StrategyName = Field("auto", description="engine and stage to use")
    offload: OffloadName = Field("auto", description="where optimizer states and parameters may live")
    loss: LossImplementation = Field("eager", description="chunked never materialises all logits")
    tensor_parallel_size: int | Literal["auto"] = Field("auto", description="ranks that share each layer")
    pipeline_parallel_size: int | Literal["auto"] = Field("auto", description="pipeline stages")
    sequence_parallel_size: int | Literal["auto"] = Field(
        "auto", description="ranks that share each sequence (Ulysses)"
    )
    context_parallel_size: int | Literal["auto"] = Field("auto", description="ranks that share each sequence (FSDP2)")
    expert_parallel_size: int | Literal["auto"] = Field("auto", description="ranks that share the experts")
    zero_quantized_weights: bool = Field(False, description="ZeRO++ qwZ: ZeRO-3 gathers weights in int8")
    zero_quantized_gradients: bool = Field(False, description="ZeRO++ qgZ: ZeRO-3 reduces gradients in int4")
    revision: str | None = Field(None, description="branch, tag or commit of a Hub model")
    teacher: str | None = Field(None, description="a frozen second model for distillation")
    teacher_placement: TeacherPlacementChoice = Field("auto", description="where the teacher lives")


_NUMBERS = frozenset(
    name for name, field in PlanSettings.model_fields.items() if int in (field.annotation, *get_args(field.annotation))
)
_SWITCHES = frozenset(name for name, field in PlanSettings.model_fields.items() if field.annotation is bool)
_INTEGER = re.compile(r"-?[0-9]{1,30}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedSettings:
    """Settings with where each value came from."""

    values: PlanSettings
    """The merged settings."""
    origins: Mapping[str, str]
    """`default`, `file`, `environment` or `flag`, by setting."""


def resolve_settings(
    flags: Mapping[str, Any], *, file: Path | None, environment: Mapping[str, str] | None = None
) -> ResolvedSettings:
    """Merge the sources of settings; a flag of `None` was not given.

    Raises:
        UsageError: unknown keys or values of a wrong kind, all together.
    """
    merged: dict[str, Any] = {}
    origins = dict.fromkeys(PlanSettings.model_fields, "default")
    sources: list[tuple[str, Mapping[str, Any]]] = []
    if file is not None:
        from ..plugins.planning.from_names import read_yaml_mapping

        sources.append(("file", read_yaml_mapping(file, what="config")))
    sources.append(("environment", _from_environment(os.environ if environment is None else environment)))
    sources.append(("flag", {name: value for name, value in flags.items() if value is not None}))
    for origin, values in sources:
        for key, value in values.items():
            name = key.replace("-", "_")
            if origin == "file" and origins.get(name) == "file":
                rule, fix = "is stated twice, with a hyphen and an underscore", "keep one"
                raise UsageError(Fault(where=f"{name} (from file)", rule=rule, fix=fix))
            merged[name] = value
            origins[name] = origin
    try:
        return ResolvedSettings(values=PlanSettings.model_validate(merged), origins=origins)
    except ValidationError as error:
        # A field that takes a number or a word fails once for each kind.
        faults = {detail["loc"][0]: _fault(detail, origins) for detail in reversed(error.errors())}
        raise UsageError(list(reversed(faults.values()))) from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _NOT_SETTINGS:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        values[name] = int(text) if name in _NUMBERS and _INTEGER.fullmatch(text) else text
        if name in _SWITCHES and text.lower() in ("true", "false"):
            values[name] = text.lower() == "true"
    return values


def _fault(detail: Mapping[str, Any], origins: Mapping[str, str]) -> Fault:
    name = str(detail["loc"][0])
    where = f"{name} (from {origins.get(name, 'flag')})"
    if detail["type"] == "extra_forbidden":
        near = get_close_matches(name, list(PlanSettings.model_fields), n=1, cutoff=0.5)
        return Fault(where=where, rule="is not a setting", fix=f"did you mean {near[0]}?" if near else "")
    return Fault(where=where, value=detail["input"], rule=str(detail["msg"]).lower())


def _chosen(size: int | Literal["auto"]) -> int | None:
    return None if size == "auto" else size


def job_from_settings(settings: PlanSettings, teacher: ModelSpec | None) -> TrainingJob:
    """Return the training job that the settings describe.

    Raises:
        UsageError: a teacher is placed and none is named.
    """
    if teacher is None and settings.teacher_placement != "auto":
        rule, fix = "places a teacher, and none is named", "give --teacher too"
        raise UsageError(Fault(where="teacher_placement", value=settings.teacher_placement, rule=rule, fix=fix))
    return TrainingJob(
        seq_len_tokens=settings.seq_len,
        **{name: _chosen(getattr(settings, name)) for name in ("micro_batch_size", *AXIS_FIELDS)},
        zero_quantized_weights=settings.zero_quantized_weights,
        zero_quantized_gradients=settings.zero_quantized_gradients,
        global_batch_size=settings.global_batch_size,
        precision=settings.precision,
        optimizer=settings.optimizer,
        method=settings.method,
        lora_rank=settings.lora_rank,
        lora_targets=tuple(target.strip() for target in settings.lora_targets.split(",") if target.strip()),
        gradient_checkpointing=settings.gradient_checkpointing,
        strategy=settings.strategy,
        offload=settings.offload,
        loss=settings.loss,
        teacher=teacher,
        teacher_placement=settings.teacher_placement,
    )
