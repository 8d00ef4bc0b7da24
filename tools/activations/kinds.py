"""Derives activation coefficients for each kind of layer of a family, from traces of small models."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from shardwright.ds_configs.memory.activations import Adapter, Mode, feature, kind_table, layer_counts
from shardwright.ds_configs.specs.model import merged

from .fit import Candidate, TraceError, undominated
from .kind_families import KIND_FAMILIES, KindFamily
from .kind_models import KindShape, drawn_shapes, run_shape, shape_factors, specification
from .run import LayerPhases, Phases, TracedStep

_DRAWN_SHAPES, _TRACED_SHAPES = 48, 6
"""Shapes that show which features are independent, and those that run: many more than features in the largest sum."""
_MOST_UNKNOWN = 64
_MOST_FEATURES = 3
"""Features in the size of one tensor: a tower with a class has one more row for each image than patches."""
_COUNTS = frozenset(
    [
        *("token", "sequence", "sequence*patches", "sequence*max_source_positions", "sequence*vision_config.patches"),
        *("patch", "image_token"),
    ]
)
_IMAGE_FEATURES = frozenset(["image", "patch", "image_token"])
_FEW_BYTES = 128
"""Size of a tensor, such as the numbers of an image's rows, without which a row is an upper bound."""
_OF_SCORES = frozenset(["position*position", "token*position", "token*position*attention_heads"])
_FURTHER_LAYERS = 2
"""Layers of the deep models besides those of the shallow ones."""
_ADAPTED_EXPERTS = ("experts", "hidden_size", "experts*hidden_size", "experts*expert_intermediate_size")


Quarters = NDArray[np.int64]
"""Quarter bytes for each unit of each feature, and tensors whose sizes are no sums of features."""


@dataclass(frozen=True, kw_only=True)
class _Traced:
    """Coefficients of one kind of run."""

    per_layer: Mapping[str, Quarters]
    shallow: Phases
    layers: dict[str, list[LayerPhases]]
    """Layers of each kind in the shallow model, in the order in which they run."""

    @property
    def outside(self) -> Quarters:
        kept = [self.per_layer[kind] * len(layers) for kind, layers in self.layers.items()]
        difference: Quarters = self.shallow.head_start - sum(kept)
        return difference


def _traced(
    architecture: str,
    shapes: Sequence[KindShape],
    kinds: Sequence[str],
    solver: _Solver,
    known: Mapping[str, Quarters] | None,
    **how: Any,
) -> _Traced:
    """Run shallow models, and deep ones too if what layers keep is not `known`."""
    family = KIND_FAMILIES[architecture]
    shallow = dict.fromkeys(family.kinds, family.shallow_layers)

    def run(depths: Mapping[str, int]) -> Phases:
        return solver.phases([run_shape(architecture, shape, depths, whole=False, **how) for shape in shapes])

    base, per_layer = run(shallow), dict(known or {})
    for kind in [] if known else kinds:
        deep = run(shallow | {kind: family.shallow_layers + _FURTHER_LAYERS})
        per_layer[kind], rest = divmod(deep.head_start - base.head_start, _FURTHER_LAYERS)
        if np.any(rest):
            raise TraceError(f"{architecture}: layers of kind {kind} keep different numbers of bytes")
    each, turns = len(base.by_layer) // len(kinds), len(family.text_kinds)
    of_tower = len(kinds) - turns
    by_kind = {
        kind: base.by_layer[of_tower * each + number - of_tower :: turns]
        if family.interleaved and number >= of_tower
        else base.by_layer[number * each : (number + 1) * each]
        for number, kind in enumerate(kinds)
    }
    return _Traced(per_layer=per_layer, shallow=base, layers=by_kind)


class _Solver:
    """Finds the coefficients of each tensor's size from the same tensor in several shapes."""

    def __init__(self, names: Sequence[str], rows: Sequence[Mapping[str, int]], what: str) -> None:
        self.names, self.what = names, what
        self._design = np.array([[row[name] for name in names] for row in rows], dtype=np.int64)
        self._known: dict[tuple[int, ...], Quarters] = {}
        self._unknown: list[tuple[int, ...]] = []
        scaled = self._design.astype(np.float64)
        self._sums = []
        for count in range(1, _MOST_FEATURES + 1):
            chosen = np.array(list(combinations(range(len(names)), count)))
            self._sums.append((chosen, np.linalg.pinv(scaled[:, chosen].transpose(1, 0, 2), rcond=1e-12)))

    def phases(self, steps: Sequence[TracedStep]) -> Phases:
        """Return the coefficients of live bytes by phase.

        An activation is shaped like a weight in a few shapes, and a gradient in all.

        Raises:
            TraceError: shapes ran different operators.
        """
        weight_shaped = frozenset.intersection(*(step.weight_shaped for step in steps))
        ignored = weight_shaped | steps[0].gradients
        orders = [
            # Autocast frees its copies of weights in any order.
            [(number, value > 0) for number, value in step.recording.steps if number not in ignored]
            for step in steps
        ]
        if any(order != orders[0] for order in orders):
            raise TraceError(f"{self.what}: shapes run different operators")
        zero = np.zeros(len(self.names) + _MOST_UNKNOWN, dtype=np.int64)
        sizes = [
            zero if number in ignored else self._coefficients(each)
            for number, each in enumerate(zip(*(step.recording.bytes for step in steps), strict=True))
        ]
        return steps[0].phases(weight_shaped, sizes)

    def _coefficients(self, sizes: tuple[int, ...]) -> Quarters:
        if sizes in self._known:
            return self._known[sizes]
        found = np.zeros(len(self.names) + _MOST_UNKNOWN, dtype=np.int64)
        quarters = 4 * np.array(sizes, dtype=np.int64)
        for chosen, inverses in self._sums:
            solutions = np.rint(inverses @ quarters).astype(np.int64)
            exact = (np.einsum("skc,sc->sk", self._design[:, chosen].transpose(1, 0, 2), solutions) == quarters).all(1)
            if exact.any():
                break
        if exact.sum() == 1:
            (number,) = np.flatnonzero(exact)
            found[chosen[number]] = solutions[number]
        else:
            # Most such tensors are freed before a moment that counts.
            found[len(self.names) + len(self._unknown)] = 1
            self._unknown.append(sizes)
        self._known[sizes] = found
        return found

    def rows(self, quarters: Sequence[Quarters]) -> list[Candidate]:
        """Return the largest rows in bytes.

        Raises:
            TraceError: the size of a tensor that they contain is not a sum of few features.
        """
        if not quarters:
            return []
        rows = np.array([np.broadcast_to(row, len(self.names) + _MOST_UNKNOWN) for row in quarters])
        unknown = rows[:, len(self.names) :]
        for number in np.flatnonzero(unknown.any(0)):
            if max(self._unknown[number]) <= _FEW_BYTES and (unknown[:, number] <= 0).all():
                continue
            raise TraceError(
                f"{self.what}: a tensor of {self._unknown[number]} bytes is no sum of few of {', '.join(self.names)}"
            )
        return undominated(rows[:, : len(self.names)])


def candidate_features(family: KindFamily, adapter: Adapter, attention: str) -> list[str]:
    """Return the names of all features that the family's bytes may depend on."""
    names = [*family.more, *(f"token*{width}" for width in family.widths)]
    if family.image and attention == "fused":
        names = [name for name in names if name not in _OF_SCORES]
    if adapter != "none":
        names += [f"{name}*lora_rank" for name in names if name in _COUNTS]
        names += [f"{name}*lora_rank" for name in _ADAPTED_EXPERTS if "experts" in names]
    return list(dict.fromkeys(names))


def independent_features(names: Sequence[str], rows: Sequence[Mapping[str, int]]) -> list[str]:
    """Return features of which none is a sum of others in every shape, the first ones kept."""
    kept: list[str] = []
    for name in names:
        columns = np.array([[row[other] for other in (*kept, name)] for row in rows], dtype=np.float64)
        scale = np.abs(columns).max(axis=0)
        if scale[-1] and np.linalg.matrix_rank(columns / scale, tol=1e-9 * len(rows)) == len(kept) + 1:
            kept.append(name)
    return kept


def _has_multiples(names: Sequence[str], rows: Sequence[Mapping[str, int]]) -> bool:
    columns = np.array([[row[name] for row in rows] for name in names], dtype=np.float64)
    columns /= np.linalg.norm(columns, axis=1, keepdims=True)
    return bool((np.triu(columns @ columns.T, 1) > 1 - 1e-9).any())


@cache
def _drawn(architecture: str, adapter: Adapter) -> tuple[list[KindShape], list[dict[str, int]]]:
    shapes = drawn_shapes(architecture, _DRAWN_SHAPES, adapter=adapter)
    return shapes, [shape_factors(architecture, shape) for shape in shapes]


def derive_kind_table(
    architecture: str,
    *,
    mode: Mode,
    adapter: Adapter,
    attention: str,
    trained: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trace enough shapes to solve for every coefficient, with spare shapes that must come out to the byte.

    Args:
        trained: Table of a model whose tower is trained: with a frozen one, layers of the language model keep the same.
        base: Table of a class with the same layers.

    Raises:
        TraceError: the bytes are not linear in the features.
    """
    family, how = KIND_FAMILIES[architecture], {"mode": mode, "adapter": adapter, "attention": attention}
    (shapes, factors), kinds = _drawn(architecture, adapter), list(family.kinds)
    if trained and adapter == "frozen_tower":
        # A frozen tower saves nothing, but may keep the inputs of its layers with checkpointing.
        kept = {"saved_per_layer": {kind: trained["saved_per_layer"][kind] for kind in family.text_kinds}}
        table = _table(architecture, shapes, factors, kinds, how, like={"features": trained["features"], **kept})
        if set(table["features"]) <= set(trained["features"]):
            return {"based_on": "none"} | differing(with_features(table, trained["features"]), trained)
        return table
    table = _table(architecture, shapes, factors, kinds, how, like=base)
    if not family.image:
        return table
    texts = [replace(shape, images=()) for shape in shapes]
    of_texts = [known | text.factors for known, text in zip(factors, texts, strict=True)]
    text = _table(architecture, texts, of_texts, family.text_kinds, how, like=table)
    table = with_features(table, list(dict.fromkeys([*table["features"], *text["features"]])))
    return table | {"without_images": differing(with_features(text, table["features"]), _of_text(table))}


def _of_text(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a table comes to without images, whose features are zero then."""
    of_images = {place for place, name in enumerate(table["features"]) if _IMAGE_FEATURES & set(name.split("*"))}

    def without(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: without(rows) for name, rows in value.items()}
        if not isinstance(value, list):
            return value
        rows = [[0 if place in of_images else int(4 * cell) for place, cell in enumerate(row)] for row in value]
        return undominated(np.array(rows)) if rows else rows

    return {name: value if name == "features" else without(value) for name, value in table.items()}


def with_features(table: Mapping[str, Any], features: Sequence[str]) -> dict[str, Any]:
    """Return a table with its columns in the order of `features`, of which others are zero.

    Raises:
        ValueError: a feature of the table is missing.
    """
    if missing := set(table["features"]) - set(features):
        raise ValueError(f"features {', '.join(sorted(missing))} are missing")
    places = {name: place for place, name in enumerate(table["features"])}

    def reordered(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: reordered(rows) for name, rows in value.items()}
        if not isinstance(value, list):
            return value
        return [
            [row[places[name]] if places.get(name, len(row)) < len(row) else 0 for name in features] for row in value
        ]

    return {name: list(features) if name == "features" else reordered(value) for name, value in table.items()}


def differing(table: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that makes `table` of `base`, which keeps what `table` has no value of."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            if difference := differing(value, base.get(name, {})):
                found[name] = difference
        elif name not in base or base[name] != value:
            found[name] = value
    return found


def _without_zeros(table: Mapping[str, Any]) -> dict[str, Any]:
    quantities = [value for name, value in table.items() if name != "features" and isinstance(value, Mapping | list)]
    rows = [
        row
        for value in quantities
        for rows in (value.values() if isinstance(value, Mapping) else [value])
        for row in rows
    ]
    used = [name for place, name in enumerate(table["features"]) if any(row[place] for row in rows)]
    places = [table["features"].index(name) for name in used]

    def kept(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: kept(rows) for name, rows in value.items()}
        return [[row[place] for place in places] for row in value] if isinstance(value, list) else value

    return {name: used if name == "features" else kept(value) for name, value in table.items()}


def _table(
    architecture: str,
    shapes: Sequence[KindShape],
    factors: Sequence[Mapping[str, int]],
    kinds: Sequence[str],
    how: Mapping[str, Any],
    *,
    like: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trace one table; with `like`, layers keep the same as in that table, and those of kinds without rows nothing."""
    family = KIND_FAMILIES[architecture]
    candidates = candidate_features(family, how["adapter"], how["attention"])
    rows = [{name: feature(name, each) for name in candidates} for each in factors]
    names = independent_features(candidates, rows)
    # Shapes in which no feature is a multiple of another.
    start = next(n for n in range(len(rows)) if not _has_multiples(names, rows[n : n + _TRACED_SHAPES]))
    shapes = shapes[start : start + _TRACED_SHAPES]
    solver = _Solver(names, rows[start : start + _TRACED_SHAPES], f"{architecture} {how}")

    def known(name: str) -> dict[str, Quarters] | None:
        if like is None or name not in like:
            return None
        found = {}
        for kind in kinds:
            found[kind] = np.zeros(len(names) + _MOST_UNKNOWN, dtype=np.int64)
            for row in like[name].get(kind, []):
                kept = dict(zip(like["features"], row, strict=False))
                found[kind][: len(names)] = [int(4 * kept.get(feature_name, 0)) for feature_name in names]
        return found

    plain, checkpointed = (
        _traced(architecture, shapes, kinds, solver, known(name), checkpointing=checkpointing, **how)
        for name, checkpointing in (("saved_per_layer", False), ("checkpointed_per_layer", True))
    )
    runs, last = (plain.shallow, checkpointed.shallow), kinds[-1]

    def backward(traced: _Traced, kind: str) -> list[Candidate]:
        # The last layer may have no gradient, as no layer of a frozen tower has.
        layer = next((layer for layer in reversed(traced.layers[kind]) if layer.backward), None)
        if layer is None:
            return []
        # The last layer's is counted from the head's start, as everything else; the others' from their own end.
        start = traced.shallow.head_start if kind == last else layer.end
        return solver.rows([live - start for live in layer.backward])

    table = {
        "features": names,
        "saved_per_layer": {kind: solver.rows([plain.per_layer[kind]]) for kind in kinds},
        "checkpointed_per_layer": {kind: solver.rows([checkpointed.per_layer[kind]]) for kind in kinds},
        # Layers that differ from others of their kind, as the first one may, and those of a tower that nothing reads,
        # or that no gradient reaches, count as outside. Checkpointing keeps position numbers and masks there.
        "outside_layers": solver.rows([plain.outside]),
        "checkpointed_outside_layers": solver.rows([checkpointed.outside]),
        "backward_transient": {kind: backward(plain, kind) for kind in kinds},
        "recompute_backward_transient": {kind: backward(checkpointed, kind) for kind in kinds},
        "forward_transient": {kind: solver.rows(checkpointed.layers[kind][-1].forward) for kind in kinds},
        # A cache of keys and values that dies before the backward pass exists without checkpointing only.
        "loss_forward_peak": solver.rows([live - run.head_start for run in runs for live in run.loss_forward]),
        "loss_backward_peak": solver.rows([live - run.head_start for run in runs for live in run.loss_backward]),
    }
    copies = how["mode"] == "bf16_autocast" and plain.shallow.weight_copy_bytes > 0
    return _without_zeros(table) | {"weight_copy_bytes_per_parameter": 2 if copies else 0}


def kind_table_names(family: KindFamily) -> list[tuple[Mode, Adapter, str]]:
    """Return the tables that a family has.

    Adapters have them in 16 bit with the first attention and with a mask, and take full training's elsewhere.
    """
    return [
        (mode, adapter, attention)
        for mode in get_args(Mode)
        for adapter in family.adapters
        for attention in family.attentions
        if (adapter in ("none", "frozen_tower") or (mode == "bf16" and attention in (family.attentions[0], "masked")))
        and (attention != "math" or mode == "fp32")
        # Models that read images have grouped heads, which in fp32 have the math kernel alone.
        and not (family.image and mode == "fp32" and attention == "fused" and "math" in family.attentions)
    ]


def derive_kind_family(architecture: str, families: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Trace one family, and yield what `kind_activations.json` holds of it whenever a table more is solved.

    Args:
        families: What the file holds; tables of the family are kept.

    Raises:
        TraceError: its bytes are not linear in its sizes.
    """
    family = KIND_FAMILIES[architecture]
    spec = specification(architecture, drawn_shapes(architecture, 1, adapter="none")[0])
    counts = layer_counts(spec, family.kinds)
    if wrong := {kind: count for kind, count in counts.items() if count != family.shallow_layers}:
        raise TraceError(f"{architecture}: layers by kind are {wrong}, {family.shallow_layers} were built of each")
    stated = dict(spec.settings)
    tables: dict[str, Any] = copy.deepcopy(families.get(architecture, {}).get("tables", {}))
    for mode, adapter, attention in kind_table_names(family):
        known = tables.setdefault(mode, {}).setdefault(adapter, {})
        if attention in known:
            continue
        base = kind_table(families, family.based_on, mode, adapter, attention)
        own = {"tables": tables} | ({"based_on": family.based_on} if family.based_on else {})
        trained = kind_table({**families, architecture: own}, architecture, mode, "none", attention)
        table = derive_kind_table(
            architecture,
            mode=mode,
            adapter=adapter,
            attention=attention,
            trained=trained,
            # Under autocast, what a layer keeps also depends on the type of what reads its output.
            base=None if mode == "bf16_autocast" else base,
        )
        if base is not None:
            table = merged(trained, table) if trained and "based_on" in table else table
            # Features of its own follow those of the base, whose rows are shorter.
            features = list(dict.fromkeys([*base["features"], *table["features"]]))
            aligned = with_features(base, features) | {"features": base["features"]}
            table = differing(with_features(table, features), aligned)
        known[attention] = table
        yield {
            **({"based_on": family.based_on} if family.based_on else {}),
            "settings": {name: stated[name] for name in family.settings if name in stated},
            "kinds": dict(family.kinds),
            "interleaved": family.interleaved,
            "tables": tables,
        }
