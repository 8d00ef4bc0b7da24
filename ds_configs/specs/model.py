"""`ModelSpec`: every parameter of a model by name pattern, shape and group, without its weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from .dimensions import Dimensions

Group = Literal["embedding", "attention", "mlp", "experts", "norm", "head", "other"]
ParameterKind = Literal["linear", "router", "embedding", "norm", "experts", "bias", "other"]

LEAF_MOE_BLOCKS = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Model types whose sparse block DeepSpeed gathers as one unit (deepspeed/runtime/zero/leaf_module_config.py:11)."""
ADAPTED_MIXTURES = frozenset(
    """
    afmoe cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe
    glm4_moe_lite glm4v_moe glm_moe_dsa hunyuan_v1_moe longcat_flash mellum minimax minimax_m2 mixtral olmoe qwen3_moe
    qwen3_next qwen3_omni_moe qwen3_omni_moe_thinker solar_open
    """.split()  # noqa: SIM905
)
"""Model types whose router and fused experts PEFT 0.21 adapts under `all-linear`
(peft/utils/transformers_weight_conversion.py, `_MOE_TARGET_MODULE_MAPPING`); others' experts, such as gpt-oss's, stay
frozen."""

NOT_ADAPTED_IN_MAMBA = ("out_proj", "conv1d")
MAMBA_TYPES = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})
"""PEFT 0.21 refuses to adapt these modules of these model types (peft/tuners/tuners_utils.py,
`_check_lora_target_modules_mamba`): kernels read their weights past the modules' forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """One parameter name pattern; `*` stands for a layer index."""

    name: str
    """Qualified name with layer indices replaced, such as `model.layers.*.mlp.up_proj.weight`."""
    shape: tuple[int, ...]
    """Shape of one such tensor."""
    count: int
    """How many layers hold it; 1 outside the layers."""
    group: Group
    """The part of the model it belongs to."""
    kind: ParameterKind
    """What the owning module is; decides which tensors LoRA targets and 4-bit loading replaces."""

    @property
    def numel(self) -> int:
        """Elements of one such tensor."""
        return prod(self.shape)

    @property
    def total(self) -> int:
        """Elements of all such tensors."""
        return self.numel * self.count

    @property
    def module(self) -> str:
        """Name pattern of the module that owns it."""
        return self.name.rpartition(".")[0]

    @property
    def in_layer(self) -> bool:
        """Whether it belongs to a repeated layer."""
        return ".*." in self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Description of a model for planning; made from `config.json` or on the meta device, never from weights."""

    name: str
    """Hub id, directory or file that the user named."""
    revision: str | None = None
    """Commit hash that a Hub id was resolved to; `None` for local files."""
    model_type: str
    """`model_type` of `config.json`, such as `llama`."""
    architecture: str
    """Class that transformers builds, such as `LlamaForCausalLM`."""
    task: Literal["causal_lm", "masked_lm", "seq2seq", "contrastive", "encoder", "other"] = "causal_lm"
    """What the class is trained for; decides the loss term."""
    dimensions: Dimensions
    """Sizes of the main stack (the text decoder of a multimodal model)."""
    parameters: tuple[ParameterShape, ...]
    """All parameters; tied tensors appear once."""
    buffer_bytes: int = 0
    """Non-parameter tensors (rotary tables), kept in fp32 on every rank."""
    layer_classes: tuple[str, ...]
    """Module classes that FSDP wraps and checkpointing recomputes (`_no_split_modules`)."""
    tied_embeddings: bool
    """Whether the head shares the token embedding."""
    learned_positions: int | None = None
    """Rows of a learned position table, which bound the sequence; `None` with rotary or relative positions."""
    sliding_window: int | None = None
    """Tokens that attention looks back in some layers; a longer sequence brings a mask. `None` for full attention."""
    residual_dropout_masks: int = 0
    """Dropout masks of hidden size that each layer keeps for the backward pass, one byte per element on CUDA."""
    weight_conversion: bool = False
    """Whether loading fuses tensors (mixture of experts), which materialises them on every rank."""
    layer_types: tuple[str, ...] = ()
    """The kinds of layers that `config.json` names, each once; empty where it names none."""
    attention: str | None = None
    """The attention implementation that `config.json` asks for; `None` leaves it to transformers (sdpa)."""
    settings: tuple[tuple[str, bool | int | float | str], ...] = ()
    """Plain values of the configuration by their (dotted) names; empty where a closed form counts the model."""
    rope_type: str = ""
    """How `config.json` scales rotary angles; empty for the plain ones."""
    source: Literal["config", "meta", "structure"]
    """`config`: the closed form of a known family; `meta`: built by transformers on the meta device; `structure`: what
    the files of a model of remote code say of it."""

    def __hash__(self) -> int:
        """Return a hash that does not walk all parameters: models are keys of many caches."""
        return hash((self.name, self.architecture, self.dimensions))

    @property
    def parameter_count(self) -> int:
        """All parameters, tied ones once."""
        return sum(parameter.total for parameter in self.parameters)

    def group_counts(self) -> dict[str, int]:
        """Parameters by group, in the order of first appearance."""
        counts: dict[str, int] = defaultdict(int)
        for parameter in self.parameters:
            counts[parameter.group] += parameter.total
        return dict(counts)

    @property
    def layer_parameter_count(self) -> int:
        """Parameters of the largest single transformer layer."""
        layers: dict[str, int] = defaultdict(int)
        for parameter in self.parameters:
            if parameter.in_layer:
                layers[parameter.name.split(".*.")[0]] += parameter.numel
        return max(layers.values(), default=0)

    @property
    def parameters_outside_layers(self) -> int:
        """Embeddings, final norm and head, tied ones once."""
        return sum(parameter.total for parameter in self.parameters if not parameter.in_layer)

    @property
    def tail_parameters(self) -> int:
        """Final norm and head, whose gradients come first; a tied head is the token embedding."""
        outside = [parameter for parameter in self.parameters if not parameter.in_layer]
        tied = self.embedding_parameters if self.tied_embeddings else 0
        return tied + sum(parameter.total for parameter in outside if parameter.group != "embedding")

    @property
    def embedding_parameters(self) -> int:
        """Elements of the token embedding."""
        return self.dimensions.vocab_size * self.dimensions.hidden_size

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest single tensor."""
        return max(parameter.numel for parameter in self.parameters)

    def largest_gather_unit(self) -> int:
        """Elements that ZeRO-3 gathers at once for the most demanding module.

        DeepSpeed fetches the direct parameters of one module at a time, and a leaf module (sparse
        mixture-of-experts block) as a whole (deepspeed/runtime/zero/parameter_offload.py). Transformers 5
        keeps all experts of a layer in two 3-D tensors of one module.
        """
        units: dict[str, int] = defaultdict(int)
        for parameter in self.parameters:
            units[self.gather_module(parameter)] += parameter.numel
        return max(units.values())

    @property
    def largest_layer_parameter(self) -> int:
        """Elements of the largest single tensor in a layer."""
        return max((parameter.numel for parameter in self.parameters if parameter.in_layer), default=0)

    @property
    def largest_layer_unit(self) -> int:
        """Elements of the largest module in a layer, gathered or reduced at once."""
        units: dict[str, int] = defaultdict(int)
        for parameter in self.parameters:
            if parameter.in_layer:
                units[self.gather_module(parameter)] += parameter.numel
        return max(units.values(), default=0)

    def gather_module(self, parameter: ParameterShape) -> str:
        """Name pattern of the module whose turn gathers a parameter."""
        if self.model_type in LEAF_MOE_BLOCKS and ".mlp." in parameter.name:
            return parameter.name.split(".mlp.")[0] + ".mlp"
        return parameter.module

    def persistent_parameters(self, threshold: int) -> int:
        """Elements of all tensors of at most `threshold` elements, which ZeRO-3 keeps on every rank."""
        return sum(parameter.total for parameter in self.parameters if parameter.numel <= threshold)

    def linear_parameters(self, *, include_head: bool) -> int:
        """Elements of all Linear weights, which bitsandbytes replaces (without the head) and autocast copies."""
        return sum(
            parameter.total
            for parameter in self.parameters
            if parameter.kind == "linear" and (include_head or parameter.group != "head")
        )


def lora_parameter_count(model: ModelSpec, *, rank: int, targets: Iterable[str]) -> int:
    """Trainable parameters that LoRA adds: `rank * (in_features + out_features)` for each targeted matrix.

    `targets` holds module name endings (`q_proj`) or `all-linear`, which PEFT expands to every Linear but the
    output head (peft/tuners/tuners_utils.py, `_maybe_include_all_linear_layers`). In `ADAPTED_MIXTURES` PEFT
    0.21 also adapts the router and every expert; the fused gate and up projections get twice the rank, one for each
    half. Returns 0 when nothing matches.
    """
    return sum(adapter.total for adapter in adapters(model, rank=rank, targets=targets))


def adapters(model: ModelSpec, *, rank: int, targets: Iterable[str]) -> list[ParameterShape]:
    """LoRA's matrices, two for each adapted one, as PEFT names and orders them."""
    wanted = tuple(targets)
    found = []
    for parameter in [*targeted_linears(model, wanted), *adapted_experts(model, wanted)]:
        experts = parameter.shape[0] if parameter.kind == "experts" else 1
        wide = experts * rank * (2 if parameter.name.endswith("gate_up_proj") else 1)
        rows, columns = parameter.shape[-2:]
        for name, shape in (("lora_A", (wide, columns)), ("lora_B", (rows, wide))):
            owner = parameter.name.removesuffix(".weight")
            found.append(replace(parameter, name=f"{owner}.{name}.weight", shape=shape, kind="other"))
    return found


def adapted_experts(model: ModelSpec, targets: Iterable[str]) -> list[ParameterShape]:
    """Router and fused expert matrices that LoRA adapts for these targets."""
    if "all-linear" not in tuple(targets) or model.model_type not in ADAPTED_MIXTURES:
        return []
    routers = [p for p in model.parameters if p.name.endswith(".mlp.gate.weight") and p.kind == "other"]
    return routers + [p for p in model.parameters if p.kind == "experts"]


def targeted_linears(model: ModelSpec, targets: Iterable[str]) -> list[ParameterShape]:
    """Linear weights that LoRA adapts for these targets."""
    wanted = tuple(targets)
    linears = [p for p in model.parameters if p.kind == "linear" and p.name.endswith(".weight") and len(p.shape) == 2]
    if "all-linear" in wanted:
        return [parameter for parameter in linears if parameter.group != "head"]
    return [p for p in linears if any(p.module == t or p.module.endswith("." + t) for t in wanted)]
