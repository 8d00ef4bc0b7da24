"""The simplest sum of products of sizes that explains a number in every sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, combinations_with_replacement
from typing import Any

import numpy as np


def monomials(tables: Sequence[Mapping[str, int]]) -> tuple[list[str], Any]:
    """Return products and quotients of sizes that vary, simplest first, with their values by sample."""
    # All layers can be of one type.
    names = sorted({name for table in tables for name in table}, key=lambda name: ("=" in name, name))
    values = {name: np.array([table.get(name, 0) for table in tables], dtype=np.int64) for name in names}
    varying = [name for name in names if len(set(values[name])) > 1]
    found = {"1": np.ones(len(tables), dtype=np.int64)} | {name: values[name] for name in varying}
    for one, other in combinations_with_replacement(varying, 2):
        found[f"{one}*{other}"] = values[one] * values[other]
    positive = [name for name in varying if values[name].min() > 0]
    if {"num_hidden_layers", "max_window_layers"} <= {*positive}:
        # Layers of Qwen without a window.
        layers = np.minimum(values["num_hidden_layers"], values["max_window_layers"])
        found["min num_hidden_layers//max_window_layers"] = layers
    for one in positive:
        # LFM2 rounds two thirds of its width up to a multiple of 256.
        for divisor in ("2", "3", "4", "6", "8", "16", "384"):
            found[f"{one}//{divisor}"] = values[one] // int(divisor)
            found[f"ceil {one}//{divisor}"] = -(-values[one] // int(divisor))
            found[f"round {one}//{divisor}"] = (values[one] + int(divisor) // 2) // int(divisor)
        for other in positive:
            if one != other:
                found[f"{one}//{other}"] = values[one] // values[other]
    for patch in [name for name in varying if name.endswith(("patch_size", "merge_size", "scale_factor"))]:
        # Rotary tables of images have two quarters of a head for each patch.
        for name in [*varying, *(quarter for quarter in found if _is_quarter(quarter))]:
            found[f"{patch}*{patch}*{name}"] = values[patch] ** 2 * found[name]
    for quotient in [name for name in found if name.startswith("hidden_size//") and not name[-1].isdigit()]:
        for name in varying:
            found[f"{quotient}*{name}"] = found[quotient] * values[name]
    return list(found), np.array(list(found.values())).reshape(len(found), len(tables))


def solved(target: list[int], names: list[str], points: Any) -> str | None:
    """Return the simplest expression that equals the target in every sample."""
    wanted = np.array(target, dtype=np.int64)
    if len(set(target)) == 1:
        return str(target[0])
    for offset in (0, 1, 2, 3, -1, -2, 4):
        rest = wanted - offset
        for name, point in zip(names, points, strict=True):
            factor = rest[0] // point[0] if point[0] else 0
            if 0 < abs(factor) <= 256 and np.array_equal(factor * point, rest):
                return _term(int(factor), name) + (f" + {offset}" if offset else "")
    return _two_terms(wanted, names, points)


def _two_terms(wanted: Any, names: list[str], points: Any) -> str | None:
    plain = [
        index for index, name in enumerate(names) if "//" not in name or "*" not in name or name.endswith("_heads//4")
    ]
    rows, rest = points[plain].astype(np.float64), wanted.astype(np.float64)
    squared = np.maximum((rows * rows).sum(axis=1), 1)
    for count in (2, 3):
        # Three terms are products of two, as widths of queries, keys and values are.
        products = [i for i, index in enumerate(plain) if "//" not in names[index]]
        for picked in combinations(range(len(plain)) if count == 2 else products[:250], count - 1):
            # The last term is the residual of the others' least squares, computed for all candidates together.
            q, _ = np.linalg.qr(rows[list(picked)].T)
            left = rest - q @ (q.T @ rest)
            others = rows - (rows @ q) @ q.T
            norms = np.maximum((others * others).sum(axis=1), 1e-9)
            misfit = (left * left).sum() - (others @ left) ** 2 / norms
            misfit = np.where(norms > 1e-6 * squared, misfit, np.inf)
            for best in np.argsort(misfit)[:4]:
                if misfit[best] > 1e-6 * (rest * rest).sum():
                    break
                chosen = [plain[i] for i in (*picked, best)]
                factors = np.rint(np.linalg.lstsq(points[chosen].T.astype(float), rest, rcond=None)[0]).astype(np.int64)
                if 0 not in factors and abs(factors).max() <= 64 and np.array_equal(factors @ points[chosen], wanted):
                    return " + ".join(_term(int(f), names[i]) for f, i in zip(factors, chosen, strict=True))
    return None


def _is_quarter(name: str) -> bool:
    return "*" not in name and name.endswith("_heads//4") and not name.startswith(("ceil ", "round "))


def _term(factor: int, name: str) -> str:
    return name if factor == 1 else f"{factor}*{name}"
