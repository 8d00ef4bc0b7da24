"""Puts rounding into the linear layers of a model, by changing their class."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ....ds_configs.legality.model_classes import model_class_faults
from ....ds_configs.quantization.layers import DEFAULT_IGNORE, LinearLayer, scheme_faults, selected_layers
from ....ds_configs.quantization.mixtures import expert_scheme, unloadable_expert_faults
from ....ds_configs.quantization.scheme import QuantizationScheme
from ....ds_configs.specs.errors import Fault, UsageError
from ....plugins.transformers.expert_layers import router_modules, router_patterns
from .attachment import ATTRIBUTE, Attachment, QuantizationState, checkpoint_name
from .config import QATConfig
from .experts import expert_linear_layers, experts_faults, fake_quantize_experts, is_fused_experts
from .input_ranges import InputRange
from .kv_cache import attach_kv_cache, kv_cache_faults
from .layers import LEARNED, FakeQuantizedLinear, LayerQuantizer
from .learned_scales import add_learned_scales
from .lora import is_lora_linear, lora_faults, make_fake_quantized

if TYPE_CHECKING:
    import torch

_PEFT_PARTS = (".lora_", ".original_module")
"""Linear layers of adapters, and those that a trained copy has taken the place of."""


def attach(model: Any, config: QATConfig, *, stored_dtype: torch.dtype | None = None) -> Attachment:
    """Change the class of the linear layers that a scheme targets; they round from `state.enabled` on.

    Parameters, hooks and keys of the state dict stay as they are, but for scales that are learned.

    Args:
        model: Transformers model, with PEFT's adapters in it already if there are any.
        config: What to round, and how.
        stored_dtype: Type of scales in the checkpoint, if the configuration names none; `None`: the model's.

    Raises:
        UsageError: the scheme does not fit the model; all faults at once.
    """
    if any(isinstance(module, FakeQuantizedLinear) for module in model.modules()):
        rule, fix = "rounds already", "attach once, and to a model that has its adapters already"
        raise UsageError(Fault(where="model", value=type(model).__name__, rule=rule, fix=fix))
    found = dict(_roundable(model, config))
    layers = tuple(layer for layers in found.values() for layer in layers)
    if faults := config.faults() or missing_package_faults():
        raise UsageError(faults)
    scheme = _scheme_for(model, config, layers)
    chosen = selected_layers(scheme, layers)
    if faults := _model_faults(config, scheme, chosen, found, model):
        raise UsageError(faults)
    kept = _dtype(config.stored_dtype) or stored_dtype or model.dtype
    routers = tuple(map(checkpoint_name, router_modules(model)))
    attachment = Attachment(
        config=config,
        scheme=replace(scheme, ignore=(*scheme.ignore, *(name for name in routers if name not in scheme.ignore))),
        stored_dtype=kept,
        state=QuantizationState(),
        modules={},
        layers=chosen,
        lora_rank=_lora_rank(model),
    )
    _change_classes(model, attachment, found)
    _note_dense_layers(model, attachment, routers)
    attach_kv_cache(model, attachment)
    add_learned_scales(attachment)
    model.register_load_state_dict_pre_hook(_refuse_foreign_scales)
    setattr(model, ATTRIBUTE, attachment)
    return attachment


def missing_package_faults() -> list[Fault]:
    """Return the fault of an installation that could train, and not write what it trained."""
    if importlib.util.find_spec("compressed_tensors") is not None:
        return []
    rule = "is not installed, and packs the checkpoint"
    return [Fault(where="compressed-tensors", rule=rule, fix="install the extra too: pip install '.[quantize]'")]


def _roundable(model: Any, config: QATConfig) -> Iterator[tuple[str, tuple[LinearLayer, ...]]]:
    """Yield modules that can round, each with its matrices; a LoRA layer stands for the layer in it."""
    import torch

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(inside) and inside:
            continue
        if is_fused_experts(module):
            yield name, expert_linear_layers(model, name)
        elif is_lora_linear(module) and config.lora == "merged":
            inside = (*inside, f"{name}.")
            yield name, (_layer(checkpoint_name(name), module.get_base_layer(), head, tied),)
        elif config.lora == "on_quantized_base" and ".modules_to_save." in name:
            # Saved with the adapter, beside the packed base.
            continue
        elif type(module) is torch.nn.Linear and not any(part in name for part in _PEFT_PARTS):
            yield name, (_layer(checkpoint_name(name), module, head, tied),)


def _layer(name: str, linear: torch.nn.Linear, head: Any, tied: bool) -> LinearLayer:
    is_head = linear is head
    return LinearLayer(
        name=name,
        out_features=linear.out_features,
        in_features=linear.in_features,
        is_tied=is_head and tied,
        is_head=is_head,
        has_bias=linear.bias is not None,
    )


def _scheme_for(model: Any, config: QATConfig, layers: tuple[LinearLayer, ...]) -> QuantizationScheme:
    """Leave out what a model cannot lose, unless the user listed what to leave out."""
    scheme = config.rounded_scheme
    if scheme.ignore != DEFAULT_IGNORE:
        return scheme
    heads = [layer.name for layer in layers if layer.is_head and layer.name not in DEFAULT_IGNORE]
    return replace(scheme, ignore=(*DEFAULT_IGNORE, *heads, *map(checkpoint_name, router_patterns(model))))


def _model_faults(
    config: QATConfig,
    scheme: QuantizationScheme,
    chosen: tuple[LinearLayer, ...],
    found: Mapping[str, tuple[LinearLayer, ...]],
    model: Any,
) -> list[Fault]:
    layers = [layer for layers in found.values() for layer in layers]
    if transposed := _class_faults(scheme, model):
        return transposed
    if not layers:
        rule = "has no linear layers (layers that are quantized already cannot be trained)"
        return [Fault(where="model", value=type(model).__name__, rule=rule)]
    faults = scheme_faults(scheme, layers, chosen)
    faults += unloadable_expert_faults(expert_scheme(scheme), chosen, layers)
    faults += kv_cache_faults(model, config)
    if config.learns_scales and any(layer.is_expert for layer in chosen):
        rule = "are not learned for fused experts"
        faults.append(Fault(where="weight_rule", value="learned", rule=f"scales {rule}", fix="use minmax"))
    picked = {layer.name for layer in chosen}
    faults += _adapted_model_faults(config, model)
    modules = dict(model.named_modules())
    # What is said of one layer of a kind holds for all.
    adapters = (name for name in found if is_lora_linear(modules[name]) and checkpoint_name(name) in picked)
    faults += next(filter(None, (lora_faults(checkpoint_name(name), modules[name]) for name in adapters)), [])
    return faults + experts_faults(model, scheme)


def _class_faults(scheme: QuantizationScheme, model: Any) -> list[Fault]:
    from transformers.pytorch_utils import Conv1D

    return model_class_faults(
        type(model).__name__,
        work="qat",
        is_causal=True,
        is_encoder_decoder=False,
        model_type=model.config.get_text_config().model_type if hasattr(model, "config") else "",
        transposed_layers=[name for name, module in model.named_modules() if isinstance(module, Conv1D)],
        targets=scheme.targets,
    )


def _adapted_model_faults(config: QATConfig, model: Any) -> list[Fault]:
    """Return what a model with adapters cannot keep or cannot merge."""
    import torch

    if not hasattr(model, "peft_config"):
        return []
    faults = []
    if config.learns_scales:
        rule = "checkpoints of PEFT hold no parameters beside its own, so that a resumed run would lose learned scales"
        faults.append(Fault(where="weight_rule", value="learned", rule=rule, fix="use minmax and calibrated ranges"))
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return faults
    vocab_size = model.config.get_text_config().vocab_size
    for name, module in model.named_modules():
        inner = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
        is_head = isinstance(inner, torch.nn.Linear) and inner.out_features == vocab_size
        if is_head or isinstance(inner, torch.nn.Embedding):
            rule = "is adapted, and the output head shares its weight with the token embedding: one would change both"
            fix = "leave both out of the adapter, or untie them"
            faults.append(Fault(where="LoRA", value=checkpoint_name(name), rule=rule, fix=fix))
    return faults


def _change_classes(model: Any, attachment: Attachment, found: Mapping[str, tuple[LinearLayer, ...]]) -> None:
    picked = {layer.name for layer in attachment.layers}

    def quantizer(name: str) -> LayerQuantizer:
        made = LayerQuantizer(
            name=name,
            scheme=attachment.scheme,
            rule=attachment.config.weight_rule,
            stored_dtype=attachment.stored_dtype,
            state=attachment.state,
        )
        if attachment.scheme.activations_are_static:
            made.input_range = attachment.ranges[name] = _input_range(attachment, name)
        return made

    modules = dict(model.named_modules())
    for name, layers in found.items():
        names = [layer.name for layer in layers if layer.name in picked]
        if not names:
            continue
        module = modules[name]
        if is_fused_experts(module):
            fake_quantize_experts(module, name, {each: quantizer(each) for each in names})
            for each in names:
                # Loaders round no inputs of experts by stored ranges.
                attachment.ranges.pop(each, None)
        elif is_lora_linear(module):
            make_fake_quantized(module, quantizer(names[0]))
        else:
            module.__class__ = FakeQuantizedLinear
            module.quantizer = quantizer(names[0])
        attachment.modules[name] = module


def _note_dense_layers(model: Any, attachment: Attachment, routers: tuple[str, ...]) -> None:
    """Keep what loaders must not quantize, by names that an engine may take away."""
    import torch

    names, experts = [*routers], []
    for name, module in model.named_modules():
        parts = name.split(".")
        if name in attachment.modules or "original_module" in parts or any(part.startswith("lora_") for part in parts):
            continue
        if is_fused_experts(module):
            experts.append(re.split(r"\.\d+\.", expert_linear_layers(model, name)[0].name)[0])
        elif isinstance(module, torch.nn.Linear) and name.removesuffix(".base_layer") not in attachment.modules:
            names.append(checkpoint_name(name))
    attachment.dense, attachment.dense_experts = tuple(names), tuple(experts)


def _lora_rank(model: Any) -> int | None:
    configs = getattr(model, "peft_config", {})
    active = getattr(model, "active_adapter", None)
    return getattr(configs.get(active), "r", None) if isinstance(active, str) else None


def _refuse_foreign_scales(model: Any, state: Mapping[str, Any], *_: Any) -> None:
    """Refuse learned scales that have no place in a model, or that it lacks: a resumed Trainer merely warns of keys."""
    own = {name for name, _ in model.named_parameters() if name.rpartition(".")[2] in LEARNED}
    stored = {name for name in state if name.rpartition(".")[2] in LEARNED}
    fix = "resume with the weight_rule and ranges that it was trained with"
    foreign = sorted(stored - own)
    if foreign:
        rule = f"holds {len(foreign)} learned scales, such as {foreign[0]}, and the model learns none there"
        raise UsageError(Fault(where="checkpoint", rule=rule, fix=fix))
    missing = sorted(name for name in own - stored if f"{name.rpartition('.')[0]}.weight" in state)
    if missing:
        rule = f"holds no {len(missing)} scales that the model learns, such as {missing[0]}"
        raise UsageError(Fault(where="checkpoint", rule=rule, fix=fix))


def _input_range(attachment: Attachment, name: str) -> InputRange:
    activations = attachment.scheme.activations
    assert activations is not None, "stored ranges belong to rounded activations"
    return InputRange(activations, method=attachment.config.ranges, stored_dtype=attachment.stored_dtype, name=name)


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else getattr(torch, name)
