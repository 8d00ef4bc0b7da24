"""Derives activation coefficients for each kind of layer of a family, from traces of small models."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.modeling_layers import GradientCheckpointingLayer

from ...ds_configs.memory.activation_kinds import feature, feature_factors, layer_counts
from ...ds_configs.memory.activations import Adapter, Mode
from ...ds_configs.specs.model import ModelSpec
from ..transformers.meta_model import model_spec_from_meta
from .families import attention_kernel
from .fit import DEEP_LAYERS, SHALLOW_LAYERS, SPARE_SHAPES, Candidate, TraceError, above_head, solve
from .kind_families import KIND_FAMILIES, KindFamily
from .kind_sizes import Values
from .run import Phases, TracedStep, enable_checkpointing, trace_training_step

_DRAWN_SHAPES = 64
# No batch size: an adapter's matrix would look like one vector of each sequence.
_LORA_RANKS = (4, 8, 12, 16)
_COUNTS = frozenset(
    ["token", "sequence", "sequence*patches", "sequence*max_source_positions", "sequence*vision_config.patches"]
)
_ADAPTED_EXPERTS = ("experts", "hidden_size", "experts*hidden_size", "experts*expert_intermediate_size")


@dataclass(frozen=True, kw_only=True)
class KindShape:
    """One traced case."""

    values: Values
    """Sizes in the configuration, without depths."""
    micro_batch_size: int
    """Sequences, or images."""
    seq_len_tokens: int
    """Tokens of each text."""
    lora_rank: int
    """Rank of the adapters; 0 without."""


def config_at(architecture: str, values: Values, depths: Mapping[str, int]) -> dict[str, Any]:
    """Return a `config.json` of the family with layers of each kind."""
    family = KIND_FAMILIES[architecture]
    return {"model_type": family.model_type, "architectures": [architecture], **family.depth(values, depths)}


def drawn_shapes(architecture: str, count: int, *, adapter: Adapter, seed: int = 20) -> list[KindShape]:
    """Draw shapes whose sizes vary independently; token counts are no multiples of 8, as the widths are."""
    choose, family = random.Random(f"{architecture} {seed}"), KIND_FAMILIES[architecture]
    shapes: list[KindShape] = []
    while len(shapes) < count:
        shape = KindShape(
            values=family.sizes(choose),
            micro_batch_size=choose.choice([2, 3, 5, 6]),
            seq_len_tokens=choose.choice([9, 11, 13, 15, 17, 19, 21, 23]),
            lora_rank=0 if adapter == "none" else choose.choice(_LORA_RANKS),
        )
        tokens = shape.micro_batch_size * shape.seq_len_tokens
        # What routed tokens keep must not look like a weight's gradient either.
        if not {tokens, tokens * shape.values.get("num_experts_per_tok", 1)} & _integers(shape.values):
            shapes.append(shape)
    return shapes


def _integers(values: Values) -> set[int]:
    return {value for value in values.values() if isinstance(value, int)}


def specification(architecture: str, shape: KindShape) -> ModelSpec:
    """Return what a plan knows of a shape, two layers of each kind deep."""
    depths = dict.fromkeys(KIND_FAMILIES[architecture].kinds, SHALLOW_LAYERS)
    return model_spec_from_meta(config_at(architecture, shape.values, depths), name=architecture)


def build_model(
    architecture: str,
    shape: KindShape,
    depths: Mapping[str, int],
    *,
    mode: Mode,
    adapter: Adapter = "none",
    checkpointing: bool = False,
    attention: str = "fused",
) -> Any:
    """Build one randomly initialised model in training mode, with adapters and checkpointing as asked."""
    config = config_at(architecture, shape.values, depths)
    built = transformers.AutoConfig.for_model(**config)
    built.use_cache = False
    built._attn_implementation = "eager" if attention == "eager" else "sdpa"
    model: Any = getattr(transformers, architecture)(built)
    if adapter != "none":
        from peft import LoraConfig, get_peft_model

        # As in `families.py`: PEFT holds adapters in float32 where the base is 16-bit under autocast.
        rank = shape.lora_rank
        model = get_peft_model(
            model.to(torch.bfloat16),
            # A scale of one would leave out an operator.
            LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0),
        )
    if adapter == "none" or mode != "bf16_autocast":
        model = model.to(torch.bfloat16 if mode == "bf16" else torch.float32)
    model.train()
    if checkpointing:
        enable_checkpointing(model)
    return model


def model_inputs(architecture: str, shape: KindShape, model: Any) -> dict[str, torch.Tensor]:
    """Return random inputs with labels, none of them padded."""
    family, config = KIND_FAMILIES[architecture], model.config
    batch = shape.micro_batch_size
    found: dict[str, Any] = {}
    element = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if family.inputs in ("text", "text pair", "image and text"):
        words = config.get_text_config().vocab_size
        found["input_ids"] = torch.randint(3, words - 1, (batch, shape.seq_len_tokens))
    if family.inputs in ("image", "image and text"):
        vision = getattr(config, "vision_config", config)
        found["pixel_values"] = torch.randn(batch, vision.num_channels, vision.image_size, vision.image_size)
    if family.inputs == "sound":
        found["input_features"] = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    found = {name: value.to(element) if value.is_floating_point() else value for name, value in found.items()}
    if family.inputs == "image":
        found["labels"] = torch.randint(0, config.num_labels, (batch,))
    elif family.inputs == "image and text":
        found["return_loss"] = True
    else:
        found["labels"] = torch.randint(3, config.get_text_config().vocab_size - 1, (batch, shape.seq_len_tokens))
    return found


def run_shape(
    architecture: str,
    shape: KindShape,
    depths: Mapping[str, int],
    *,
    mode: Mode,
    adapter: Adapter,
    attention: str,
    checkpointing: bool,
) -> TracedStep:
    """Meter one training step of one shape."""
    model = build_model(
        architecture, shape, depths, mode=mode, adapter=adapter, checkpointing=checkpointing, attention=attention
    )
    base = model.get_base_model() if adapter != "none" else model
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    layers = _layers_as_they_run(base, KIND_FAMILIES[architecture], depths)
    with attention_kernel(attention):
        return trace_training_step(model, model_inputs(architecture, shape, base), mode=mode, layers=layers, head=head)


def _layers_as_they_run(model: Any, family: KindFamily, depths: Mapping[str, int]) -> list[torch.nn.Module]:
    """Return the layers in the order of execution; stacks of a model may stand in another one."""
    layers = {n: module for n, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    if family.interleaved or len(family.kinds) == 1:
        return list(layers.values())
    stacks = [parameter.split(".*.")[0] + "." for parameter in family.kinds.values()]
    return [layers[name] for stack in dict.fromkeys(stacks) for name in layers if name.startswith(stack)]


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
    """Return the tables that a family has: adapters take the eager attention of full training."""
    return [
        (mode, adapter, attention)
        for mode in get_args(Mode)
        for adapter in family.adapters
        for attention in family.attentions
        if (adapter == "none" or attention != "eager" or "fused" not in family.attentions)
        and (attention != "math" or mode == "fp32")
    ]


def derive_kind_family(architecture: str) -> dict[str, Any]:
    """Trace one family and return what `kind_activations.json` holds of it.

    Raises:
        TraceError: its bytes are not linear in its sizes.
    """
    family = KIND_FAMILIES[architecture]
    spec = specification(architecture, drawn_shapes(architecture, 1, adapter="none")[0])
    counts = layer_counts(spec, family.kinds)
    if wrong := {kind: count for kind, count in counts.items() if count != SHALLOW_LAYERS}:
        raise TraceError(f"{architecture}: layers by kind are {wrong}, {SHALLOW_LAYERS} were built of each")
    stated = dict(spec.settings)
    tables: dict[str, Any] = {}
    for mode, adapter, attention in kind_table_names(family):
        table = derive_kind_table(architecture, mode=mode, adapter=adapter, attention=attention)
        tables.setdefault(mode, {}).setdefault(adapter, {})[attention] = table
    return {
        "settings": {name: stated[name] for name in family.settings if name in stated},
        "kinds": dict(family.kinds),
        "interleaved": family.interleaved,
        "tables": tables,
    }
