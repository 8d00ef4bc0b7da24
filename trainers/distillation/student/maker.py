"""Makes a smaller student from a teacher: fewer layers, narrower layers."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.plan.output import disk_errors, output_errors, reserved, write_files
from ....ds_configs.shrink import keep_layers
from ....ds_configs.specs.errors import ConfigError, DoesNotFitError, RefusedInputError, UsageError
from ....ds_configs.specs.settings import settings_of
from ....plugins.huggingface_hub import ModelSource, model_directory, read_model_source
from ....plugins.safetensors import SHARD_BYTES, appearing_directory, each_tensor, read_checkpoint, save_checkpoint
from ....plugins.transformers.meta_model import build_meta_model
from ....plugins.transformers.sound_model import check_weights, is_finite, refuse_code, stored_errors
from ...data.models import copy_companions
from .layers import LayerStack, layer_stack, uniform_layers, unlike_layers
from .request import StudentRequest, layer_errors, request_errors, width_errors
from .width import WIDTH_FAMILIES, WidthCutter, teacher_with_batches, tensor_axes

if TYPE_CHECKING:
    import torch


FILE_NAME = "student.json"

logger = logging.getLogger(__name__)


def student(
    teacher: str,
    output_dir: str | Path | None = None,
    *,
    revision: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    **request: Any,
) -> StudentReport:
    """Make a smaller student from a teacher: a model directory that Transformers loads, to be distilled into.

    Nothing is printed on stdout. Example: ``shardwright.student("teacher", "student", layers=16, intermediate=8192)``

    Args:
        teacher: Hub id or directory with safetensors weights.
        output_dir: Directory for the student; `None` is a dry run.
        revision: Branch, tag or commit of a Hub teacher.
        dry_run: Check everything and compute sizes; no weights are read.
        force: Replace the model in a directory that is not empty.
        request: Fields of `StudentRequest`, which are the flags of `shardwright student`.

    Returns:
        The student that was made; `to_dict()` is what `--format json` prints.

    Raises:
        UsageError: all errors of the request together.
        RefusedInputError: the teacher's config is unsafe or unknown, or its weights are missing or damaged.
    """
    directory = None if output_dir is None else Path(output_dir)
    checked_request = settings_of(StudentRequest, request)
    with redirect_stdout(sys.stderr):
        plan = plan_student(teacher, checked_request, revision=revision, output_dir=directory, force=force)
        if dry_run or directory is None:
            return plan
        return make_student(plan, teacher, directory, force=force)


@dataclass(frozen=True, kw_only=True)
class StudentReport:
    """A student that is to be made, or was made."""

    source: ModelSource
    request: StudentRequest
    config: dict[str, Any]
    """The student's `config.json`."""
    stack: LayerStack
    """The teacher's layers."""
    kept_layers: tuple[int, ...]
    """Numbers of the teacher's layers that stay."""
    teacher_widths: dict[str, int] | None
    """Sizes of a layer; `None` if no width is reduced."""
    student_widths: dict[str, int] | None
    teacher_parameters: int
    """Parameters of the teacher, tied ones once."""
    student_parameters: int
    output_dir: Path | None = None
    """Directory of the student; `None` if no files were written."""

    @property
    def least_bytes(self) -> int:
        """Lower bound of the bytes of the weights; no dense type that weights are stored in has fewer than 16 bits."""
        return self.student_parameters * (4 if self.request.dtype == "float32" else 2)

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of `student.json`, without absolute paths except the teacher's."""
        return {
            "schema_version": 1,
            "teacher": self.source.name,
            "revision": self.source.revision,
            "request": self.request.model_dump() | {"text": [str(path) for path in self.request.text]},
            "kept_layers": list(self.kept_layers),
            "widths": self.student_widths,
            "teacher_widths": self.teacher_widths,
            "teacher_parameters": self.teacher_parameters,
            "student_parameters": self.student_parameters,
        }


def plan_student(
    teacher: str,
    request: StudentRequest,
    *,
    revision: str | None = None,
    output_dir: Path | None = None,
    force: bool = False,
) -> StudentReport:
    """Check a request against a teacher and return what will be made; reads the config, not the weights.

    Raises:
        UsageError: all errors of the request together.
        RefusedInputError: the teacher's config is unsafe or unknown.
    """
    errors = request_errors(request)
    if output_dir is not None:
        errors += output_errors(output_dir, force=force, sources={"the teacher": teacher})
    source = read_model_source(teacher, revision=revision)
    refuse_code(source.config, source.name)
    if source.config.get("quantization_config"):
        fix = "use the checkpoint that it was quantized from"
        errors.append(ConfigError(where="teacher", value=teacher, rule="its weights are quantized", fix=fix))
    model = build_meta_model(source.config, source=source.name)
    before, after = None, None
    stack = layer_stack(model)
    errors += layer_errors(request, stack.count)
    if request.cuts_width:
        if model.config.model_type not in WIDTH_FAMILIES:
            rule = f"widths can be reduced only in {', '.join(WIDTH_FAMILIES)}"
            fix = "--layers works for every plain stack of layers"
            errors.append(ConfigError(where="model_type", value=model.config.model_type, rule=rule, fix=fix))
        else:
            errors += width_errors(request, model.config)
            hidden_size, heads = model.config.hidden_size, model.config.num_attention_heads
            before = {
                "hidden_size": hidden_size,
                "intermediate_size": model.config.intermediate_size,
                "heads": heads,
                "head_dim": getattr(model.config, "head_dim", None) or hidden_size // heads,
            }
            cut = {name: getattr(request, name) for name in ("hidden_size", "intermediate_size")}
            after = before | {name: size for name, size in cut.items() if size is not None}
    if errors:
        raise UsageError(errors)
    kept_layers = request.keep_layers or uniform_layers(stack.count, request.layers or stack.count)
    config = dict(source.config)
    if len(kept_layers) < stack.count:
        complete = model.config.to_dict()
        thinner = dict(complete)
        keep_layers(thinner, kept_layers)
        config |= {name: value for name, value in thinner.items() if value != complete.get(name)}
    student = build_meta_model(config, source="student")
    if unlike := unlike_layers(model, student, stack, kept_layers):
        raise UsageError(unlike)
    if after is not None:
        config |= {name: size for name, size in after.items() if name != "heads"}
        student = build_meta_model(config, source="student")
    if request.dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = request.dtype
    return StudentReport(
        source=source,
        request=request,
        config=config,
        stack=stack,
        kept_layers=kept_layers,
        teacher_widths=before,
        student_widths=after,
        teacher_parameters=sum(parameter.numel() for parameter in model.parameters()),
        student_parameters=sum(parameter.numel() for parameter in student.parameters()),
    )


def make_student(plan: StudentReport, teacher: str, output_dir: Path, *, force: bool = False) -> StudentReport:
    """Write the student as a Transformers directory with its `student.json`; a failure leaves no files.

    Raises:
        UsageError: the directory is not empty, or the checkpoint has tensors that the family does not have.
        RefusedInputError: the teacher's weights are missing, damaged or not finite.
        ShardwrightError: the teacher cannot be downloaded.
    """
    import torch

    if errors := output_errors(output_dir, force=force, sources={"the teacher": teacher}):
        raise UsageError(errors)
    if errors := disk_errors(output_dir, needed_bytes=plan.least_bytes):
        raise DoesNotFitError("\n".join(map(str, errors)))
    with reserved(output_dir, force=force):
        directory = Path(teacher).expanduser()
        if not directory.exists():
            directory = model_directory(teacher, revision=plan.source.revision)
        elif not directory.is_dir():
            rule = "is a file"
            raise UsageError(ConfigError(where="teacher", value=teacher, rule=rule, fix="pass the model's directory"))
        tensors = read_checkpoint(directory)
        # Transformers would initialise a missing tensor, or one of another shape, at random in the student.
        check_weights(directory)
        model = build_meta_model(plan.source.config, source=plan.source.name)
        if errors := stored_errors(tensors, model, f"teacher {directory}", base_prefix=f"{plan.stack.base_prefix}."):
            raise RefusedInputError(errors)
        cutter, stack, widths = None, plan.stack, plan.student_widths
        if widths is not None:
            axes = tensor_axes(plan.source.config, widths, stack)
            unknown = sorted(name for name in tensors if stack.canonical(name) not in axes)
            if unknown := [name for name in unknown if not name.endswith("rotary_emb.inv_freq")]:
                rule = "is a tensor that this family does not have, so widths cannot be reduced"
                raise UsageError([ConfigError(where="teacher", value=name, rule=rule) for name in unknown[:5]])
            teacher_model, batches = teacher_with_batches(directory, plan.source, plan.request.text)
            cutter = WidthCutter(teacher_model, batches, stack, axes, widths)
        # Tensors that stay as they are stay memory-mapped.
        student: dict[str, torch.Tensor] = {}
        for name, tensor in each_tensor(tensors):
            new_name = stack.renamed(name, plan.kept_layers)
            if new_name is None:
                continue
            if not is_finite(tensor):
                where, rule = f"teacher {plan.source.name}", "has NaN or infinite values"
                fix = "download an undamaged copy, or train it again"
                raise RefusedInputError(ConfigError(where=where, value=name, rule=rule, fix=fix))
            if cutter is not None:
                tensor = cutter.cut(name, tensor)
            if plan.request.dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype=getattr(torch, plan.request.dtype))
            student[new_name] = tensor
        with appearing_directory(output_dir) as unfinished:
            save_checkpoint(student, unfinished, shard_bytes=SHARD_BYTES)
            copy_companions(directory, unfinished)
            files = {"config.json": plan.config, FILE_NAME: plan.to_dict()}
            texts = {name: json.dumps(value, indent=2) + "\n" for name, value in files.items()}
            write_files(texts, unfinished, force=True)
    return replace(plan, output_dir=output_dir)
