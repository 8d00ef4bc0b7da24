"""Activation bytes of models that mix kinds of layers, or name their sizes their own way, from traced coefficients.

A family's tables hold what a layer of each kind keeps (encoder and decoder, full and linear attention, dense and
routed), and the sum over a model's layers is what it keeps. Features are products of batch sizes and of sizes that the
configuration states, by its own names. `python -m shardwright.tools.add_family` derives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from math import ceil, prod
from typing import Any

from ..specs.model import ModelSpec
from .activations import ActivationEstimate, Adapter, Mode, UnknownFamilyError

KINDS_FILE = "kind_activations.json"


@lru_cache(maxsize=1)
def load_kind_families() -> Mapping[str, Any]:
    """Read the stored families: `versions`, and `families` by model class.

    A family has `settings` under which it was traced, `kinds` with the parameter that each layer of that kind holds
    once, in the order of execution, and `tables` by mode, adapter and attention.
    """
    data = resources.files(__package__.rpartition(".")[0]).joinpath("data", KINDS_FILE)
    found: Mapping[str, Any] = json.loads(data.read_text(encoding="utf-8"))
    return found


def stored_family(model: ModelSpec) -> Mapping[str, Any] | None:
    """Return what is stored of the model's class, if it was traced under the model's settings."""
    family: Mapping[str, Any] | None = load_kind_families()["families"].get(model.architecture)
    stated = dict(model.settings)
    if family is None or any(stated.get(name) != value for name, value in family["settings"].items()):
        return None
    return family


def feature_factors(
    model: ModelSpec, *, micro_batch_size: int, seq_len_tokens: int, lora_rank: int = 0
) -> dict[str, int]:
    """Return the sizes whose products are features, by name.

    Those of the batch: `sequence` counts sequences, `position` the tokens of one, `token` all of them; `patches` are
    those of an image, under the prefix of a nested vision configuration. Those of the model are its dimensions, and
    whatever integers its configuration states.
    """
    stated = {name: value for name, value in model.settings if isinstance(value, int) and not isinstance(value, bool)}
    patches = {
        name.removesuffix("image_size") + "patches": (value // stated[patch]) ** 2
        for name, value in stated.items()
        if name.endswith("image_size") and stated.get(patch := name.replace("image_size", "patch_size"))
    }
    sizes = model.dimensions
    return {
        **stated,
        **patches,
        "hidden_size": sizes.hidden_size,
        "query_size": sizes.query_size,
        "key_value_size": sizes.key_value_size,
        "intermediate_size": sizes.intermediate_size,
        "attention_heads": sizes.num_attention_heads,
        "key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab_size,
        "experts": sizes.num_experts,
        "experts_per_token": sizes.experts_per_token,
        "expert_intermediate_size": sizes.expert_intermediate_size,
        "constant": 1,
        "sequence": micro_batch_size,
        "position": seq_len_tokens,
        "token": micro_batch_size * seq_len_tokens,
        "lora_rank": lora_rank,
    }


def feature(name: str, factors: Mapping[str, int]) -> int:
    """Return the value of one feature, the product of the sizes in its name."""
    return prod(factors.get(factor, 0) for factor in name.split("*"))


def layer_counts(model: ModelSpec, kinds: Mapping[str, str]) -> dict[str, int]:
    """Return the layers of each kind, by the parameter that each of them holds once or by `layer_types=NAME`.

    `ONE - OTHER` counts layers with one mark and without the other.
    """
    held: dict[str, Any] = {parameter.name: parameter.count for parameter in model.parameters if parameter.in_layer}
    held |= {name: count for name, count in model.settings if "=" in name}

    def counted(mark: str) -> int:
        first, *others = (int(held.get(name, 0)) for name in mark.split(" - "))
        return max(0, first - sum(others))

    return {kind: counted(mark) for kind, mark in kinds.items()}


@lru_cache(maxsize=4096)
def estimate_kinds(
    model: ModelSpec,
    *,
    micro_batch_size: int,
    seq_len_tokens: int,
    mode: Mode,
    adapter: Adapter,
    lora_rank: int,
    attention: str,
) -> ActivationEstimate:
    """Return the activation bytes of one micro-batch, layers of all kinds summed and spread evenly.

    Raises:
        UnknownFamilyError: nothing is stored for the class, mode, adapter or attention.
    """
    family = stored_family(model)
    stored = {} if family is None else family["tables"].get(mode, {}).get(adapter, {})
    if attention != "eager" and "fused" not in stored and "masked" in stored:
        # Images in text bring a mask to every batch.
        attention = "masked"
    table = stored.get(attention)
    if family is None or table is None:
        raise UnknownFamilyError(
            f"model = {model.architecture!r}: no activation coefficients for mode {mode!r}, adapter {adapter!r} and "
            f"attention {attention!r}; trace the model from its config instead"
        )
    factors = feature_factors(
        model, micro_batch_size=micro_batch_size, seq_len_tokens=seq_len_tokens, lora_rank=lora_rank
    )
    point = [feature(name, factors) for name in table["features"]]

    def largest(candidates: list[list[float]]) -> int:
        return max(ceil(sum(c * x for c, x in zip(row, point, strict=True))) for row in candidates)

    counts = layer_counts(model, family["kinds"])
    saved = {kind: largest(table["saved_per_layer"][kind]) for kind in counts}
    checkpointed = {kind: largest(table["checkpointed_per_layer"][kind]) for kind in counts}

    def transient(name: str, kept: Mapping[str, int]) -> int:
        """The largest over kinds, where layers that run after the last of a kind have been freed or not run yet."""
        found, later = [0], 0
        for kind in reversed(counts):
            if counts[kind]:
                found.append(largest(table[name][kind]) - later)
                later += (1 if family["interleaved"] else counts[kind]) * kept[kind]
        return max(found)

    layers = max(1, model.dimensions.num_layers)
    return ActivationEstimate(
        saved_bytes_per_layer=-(-sum(counts[kind] * saved[kind] for kind in counts) // layers),
        checkpointed_bytes_per_layer=-(-sum(counts[kind] * checkpointed[kind] for kind in counts) // layers),
        outside_layer_bytes=largest(table["outside_layers"]),
        backward_transient_bytes=transient("backward_transient", saved),
        recompute_backward_transient_bytes=transient("recompute_backward_transient", checkpointed),
        forward_transient_bytes=transient("forward_transient", checkpointed),
        loss_forward_peak_bytes=largest(table["loss_forward_peak"]),
        loss_kept_bytes=largest(table["loss_kept"]),
        loss_backward_peak_bytes=largest(table["loss_backward_peak"]),
        autocast_weight_copy_bytes_per_parameter=int(table["weight_copy_bytes_per_parameter"]),
        source=f"traced coefficients, {model.architecture}, {mode}, {adapter}, {attention} attention; "
        + ", ".join(f"{name} {version}" for name, version in load_kind_families()["versions"].items()),
    )
