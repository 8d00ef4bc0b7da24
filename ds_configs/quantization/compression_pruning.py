"""What takes the place of the pruning and of the layer reduction in DeepSpeed's `compression_training`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .compression_reading import (
    Replacement,
    count_of,
    groups_of,
    is_count,
    is_enabled,
    mapping_of,
    patterns_of,
    share_of,
)


def replace_pruning(found: Replacement, block: Mapping[str, Any]) -> None:
    """Take over pruning of weights, rows, heads and channels."""
    sparse = mapping_of(block.get("sparse_pruning"))
    shared = mapping_of(sparse.get("shared_parameters"))
    if is_enabled(shared):
        _sparse(found, sparse, shared)
    for where, replacement in (("row_pruning", _rows), ("head_pruning", _heads)):
        part = mapping_of(block.get(where))
        if is_enabled(mapping_of(part.get("shared_parameters"))):
            for name, params, _ in groups_of(found, where, part):
                kept = share_of(params.get("dense_ratio"))
                if kept is None:
                    found.drop(f"{where}.{name}.dense_ratio", "is no share above 0, up to 1")
                else:
                    replacement(found, f"{where}.{name}", kept, part, name)
    if is_enabled(mapping_of(mapping_of(block.get("channel_pruning")).get("shared_parameters"))):
        found.drop("channel_pruning", "was for convolutions, which language models do not have")


def _sparse(found: Replacement, block: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    where, method = "sparse_pruning", shared.get("method", "l1")
    offset = count_of(shared.get("schedule_offset"), 1000)
    if method == "snip_momentum":
        pattern = ', pattern="2:4"' if shared.get("block_pattern") == "2:4" else ""
        if not pattern:
            found.drop(f"{where}.block_pattern", "zeros are single weights, or 2:4")
        end = max(count_of(shared.get("schedule_offset_end"), offset), offset)
        every = max(count_of(shared.get("schedule_offset_stride"), 1), 1)
        steps = f"start_step={offset}, end_step={end}, every={every}"
        excluded = patterns_of(found, f"{where}.excluded_modules", shared.get("excluded_modules", []))
        if excluded:
            # The callback refuses patterns that no layer matches, and the model is not known here.
            ignore = ["lm_head", *excluded]
            found.drop(f"{where}.excluded_modules", f"where the model has such layers, add ignore={ignore!r}")
        groups: list[tuple[str, Mapping[str, Any], list[str]]] = [("shared_parameters", shared, ["Linear"])]
        found.keep(f"{where}.method", "by magnitude, where snip_momentum weighed magnitudes with gradients")
    else:
        pattern, steps = "", f"start_step={offset}, end_step={offset}"
        groups = list(groups_of(found, where, block))
        learned = "by magnitude, where topk learned a score for every weight"
        chosen = "by magnitude when the zeros are set, where DeepSpeed took those of the first step"
        found.keep(f"{where}.method", learned if method == "topk" else chosen)
    for name, params, modules in groups:
        kept = share_of(params.get("dense_ratio", 0.1 if method == "snip_momentum" else None))
        if kept is None or (pattern and kept != 0.5):
            rule = "2:4 keeps half of the weights" if kept is not None else "is no share above 0, up to 1"
            found.drop(f"{where}.{name}.dense_ratio", rule)
            continue
        targets = "" if "Linear" in modules or not modules else f", targets={modules!r}"
        zeros = round(1 - kept, 12)
        found.callbacks.append(f"MagnitudePruningCallback({zeros:g}, {steps}{pattern}{targets})")


def _rows(found: Replacement, key: str, kept: float, block: Mapping[str, Any], name: str) -> None:
    group = mapping_of(mapping_of(block.get("different_groups")).get(name))
    if group.get("related_modules"):
        found.drop(key, "rows are cut before training: shardwright student --intermediate N")
    elif "--sparsity" in found.student:
        found.drop(key, "rows of all layers become zero alike")
    else:
        found.student += ["--sparsity", f"{round(1 - kept, 12):g}", "--granularity", "row", "--prune", "l1"]
        found.keep(key, "before training and in every layer, rows of the smallest L1 norm")


def _heads(found: Replacement, key: str, kept: float, block: Mapping[str, Any], name: str) -> None:
    heads = mapping_of(block.get("shared_parameters")).get("num_heads")
    if not (is_count(heads) and 1 <= heads <= 4096):
        found.drop(f"{key}.num_heads", "heads are cut before training: shardwright student --heads N")
    elif "--heads" in found.student:
        found.drop(key, "all layers keep equally many heads")
    else:
        found.student += ["--heads", str(max(math.ceil(kept * heads), 1))]
        found.keep(key, "before training, by magnitude, where DeepSpeed learned a score for every head")


def replace_layer_reduction(found: Replacement, block: Mapping[str, Any]) -> None:
    """Take over the layers that a student keeps."""
    if not is_enabled(block):
        return
    chosen, count = block.get("teacher_layer"), block.get("keep_number_layer")
    if isinstance(chosen, list) and 0 < len(chosen) <= 1024 and all(is_count(layer) for layer in chosen):
        found.student[:0] = ["--keep-layers", ",".join(str(layer) for layer in chosen)]
    elif is_count(count) and count:
        found.student[:0] = ["--layers", str(count)]
    else:
        found.drop("layer_reduction", "names no layers: shardwright student --layers N")
        return
    found.keep("layer_reduction", "embeddings, head and all else come along without being named")
