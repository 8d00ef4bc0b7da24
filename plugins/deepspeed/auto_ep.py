"""DeepSpeed AutoEP under the Transformers Trainer: configuration, optimizer groups, and corrections.

Observed with deepspeed 0.19.8, transformers 5.17.0 and accelerate 1.15.0:

- `deepspeed.initialize` replaces every MoE block by an `AutoEPMoELayer` with this rank's experts. In an existing
  optimizer the new parameters go into the groups of the old ones (`_remap_client_optimizer_...`), and ZeRO-1 and 2 then
  fail with "None of the param groups are marked as MoE", because the Trainer makes two groups, by weight decay. Groups
  that contain only experts and are marked beforehand work: the marks are keys of the group, which are kept.
- Without ZeRO, `clip_grad_norm_` (runtime/utils.py) averages the norms of the ranks, each over the dense parameters
  and its own experts, instead of adding the squares of the experts: gradients are clipped too little.
- Models with `topk_method: greedy` get DeepSeek's group-limited routing if `n_group` is above 1
  (`fill_autoep_config_from_hf`); one group of all experts is the same as none.
- `router_jitter_noise` is ignored with a warning; unknown keys of the section are ignored without one.
- An engine for a model that AutoEP has already changed finds no blocks and fails.
- While it installs hooks, AutoEP points the recorder of router logits at its own router (`auto_ep_presets/base.py`). It
  reads and restores the registry of Transformers by class name, but since 5.23 the registry accepts only models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...ds_configs.legality.axes import expert_errors
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.model import ModelTraits
from .. import patches
from ..transformers.training_arguments import layout_of

if TYPE_CHECKING:
    import torch
    from deepspeed import DeepSpeedEngine
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

SECTION = "expert_parallel"
_BLOCK = re.compile(r"model\.layers\.\d+\.mlp")
"""The blocks that AutoEP's presets match (auto_ep_presets/)."""
_LEAF_MODULE = "deepspeed.module_inject.auto_ep_layer.AutoEPMoELayer"
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CHANGES_THE_MODEL = (
    *("expert_activation", "num_expert_groups", "num_limited_groups", "route_norm", "route_scale"),
    *("routed_scaling_factor", "score_apply", "score_func", "top_k"),
)


def expert_count(config: Any) -> int:
    """Return the routed experts per layer of a Transformers configuration, 0 for a dense model."""
    counts = (getattr(config, name, None) for name in _EXPERT_COUNTS)
    return next((int(count) for count in counts if count), 0)


def configuration_errors(
    configuration: Mapping[str, Any], model_config: PreTrainedConfig, ep: int
) -> list[ConfigError]:
    """Return why a DeepSpeed configuration does not allow `ep` ranks for the experts of a layer."""
    section = configuration.get(SECTION)
    errors = [] if section is None else _section_errors(section, model_config, ep)
    zero = configuration.get("zero_optimization", {})
    for key in ("reduce_scatter", "contiguous_gradients"):
        if zero.get("stage", 0) in (1, 2) and zero.get(key, True) is False:
            rule = "must be true for experts (deepspeed/runtime/zero/stage_1_and_2.py)"
            errors.append(ConfigError(where=f"zero_optimization.{key}", value=False, rule=rule, fix="remove it"))
    return errors


def expert_parallelism_errors(
    arguments: TrainingArguments, model_config: PreTrainedConfig, ep: int
) -> list[ConfigError]:
    """Return the errors of `expert_errors` for a run that is about to start."""
    layout = layout_of(arguments)
    data_ranks = arguments.world_size // (layout.tp * layout.sp * layout.cp)
    return expert_errors(
        ModelTraits(model_type=model_config.model_type, num_experts=expert_count(model_config)),
        replace(layout, engine="ddp" if layout.engine == "single" else layout.engine, dp_shard=data_ranks, ep=ep),
        precision="fp32" if arguments.mixed_precision == "no" else arguments.mixed_precision,
    )


def expert_model_errors(model: PreTrainedModel) -> list[ConfigError]:
    """Return why AutoEP could not shard the experts of a model without changing what the model computes."""
    if moe_layers(model):
        rule = "was sharded in an earlier training run and holds only some of its experts"
        fix = "load the checkpoint that the earlier run saved"
        return [ConfigError(where="model", value=type(model).__name__, rule=rule, fix=fix)]
    if not expert_count(model.config):
        return []
    errors = []
    parameters = _expert_parameters(model)
    if not parameters:
        rule = "has no layers `model.layers.N.mlp` with fused experts, which AutoEP requires"
        fix = "pass the causal language model itself, without adapters"
        errors.append(ConfigError(where="model", value=type(model).__name__, rule=rule, fix=fix))
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        rule = f"{frozen[0]} is frozen, but DeepSpeed needs a parameter group of trainable experts"
        fix = "train the experts, or train without expert parallelism"
        errors.append(ConfigError(where="model", rule=rule, fix=fix))
    if noise := getattr(model.config, "router_jitter_noise", None):
        rule, fix = "AutoEP's router adds no noise", "set it to 0 in the model's config"
        errors.append(ConfigError(where="router_jitter_noise", value=noise, rule=rule, fix=fix))
    return errors


def write_section(configuration: dict[str, Any], model_config: PreTrainedConfig, ep: int) -> None:
    """Complete AutoEP's section of a DeepSpeed configuration, and make its layers leaves of ZeRO-3."""
    section = configuration.setdefault(SECTION, {"enabled": True, "autoep_size": ep})
    section |= _routing(model_config)
    zero = configuration.get("zero_optimization", {})
    if zero.get("stage") == 3:
        leaves = zero.setdefault("leaf_module", {})
        named = leaves.get("classes", [])
        leaves["classes"] = list(dict.fromkeys([*([named] if isinstance(named, str) else named), _LEAF_MODULE]))


def accept_class_names_of_recorders() -> None:
    """Make the registry of output recorders accept class names, which DeepSpeed uses to read and restore it."""

    def get(original: Any) -> Any:
        def get_by_name(registry: Any, model: PreTrainedModel, default: Any = None) -> Any:
            return dict.get(registry, model, default) if isinstance(model, str) else original(registry, model)

        return get_by_name

    def set_item(original: Any) -> Any:
        def set_by_name(registry: Any, model: PreTrainedModel, can_record_outputs: Any) -> None:
            store = dict.__setitem__ if isinstance(model, str) else original
            store(registry, model, can_record_outputs)

        return set_by_name

    patches.apply("output-recorders-get", get)
    patches.apply("output-recorders-set", set_item)


def mark_expert_groups(optimizer: torch.optim.Optimizer, model: PreTrainedModel, ep: int) -> None:
    """Move experts to separate groups of a torch optimizer; DeepSpeed does this only for its own optimizers.

    Raises:
        UsageError: AutoEP cannot shard the model; see `expert_model_errors`.
    """
    if errors := expert_model_errors(model):
        raise UsageError(errors)
    experts = {id(parameter) for parameter in _expert_parameters(model).values()}
    marks = {"moe": True, "name": f"ep_size_{ep}"}
    for group in list(getattr(optimizer, "param_groups", ())):
        own = [parameter for parameter in group["params"] if id(parameter) in experts]
        if len(own) == len(group["params"]):
            group.update(marks if own else {})
        elif own:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in experts]
            optimizer.add_param_group({**group, **marks, "params": own})
            _copy_scheduled_settings(optimizer, group, marks)


def _copy_scheduled_settings(optimizer: torch.optim.Optimizer, group: dict[str, Any], marks: Mapping[str, Any]) -> None:
    """Before each step, copy a group's settings, which a scheduler may change, to the last group, of its experts."""
    own = next(index for index, candidate in enumerate(optimizer.param_groups) if candidate is group)
    indices = (own, len(optimizer.param_groups) - 1)
    pair = [optimizer.param_groups[index] for index in indices]

    def copy_settings(*_: object) -> None:
        source, experts = pair
        experts.update({name: value for name, value in source.items() if name != "params" and name not in marks})

    def follow_loaded(loaded: Any) -> None:
        pair[:] = [loaded.param_groups[index] for index in indices]

    # Only here are the groups' indices known: DeepSpeed steps one group at a time.
    optimizer.register_step_pre_hook(copy_settings)
    optimizer.register_load_state_dict_post_hook(follow_loaded)


def moe_layers(model: PreTrainedModel) -> dict[str, Any]:
    """Return AutoEP's layers by name."""
    return {name: module for name, module in model.named_modules() if getattr(module, "_is_autoep_layer", False)}


def clip_by_the_whole_norm(engine: DeepSpeedEngine) -> None:
    """Make an engine without ZeRO clip fp32 gradients by the norm over dense parameters and all ranks' experts."""

    def clip() -> None:
        import torch
        import torch.distributed as dist

        # Both kinds are already averaged over their data-parallel ranks.
        gradients = [
            (weight.grad, getattr(weight, "allreduce", True) is False)
            for weight in engine.module.parameters()
            if weight.grad is not None
        ]
        # Experts differ between the ranks of their group, dense parameters do not: only experts are summed.
        squares = torch.zeros(2, dtype=torch.float32, device=engine.device)
        for gradient, is_expert in gradients:
            squares[int(is_expert)] += torch.linalg.vector_norm(gradient, dtype=torch.float32) ** 2
        layer = next(iter(moe_layers(engine.module).values()))
        dist.all_reduce(squares[1:], group=layer.ep_group)
        norm = squares.sum().sqrt()
        engine._global_grad_norm = norm
        scale = torch.clamp(engine.gradient_clipping() / (norm + 1e-6), max=1.0)
        for gradient, _ in gradients:
            gradient.mul_(scale)

    patches.apply("expert-parallel-clipping", lambda _: clip, on=engine)


def _expert_parameters(model: PreTrainedModel) -> dict[str, Any]:
    """Return the fused expert weights of a model that AutoEP has not changed yet."""
    blocks = (name for name, _ in model.named_modules() if _BLOCK.fullmatch(name))
    prefixes = tuple(f"{name}.experts." for name in blocks)
    return {name: parameter for name, parameter in model.named_parameters() if name.startswith(prefixes)}


def _routing(model_config: PreTrainedConfig) -> dict[str, int]:
    greedy = getattr(model_config, "topk_method", None) == "greedy"
    return {"num_expert_groups": 1, "num_limited_groups": 1} if greedy else {}


def _section_errors(section: Any, model_config: PreTrainedConfig, ep: int) -> list[ConfigError]:
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig

    if not isinstance(section, dict):
        fix = 'write {"autoep_size": N, ...}'
        return [ConfigError(where=SECTION, value=section, rule="must be an object", fix=fix)]
    errors = []
    for key, wanted in (("enabled", True), ("autoep_size", ep)):
        if section.get(key) != wanted:
            rule = f"contradicts the callback, which shards the experts over {ep} ranks"
            fix = f"write {str(wanted).lower()}, or remove the section"
            errors.append(ConfigError(where=f"{SECTION}.{key}", value=section.get(key, "missing"), rule=rule, fix=fix))
    known = {name for name in AutoEPConfig.__dataclass_fields__ if not name.startswith("_")}
    for key in section:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            fix = f"did you mean {nearest[0]!r}?" if nearest else "remove it"
            rule = "is not a key of DeepSpeed, which would ignore it"
            errors.append(ConfigError(where=f"{SECTION}.{key}", rule=rule, fix=fix))
        elif key in _CHANGES_THE_MODEL and section[key] != _routing(model_config).get(key):
            rule = "would train a different function from the one that the saved model computes"
            errors.append(ConfigError(where=f"{SECTION}.{key}", value=section[key], rule=rule, fix="remove it"))
    return errors


def whole_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the names and unsharded shapes of a model's state dict."""
    return {name: tuple(getattr(value, "ds_shape", value.shape)) for name, value in saved_tensors(model)}


def whole_state_dict(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]] | None, *, keep: bool
) -> dict[str, Tensor]:
    """Gather the state dict of a model that AutoEP has sharded; every rank must call it.

    `shapes` is `whole_shapes` before the engine existed, to compare with. Only ranks with `keep` get tensors, on the
    host.
    """
    import deepspeed
    import torch

    layers = moe_layers(model)
    tensors: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    for name, value in saved_tensors(model):
        owner = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), None)
        if owner is not None and name.startswith(f"{owner}.experts."):
            continue
        original = name if owner is None else f"{owner}.{original_name(layers[owner], name[len(owner) + 1 :])}"
        if id(value) in seen:
            # Tied weights stay one tensor, which `save_pretrained` writes once.
            if keep:
                tensors[original] = tensors[seen[id(value)]]
            continue
        seen[id(value)] = original
        with deepspeed.zero.GatheredParameters([value]):
            if keep:
                tensors[original] = value.detach().to("cpu", copy=True)
    for prefix, layer in layers.items():
        experts, group = layer.experts, layer.ep_group
        gate, down, up = (_all_experts(weight, group, keep) for weight in (experts.w1, experts.w2, experts.w3))
        if keep:
            tensors[f"{prefix}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
            tensors[f"{prefix}.experts.down_proj"] = down
    if keep and shapes is not None:
        assert {name: tuple(value.shape) for name, value in tensors.items()} == dict(shapes), "names have changed"
    return tensors


def _all_experts(parameter: torch.Tensor, group: ProcessGroup, keep: bool) -> Tensor:
    """Gather the experts of a group, in rank order, on the host of ranks that keep them."""
    import deepspeed
    import torch
    import torch.distributed as dist

    with deepspeed.zero.GatheredParameters([parameter]):
        own = parameter.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
    # Joined on the host, because the device already holds the parts.
    return torch.cat([part.cpu() for part in parts]) if keep else own.new_empty(0, device="cpu")


def original_name(layer: torch.nn.Module, name: str) -> str:
    """Return the name that a tensor of AutoEP's layer has in the model's own block."""
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset

    preset = get_preset(layer.model_family)
    renamed = {
        "router.gate.": f"{preset.router_pattern}.",
        "router.": f"{preset.router_pattern}.",
        "shared_experts.": f"{preset.shared_experts_pattern}.",
        "shared_experts_gate.": f"{preset.shared_experts_gate_pattern}.",
    }
    for prefix, original in renamed.items():
        if name.startswith(prefix):
            return original + name[len(prefix) :]
    return name


def saved_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield parameters and persistent buffers, tied ones under each of their names."""
    for prefix, module in model.named_modules():
        saved = (item for item in module._buffers.items() if item[0] not in module._non_persistent_buffers_set)
        for name, value in (*module._parameters.items(), *saved):
            if value is not None:
                yield f"{prefix}.{name}" if prefix else name, value
