"""Recovers the exact coefficients of activation bytes from traces of small models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from shardwright.ds_configs.memory.activations import Adapter, Mode, feature, size_factors
from shardwright.ds_configs.specs.errors import ShardwrightError

from .families import (
    Shape,
    attention_kernel,
    build_inputs,
    build_subject,
    feature_names,
    sample_shapes,
)
from .run import Phases, run_training_step

Candidate = list[float]
# The difference between two depths is what layers keep, free of what lies around them.
SHALLOW_LAYERS, DEEP_LAYERS = 2, 4
# A wrong feature can solve as many equations as unknowns exactly; spare shapes must then fail to fit.
SPARE_SHAPES = 5


class TraceError(ShardwrightError):
    """A trace failed, or its bytes are not linear in the features."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The quantities of one shape, from a shallow and a deep model."""

    per_layer: int
    """Kept by each layer."""
    shallow: Phases
    """The two-layer run."""

    @property
    def outside(self) -> int:
        """Live around the layers when the head starts."""
        return self.shallow.head_start - SHALLOW_LAYERS * self.per_layer


def measure(
    family: str,
    shape: Shape,
    *,
    mode: Mode,
    adapter: Adapter,
    attention: str,
    checkpointing: bool,
    liger: bool = False,
) -> Measured:
    """Runs the model with two and with four layers."""
    runs = []
    for num_layers in (SHALLOW_LAYERS, DEEP_LAYERS):
        subject = build_subject(
            family,
            replace(shape.dimensions, num_layers=num_layers),
            mode=mode,
            adapter=adapter,
            lora_rank=shape.lora_rank,
            checkpointing=checkpointing,
            implementation="eager" if attention == "eager" else "sdpa",
            liger=liger,
        )
        inputs = build_inputs(shape, attention=attention)
        with attention_kernel(attention):
            runs.append(run_training_step(subject.model, inputs, mode=mode, layers=subject.layers, head=subject.head))
    shallow, deep = runs
    per_layer, rest = divmod(deep.head_start - shallow.head_start, DEEP_LAYERS - SHALLOW_LAYERS)
    if rest:
        raise TraceError(f"{family}: layers keep different numbers of bytes, so no per-layer figure exists")
    return Measured(per_layer=per_layer, shallow=shallow)


def derive_table(family: str, *, mode: Mode, adapter: Adapter, attention: str, liger: bool = False) -> dict[str, Any]:
    """Traces enough shapes to solve for every coefficient, with spare shapes that must fit exactly."""
    names, shapes, design = _equations(family, adapter, attention)

    def traced(checkpointing: bool) -> list[Measured]:
        return [
            measure(
                family,
                shape,
                mode=mode,
                adapter=adapter,
                attention=attention,
                checkpointing=checkpointing,
                liger=liger,
            )
            for shape in shapes
        ]

    def solved(name: str, rows: Sequence[Sequence[int]]) -> list[Candidate]:
        return solve(design, rows, names, f"{family} {mode} {adapter} {attention} {name}")

    plain, checkpointed = traced(False), traced(True)
    runs = [case.shallow for case in plain]
    copies = {run.weight_copy_bytes > 0 for run in runs}
    return {
        "features": names,
        "saved_per_layer": solved("saved", [[case.per_layer] for case in plain]),
        "checkpointed_per_layer": solved("checkpointed", [[case.per_layer] for case in checkpointed]),
        # Checkpointing keeps position numbers and the mask for its recomputation; both cases are candidates.
        "outside_layers": solved(
            "outside", [[case.outside for case in pair] for pair in zip(plain, checkpointed, strict=True)]
        ),
        "backward_transient": solved("backward", [above_head(run, run.layer_backward) for run in runs]),
        "recompute_backward_transient": solved(
            "recompute", [above_head(case.shallow, case.shallow.layer_backward) for case in checkpointed]
        ),
        "forward_transient": solved("forward", [case.shallow.layer_forward for case in checkpointed]),
        "loss_forward_peak": solved("loss forward", [above_head(run, run.loss_forward) for run in runs]),
        "loss_backward_peak": solved("loss backward", [above_head(run, run.loss_backward) for run in runs]),
        "weight_copy_bytes_per_parameter": 2 if mode == "bf16_autocast" and copies == {True} else 0,
    }


def _equations(family: str, adapter: Adapter, attention: str) -> tuple[list[str], list[Shape], NDArray[np.int64]]:
    """Return the features, shapes that determine their coefficients, and the features' values in each shape."""
    names = feature_names(family, adapter, attention)
    shapes = sample_shapes(family, len(names) + SPARE_SHAPES, adapter=adapter)
    values = [
        size_factors(
            shape.dimensions,
            micro_batch_size=shape.micro_batch_size,
            seq_len_tokens=shape.seq_len_tokens,
            lora_rank=shape.lora_rank,
        )
        for shape in shapes
    ]
    return names, shapes, np.array([[feature(name, factors) for name in names] for factors in values], dtype=np.int64)


def above_head(run: Phases, live: Sequence[int]) -> list[int]:
    """Live bytes beyond those live when the output head starts."""
    return [sample - run.head_start for sample in live]


def solve(design: NDArray[np.int64], rows: Sequence[Sequence[int]], names: Sequence[str], what: str) -> list[Candidate]:
    """Solves `design @ coefficients = rows` for every column and keeps the columns that can be the largest.

    Every operator is one column, since all shapes run the same operators; the largest over columns is then exact for
    any shape, where a fit of the maximum itself would not be linear.

    Raises:
        TraceError: shapes ran different operators, or a coefficient is not a multiple of a quarter byte.
    """
    if len({len(row) for row in rows}) != 1:
        raise TraceError(f"{what}: shapes run different numbers of operators")
    measured = np.array(rows, dtype=np.int64)
    scale = design.max(axis=0).astype(np.float64)
    solution, _, rank, _ = np.linalg.lstsq(design / scale, measured.astype(np.float64), rcond=None)
    if rank < design.shape[1]:
        raise TraceError(f"{what}: the traced shapes do not determine all {design.shape[1]} coefficients")
    quarters = np.rint(4 * solution / scale[:, None]).astype(np.int64)
    residual = np.abs(design @ quarters - 4 * measured).max()
    if residual:
        raise TraceError(f"{what}: not linear in {', '.join(names)}; residual {residual / 4} bytes")
    return undominated(quarters.T)


def undominated(quarters: NDArray[np.int64]) -> list[Candidate]:
    """Return the rows of quarter bytes, in bytes, without those that another row is at least equal to everywhere."""
    unique = np.unique(quarters, axis=0)
    kept = []
    for number, row in enumerate(unique):
        others = np.delete(unique, number, axis=0)
        if not (others >= row).all(axis=1).any():
            kept.append(row)
    return [[_plain(value) for value in row] for row in kept]


def _plain(quarters: np.int64) -> float:
    whole, part = divmod(int(quarters), 4)
    return whole if part == 0 else int(quarters) / 4
