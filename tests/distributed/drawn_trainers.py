"""Random trainers with options, families and layouts, and verdicts on their runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivalence.cases import LAYOUTS, LOSS_TOLERANCE, WEIGHT_TOLERANCE
from shardwright.ds_configs.legality.combinations import columns_of, incompatibility_errors
from trainer_cases import EVALUATED, EVERY_LAYOUT, FAMILIES, OPTIONS, ROWS, TRAINERS, TrainerCase

NORM_TOLERANCE = 1e-5
"""Largest difference of a gradient norm from the one in one process, over that."""
NOISE_TOLERANCE = 1e-2
"""In nats for each token: ranks draw other noise than one process, which is small here."""
_SMALLEST_SCALE = 1e-2
"""Of a tensor: adapters that begin with zeros are sums of a few steps."""
_OPTIMIZERS = ("adamw", "fused_adamw", "rmsprop", "own_adamw", "own_sgd", "optimizer_class")
_LENGTHS = ("epochs", "long", "logged_seldom", "first_logged", "last_dropped")
_TRAINED = ("lora", "frozen", "embedding_frozen")
_MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3")
_LAYOUTS = tuple(name for name, layout in EVERY_LAYOUT.items() if LAYOUTS[layout].world_size == 2)
_LAYOUTS_OF_A_DRAW = 2
_KEPT_REJECTIONS = 0.25
"""Of cases that the table rejects, which cost little and show little."""


def drawn_trainers(count: int, seed: int) -> list[TrainerCase]:
    """Return cases, the same for a seed; two layouts share what they are compared with."""
    draw = random.Random(seed)
    found: dict[str, TrainerCase] = {}
    while len(found) < count:
        trainer = draw.choice([name for name in TRAINERS if name not in ("pipeline", "sft_texts")])
        # Transformers has no classifier of Granite.
        family = draw.choice([name for name in FAMILIES if (trainer, name) != ("reward", "granite")])
        groups = [(_OPTIMIZERS, 0.4), (_LENGTHS, 0.4), (_TRAINED, 0.3)]
        grouped = {name for group, _ in groups for name in group}
        options = [draw.choice(group) for group, share in groups if draw.random() < share]
        options += draw.sample(
            [name for name in OPTIONS if name not in (*grouped, "reference", "peft")], draw.choice((1, 1, 2))
        )
        if own := TRAINERS[trainer].options:
            options += [draw.choice(tuple(own))] if draw.random() < 0.5 else []
        rows, accumulation = draw.choice((ROWS, ROWS, 7)), draw.choice((1, 1, 2))
        layouts = [name for name in _LAYOUTS if not name.startswith("ep") or family in _MIXTURES]
        chosen = draw.sample(layouts, _LAYOUTS_OF_A_DRAW)
        if "zero_offload" in chosen and not {"adamw", "fused_adamw", "own_adamw"} & set(options):
            # DeepSpeed's CPU Adam alone steps there.
            options = ["adamw", *(name for name in options if name not in _OPTIMIZERS)]
        if not trainer.startswith(("trainer", "sft", "distillation")):
            # TRL rejects it in one process too: KTO needs its order, and others have no input_ids.
            options = [name for name in options if name != "length_groups"]
        if trainer in ("kto", "orpo", "cpo", "tpo") or "mixed" in options:
            # Their losses are of micro-batches, of which an evaluation deals other ones.
            options = [name for name in options if name not in EVALUATED]
        if "last_dropped" in options:
            # It drops other samples of an evaluation.
            options = [name for name in options if name not in EVALUATED]
        if "lora" in options or "clipped" in options:
            # It divides gradients near zero by their own size, and so rounds to whole steps.
            options = [name for name in options if name != "rmsprop"]
        for layout in chosen:
            case = TrainerCase(
                trainer=trainer,
                layout=layout,
                family=family,
                accumulation=accumulation,
                rows=rows,
                options=tuple(dict.fromkeys(options)),
            )
            if len(found) < count and (is_trained(case) or draw.random() < _KEPT_REJECTIONS):
                found[case.name] = case
    return list(found.values())


def is_trained(case: TrainerCase) -> bool:
    return not incompatibility_errors([TRAINERS[case.trainer].table_row], columns_of(case.full_layout))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    verdict: str
    """`equal`, `rejected` or `wrong`."""
    said: str
    difference: float = 0.0
    """The largest of a loss."""


def outcome(case: TrainerCase, record: Mapping[str, Any], reference: Mapping[str, Any], directory: Path) -> Outcome:
    if "refused" in record:
        return Outcome(verdict="wrong" if record["steps"] else "rejected", said=record["refused"])
    if "error" in record:
        return Outcome(verdict="wrong", said=record["error"])
    if not is_trained(case):
        return Outcome(verdict="wrong", said="trained, and the table rejects it")
    if "losses" not in reference:
        return Outcome(verdict="wrong", said=f"the reference: {reference}")
    noisy = "noise" in case.options
    tolerance = NOISE_TOLERANCE if noisy else LOSS_TOLERANCE
    said = []
    difference = 0.0
    for name in ("losses", "eval_losses"):
        own, expected = record[name], reference[name]
        if len(own) != len(expected):
            said.append(f"{name}: {own} instead of {expected}")
            continue
        largest = max((abs(one - other) for one, other in zip(own, expected, strict=True)), default=0.0)
        difference = max(difference, 0.0 if noisy else largest)
        if not largest <= tolerance:
            said.append(f"{name}: {own} instead of {expected}")
    if noisy:
        return Outcome(verdict="wrong" if said else "equal", said="; ".join(said))
    norms = zip(record["grad_norms"], reference["grad_norms"], strict=False)
    if case.layout != "zero0" and any(abs(one - other) > NORM_TOLERANCE * abs(other) + 1e-6 for one, other in norms):
        said.append(f"gradient norms: {record['grad_norms']} instead of {reference['grad_norms']}")
    if record["tokens"] != reference["tokens"]:
        said.append(f"tokens: {record['tokens']} instead of {reference['tokens']}")
    if record["train_loss"] is not None and abs(record["train_loss"] - reference["train_loss"]) > tolerance:
        said.append(f"train_loss: {record['train_loss']} instead of {reference['train_loss']}")
    if case.options:
        said += _differing_weights(directory / case.name / "trained", directory / case.reference().name / "trained")
    return Outcome(verdict="wrong" if said else "equal", said="; ".join(said), difference=difference)


def _differing_weights(own: Path, expected: Path) -> list[str]:
    from safetensors.torch import load_file

    weights = {name: tensor for file in own.glob("*.safetensors") for name, tensor in load_file(file).items()}
    others = {name: tensor for file in expected.glob("*.safetensors") for name, tensor in load_file(file).items()}
    # A tied head may be saved with the embedding that it is.
    if (weights.keys() ^ others.keys()) - {"lm_head.weight"} or not weights:
        return [f"saved tensors: {sorted(weights.keys() ^ others.keys())[:6]} of {len(weights)}"]
    differences = {
        name: float((tensor - weights[name]).abs().max() / tensor.abs().max().clamp(min=_SMALLEST_SCALE))
        for name, tensor in others.items()
        # Attention does not change with the bias of keys: its gradient is rounding alone.
        if name in weights and not name.endswith(("k_proj.bias", "c_attn.bias"))
    }
    worst = max(differences, key=differences.__getitem__)
    return [f"{worst}: differs by {differences[worst]:.1e}"] if differences[worst] > WEIGHT_TOLERANCE else []
