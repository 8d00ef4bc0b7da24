"""Weight matrices of a model that become sparse."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from ...ds_configs.quantization.layers import DEFAULT_IGNORE, is_match
from ...ds_configs.specs.errors import Fault, UsageError
from ...plugins.deepspeed.engine_layers import named_linear_layers, stages_of

_SHOWN = 3


def layers_to_train(
    model: Any, named: Sequence[str] | None, targets: Sequence[str], ignore: Sequence[str]
) -> dict[str, Any]:
    """Return the target layers of a model that an engine may have taken over, by their names in the checkpoint.

    Args:
        model: As it is trained; of a pipeline this rank's stages.
        named: What `target_layers` found in the whole model, before the engine; `None` where nobody looked.
        targets: As for `target_layers`.
        ignore: Likewise.

    Raises:
        UsageError: as `target_layers` does, or stages alone would have to tell what the whole model has.
    """
    if stages_of(model) is None:
        return target_layers(model, targets, ignore)
    if named is None:
        rule = "has not seen the whole model, which a name must fit, but stages of it"
        fix = "give it to PipelineTrainer(callbacks=[...])"
        raise UsageError(Fault(where="callback", rule=rule, fix=fix))
    layers = named_linear_layers(model)
    return {name: layers[name] for name in named if name in layers}


def target_layers(
    model: Any, targets: Sequence[str] = ("Linear",), ignore: Sequence[str] = DEFAULT_IGNORE
) -> dict[str, Any]:
    """Return linear layers by their names in the checkpoint, without adapters and what is the token embedding too.

    Args:
        model: Transformers model, or any module.
        targets: Module names, `re:` patterns of names, or `Linear` for all, as in a quantization scheme.
        ignore: Likewise, what stays dense.

    Raises:
        UsageError: a target or an entry of `ignore` fits no layer, or nothing is left; all faults at once.
    """
    layers = {name: module for name, module in named_linear_layers(model).items() if ".lora_" not in name}
    faults = [
        Fault(where=where, value=pattern, rule="matches no linear layer of the model", fix=_near(pattern, layers))
        for where, patterns in (("targets", targets), ("ignore", ignore))
        for pattern in patterns
        if pattern not in DEFAULT_IGNORE and not any(is_match(name, pattern) for name in layers)
    ]
    chosen = {
        name: module
        for name, module in layers.items()
        if any(is_match(name, target) for target in targets) and not any(is_match(name, each) for each in ignore)
    }
    embedded = _embedding_weights(model)
    kept = {name: module for name, module in chosen.items() if id(module.weight) not in embedded or name in targets}
    faults += [
        Fault(where="targets", value=name, rule="shares its weight with the token embedding", fix="leave it out")
        for name, module in kept.items()
        if id(module.weight) in embedded
    ]
    if not kept and not faults:
        rule = "leaves no linear layer of the model" + _transposed_layers(model)
        faults.append(Fault(where="targets", value=", ".join(targets), rule=rule))
    if faults:
        raise UsageError(faults)
    return kept


def _transposed_layers(model: Any) -> str:
    from transformers.pytorch_utils import Conv1D

    count = sum(isinstance(module, Conv1D) for module in model.modules())
    return f", which keeps {count} matrices in Conv1D" if count else ""


def fused_experts_remark(model: Any) -> str | None:
    """Return a remark if a model has experts in one parameter of three dimensions, which stay dense."""
    found = [name for name, value in model.named_parameters() if len(getattr(value, "ds_shape", value.shape)) == 3]
    if not found:
        return None
    return f"{len(found)} fused weights of experts stay dense, such as {found[0]}: linear layers alone become sparse"


def _embedding_weights(model: Any) -> set[int]:
    import torch

    divided = ("VocabParallelEmbedding", "HiddenParallelEmbedding")
    return {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) or type(module).__name__ in divided
    }


def _near(pattern: str, layers: dict[str, Any]) -> str:
    near = difflib.get_close_matches(pattern, [*layers, "Linear"], n=_SHOWN, cutoff=0.5)
    if not layers:
        return "it has none (GPT-2's Conv1D and quantized layers are no linear layers)"
    return f"did you mean {', '.join(near)}?" if near else f"layers have names such as {next(iter(layers))}"
