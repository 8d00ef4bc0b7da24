"""Request for a smaller student, and every reason why a teacher cannot give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from ....ds_configs.specs.errors import Fault
from ....ds_configs.specs.settings import Numbers, Paths, Settings

Importance = Literal["magnitude", "activation"]
Prune = Literal["magnitude", "l1"]
Granularity = Literal["unstructured", "row"]
StoredDtype = Literal["float32", "bfloat16", "float16"]


class StudentRequest(Settings):
    """Sizes of a student; `None` leaves a size as the teacher has it."""

    group = "Student"

    layers: int | None = Field(None, description="Layers to keep, evenly spread; the first and the last stay")
    keep_layers: Numbers | None = Field(
        None, description="Numbers of the layers to keep, from 0, ascending, such as 0,3,7; instead of layers"
    )
    hidden_size: int | None = Field(None, alias="hidden", description="Width of the residual stream")
    intermediate_size: int | None = Field(None, alias="intermediate", description="Channels inside the MLP")
    heads: int | None = Field(None, description="Query heads of each layer")
    key_value_heads: int | None = Field(
        None,
        alias="kv_heads",
        description="Key/value heads of each layer. Default: as many query heads on each as the teacher has",
    )
    importance: Importance = Field(
        "magnitude", description="What decides which channels and heads stay: the weights, or what they do with a text"
    )
    text: Paths = Field((), description="Files that activations are measured on. Default: Python's help")
    low_rank: int | None = Field(
        None, description="Rank of every weight matrix inside the layers; the dense product is stored"
    )
    low_rank_energy: float | None = Field(
        None, description="Share of the squared singular values that every matrix keeps, instead of a rank"
    )
    sparsity: float | None = Field(
        None, description="Share of the weights, or rows, of every matrix inside the layers that become zero"
    )
    prune: Prune = Field(
        "magnitude", description="magnitude leaves what stays as it is; l1 shrinks it as an L1 penalty does"
    )
    granularity: Granularity = Field(
        "unstructured", description="unstructured for single weights, row for whole outputs"
    )
    dtype: StoredDtype | None = Field(None, description="Stored type. Default: that of each tensor")

    @property
    def cuts_width(self) -> bool:
        """Whether any width is asked for."""
        sizes = (self.hidden_size, self.intermediate_size, self.heads, self.key_value_heads)
        return any(size is not None for size in sizes)

    @property
    def cuts_layers(self) -> bool:
        """Whether layers are asked for."""
        return self.layers is not None or self.keep_layers is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Sizes that a layer has."""

    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Channels inside the MLP."""
    heads: int
    """Query heads."""
    key_value_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of one head; never changed."""


def request_faults(request: StudentRequest) -> list[Fault]:
    """Return what is wrong whatever the teacher is."""
    faults = []
    if request.layers is not None and request.keep_layers is not None:
        faults.append(Fault(where="--keep-layers", rule="cannot be given together with --layers"))
    if request.low_rank is not None and request.low_rank_energy is not None:
        faults.append(Fault(where="--low-rank", rule="cannot be given together with --low-rank-energy"))
    sizes = {
        "--layers": request.layers,
        "--hidden": request.hidden_size,
        "--intermediate": request.intermediate_size,
        "--heads": request.heads,
        "--kv-heads": request.key_value_heads,
        "--low-rank": request.low_rank,
    }
    faults += [
        Fault(where=name, value=n, rule="must be at least 1") for name, n in sizes.items() if n is not None and n < 1
    ]
    energy, sparsity = request.low_rank_energy, request.sparsity
    if energy is not None and not 0 < energy <= 1:
        faults.append(Fault(where="--low-rank-energy", value=energy, rule="must lie above 0 and at most at 1"))
    if sparsity is not None and not 0 < sparsity < 1:
        faults.append(Fault(where="--sparsity", value=sparsity, rule="must lie between 0 and 1"))
    if sparsity is None and (request.prune, request.granularity) != ("magnitude", "unstructured"):
        faults.append(Fault(where="--prune", rule="and --granularity say how zeros are chosen", fix="give --sparsity"))
    if request.text and not (request.importance == "activation" and request.cuts_width):
        fix = "add --importance activation and a width"
        faults.append(Fault(where="--text", rule="is read only to measure activations", fix=fix))
    wanted = (request.low_rank, energy, sparsity)
    if not request.cuts_layers and not request.cuts_width and all(value is None for value in wanted):
        fix = "give --layers, --hidden, --intermediate, --heads, --low-rank or --sparsity"
        faults.append(Fault(where="student", rule="nothing is asked for that makes it smaller", fix=fix))
    return faults


def layer_faults(request: StudentRequest, teacher_layers: int) -> list[Fault]:
    """Return what is wrong with the layers that are asked for."""
    limit = f"the teacher has {teacher_layers} layers"
    if request.layers is not None and request.layers > teacher_layers:
        return [Fault(where="--layers", value=request.layers, rule=limit, fix="ask for fewer")]
    kept = request.keep_layers
    if kept is None:
        return []
    faults = [
        Fault(where="--keep-layers", value=layer, rule=f"{limit}, numbered from 0 to {teacher_layers - 1}")
        for layer in kept
        if not 0 <= layer < teacher_layers
    ]
    if not kept or list(kept) != sorted(set(kept)):
        faults.append(Fault(where="--keep-layers", value=kept, rule="must be one or more ascending numbers, each once"))
    return faults


def student_widths(request: StudentRequest, teacher: Widths, *, coupled: bool) -> tuple[Widths, list[Fault]]:
    """Return the student's widths and what is wrong with them.

    Where only one of heads and key/value heads is given, each key/value head keeps its number of query heads. With
    `coupled`, hidden size = heads · head_dim must hold, and the one that is not given follows from the other.
    """
    faults = _beyond(request, teacher)
    group = teacher.heads // teacher.key_value_heads
    heads, key_value_heads, hidden_size = request.heads, request.key_value_heads, request.hidden_size
    if coupled and heads is None and key_value_heads is None and hidden_size is not None:
        heads = hidden_size // teacher.head_dim
    if heads is None:
        heads = teacher.heads if key_value_heads is None else key_value_heads * group
    if key_value_heads is None:
        key_value_heads = heads // group
        if heads % group:
            rule = f"the teacher has {group} query heads for each key/value head, which {heads} is no multiple of"
            fix = f"take a multiple of {group}, or give --kv-heads"
            faults.append(Fault(where="--heads", value=heads, rule=rule, fix=fix))
    elif heads % max(1, key_value_heads):
        rule = f"must divide --heads = {heads}"
        faults.append(Fault(where="--kv-heads", value=key_value_heads, rule=rule))
    elif heads // max(1, key_value_heads) > group:
        rule = f"{heads} query heads on it are {heads // key_value_heads} for each, the teacher has {group}"
        faults.append(Fault(where="--kv-heads", value=key_value_heads, rule=rule, fix="ask for fewer query heads"))
    if coupled and hidden_size is None:
        hidden_size = heads * teacher.head_dim
    hidden_size = teacher.hidden_size if hidden_size is None else hidden_size
    if coupled and hidden_size != heads * teacher.head_dim:
        rule = f"must be the number of heads times the head width, {heads} · {teacher.head_dim}, in this family"
        fix = f"give --hidden {max(1, hidden_size // teacher.head_dim) * teacher.head_dim} alone: heads follow"
        faults.append(Fault(where="--hidden", value=hidden_size, rule=rule, fix=fix))
    elif heads and hidden_size % heads and not any(fault.where in ("--heads", "--kv-heads") for fault in faults):
        rule = f"must be a multiple of the {heads} query heads"
        faults.append(Fault(where="--hidden", value=hidden_size, rule=rule, fix=f"take {hidden_size // heads * heads}"))
    student = Widths(
        hidden_size=hidden_size,
        intermediate_size=request.intermediate_size or teacher.intermediate_size,
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=teacher.head_dim,
    )
    return student, faults


def _beyond(request: StudentRequest, teacher: Widths) -> list[Fault]:
    pairs: Sequence[tuple[str, int | None, int]] = (
        ("--hidden", request.hidden_size, teacher.hidden_size),
        ("--intermediate", request.intermediate_size, teacher.intermediate_size),
        ("--heads", request.heads, teacher.heads),
        ("--kv-heads", request.key_value_heads, teacher.key_value_heads),
    )
    return [
        Fault(where=name, value=asked, rule=f"the teacher has {has}", fix="a student is never larger")
        for name, asked, has in pairs
        if asked is not None and asked > has
    ]
