"""Make a smaller student from a teacher: fewer layers, narrower layers."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ...ds_configs.plan.output import disk_errors, output_errors, reserved, write_files
from ...ds_configs.shrink import keep_layers
from ...ds_configs.specs.errors import ConfigError, DoesNotFitError, RefusedInputError, UsageError
from ...ds_configs.specs.settings import Numbers, Paths, Settings, settings_of
from ...plugins.huggingface_hub import ModelSource, model_directory, read_model_source
from ...plugins.safetensors import SHARD_BYTES, appearing_directory, each_tensor, read_checkpoint, save_checkpoint
from ...plugins.transformers.loading import (
    check_config,
    check_weights,
    is_finite,
    refuse_code,
    refused_by_name,
    stored_errors,
)
from ...plugins.transformers.meta_model import build_meta_model
from ..data.models import StartingModel, copy_companions, load_tokenizer
from ..data.sources import pack, read_documents

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

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


_POSITION = re.compile(r"layer_(idx|index|id|number)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStack:
    """The list of layers of a model."""

    path: str
    """Name of the list, without the prefix of the base model."""
    count: int
    base_prefix: str
    """Attribute of the base model in models with a head; checkpoints may omit it."""

    def canonical(self, name: str) -> str:
        """Return a tensor's or module's name without the prefix of the base model."""
        return name.removeprefix(f"{self.base_prefix}.") if self.base_prefix else name

    def layer_of(self, name: str) -> int | None:
        match = re.match(rf"{re.escape(self.path)}\.(\d+)\.", self.canonical(name))
        return int(match[1]) if match else None

    def renamed(self, name: str, kept: Sequence[int]) -> str | None:
        """Return a tensor's name in the student, or `None` if its layer is removed."""
        layer = self.layer_of(name)
        if layer is None:
            return name
        if layer not in kept:
            return None
        start = len(name) - len(self.canonical(name)) + len(self.path) + 1
        return f"{name[:start]}{kept.index(layer)}{name[start + len(str(layer)) :]}"


def uniform_layers(total: int, kept: int) -> tuple[int, ...]:
    """Return `kept` of `total` layers, evenly spread: i ↦ round(i · (total - 1) / (kept - 1)), halves rounded up.

    The first and the last layer stay; a single layer is the first.

    >>> uniform_layers(12, 4)
    (0, 4, 7, 11)
    """
    assert 1 <= kept <= total
    if kept == 1:
        return (0,)
    return tuple((2 * index * (total - 1) + kept - 1) // (2 * (kept - 1)) for index in range(kept))


def layer_stack(model: PreTrainedModel) -> LayerStack:
    """Return the stack of layers of a Transformers model.

    Raises:
        UsageError: the model has none, several (an encoder and a decoder, text and vision), or nested ones.
    """
    from torch.nn import ModuleList

    config = model.config
    total: int = getattr(config, "num_hidden_layers", 0)
    lists = [name for name, module in model.named_modules() if isinstance(module, ModuleList) and len(module) == total]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1 or getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        rule = "layers and widths can be reduced only in models with one plain stack of layers"
        raise UsageError(ConfigError(where="teacher", value=type(model).__name__, rule=rule))
    prefix = model.base_model_prefix
    path = outer[0].removeprefix(f"{prefix}.") if prefix else outer[0]
    return LayerStack(path=path, count=total, base_prefix=prefix)


def unlike_layers(
    teacher: PreTrainedModel, student: PreTrainedModel, stack: LayerStack, kept: Sequence[int]
) -> list[ConfigError]:
    """Return an error for each layer of a student of the same widths that is built differently from the teacher's."""
    errors = []
    teacher_modules, student_modules = (
        {stack.canonical(name): module for name, module in model.named_modules()} for model in (teacher, student)
    )
    for new, old in enumerate(kept):
        before = _structure(teacher_modules[f"{stack.path}.{old}"])
        after = _structure(student_modules[f"{stack.path}.{new}"])
        if before != after:
            name = min(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            difference = f"{name}: {before.get(name)} and {after.get(name)}"
            rule = f"would become layer {new}, which this family builds differently ({difference})"
            fix = "keep full periods of the layer pattern with --keep-layers"
            errors.append(ConfigError(where="layer", value=old, rule=rule, fix=fix))
    return errors


def _structure(layer: torch.nn.Module) -> dict[str, object]:
    """Return the shapes of a layer and the plain attributes of its modules, except its position."""
    values: dict[str, object] = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    for name, module in layer.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str) and not key.startswith("_") and not _POSITION.search(key):
                values[f"{name}.{key}".lstrip(".")] = value
    return values


WIDTH_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types with RMS norms and gated MLPs, whose widths can be reduced."""
HIDDEN, INTERMEDIATE = "hidden_size", "intermediate_size"
Axes = tuple[str | None, ...]
"""The width that each axis of a tensor has; `None` if no reduced width changes the axis."""


def tensor_axes(teacher: Mapping[str, Any], widths: Mapping[str, int], stack: LayerStack) -> dict[str, Axes]:
    """Return the axes of every tensor of a teacher, by its name without the base model's prefix.

    Compares the shapes of the teacher's config with those of the config with one width reduced.
    """

    def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        state = build_meta_model(dict(config), source="student").state_dict()
        return {stack.canonical(name): tuple(tensor.shape) for name, tensor in state.items()}

    own = shapes(teacher)
    axes: dict[str, list[str | None]] = {name: [None] * len(shape) for name, shape in own.items()}
    for width in (HIDDEN, INTERMEDIATE):
        for name, shape in shapes({**teacher, "head_dim": widths["head_dim"], width: widths[width]}).items():
            for axis, size in enumerate(shape):
                if size != own[name][axis]:
                    axes[name][axis] = width
    return {name: tuple(meanings) for name, meanings in axes.items()}


class WidthCutter:
    """Cuts a teacher's tensors to the channels of largest importance, from its activations on token batches.

    A channel of the MLP: mean over tokens of |a| ‖w‖₂, the norm of what it adds to the residual stream, where w are the
    weights that read it. A channel of the residual stream: mean |x| after every norm, each divided by its mean over
    channels, summed (Muralidharan et al. 2024, arXiv 2407.14679, §2.2).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[dict[str, torch.Tensor]],
        stack: LayerStack,
        axes: Mapping[str, Axes],
        widths: Mapping[str, int],
    ) -> None:
        import torch

        self._stack, self._axes = stack, axes
        # Sums over tokens; dividing by their number would not change the order within a layer.
        channels: dict[int, Any] = defaultdict(float)
        outputs: dict[str, Any] = defaultdict(float)
        squares: dict[str, Any] = defaultdict(float)

        def add_channels(layer: int, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            activations_NI = inputs[0].flatten(0, -2)
            norms_I = module.weight.float().norm(dim=0)
            channels[layer] += (activations_NI.float().abs().sum(dim=0) * norms_I).double().cpu()

        def add_norm(
            name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output_BSH: torch.Tensor
        ) -> None:
            squares[name] += inputs[0].flatten(0, -2).float().square().sum(dim=0).double().cpu()
            outputs[name] += output_BSH.flatten(0, -2).float().abs().sum(dim=0).double().cpu()

        with ExitStack() as hooks, torch.no_grad():
            for name, module in model.named_modules():
                own = stack.canonical(name)
                layer, weight = stack.layer_of(own + "."), axes.get(f"{own}.weight", ())
                if layer is not None and weight[1:] == (INTERMEDIATE,):
                    handle = module.register_forward_pre_hook(partial(add_channels, layer))
                elif weight == (HIDDEN,):
                    handle = module.register_forward_hook(partial(add_norm, own))
                else:
                    continue
                hooks.callback(handle.remove)
            model.eval()
            for batch in batches:
                model(**batch)
        self._intermediate = {layer: _largest(sum_I, widths[INTERMEDIATE]) for layer, sum_I in channels.items()}
        self._gains: dict[str, float] = {}
        if outputs:
            importance_H = torch.stack([sum_H / sum_H.mean() for sum_H in outputs.values()]).sum(dim=0)
            self._hidden = _largest(importance_H, widths[HIDDEN])
            for name, sum_H in squares.items():
                before, after = float(sum_H.mean()), float(sum_H[self._hidden].mean())
                self._gains[f"{name}.weight"] = (after / before) ** 0.5 if before > 0 else 1.0

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the teacher with the student's widths.

        The gain of a norm is multiplied by the change of the root mean square that the norm divides by.
        """
        own = self._stack.canonical(name)
        for axis, width in enumerate(self._axes.get(own, ())):
            if width == HIDDEN:
                tensor = tensor.index_select(axis, self._hidden)
            elif width == INTERMEDIATE:
                layer = self._stack.layer_of(name)
                assert layer is not None, "only layers have these channels"
                tensor = tensor.index_select(axis, self._intermediate[layer])
        if own in self._gains:
            tensor = (tensor.double() * self._gains[own]).to(tensor.dtype)
        return tensor


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` largest scores, ascending; the lower index wins a tie."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


MAX_SAMPLE_TOKENS = 512
MAX_SAMPLES = 64
_SAMPLES_PER_BATCH = 4


def teacher_with_batches(
    directory: Path, source: ModelSource, text: tuple[Path, ...]
) -> tuple[PreTrainedModel, list[dict[str, torch.Tensor]]]:
    """Return the teacher in evaluation mode, on a GPU if there is one, and up to 64 samples of up to 512 tokens.

    The samples are spread over the text, which defaults to Python's help topics.

    Raises:
        UsageError: a text cannot be read, or is shorter than one sample.
    """
    import torch
    import transformers

    architecture = (source.config.get("architectures") or ["AutoModel"])[0]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = getattr(transformers, architecture)
    check_config(str(directory))
    with refused_by_name(str(directory)):
        model = loader.from_pretrained(str(directory), trust_remote_code=False, use_safetensors=True, dtype="auto")
    model = model.to(device).eval()
    positions = getattr(model.config, "max_position_embeddings", None) or MAX_SAMPLE_TOKENS
    tokenizer = load_tokenizer(StartingModel(model=str(directory)), model.config.vocab_size)
    samples = pack(read_documents(text), tokenizer, min(MAX_SAMPLE_TOKENS, positions))
    spread = samples[:: -(-len(samples) // MAX_SAMPLES)]
    rows_NT = torch.stack([sample["input_ids"] for sample in spread]).to(device)
    return model, [{"input_ids": part_BT} for part_BT in rows_NT.split(_SAMPLES_PER_BATCH)]


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
    errors = []
    if request.layers is not None and request.keep_layers is not None:
        errors.append(ConfigError(where="--keep-layers", rule="cannot be combined with --layers"))
    if request.text and not request.cuts_width:
        rule = "is only used to compare channels"
        errors.append(ConfigError(where="--text", rule=rule, fix="add --hidden or --intermediate"))
    if request.layers is None and request.keep_layers is None and not request.cuts_width:
        fix = "pass --layers, --hidden or --intermediate"
        errors.append(ConfigError(where="student", rule="no setting makes it smaller", fix=fix))
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
            hidden_size, heads = model.config.hidden_size, model.config.num_attention_heads
            for flag, size, limit in (
                ("--hidden", request.hidden_size, hidden_size),
                ("--intermediate", request.intermediate_size, model.config.intermediate_size),
            ):
                if size is not None and size > limit:
                    rule = f"the teacher has {limit}"
                    fix = "use a smaller value; a student cannot be larger than its teacher"
                    errors.append(ConfigError(where=flag, value=size, rule=rule, fix=fix))
            if request.hidden_size is not None and request.hidden_size % heads:
                fix = f"use {request.hidden_size // heads * heads or heads}"
                rule = f"must be a multiple of the {heads} query heads"
                errors.append(ConfigError(where="--hidden", value=request.hidden_size, rule=rule, fix=fix))
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
    # No dense type that weights are stored in has fewer than 16 bits.
    least_bytes = plan.student_parameters * (4 if plan.request.dtype == "float32" else 2)
    if errors := disk_errors(output_dir, needed_bytes=least_bytes):
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
