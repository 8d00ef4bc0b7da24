"""`ModelSpec`: sizes and parameters of a model, for one release of Transformers."""

from __future__ import annotations

import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from importlib import resources
from math import prod
from typing import Any, Literal, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

_Measured = TypeVar("_Measured")

ModelConfig = Mapping[str, Any]
"""Content of a `config.json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimensions:
    """Sizes of one transformer stack, from its `config.json`."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense MLP; 0 when every layer is a mixture of experts."""
    num_attention_heads: int
    num_key_value_heads: int
    """Key/value heads; equals `num_attention_heads` without grouped-query attention."""
    head_dim: int
    vocab_size: int
    """Rows of the token embedding; 0 for a stack without tokens (a vision tower)."""
    num_experts: int = 0
    """Routed experts in each mixture-of-experts layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Routed experts that process each token; 0 for a dense model."""
    expert_intermediate_size: int = 0
    """MLP width of one routed expert; 0 for a dense model."""

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, which equals that of all value heads."""
        return self.num_key_value_heads * self.head_dim


FIRST_RELEASE = "5.17.0"
"""Release of Transformers that stored facts describe by default, and that plans without a release assume."""


@cache
def newest_tested_release() -> str:
    """Return the newest release of Transformers that the tests cover."""
    newest: str = tomllib.loads(_text("releases.toml"))["transformers"][1]
    return newest


@cache
def is_within(release: str, specifier: str) -> bool:
    """Return whether a release satisfies a specifier such as `>=5.18` or `<5.17`.

    A development version counts as the release that it precedes. An invalid version, such as that of a custom build,
    counts as the newest tested release.
    """
    try:
        version = Version(release)
    except InvalidVersion:
        version = Version(newest_tested_release())
    return SpecifierSet(specifier).contains(version.base_version)


def stored_facts(file_name: str, release: str) -> Mapping[str, Any]:
    """Return a JSON file of `ds_configs/data` for a release of Transformers.

    Its key `changes` has merge patches (see `merged`) by the specifier of the releases to which they apply.
    """
    changes = _document(file_name).get("changes", {})
    return _changed(file_name, tuple(specifier for specifier in changes if is_within(release, specifier)))


@cache
def _changed(file_name: str, specifiers: tuple[str, ...]) -> Mapping[str, Any]:
    # Cached by changes, so that releases with the same changes share one copy.
    document = {name: value for name, value in _document(file_name).items() if name != "changes"}
    for specifier in specifiers:
        document = merged(document, _document(file_name)["changes"][specifier])
    return document


def merged(document: Any, patch: Any) -> Any:
    """Return a document with a merge patch applied.

    Mappings are merged key by key, `null` removes a key, and any other value replaces the old one (RFC 7396). The patch
    of a list of rows has a `column`, and the values to `add` to it in each row.
    """
    if not isinstance(patch, Mapping):
        return patch
    if isinstance(document, list):
        column = patch["column"]
        return [
            [*row[:column], row[column] + more, *row[column + 1 :]]
            for row, more in zip(document, patch["add"], strict=True)
        ]
    result = dict(document) if isinstance(document, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


@cache
def _document(file_name: str) -> Mapping[str, Any]:
    document: Mapping[str, Any] = json.loads(_text(file_name))
    return document


def _text(file_name: str) -> str:
    data = resources.files(__package__.rpartition(".")[0]).joinpath("data")
    return data.joinpath(file_name).read_text(encoding="utf-8")


Group = Literal["embedding", "attention", "mlp", "experts", "norm", "head", "other"]
ParameterKind = Literal["linear", "router", "embedding", "norm", "experts", "bias", "other"]

LEAF_MOE_BLOCKS = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Model types whose sparse block DeepSpeed gathers as a unit (deepspeed/runtime/zero/leaf_module_config.py:11)."""
ADAPTED_MIXTURES = frozenset(
    """
    afmoe cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe
    glm4_moe_lite glm4v_moe glm_moe_dsa hunyuan_v1_moe longcat_flash mellum minimax minimax_m2 mixtral olmoe qwen3_moe
    qwen3_next qwen3_omni_moe qwen3_omni_moe_thinker solar_open
    """.split()  # noqa: SIM905
)
"""Model types whose router and fused experts PEFT 0.21 adapts with `all-linear`
(peft/utils/transformers_weight_conversion.py, `_MOE_TARGET_MODULE_MAPPING`, and the conversions of Transformers). The
experts of other types, such as gpt-oss, stay frozen."""
EXPERT_MODULES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names that PEFT takes for those of the router and of experts in these model types, before Transformers 5 fused them.
Linear modules with these names, such as shared experts and dense layers, are not adapted."""
ALL_LINEAR, EXPERTS = "all-linear", "experts"
"""LoRA targets that are not names: every Linear except the head, and every fused expert matrix."""
ADAPTED_SINCE = {
    "UnlimitedOcrTextModel": "5.20",
    **dict.fromkeys(("beam", "qwen3_omni_moe_text"), "5.21"),
    "Dots3NoteTextModel": "5.23",
    "sarvam_mla": "5.24",
}
"""Further model types, with the first release of Transformers that converts their weights."""

TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "openai_privacy_filter"})
"""Model types whose expert matrices are stored as (experts, in, out), as `is_transposed` of transformers 5.17 marks."""

UNPACKED_LINEARS: Mapping[str, str] = {
    "deepseek_v4": r"\.compressor\.(gate_proj|kv_proj|indexer\.(gate_proj|kv_proj|scorer\.weights_proj))$",
    "falcon": "",
    "mt5": r"\.wo$",
    "t5": r"\.wo$",
}
"""Patterns of Linear modules that bitsandbytes does not pack, by model type: subclasses of Linear, as all of Falcon's
are, and `_keep_in_fp32_modules` (transformers 5.17, integrations/bitsandbytes.py, `replace_with_bnb_linear`)."""

CONV1D_FAMILIES = ("gpt2",)
"""Model types whose matrices are stored as (in, out)."""
NOT_ADAPTED_IN_MAMBA = ("out_proj", "conv1d")
MAMBA_TYPES = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})
"""PEFT 0.21 rejects these modules of these model types (peft/tuners/tuners_utils.py,
`_check_lora_target_modules_mamba`): kernels read their weights outside the modules' forward."""


LIGER_FILE = "liger_kernels.json"
FUSED_LOSS = "fused_linear_cross_entropy"
TEXT_MODEL = "text_model"
"""The kernels of a nested text model, which its family enables; configurations of the Trainer do not reach them."""

Kernels = Mapping[str, Mapping[str, bool]]
"""The kernels of liger-kernel's tested release for each model type, with their defaults."""


def liger_kernels() -> Kernels:
    """Return the kernels of each model type; liger-kernel silently ignores other types."""
    kernels: Kernels = stored_facts(LIGER_FILE, "0")["kernels"]
    return kernels


def has_liger_loss(model_type: str, *, alone: bool) -> bool:
    """Return whether Liger computes head and loss of a model type together, as it does unless it is disabled.

    `alone` is without its other kernels.
    """
    kernels = liger_kernels().get(model_type, {})
    return kernels.get(FUSED_LOSS, False) and not (alone and TEXT_MODEL in kernels)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """One pattern of parameter names, with `*` for the layer index."""

    name: str
    """Qualified name with layer indices replaced, such as `model.layers.*.mlp.up_proj.weight`."""
    shape: tuple[int, ...]
    count: int
    """Number of layers with this parameter; 1 outside the layers."""
    group: Group
    kind: ParameterKind
    """Kind of the owning module; decides what LoRA targets and what 4-bit loading replaces."""
    frozen: bool = False
    """Whether it belongs to a part that the job does not train, such as a vision tower."""
    whole: bool = False
    """Whether it is trained as it is where LoRA trains the rest, such as a vision tower."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def total(self) -> int:
        """Elements of the tensors in all layers."""
        return self.numel * self.count

    @property
    def module(self) -> str:
        """Name pattern of the owning module."""
        return self.name.rpartition(".")[0]

    @property
    def in_layer(self) -> bool:
        """Whether the parameter is in a layer; the mergers of Qwen3-VL's tower are several, but no layers."""
        return ".*." in self.name and "deepstack_merger_list" not in self.name

    @property
    def kind_in_layer(self) -> tuple[str, str, bool]:
        """Its stack of layers, the module in a layer that has it, and whether that part routes tokens to experts."""
        stack, _, inside = self.name.partition(".*.")
        module, _, inner = inside.partition(".")
        return stack, module, "expert" in inner or inner.partition(".")[0] in ("gate", "router")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTraits:
    """What the rules of parallel axes need: from a `ModelSpec`, or from the configuration of a built model."""

    model_type: str = ""
    """`model_type` of `config.json`; if empty, rules about families do not apply."""
    num_layers: int = 0
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    intermediate_size: int = 0
    vocab_size: int = 0
    num_experts: int = 0
    attention: str = "sdpa"
    layer_types: tuple[str, ...] = ()
    attention_window_tokens: int | None = None
    has_equal_head_widths: bool = True
    """Whether keys are as wide as values (they are not in multi-head latent attention)."""
    rope_type: str = ""


def _routed_layers(settings: Mapping[str, int], count: int, number: int) -> set[int]:
    """Return the indices of `number` layers with routed experts: as the configuration says, or else the last ones."""
    said: list[Iterable[int]] = []
    # Qwen's and Llama 4's step, Jamba's period, and ERNIE's first layer.
    for name in ("decoder_sparse_step", "interleave_moe_layer_step"):
        if (step := settings.get(name, 0)) > 0:
            said.append(range(step - 1, count, step))
    if (period := settings.get("expert_layer_period", 0)) > 0:
        said.append(range(settings.get("expert_layer_offset", 1) % period, count, period))
    if (start := settings.get("moe_layer_start_index", -1)) >= 0:
        said.append(range(start, min(count, start + number)))
    return set(next((indices for indices in map(list, said) if len(indices) == number), range(count - number, count)))


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Description of a model for planning, from `config.json` or the meta device, never from weights."""

    name: str
    """Hub id, directory or file."""
    revision: str | None = None
    """Commit hash of a Hub id; `None` for local files."""
    model_type: str
    architecture: str
    """Model class in Transformers, such as `LlamaForCausalLM`."""
    task: Literal["causal_lm", "masked_lm", "seq2seq", "contrastive", "encoder", "other"] = "causal_lm"
    """Training task of the class; decides the loss term."""
    dimensions: Dimensions
    """Sizes of the main stack (the text decoder of a multimodal model)."""
    parameters: tuple[ParameterShape, ...]
    """All parameters; tied tensors once."""
    buffer_bytes: int = 0
    """Non-parameter tensors (rotary tables), kept in fp32 on every rank."""
    layer_classes: tuple[str, ...]
    """Module classes that FSDP wraps and gradient checkpointing recomputes (`_no_split_modules`)."""
    tied_embeddings: bool
    learned_positions: int | None = None
    """Rows of a learned position table, which limit the sequence; `None` with rotary or relative positions."""
    sliding_window: int | None = None
    """Attention window of some layers in tokens; longer sequences need a mask. `None` for full attention."""
    residual_dropout_masks: int = 0
    """Dropout masks of hidden size per layer that the backward pass needs, one byte per element on CUDA."""
    weight_conversion: bool = False
    """Whether loading fuses tensors (mixture of experts), which allocates them on every rank."""
    layer_types: tuple[str, ...] = ()
    """Distinct layer types of `config.json`; empty if it has none."""
    attention: str | None = None
    """Attention implementation set in `config.json`; `None` for the default of Transformers (sdpa)."""
    release: str = FIRST_RELEASE
    settings: tuple[tuple[str, bool | int | float | str], ...] = ()
    """Scalar values of the configuration by (dotted) name."""
    rope_type: str = ""
    """Scaling of rotary angles in `config.json`; empty for none."""
    source: Literal["config", "meta", "structure"]
    """`config`: the stored shapes of a known class; `meta`: built by Transformers on the meta device; `structure`: from
    the files of a model with remote code."""

    def __hash__(self) -> int:
        """Return a cheap hash that ignores the parameters: models are keys of many caches."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.architecture, self.dimensions))

    @cached_property
    def traits(self) -> ModelTraits:
        sizes = self.dimensions
        return ModelTraits(
            model_type=self.model_type,
            num_layers=sizes.num_layers,
            num_attention_heads=sizes.num_attention_heads,
            num_key_value_heads=sizes.num_key_value_heads,
            intermediate_size=sizes.intermediate_size,
            vocab_size=sizes.vocab_size,
            num_experts=sizes.num_experts,
            attention=self.attention or "sdpa",
            layer_types=self.layer_types,
            attention_window_tokens=self.sliding_window,
            has_equal_head_widths=equal_head_widths(
                {name.removeprefix("text_config."): value for name, value in self.settings}
            ),
            rope_type=self.rope_type,
        )

    @cached_property
    def parameter_count(self) -> int:
        return sum(parameter.total for parameter in self.parameters)

    @cached_property
    def has_score_head(self) -> bool:
        return any(parameter.name == "score.weight" for parameter in self.parameters)

    def with_score_head(self) -> ModelSpec:
        """Return the model with a score per token instead of logits, as `ForSequenceClassification` classes have."""
        width = self.dimensions.hidden_size
        score = ParameterShape(name="score.weight", shape=(1, width), count=1, group="head", kind="linear")
        backbone = tuple(parameter for parameter in self.parameters if parameter.group != "head")
        return replace(self, parameters=(*backbone, score), tied_embeddings=False)

    @cached_property
    def reads_images(self) -> bool:
        return self.task == "causal_lm" and any(name.startswith("vision_config.") for name, _ in self.settings)

    @cached_property
    def trained_part(self) -> ModelSpec:
        """The model without its frozen parts."""
        if not any(parameter.frozen for parameter in self.parameters):
            return self
        return replace(self, parameters=tuple(p for p in self.parameters if not p.frozen))

    def group_counts(self) -> dict[str, int]:
        """Return the number of parameters by group."""
        counts: dict[str, int] = defaultdict(int)
        for parameter in self.parameters:
            counts[parameter.group] += parameter.total
        return dict(counts)

    @cached_property
    def layers(self) -> tuple[tuple[ParameterShape, ...], ...]:
        """Parameters of every layer in execution order.

        A specification counts the layers with a parameter, but does not have their indices. Two kinds (dense and routed
        MLP, or attention and Mamba) whose counts add up to all layers exclude each other. Routed MLPs are in the layers
        that the configuration names, or else in the last ones. Of other kinds, the rarer one is in the middle of equal
        periods, or at their ends beside gated delta nets (Qwen3-Next). Parameters of all other kinds are in every
        layer, which is an upper bound.
        """
        inside = [parameter for parameter in self.parameters if parameter.in_layer]
        count = max(1, self.dimensions.num_layers)
        mixtures = {p.kind_in_layer[:2] for p in inside if p.kind == "experts" or ".experts." in p.name}
        stacks = {p.kind_in_layer[0] for p in inside if p.count == count}
        held: dict[tuple[str, str, bool], int] = defaultdict(int)
        for parameter in inside:
            kind = parameter.kind_in_layer
            if parameter.count < count and kind[0] in stacks:
                held[kind] = max(held[kind], parameter.count)
        settings = {name.rpartition(".")[2]: value for name, value in self.settings if isinstance(value, int)}
        indices: dict[tuple[str, str, bool], set[int]] = {}
        for stack in stacks:
            for routes in (True, False):
                kinds = [kind for kind in held if kind[0] == stack and (kind[:2] in mixtures) == routes]
                if len(kinds) != 2 or sum(held[kind] for kind in kinds) != count:
                    continue
                first, second = sorted(kinds, key=lambda kind: (kind[2], -held[kind]))
                number = held[second]
                if routes:
                    indices[second] = _routed_layers(settings, count, number)
                elif "linear_attn" in (first[1], second[1]):
                    indices[second] = {(period + 1) * count // number - 1 for period in range(number)}
                else:
                    indices[second] = {(2 * period + 1) * count // (2 * number) for period in range(number)}
                indices[first] = {*range(count)} - indices[second]
        same: dict[frozenset[tuple[str, str, bool]], tuple[ParameterShape, ...]] = {}
        layers = []
        for index in range(count):
            absent = frozenset(kind for kind, own in indices.items() if index not in own)
            if absent not in same:
                same[absent] = tuple(p for p in inside if p.count == count or p.kind_in_layer not in absent)
            layers.append(same[absent])
        return tuple(layers)

    def of_layers(self, measure: Callable[[tuple[ParameterShape, ...]], _Measured]) -> tuple[_Measured, ...]:
        """Return a measure of every layer, computed once for layers with the same parameters."""
        measured = {id(layer): layer for layer in self.layers}
        values = {key: measure(layer) for key, layer in measured.items()}
        return tuple(values[id(layer)] for layer in self.layers)

    @cached_property
    def layer_sizes(self) -> tuple[int, ...]:
        """Parameters of every layer; if layers of several stacks have the same index, those of the largest one."""

        def size(layer: tuple[ParameterShape, ...]) -> int:
            stacks: dict[str, int] = defaultdict(int)
            for parameter in layer:
                stacks[parameter.name.split(".*.")[0]] += parameter.numel
            return max(stacks.values(), default=0)

        return self.of_layers(size)

    @property
    def layer_parameter_count(self) -> int:
        """Parameters of the largest single transformer layer."""
        return max(self.layer_sizes)

    @cached_property
    def first_large_layer(self) -> int:
        """Index of the first layer with most parameters; 0 if there is no smaller one before it."""
        return self.layer_sizes.index(self.layer_parameter_count)

    @cached_property
    def parameters_outside_layers(self) -> int:
        """Parameters of embeddings, final norm and head; tied ones once."""
        return sum(parameter.total for parameter in self.parameters if not parameter.in_layer)

    @cached_property
    def tail_parameters(self) -> int:
        """Parameters of final norm and head, whose gradients come first; a tied head is the token embedding."""
        outside = [parameter for parameter in self.parameters if not parameter.in_layer]
        tied = self.embedding_parameters if self.tied_embeddings else 0
        return tied + sum(parameter.total for parameter in outside if parameter.group != "embedding")

    @property
    def embedding_parameters(self) -> int:
        return self.dimensions.vocab_size * self.dimensions.hidden_size

    @cached_property
    def largest_parameter(self) -> int:
        return max(parameter.numel for parameter in self.parameters)

    @cached_property
    def largest_layer_matrix(self) -> int:
        """Elements of the largest Linear weight of a layer; 0 without any."""
        return max((p.numel for p in self.parameters if p.kind == "linear" and p.in_layer), default=0)

    @property
    def largest_stored_tensor(self) -> int:
        """Elements of the largest tensor of a checkpoint, which has each expert as tensors of its own."""
        experts = max(1, self.dimensions.num_experts)
        return max(p.numel // (experts if p.kind == "experts" else 1) for p in self.parameters)

    def largest_gather_unit(self) -> int:
        """Return the largest number of elements that ZeRO-3 gathers together.

        DeepSpeed gathers the direct parameters of a module, and all parameters of a leaf module (sparse
        mixture-of-experts block), together (deepspeed/runtime/zero/parameter_offload.py). Transformers 5 stores all
        experts of a layer in two 3-D tensors of one module.
        """
        units: dict[str, int] = defaultdict(int)
        for parameter in self.parameters:
            units[self.gather_module(parameter)] += parameter.numel
        return max(units.values())

    @cached_property
    def largest_layer_unit(self) -> int:
        """Elements of the largest module in a layer, which are gathered or reduced together."""

        def largest(layer: tuple[ParameterShape, ...]) -> int:
            units: dict[str, int] = defaultdict(int)
            for parameter in layer:
                units[self.gather_module(parameter)] += parameter.numel
            return max(units.values(), default=0)

        return max(self.of_layers(largest))

    def gather_module(self, parameter: ParameterShape) -> str:
        """Return the name pattern of the module with which a parameter is gathered."""
        if self.model_type in LEAF_MOE_BLOCKS and ".mlp." in parameter.name:
            return parameter.name.split(".mlp.")[0] + ".mlp"
        return parameter.module

    def persistent_parameters(self, threshold: int) -> int:
        """Return the elements of all tensors of at most `threshold` elements, which ZeRO-3 keeps on every rank."""
        return sum(parameter.total for parameter in self.parameters if parameter.numel <= threshold)

    @property
    def linear_parameters(self) -> int:
        """Elements of Linear weights, which autocast copies."""
        return sum(parameter.total for parameter in self.parameters if parameter.kind == "linear")

    @property
    def packed_parameters(self) -> list[ParameterShape]:
        """Linear weights that QLoRA stores in 4 bit; the head, fused experts and `UNPACKED_LINEARS` stay in 16 bit."""
        kept = UNPACKED_LINEARS.get(self.model_type)
        linears = [p for p in self.parameters if p.kind == "linear" and p.group != "head"]
        return [p for p in linears if kept is None or not re.search(kept, p.module)]


def lora_parameter_count(model: ModelSpec, *, rank: int, targets: Iterable[str], variant: str = "lora") -> int:
    """Return the parameters that LoRA adds: `rank * (in_features + out_features)` per targeted matrix and expert.

    `targets` has endings of module names (`q_proj`), `all-linear`, which PEFT expands to every Linear except the output
    head (peft/tuners/tuners_utils.py, `_maybe_include_all_linear_layers`), and fused expert matrices (`experts`, or
    `experts.down_proj`). In `adapted_mixtures`, `all-linear` also adapts the router and every expert; the fused gate
    and up projections get twice the rank. The variant `dora` has a norm per row too. Returns 0 without a match.
    """
    return sum(adapter.total for adapter in adapters(model, rank=rank, targets=targets, variant=variant))


def adapters(model: ModelSpec, *, rank: int, targets: Iterable[str], variant: str = "lora") -> list[ParameterShape]:
    """Return LoRA's matrices, two per adapted matrix, and DoRA's norms, with PEFT's names and order."""
    wanted = tuple(targets)
    as_linears = ALL_LINEAR in wanted and model.model_type in adapted_mixtures(model.release)
    matrices = []
    for parameter in [*targeted_linears(model, wanted), *adapted_experts(model, wanted)]:
        experts = parameter.shape[0] if parameter.kind == "experts" else 1
        wide = experts * rank * (2 if as_linears and parameter.name.endswith("gate_up_proj") else 1)
        rows, columns = parameter.shape[-2:]
        if model.model_type in (TRANSPOSED_EXPERTS if parameter.kind == "experts" else CONV1D_FAMILIES):
            rows, columns = columns, rows
        shapes: dict[str, tuple[int, ...]] = {"lora_A": (wide, columns), "lora_B": (rows, wide)}
        if variant == "dora":
            shapes["lora_magnitude_vector"] = (rows,)
        for name, shape in shapes.items():
            owner = parameter.name.removesuffix(".weight")
            matrices.append(replace(parameter, name=f"{owner}.{name}.weight", shape=shape, kind="other"))
    return matrices


def adapted_mixtures(release: str) -> frozenset[str]:
    """Return the model types whose router and fused experts PEFT adapts in a release of Transformers."""
    return ADAPTED_MIXTURES | {name for name, since in ADAPTED_SINCE.items() if is_within(release, f">={since}")}


@lru_cache(maxsize=256)
def adapted_experts(model: ModelSpec, targets: tuple[str, ...]) -> tuple[ParameterShape, ...]:
    """Return the router and fused expert matrices that LoRA adapts for these targets."""
    experts = [p for p in model.parameters if p.kind == "experts"]
    if ALL_LINEAR in targets and model.model_type in adapted_mixtures(model.release):
        return (*(p for p in model.parameters if p.name.endswith(".gate.weight") and len(p.shape) == 2), *experts)
    names = [target for target in targets if not targeted_linears(model, (target,))]
    return tuple(p for p in experts if EXPERTS in names or any(p.name.endswith(f".{name}") for name in names))


@lru_cache(maxsize=256)
def targeted_linears(model: ModelSpec, targets: tuple[str, ...]) -> tuple[ParameterShape, ...]:
    """Return the Linear weights that LoRA adapts for these targets."""
    linears = [p for p in model.parameters if p.kind == "linear" and p.name.endswith(".weight") and len(p.shape) == 2]
    linears = [parameter for parameter in linears if not (parameter.frozen or parameter.whole)]
    if model.model_type in adapted_mixtures(model.release):
        linears = [p for p in linears if p.module.rpartition(".")[2] not in EXPERT_MODULES]
    if ALL_LINEAR in targets:
        return tuple(parameter for parameter in linears if parameter.group != "head")
    return tuple(p for p in linears if any(p.module == t or p.module.endswith("." + t) for t in targets))


def equal_head_widths(values: Mapping[str, Any]) -> bool:
    """Return whether a configuration of Transformers has equal key and value widths.

    >>> equal_head_widths({"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128})
    False
    """
    width = values.get("v_head_dim")
    keys = (values.get("qk_nope_head_dim") or 0) + (values.get("qk_rope_head_dim") or 0)
    return width is None or width == (keys or values.get("head_dim", width))
