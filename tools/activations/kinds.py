"""Derives activation coefficients for each kind of layer of a family, from traces of small models."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from shardwright.ds_configs.memory.activations import (
    Adapter,
    Mode,
    feature,
    feature_factors,
    kind_table,
    layer_counts,
)

from .fit import DEEP_LAYERS, SHALLOW_LAYERS, SPARE_SHAPES, Candidate, TraceError, above_head, solve
from .kind_families import KIND_FAMILIES, KindFamily
from .kind_models import KindShape, drawn_shapes, run_shape, specification
from .run import Phases, TracedStep

_DRAWN_SHAPES = 64
_COUNTS = frozenset(
    ["token", "sequence", "sequence*patches", "sequence*max_source_positions", "sequence*vision_config.patches"]
)
_ADAPTED_EXPERTS = ("experts", "hidden_size", "experts*hidden_size", "experts*expert_intermediate_size")


@dataclass(frozen=True, kw_only=True)
class _Measured:
    per_layer: dict[str, int]
    shallow: Phases

    @property
    def outside(self) -> int:
        return self.shallow.head_start - SHALLOW_LAYERS * sum(self.per_layer.values())

    def last_layers(self, kinds: Sequence[str], *, interleaved: bool) -> dict[str, Any]:
        """The last layer of each kind, in the order in which layers run."""
        layers = self.shallow.by_layer
        places = {
            kind: len(layers) - len(kinds) + number if interleaved else SHALLOW_LAYERS * (number + 1) - 1
            for number, kind in enumerate(kinds)
        }
        return {kind: layers[place] for kind, place in places.items()}


def _measure(architecture: str, shapes: Sequence[KindShape], **how: Any) -> list[_Measured]:
    kinds = KIND_FAMILIES[architecture].kinds
    shallow = dict.fromkeys(kinds, SHALLOW_LAYERS)
    base = _phases([run_shape(architecture, shape, shallow, **how) for shape in shapes], architecture)
    per_layer: list[dict[str, int]] = [{} for _ in shapes]
    for kind in kinds:
        depths = shallow | {kind: DEEP_LAYERS}
        deep = _phases([run_shape(architecture, shape, depths, **how) for shape in shapes], architecture)
        for found, less, more in zip(per_layer, base, deep, strict=True):
            found[kind], rest = divmod(more.head_start - less.head_start, DEEP_LAYERS - SHALLOW_LAYERS)
            if rest:
                raise TraceError(f"{architecture}: layers of kind {kind} keep different numbers of bytes")
    return [_Measured(per_layer=found, shallow=less) for found, less in zip(per_layer, base, strict=True)]


def _phases(steps: Sequence[TracedStep], what: str) -> list[Phases]:
    """Cut steps of one model in many sizes: an activation looks like a weight in a few of them, a gradient in all."""
    if len({len(step.recording.shapes) for step in steps}) > 1:
        raise TraceError(f"{what}: shapes make different numbers of tensors")
    weight_shaped = frozenset.intersection(*(step.weight_shaped for step in steps))
    return [step.phases(weight_shaped) for step in steps]


def candidate_features(family: KindFamily, adapter: Adapter) -> list[str]:
    """Return the names of all features that the family's bytes may depend on."""
    names = [*family.more, *(f"token*{width}" for width in family.widths)]
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


def derive_kind_table(architecture: str, *, mode: Mode, adapter: Adapter, attention: str) -> dict[str, Any]:
    """Trace enough shapes to solve for every coefficient, with spare shapes that must come out to the byte.

    Raises:
        TraceError: the bytes are not linear in the features.
    """
    family = KIND_FAMILIES[architecture]
    shapes = drawn_shapes(architecture, _DRAWN_SHAPES, adapter=adapter)
    candidates = candidate_features(family, adapter)
    rows = []
    for shape in shapes:
        factors = feature_factors(
            specification(architecture, shape),
            micro_batch_size=shape.micro_batch_size,
            seq_len_tokens=shape.seq_len_tokens,
            lora_rank=shape.lora_rank,
        )
        rows.append({name: feature(name, factors) for name in candidates})
    names = independent_features(candidates, rows)
    count = len(names) + SPARE_SHAPES
    shapes, rows = shapes[:count], rows[:count]
    design = np.array([[row[name] for name in names] for row in rows], dtype=np.int64)
    how: dict[str, Any] = {"mode": mode, "adapter": adapter, "attention": attention}
    plain = _measure(architecture, shapes, checkpointing=False, **how)
    checkpointed = _measure(architecture, shapes, checkpointing=True, **how)
    return {"features": names, **_solved(family, design, names, plain, checkpointed, f"{architecture} {how}")} | {
        "weight_copy_bytes_per_parameter": 2
        if mode == "bf16_autocast" and all(case.shallow.weight_copy_bytes > 0 for case in plain)
        else 0
    }


def _solved(
    family: KindFamily,
    design: NDArray[np.int64],
    names: Sequence[str],
    plain: Sequence[_Measured],
    checkpointed: Sequence[_Measured],
    what: str,
) -> dict[str, Any]:
    kinds = list(family.kinds)
    last = kinds[-1]

    def solved(name: str, rows: Sequence[Sequence[int]]) -> list[Candidate]:
        return solve(design, rows, names, f"{what} {name}")

    def backward(case: _Measured, kind: str) -> list[int]:
        layer = case.last_layers(kinds, interleaved=family.interleaved)[kind]
        # The last layer's is counted from the head's start, as everything else; the others' from their own end.
        return [live - (case.shallow.head_start if kind == last else layer.end) for live in layer.backward]

    def forward(case: _Measured, kind: str) -> list[int]:
        return list(case.last_layers(kinds, interleaved=family.interleaved)[kind].forward)

    runs = [case.shallow for case in plain]
    pairs = list(zip(plain, checkpointed, strict=True))
    return {
        "saved_per_layer": {
            kind: solved(f"{kind} saved", [[case.per_layer[kind]] for case in plain]) for kind in kinds
        },
        "checkpointed_per_layer": {
            kind: solved(f"{kind} checkpointed", [[case.per_layer[kind]] for case in checkpointed]) for kind in kinds
        },
        # Checkpointing keeps position numbers and masks for its recomputation; both cases are candidates.
        "outside_layers": solved("outside", [[case.outside for case in pair] for pair in pairs]),
        "backward_transient": {
            kind: solved(f"{kind} backward", [backward(case, kind) for case in plain]) for kind in kinds
        },
        "recompute_backward_transient": {
            kind: solved(f"{kind} recompute", [backward(case, kind) for case in checkpointed]) for kind in kinds
        },
        "forward_transient": {
            kind: solved(f"{kind} forward", [forward(case, kind) for case in checkpointed]) for kind in kinds
        },
        "loss_forward_peak": solved("loss forward", [above_head(run, run.loss_forward) for run in runs]),
        "loss_kept": solved("loss kept", [[run.kept - run.head_start] for run in runs]),
        "loss_backward_peak": solved("loss backward", [above_head(run, run.loss_backward) for run in runs]),
    }


def kind_table_names(family: KindFamily) -> list[tuple[Mode, Adapter, str]]:
    """Return the tables that a family has: adapters have one in 16 bit, and take full training's elsewhere."""
    return [
        (mode, adapter, attention)
        for mode in get_args(Mode)
        for adapter in family.adapters
        for attention in family.attentions
        if (adapter == "none" or (mode == "bf16" and attention == family.attentions[0]))
        and (attention != "math" or mode == "fp32")
    ]


def beyond(table: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch that makes a table of another one; new features follow those of the other."""
    names = list(dict.fromkeys([*base["features"], *table["features"]]))

    def aligned(value: Any, features: Sequence[str]) -> Any:
        if isinstance(value, Mapping):
            return {kind: aligned(rows, features) for kind, rows in value.items()}
        if not isinstance(value, list):
            return value
        return [[dict(zip(features, row, strict=False)).get(name, 0) for name in names] for row in value]

    patch: dict[str, Any] = {} if names == base["features"] else {"features": names}
    for name in table.keys() - {"features"}:
        value = aligned(table[name], table["features"])
        if value != aligned(base[name], base["features"]):
            patch[name] = value
    return {name: patch[name] for name in table if name in patch}


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
    if wrong := {kind: count for kind, count in counts.items() if count != SHALLOW_LAYERS}:
        raise TraceError(f"{architecture}: layers by kind are {wrong}, {SHALLOW_LAYERS} were built of each")
    stated = dict(spec.settings)
    tables: dict[str, Any] = copy.deepcopy(families.get(architecture, {}).get("tables", {}))
    for mode, adapter, attention in kind_table_names(family):
        known = tables.setdefault(mode, {}).setdefault(adapter, {})
        if attention in known:
            continue
        table = derive_kind_table(architecture, mode=mode, adapter=adapter, attention=attention)
        base = kind_table(families, family.based_on, mode, adapter, attention)
        known[attention] = table if base is None else beyond(table, base)
        yield {
            **({"based_on": family.based_on} if family.based_on else {}),
            "settings": {name: stated[name] for name in family.settings if name in stated},
            "kinds": dict(family.kinds),
            "interleaved": family.interleaved,
            "tables": tables,
        }
