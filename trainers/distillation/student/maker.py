"""Makes a smaller student from a teacher: fewer layers, narrower layers, low-rank matrices, zeros."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....ds_configs.plan.output import disk_errors, output_errors, reserved, write_files
from ....ds_configs.specs.errors import ConfigError, DoesNotFitError, RefusedInputError, UsageError
from ....ds_configs.specs.settings import settings_of
from ....ds_configs.specs.units import human_count
from ....plugins.huggingface_hub.hub import ModelSource, model_directory, read_model_source
from ....plugins.huggingface_hub.push import CARD_FILE, check_push, pushed, shown_name, title_of
from ....plugins.safetensors.reading import StoredTensor, each_tensor, read_checkpoint
from ....plugins.safetensors.writing import SHARD_BYTES, appearing_directory, name_shards, save_tensors
from ....plugins.transformers.meta_model import build_meta_model
from ....plugins.transformers.sound_model import check_weights, is_finite, refuse_code, stored_errors
from ...formats.model_directory import copy_companions
from ...reports.markdown import card_text, code, license_line, table, usage
from .layers import (
    WIDTH_FAMILIES,
    LayerStack,
    WidthFamily,
    layer_changes,
    layer_stack,
    teacher_widths,
    uniform_layers,
    unlike_layers,
    width_changes,
)
from .request import StudentRequest, Widths, layer_errors, request_errors, student_widths
from .width import WidthCutter, activation_scores, kept_widths, magnitude_scores, teacher_with_batches

if TYPE_CHECKING:
    import torch

    from .request import Granularity, Prune
    from .width import Scores

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
        with pushed(directory, push_to_hub, private=private, notify=logger.info):
            return make_student(plan, teacher, directory, force=force)


@dataclass(frozen=True, kw_only=True)
class StudentPlan:
    """Student to be made, before any weight is read."""

    source: ModelSource
    request: StudentRequest
    config: dict[str, Any]
    """The student's `config.json`."""
    stack: LayerStack | None
    """The teacher's layers; `None` if neither layers nor widths are reduced."""
    kept_layers: tuple[int, ...]
    """Numbers of the teacher's layers that stay; empty if none is removed."""
    family: WidthFamily | None
    """Tensor axes of the family; `None` if no width is reduced."""
    teacher_widths: Widths | None
    """`None` if no width is reduced."""
    student_widths: Widths | None
    matrices: dict[str, int]
    """Output axis of each linear weight inside the layers, by the student's names without the base model's prefix."""
    base_prefix: str
    """That prefix, which checkpoints may omit."""
    teacher_parameters: int
    """Parameters of the teacher, tied ones once."""
    student_parameters: int

    @property
    def least_bytes(self) -> int:
        """Lower bound of the bytes of the weights; no dense type that weights are stored in has fewer than 16 bits."""
        return self.student_parameters * (4 if self.request.dtype == "float32" else 2)


@dataclass(kw_only=True)
class StudentReport:
    """Student that was made."""

    plan: StudentPlan
    output_dir: Path | None
    low_rank: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`LowRank` of each low-rank matrix."""
    zeros: dict[str, float] = field(default_factory=dict)
    """Share of zeros in each pruned matrix."""

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
        UsageError: all errors of the request together.
        RefusedInputError: the teacher's config is unsafe or unknown.
    """
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    errors = request_errors(request)
    if output_dir is not None:
        errors += output_errors(output_dir, force=force, sources={"the teacher": teacher})
    source = read_model_source(teacher, revision=revision)
    refuse_code(source.config, source.name)
    if source.config.get("quantization_config"):
        fix = "use the checkpoint that it was quantized from"
        errors.append(ConfigError(where="teacher", value=teacher, rule="its weights are quantized", fix=fix))
    model = build_meta_model(source.config, source=source.name)
    stack, family, before, after = None, None, None, None
    if request.cuts_layers or request.cuts_width:
        stack = layer_stack(model)
        errors += layer_errors(request, stack.count)
    if request.cuts_width:
        family, model_type = WIDTH_FAMILIES.get(model.config.model_type), model.config.model_type
        if family is None:
            rule = f"widths can be reduced only in {', '.join(sorted(WIDTH_FAMILIES))}"
            fix = "--layers works for every plain stack of layers"
            errors.append(ConfigError(where="model_type", value=model_type, rule=rule, fix=fix))
        else:
            before = teacher_widths(model.config)
            after, width_errors = student_widths(request, before, coupled=family.coupled)
            errors += width_errors
    if errors:
        raise UsageError(errors)
    kept_layers: tuple[int, ...] = ()
    if stack is not None:
        kept_layers = request.keep_layers or uniform_layers(stack.count, request.layers or stack.count)
    config = dict(source.config)
    if stack is not None and len(kept_layers) < stack.count:
        config |= layer_changes(model.config.to_dict(), kept_layers, stack.count)
    student = build_meta_model(config, source="student")
    if stack is not None and (unlike := unlike_layers(model, student, stack, kept_layers)):
        raise UsageError(unlike)
    if family is not None and after is not None:
        config |= width_changes(family, after)
        student = build_meta_model(config, source="student")
    if request.dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = request.dtype
    prefix = f"{student.base_model_prefix}."
    return StudentPlan(
        source=source,
        request=request,
        config=config,
        stack=stack,
        kept_layers=kept_layers,
        family=family,
        teacher_widths=before,
        student_widths=after,
        matrices={
            f"{name.removeprefix(prefix)}.weight": 0 if isinstance(module, Linear) else 1
            for name, module in student.named_modules()
            if isinstance(module, Linear | Conv1D) and any(part.isdigit() for part in name.split("."))
        },
        base_prefix=prefix,
        teacher_parameters=sum(parameter.numel() for parameter in model.parameters()),
        student_parameters=sum(parameter.numel() for parameter in student.parameters()),
    )


def make_student(
    plan: StudentPlan, teacher: str, output_dir: Path, *, force: bool = False, scores: Scores | None = None
) -> StudentReport:
    """Write the student as a Transformers directory with its `student.json`; a failure leaves no files.

    `scores` replaces the importance that the request names.

    Raises:
        UsageError: the directory is not empty, or the checkpoint has tensors that the family does not have.
        RefusedInputError: the teacher's weights are missing, damaged or not finite.
        ShardwrightError: the teacher cannot be downloaded.
    """
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
        if errors := stored_errors(tensors, model, f"teacher {directory}", base_prefix=plan.base_prefix):
            raise RefusedInputError(errors)
        cutter, family, stack, before, after = None, plan.family, plan.stack, plan.teacher_widths, plan.student_widths
        if family is not None:
            assert stack is not None and before is not None and after is not None
            if unknown := sorted(name for name in tensors if family.rule(name) is None):
                rule = "is a tensor that this family does not have, so widths cannot be reduced"
                raise UsageError([ConfigError(where="teacher", value=name, rule=rule) for name in unknown[:5]])
            scores = scores or student_scores(plan, directory, tensors)
            kept = kept_widths(scores, before, after)
            cutter = WidthCutter(family=family, stack=stack, teacher=before, kept=kept, scores=scores)
        report, request = StudentReport(plan=plan, output_dir=output_dir), plan.request
        with appearing_directory(output_dir) as unfinished:
            writer = _ShardWriter(directory=unfinished)
            for name, tensor in each_tensor(tensors):
                new_name = name if plan.stack is None else plan.stack.renamed(name, plan.kept_layers)
                if new_name is None:
                    continue
                if not is_finite(tensor):
                    where, rule = f"teacher {plan.source.name}", "has NaN or infinite values"
                    fix = "download an undamaged copy, or train it again"
                    raise RefusedInputError(ConfigError(where=where, value=name, rule=rule, fix=fix))
                if cutter is not None:
                    tensor = cutter.cut(name, tensor)
                output_axis = plan.matrices.get(new_name.removeprefix(plan.base_prefix))
                if output_axis is not None and (request.low_rank is not None or request.low_rank_energy is not None):
                    tensor, approximation = low_rank(tensor, rank=request.low_rank, energy=request.low_rank_energy)
                    report.low_rank[new_name] = asdict(approximation)
                if output_axis is not None and request.sparsity is not None:
                    prune, granularity = request.prune, request.granularity
                    tensor = sparse(
                        tensor, request.sparsity, prune=prune, granularity=granularity, output_axis=output_axis
                    )
                    report.zeros[new_name] = float((tensor == 0).double().mean())
                writer.add(new_name, tensor, plan.request.dtype)
            writer.finish()
            copy_companions(directory, unfinished)
            files = {"config.json": plan.config, FILE_NAME: report.to_dict()}
            texts = {name: json.dumps(value, indent=2) + "\n" for name, value in files.items()}
            write_files(texts, unfinished, force=True)
            write_files({CARD_FILE: _card(report, teacher, unfinished)}, unfinished, force=True)
    return report


def student_scores(plan: StudentPlan, directory: Path, tensors: Mapping[str, StoredTensor]) -> Scores:
    """Return the importance of channels and heads by the criterion that the plan's request names."""
    family, stack, widths = plan.family, plan.stack, plan.teacher_widths
    assert family is not None and stack is not None and widths is not None
    if plan.request.importance == "magnitude":
        tied = not any(name.endswith(("lm_head.weight", "decoder.weight")) for name in tensors)
        return magnitude_scores(each_tensor(tensors), family, stack, widths, tied=tied)
    model, batches = teacher_with_batches(directory, plan.source, plan.request.text)
    return activation_scores(model, batches, family, stack, widths)


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """Approximation of a matrix."""

    rank: int
    """Singular values kept."""
    full_rank: int
    energy: float
    """Σ σ² of the kept singular values over Σ σ² of all; 1 for a matrix of zeros."""


def low_rank(
    weight_MN: torch.Tensor, *, rank: int | None = None, energy: float | None = None
) -> tuple[torch.Tensor, LowRank]:
    """Return the nearest matrix of a rank, in the Frobenius norm, and what it keeps.

    W = U Σ Vᵀ, truncated after `rank` singular values, or after the fewest whose squares are `energy` of all (Eckart
    and Young 1936). The result has the dtype of `weight_MN`; a matrix that keeps its full rank is returned unchanged.
    """
    import torch

    assert (rank is None) != (energy is None), "pass a rank or an energy"
    left_MK, values_K, right_KN = torch.linalg.svd(weight_MN.float(), full_matrices=False)
    squares_K = values_K.double().square()
    total = float(squares_K.sum())
    full_rank = len(values_K)
    if rank is None:
        # Sums in fp64 end a little below the total that an energy of 1 requires.
        reached_K = squares_K.cumsum(0) >= min(float(energy or 0), 1.0) * total * (1 - 1e-12)
        rank = int(reached_K.int().argmax()) + 1
    rank = min(rank, full_rank)
    product_MN = (left_MK[:, :rank] * values_K[:rank]) @ right_KN[:rank]
    kept_energy = float(squares_K[:rank].sum()) / total if total else 1.0
    approximation = LowRank(rank=rank, full_rank=full_rank, energy=kept_energy)
    return (weight_MN if rank == full_rank else product_MN.to(weight_MN.dtype)), approximation


def sparse(
    weight: torch.Tensor, sparsity: float, *, prune: Prune, granularity: Granularity, output_axis: int = 0
) -> torch.Tensor:
    """Return a copy of a matrix with round(`sparsity` · n) zeros, where n counts its weights or its rows.

    ``unstructured`` zeroes the smallest |w| of the matrix. ``magnitude`` does not change the other weights; ``l1`` also
    shrinks them by the threshold, sign(w) · (|w| - λ), which minimises ½ ‖W' - W‖² + λ ‖W'‖₁ (the step that training
    with an L1 penalty takes), where λ is the largest |w| that becomes zero.
    ``row`` zeroes the rows (of one output, along `output_axis`) with the smallest L2 norm (``magnitude``) or L1 norm
    (``l1``).
    """
    if granularity == "row":
        norms = weight.float().norm(p=1 if prune == "l1" else 2, dim=1 - output_axis)
        rows = norms.topk(round(sparsity * len(norms)), largest=False).indices
        return weight.index_fill(output_axis, rows, 0)
    sizes = weight.abs().flatten()
    smallest = sizes.topk(round(sparsity * sizes.numel()), largest=False)
    if not len(smallest.indices):
        return weight.clone()
    pruned = weight.flatten().clone()
    if prune == "l1":
        pruned = pruned.sign() * (sizes - smallest.values.max())
    pruned[smallest.indices] = 0
    return pruned.reshape(weight.shape)


@dataclass(kw_only=True)
class _ShardWriter:
    directory: Path
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of the shard that is being filled."""
    pending_bytes: int = 0
    written: list[Path] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor, dtype: str | None) -> None:
        """Add a tensor, floating-point ones as `dtype`; a full shard goes to disk."""
        import torch

        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype=getattr(torch, dtype))
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > SHARD_BYTES:
            self._flush()
        # A slice would keep the whole tensor in memory.
        self.pending[name] = tensor.contiguous().clone()
        self.pending_bytes += size

    def _flush(self) -> None:
        self.written.append(self.directory / f"shard-{len(self.written)}")
        save_tensors(self.pending, self.written[-1])
        self.pending, self.pending_bytes = {}, 0

    def finish(self) -> None:
        """Write the last shard and rename all shards to the names that Transformers reads."""
        self._flush()
        name_shards(self.written)


def _card(report: StudentReport, teacher: str, directory: Path) -> str:
    """Return the student's `README.md` with the metadata that the Hub reads; `directory` has its other files."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    plan, request = report.plan, report.plan.request.model_dump()
    omitted = {"importance", "text"} | ({"prune", "granularity"} if request["sparsity"] is None else set())
    cuts = {name: value for name, value in request.items() if value is not None and name not in omitted}
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
