"""Fit of the step-time constants to the published tables: `python benchmarks/step_time_fit.py [--write]`.

One set for each accelerator generation, jointly over all of its tables; a table's weight grows slower than its rows,
and a soft loss keeps single slow runs from bending the rest. What the tables of a generation do not determine stays at
the value of the generation that it is `like`. `--write` renews `ds_configs/data/step_time.toml`.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from published_steps import HELD_OUT, PublishedStep, published_steps
from scipy.optimize import least_squares
from shardwright.ds_configs.step_time import model_work as micro_batch
from shardwright.ds_configs.step_time.estimate import estimate_step_time
from shardwright.ds_configs.step_time.rates import GpuConstants, constants_of, group_of

FILE = Path(__file__).parents[1] / "ds_configs" / "data" / "step_time.toml"

BOUNDS: Mapping[str, tuple[float, float]] = {
    "matrix_efficiency": (0.3, 0.88),
    "product_border": (16, 600),
    "product_depth": (16, 600),
    "backward_slowdown": (1.0, 1.3),
    "attention_efficiency": (0.1, 0.9),
    "memory_efficiency": (0.2, 0.92),
    "launch_seconds": (2e-6, 6e-5),
    "kernel_seconds": (5e-7, 3e-5),
    "link_efficiency": (0.2, 0.92),
    "network_efficiency": (0.2, 0.92),
    "link_latency_seconds": (1e-6, 8e-6),
    "network_latency_seconds": (2e-6, 2e-5),
    "synchronization_seconds": (1e-6, 5e-4),
    "overlap_slowdown": (0.03, 0.4),
    "host_exponent": (1.0, 12.0),
    "unaligned_efficiency": (0.1, 0.9),
}
"""What each constant can be on any machine: efficiencies below what vendors' own benchmarks reach."""

FITTED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ampere": ("A100-80GB", tuple(BOUNDS)),
    "hopper": (
        "H100-80GB",
        (
            "matrix_efficiency",
            "product_border",
            "attention_efficiency",
            "memory_efficiency",
            "kernel_seconds",
            "link_latency_seconds",
            "network_efficiency",
            "overlap_slowdown",
        ),
    ),
}
"""Generations, the accelerator of their tables, and which constants those determine."""

_THINNED = "vTrain single node"
"""1,440 rows of 24 layer times: every fourth says as much."""


def predictions(cases: Sequence[PublishedStep], constants: GpuConstants) -> np.ndarray:
    """Return the predicted seconds of all cases under some constants."""
    # Caches by constants: their hash ignores most fields, so that entries of earlier constants make lookups slow.
    for cache in (micro_batch.layer_passes, micro_batch.head_passes, micro_batch.device_of, group_of):
        cache.cache_clear()
    return np.array(
        [
            estimate_step_time(
                case.layout, case.model, case.hardware, case.job, software=case.software, constants=constants
            ).seconds
            for case in cases
        ]
    )


def slopes_of(cases: Sequence[PublishedStep], start: GpuConstants, names: Sequence[str]) -> np.ndarray:
    """Return how the logarithms of all predictions change with those of the named constants."""
    step = 0.02
    before = np.log(predictions(cases, start))
    after = [replace(start, **{name: getattr(start, name) * math.exp(step)}) for name in names]
    return np.stack([(np.log(predictions(cases, constants)) - before) / step for constants in after], axis=1)


def fit(
    cases: Sequence[PublishedStep],
    start: GpuConstants,
    names: Sequence[str],
    *,
    evaluations: int = 25,
    slopes: np.ndarray | None = None,
) -> GpuConstants:
    """Return the constants, those named fitted to the logarithms of the measured seconds.

    `slopes` are those at the start, if it is so near that they need not be computed again after each step.
    """
    bounds = {name: BOUNDS.get(name, (0.05, 1.0)) for name in names}
    rows = Counter(case.table for case in cases)
    weights = np.array([rows[case.table] ** -0.4 for case in cases])
    measured = np.log([case.seconds for case in cases])

    def constants(values: Sequence[float]) -> GpuConstants:
        return replace(start, **{name: math.exp(value) for name, value in zip(names, values, strict=True)})

    def residuals(values: Sequence[float]) -> np.ndarray:
        return weights * (np.log(predictions(cases, constants(values))) - measured)

    first = [min(max(getattr(start, name), low * 1.001), high * 0.999) for name, (low, high) in bounds.items()]
    found = least_squares(
        residuals,
        np.log(first),
        jac="2-point" if slopes is None else lambda values: weights[:, None] * slopes,
        bounds=tuple(np.log([bounds[name][side] for name in names]) for side in (0, 1)),
        loss="soft_l1",
        f_scale=0.1 * float(np.median(weights)),
        max_nfev=evaluations,
        diff_step=0.02,
    )
    return constants(found.x)


def cases_of(generation: str, cases: Sequence[PublishedStep]) -> list[PublishedStep]:
    """Return the cases of a generation's accelerators, those of the thinned table one in four."""
    family = FITTED[generation][0].split("-")[0]
    own = [case for case in cases if case.hardware.gpu.startswith(family) and case.table not in HELD_OUT]
    return [case for index, case in enumerate(own) if case.table != _THINNED or index % 4 == 0]


def spread(cases: Sequence[PublishedStep], constants: GpuConstants) -> float:
    """Return the relative error within which nine of ten measurements lie, each table weighing the same."""
    errors = np.abs(np.log(predictions(cases, constants)) - np.log([case.seconds for case in cases]))
    rows = Counter(case.table for case in cases)
    order = np.argsort(errors)
    weights = np.array([1 / rows[case.table] for case in cases])[order]
    position = int(np.searchsorted(np.cumsum(weights), 0.9 * weights.sum()))
    return float(np.expm1(errors[order][min(position, len(order) - 1)]))


def main() -> None:
    """Fit every generation and print, or write, its constants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    cases = published_steps()
    text = FILE.read_text(encoding="utf-8")
    base: GpuConstants | None = None
    for generation, (gpu, names) in FITTED.items():
        own = cases_of(generation, cases)
        start = constants_of(gpu)
        if base is not None:
            # What is not fitted follows the generation that was fitted first.
            inherited = {name: getattr(base, name) for name in BOUNDS if name not in names}
            kept = _stated(text, generation)
            start = replace(start, **{name: value for name, value in inherited.items() if name not in kept})
        found = fit(own, start, names)
        base = base or found
        values = {name: getattr(found, name) for name in names} | {"error": spread(own, found)}
        text = _with_values(text, generation, values)
        print(generation, {name: float(f"{value:.4g}") for name, value in values.items()})
    if arguments.write:
        FILE.write_text(text, encoding="utf-8")


def _stated(text: str, generation: str) -> set[str]:
    section = text.split(f"[constants.{generation}]")[1].split("\n[")[0]
    return {line.split(" = ")[0] for line in section.splitlines() if " = " in line}


def _with_values(text: str, generation: str, values: Mapping[str, float]) -> str:
    head, _, rest = text.partition(f"[constants.{generation}]\n")
    section, separator, tail = rest.partition("\n[")
    lines = [line for line in section.splitlines() if line.split(" = ")[0] not in values]
    fitted = [f"{name} = {value:.4g}" for name, value in values.items()]
    return f"{head}[constants.{generation}]\n" + "\n".join([*lines, *fitted]) + separator + tail


if __name__ == "__main__":
    main()
