"""Makes a smaller student from a teacher: fewer layers, narrower layers."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.plan.output import disk_errors, output_errors, reserved, write_files
from ....ds_configs.shrink.config import Rewriting, keep_layers
from ....ds_configs.specs.errors import ConfigError, DoesNotFitError, RefusedInputError, UsageError
from ....ds_configs.specs.settings import settings_of
from ....ds_configs.specs.units import human_count
from ....plugins.huggingface_hub.hub import ModelSource, model_directory, read_model_source
from ....plugins.huggingface_hub.push import CARD_FILE, check_push, pushed, shown_name, title_of
from ....plugins.safetensors.reading import each_tensor, read_checkpoint
from ....plugins.safetensors.writing import SHARD_BYTES, appearing_directory, save_checkpoint
from ....plugins.transformers.meta_model import build_meta_model
from ....plugins.transformers.sound_model import check_weights, is_finite, refuse_code, stored_errors
from ...formats.model_directory import copy_companions
from ...reports.markdown import card_text, code, license_line, table, usage
from .layers import (
    WIDTH_FAMILIES,
    LayerStack,
    layer_stack,
    teacher_widths,
    uniform_layers,
    unlike_layers,
    width_rule,
)
from .request import StudentRequest, Widths, layer_errors, request_errors, width_errors
from .width import WidthCutter, activation_scores, teacher_with_batches

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
    push_to_hub: str | None = None,
    private: bool = False,
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
        push_to_hub: Hub repository to upload the student to.
        private: Make the repository private if it is new.
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
        check_push(push_to_hub)
        plan = plan_student(teacher, checked_request, revision=revision, output_dir=directory, force=force)
        if dry_run or directory is None:
            return StudentReport(plan=plan, output_dir=None)
        with pushed(directory, push_to_hub, private=private):
            return make_student(plan, teacher, directory, force=force)


@dataclass(frozen=True, kw_only=True)
class StudentPlan:
    """Student to be made, before any weight is read."""

    source: ModelSource
    request: StudentRequest
    config: dict[str, Any]
    """The student's `config.json`."""
    stack: LayerStack
    """The teacher's layers."""
    kept_layers: tuple[int, ...]
    """Numbers of the teacher's layers that stay."""
    teacher_widths: Widths | None
    """`None` if no width is reduced."""
    student_widths: Widths | None
    teacher_parameters: int
    """Parameters of the teacher, tied ones once."""
    student_parameters: int

    @property
    def least_bytes(self) -> int:
        """Lower bound of the bytes of the weights; no dense type that weights are stored in has fewer than 16 bits."""
        return self.student_parameters * (4 if self.request.dtype == "float32" else 2)


@dataclass(frozen=True, kw_only=True)
class StudentReport:
    """Student that was made."""

    plan: StudentPlan
    output_dir: Path | None

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of `student.json`, without absolute paths except the teacher's."""
        plan = self.plan
        return {
            "schema_version": 1,
            "teacher": plan.source.name,
            "revision": plan.source.revision,
            "request": plan.request.model_dump() | {"text": [str(path) for path in plan.request.text]},
            "kept_layers": list(plan.kept_layers),
            "widths": None if plan.student_widths is None else asdict(plan.student_widths),
            "teacher_widths": None if plan.teacher_widths is None else asdict(plan.teacher_widths),
            "teacher_parameters": plan.teacher_parameters,
            "student_parameters": plan.student_parameters,
        }


def plan_student(
    teacher: str,
    request: StudentRequest,
    *,
    revision: str | None = None,
    output_dir: Path | None = None,
    force: bool = False,
) -> StudentPlan:
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
            before = teacher_widths(model.config)
            errors += width_errors(request, before)
            cut = {"hidden_size": request.hidden_size, "intermediate_size": request.intermediate_size}
            after = replace(before, **{name: size for name, size in cut.items() if size is not None})
    if errors:
        raise UsageError(errors)
    kept_layers = request.keep_layers or uniform_layers(stack.count, request.layers or stack.count)
    config = dict(source.config)
    if len(kept_layers) < stack.count:
        complete = Rewriting(model.config.to_dict())
        keep_layers(complete, kept_layers)
        config |= {change.where: change.after for change in complete.changes}
    student = build_meta_model(config, source="student")
    if unlike := unlike_layers(model, student, stack, kept_layers):
        raise UsageError(unlike)
    if after is not None:
        config |= {name: size for name, size in asdict(after).items() if name != "heads"}
        student = build_meta_model(config, source="student")
    if request.dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = request.dtype
    return StudentPlan(
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


def make_student(plan: StudentPlan, teacher: str, output_dir: Path, *, force: bool = False) -> StudentReport:
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
        cutter, stack, before, after = None, plan.stack, plan.teacher_widths, plan.student_widths
        if before is not None and after is not None:
            if unknown := sorted(name for name in tensors if width_rule(name) is None):
                rule = "is a tensor that this family does not have, so widths cannot be reduced"
                raise UsageError([ConfigError(where="teacher", value=name, rule=rule) for name in unknown[:5]])
            batches = teacher_with_batches(directory, plan.source, plan.request.text)
            cutter = WidthCutter(stack=stack, scores=activation_scores(*batches, stack), student=after)
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
        report = StudentReport(plan=plan, output_dir=output_dir)
        with appearing_directory(output_dir) as unfinished:
            save_checkpoint(student, unfinished, shard_bytes=SHARD_BYTES)
            copy_companions(directory, unfinished)
            files = {"config.json": plan.config, FILE_NAME: report.to_dict()}
            texts = {name: json.dumps(value, indent=2) + "\n" for name, value in files.items()}
            write_files(texts, unfinished, force=True)
            write_files({CARD_FILE: _card(report, teacher, unfinished)}, unfinished, force=True)
    return report


def _card(report: StudentReport, teacher: str, directory: Path) -> str:
    """Return the student's `README.md` with the metadata that the Hub reads; `directory` has its other files."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    plan, request = report.plan, report.plan.request.model_dump()
    cuts = {name: value for name, value in request.items() if value is not None and name != "text"}
    is_causal = bool(set(plan.config.get("architectures") or ()) & set(CAUSAL.values()))
    commit = f" at {code(plan.source.revision)}" if plan.source.revision else ""
    return card_text(
        f"{title_of(teacher)}, pruned to {human_count(plan.student_parameters)} parameters",
        [
            f"Pruned from {code(shown_name(teacher))}{commit}, which has {human_count(plan.teacher_parameters)}. "
            "It was not trained after that: distill it before you use it.",
            table(("", ""), [(name.replace("_", " "), value) for name, value in cuts.items()]),
            usage() if is_causal and (directory / "tokenizer_config.json").is_file() else "",
        ],
        f"{license_line(teacher)} Read its card before you publish this one.",
        base=teacher,
        relation="finetune",
        tags=("pruned",),
        task="text-generation" if is_causal else None,
    )
