"""Builds a smaller student from a teacher: fewer layers, narrower ones, matrices of low rank, zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.plan.output import disk_faults, output_faults, reserved
from ....ds_configs.plan.write import write_files
from ....ds_configs.specs.errors import DoesNotFitError, Fault, RefusedInputError, UsageError
from ....ds_configs.specs.units import human_count
from ....plugins.huggingface_hub.cards import CARD_FILE
from ....plugins.huggingface_hub.hub import ModelSource, read_model_source
from ....plugins.safetensors.reading import StoredTensor, each_tensor, read_checkpoint
from ....plugins.transformers.finite_weights import is_finite
from ....plugins.transformers.meta_model import build_meta_model
from ....plugins.transformers.sound_model import check_weights, refuse_code, stored_faults
from ...formats.model_directory import copy_companions
from ...runs.report import card_text
from .families import WIDTH_FAMILIES, WidthFamily, teacher_widths, width_changes
from .files import StudentWriter, student_writer, teacher_directory
from .layers import LayerStack, layer_changes, layer_stack, uniform_layers, unlike_layers
from .low_rank import low_rank
from .request import StudentRequest, Widths, layer_faults, request_faults, student_widths
from .sparsity import sparse, zero_share
from .width import WidthCutter, kept_widths

if TYPE_CHECKING:
    import torch

    from .importance import Scores

FILE_NAME = "student.json"


@dataclass(frozen=True, kw_only=True)
class StudentPlan:
    """Student that will be made, before any weight is read."""

    source: ModelSource
    """The teacher's config and where it is from."""
    request: StudentRequest
    config: dict[str, Any]
    """The student's `config.json`."""
    stack: LayerStack | None
    """The teacher's layers; `None` when neither layers nor widths are cut."""
    kept_layers: tuple[int, ...]
    """Numbers of the teacher's layers that stay; empty when none is cut."""
    family: WidthFamily | None
    """How the family's tensors are cut; `None` when no width is."""
    teacher_widths: Widths | None
    """Of the teacher; `None` when no width is cut."""
    student_widths: Widths | None
    """Of the student; `None` when no width is cut."""
    matrices: dict[str, int]
    """Output axis of each linear weight inside the layers, by the student's names without the base model's prefix."""
    base_prefix: str
    """That prefix, which checkpoints may leave out."""
    teacher_parameters: int
    """Parameters of the teacher, tied ones once."""
    student_parameters: int
    """Parameters of the student, tied ones once."""

    @property
    def least_bytes(self) -> int:
        """Bytes that the weights take at least; no dense type that weights are stored in has fewer than 16 bits."""
        return self.student_parameters * (4 if self.request.dtype == "float32" else 2)


@dataclass(kw_only=True)
class StudentReport:
    """Student that was made."""

    plan: StudentPlan
    """What was asked for."""
    output_dir: Path | None
    """Where the files are; `None` when none were written."""
    low_rank: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each matrix of low rank keeps."""
    zeros: dict[str, float] = field(default_factory=dict)
    """Share of zeros in each pruned matrix."""

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of `student.json`, which holds no absolute path but the teacher's."""
        plan = self.plan
        widths = plan.student_widths
        asked = plan.request.model_dump()
        return {
            "schema_version": 1,
            "teacher": plan.source.name,
            "revision": plan.source.revision,
            "request": asked | {"text": [str(path) for path in plan.request.text]},
            "kept_layers": list(plan.kept_layers),
            "widths": None if widths is None else asdict(widths),
            "teacher_widths": None if plan.teacher_widths is None else asdict(plan.teacher_widths),
            "importance": plan.request.importance if plan.request.cuts_width else None,
            "teacher_parameters": plan.teacher_parameters,
            "student_parameters": plan.student_parameters,
            "low_rank": self.low_rank,
            "zeros": self.zeros,
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
        UsageError: everything that is wrong with the request, at once.
        RefusedInputError: the teacher's config is unsafe or unknown.
    """
    faults = request_faults(request)
    if output_dir is not None:
        faults += output_faults(output_dir, force=force, sources={"the teacher": teacher})
    source = read_model_source(teacher, revision=revision)
    refuse_code(source.config, source.name)
    if source.config.get("quantization_config"):
        fix = "give the checkpoint that it was made from"
        faults.append(Fault(where="teacher", value=teacher, rule="its weights are quantized", fix=fix))
    model = build_meta_model(source.config, source=source.name)
    stack, family, before, after = None, None, None, None
    if request.cuts_layers or request.cuts_width:
        stack = layer_stack(model)
        faults += layer_faults(request, stack.count)
    if request.cuts_width:
        family = WIDTH_FAMILIES.get(model.config.model_type)
        if family is None:
            faults.append(_no_width_fault(model.config.model_type))
        else:
            before = teacher_widths(model.config)
            after, more = student_widths(request, before, coupled=family.coupled)
            faults += more
    if faults:
        raise UsageError(faults)
    kept = _kept_layers(request, stack)
    cut = _cut_config(source.config, model, stack, kept)
    student = build_meta_model(cut, source="student")
    if stack is not None and (unlike := unlike_layers(model, student, stack, kept)):
        raise UsageError(unlike)
    if family is not None and after is not None:
        cut = cut | width_changes(family, after)
        student = build_meta_model(cut, source="student")
    if request.dtype is not None:
        cut = {name: value for name, value in cut.items() if name != "torch_dtype"} | {"dtype": request.dtype}
    return StudentPlan(
        source=source,
        request=request,
        config=cut,
        stack=stack,
        kept_layers=kept,
        family=family,
        teacher_widths=before,
        student_widths=after,
        matrices=_matrices(student),
        base_prefix=f"{student.base_model_prefix}.",
        teacher_parameters=sum(parameter.numel() for parameter in model.parameters()),
        student_parameters=sum(parameter.numel() for parameter in student.parameters()),
    )


def _no_width_fault(model_type: str) -> Fault:
    rule = f"widths are cut in {', '.join(sorted(WIDTH_FAMILIES))} only"
    return Fault(where="model_type", value=model_type, rule=rule, fix="--layers works for every plain stack of layers")


def _kept_layers(request: StudentRequest, stack: LayerStack | None) -> tuple[int, ...]:
    if stack is None:
        return ()
    if request.keep_layers is not None:
        return request.keep_layers
    return uniform_layers(stack.count, request.layers or stack.count)


def _cut_config(config: dict[str, Any], model: Any, stack: LayerStack | None, kept: tuple[int, ...]) -> dict[str, Any]:
    if stack is None or len(kept) == stack.count:
        return dict(config)
    return config | layer_changes(model.config.to_dict(), kept, stack.count)


def _matrices(model: Any) -> dict[str, int]:
    """Return the linear weights inside any list of layers, with the axis of their outputs."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    prefix = f"{model.base_model_prefix}."
    return {
        f"{name.removeprefix(prefix)}.weight": 0 if isinstance(module, Linear) else 1
        for name, module in model.named_modules()
        if isinstance(module, Linear | Conv1D) and any(part.isdigit() for part in name.split("."))
    }


def make_student(
    plan: StudentPlan, teacher: str, output_dir: Path, *, force: bool = False, scores: Scores | None = None
) -> StudentReport:
    """Write the student as a Transformers directory with its `student.json`; nothing remains after a failure.

    `scores` stands in for the importance that the request names.

    Raises:
        UsageError: the directory holds something, or the checkpoint holds tensors that the family does not have.
        RefusedInputError: the teacher's weights are missing, damaged or not finite.
    """
    faults = output_faults(output_dir, force=force, sources={"the teacher": teacher})
    if faults:
        raise UsageError(faults)
    if faults := disk_faults(output_dir, needed_bytes=plan.least_bytes):
        raise DoesNotFitError("\n".join(map(str, faults)))
    with reserved(output_dir, force=force):
        return _make(plan, teacher, output_dir, scores)


def _make(plan: StudentPlan, teacher: str, output_dir: Path, scores: Scores | None) -> StudentReport:
    directory = teacher_directory(plan.source, teacher)
    tensors = read_checkpoint(directory)
    _check_teacher(plan, directory, tensors)
    cutter = None if plan.family is None else _width_cutter(plan, directory, tensors, scores)
    report = StudentReport(plan=plan, output_dir=output_dir)
    with student_writer(output_dir) as writer:
        for name, tensor in each_tensor(tensors):
            _add(plan, name, tensor, cutter, report, writer)
        writer.finish()
        copy_companions(directory, writer.directory)
        writer.write_json("config.json", plan.config)
        writer.write_json(FILE_NAME, report.to_dict())
        write_files({CARD_FILE: student_card(report, teacher, writer.directory)}, writer.directory, force=True)
    return report


def student_card(report: StudentReport, teacher: str, directory: Path) -> str:
    """Return the student's `README.md`, with the metadata that the Hub reads; `directory` holds its other files."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    plan, request = report.plan, report.plan.request.model_dump()
    left_out = {"importance", "text"} | ({"prune", "granularity"} if request["sparsity"] is None else set())
    cuts = [(name.replace("_", " "), value) for name, value in request.items() if value is not None]
    cuts = [(name, value) for name, value in cuts if name not in left_out]
    is_causal = bool(set(plan.config.get("architectures") or ()) & set(CAUSAL.values()))
    return card_text(
        "distillation/student/templates/card.md.j2",
        teacher,
        "finetune",
        "transformers",
        ("pruned",),
        teacher=teacher,
        revision=plan.source.revision,
        parameters=human_count(plan.student_parameters),
        teacher_parameters=human_count(plan.teacher_parameters),
        cuts=cuts,
        causal=is_causal and (directory / "tokenizer_config.json").is_file(),
        adapter=None,
        task="text-generation" if is_causal else None,
    )


def _check_teacher(plan: StudentPlan, directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse a teacher of which a part is missing or of another shape: Transformers would make it up in the student.

    Raises:
        RefusedInputError: names three of the tensors.
    """
    check_weights(directory)
    model = build_meta_model(plan.source.config, source=plan.source.name)
    if faults := stored_faults(tensors, model, f"teacher {directory}", base_prefix=plan.base_prefix):
        raise RefusedInputError(faults)


def _width_cutter(
    plan: StudentPlan, directory: Path, tensors: Mapping[str, StoredTensor], scores: Scores | None
) -> WidthCutter:
    family, stack, before, after = plan.family, plan.stack, plan.teacher_widths, plan.student_widths
    assert family is not None and stack is not None and before is not None and after is not None
    unknown = sorted(name for name in tensors if family.rule(name) is None)
    if unknown:
        rule = "is a tensor that this family does not have, so widths cannot be cut"
        raise UsageError([Fault(where="teacher", value=name, rule=rule) for name in unknown[:5]])
    if scores is None:
        scores = student_scores(plan, directory, tensors)
    kept = kept_widths(scores, before, after)
    return WidthCutter(family=family, stack=stack, teacher=before, kept=kept, scores=scores)


def student_scores(plan: StudentPlan, directory: Path, tensors: Mapping[str, StoredTensor]) -> Scores:
    """Return the importance that a plan asks for."""
    from .calibration import teacher_with_batches
    from .importance import activation_scores, magnitude_scores

    family, stack, widths = plan.family, plan.stack, plan.teacher_widths
    assert family is not None and stack is not None and widths is not None
    if plan.request.importance == "magnitude":
        tied = not any(name.endswith(("lm_head.weight", "decoder.weight")) for name in tensors)
        return magnitude_scores(each_tensor(tensors), family, stack, widths, tied=tied)
    model, batches = teacher_with_batches(directory, plan.source, plan.request.text)
    return activation_scores(model, batches, family, stack, widths)


def _add(
    plan: StudentPlan,
    name: str,
    tensor: torch.Tensor,
    cutter: WidthCutter | None,
    report: StudentReport,
    writer: StudentWriter,
) -> None:
    new_name = name if plan.stack is None else plan.stack.renamed(name, plan.kept_layers)
    if new_name is None:
        return
    if not is_finite(tensor):
        rule, fix = "holds NaN or infinity", "fetch a sound copy, or train it again"
        raise RefusedInputError(Fault(where=f"teacher {plan.source.name}", value=name, rule=rule, fix=fix))
    if cutter is not None:
        tensor = cutter.cut(name, tensor)
    output_axis = plan.matrices.get(new_name.removeprefix(plan.base_prefix))
    if output_axis is not None:
        tensor = _thinned(plan.request, new_name, tensor, output_axis, report)
    writer.add(new_name, _stored(tensor, plan.request.dtype))


def _thinned(
    request: StudentRequest, name: str, tensor: torch.Tensor, output_axis: int, report: StudentReport
) -> torch.Tensor:
    if request.low_rank is not None or request.low_rank_energy is not None:
        tensor, found = low_rank(tensor, rank=request.low_rank, energy=request.low_rank_energy)
        report.low_rank[name] = asdict(found)
    if request.sparsity is not None:
        prune, granularity = request.prune, request.granularity
        tensor = sparse(tensor, request.sparsity, prune=prune, granularity=granularity, output_axis=output_axis)
        report.zeros[name] = zero_share(tensor)
    return tensor


def _stored(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    import torch

    if dtype is None or not tensor.is_floating_point():
        return tensor
    to: Callable[..., torch.Tensor] = tensor.to
    return to(getattr(torch, dtype))
