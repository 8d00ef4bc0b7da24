"""DeepSpeed AutoEP under the Transformers Trainer: its section, its optimizer groups, and where it is not exact.

Seen with deepspeed 0.19.8, transformers 5.17.0 and accelerate 1.15.0:

- `deepspeed.initialize` replaces every MoE block by an `AutoEPMoELayer` with this rank's experts. An optimizer that
  exists by then gets the new parameters into the groups of the old ones (`_remap_client_optimizer_...`), and ZeRO-1
  and 2 then fail with "None of the param groups are marked as MoE": the Trainer makes two groups, by weight decay.
  Groups of experts alone, marked before, come out right: the marks are keys of the group, which stay.
- Without ZeRO `clip_grad_norm_` (runtime/utils.py) averages the norms of the ranks, each over the dense parameters
  and its own experts, in place of adding the squares of the experts: gradients are clipped too little.
- Models with `topk_method: greedy` get DeepSeek's group-limited routing as soon as `n_group` is above 1
  (`fill_autoep_config_from_hf`); one group of all experts is the same as none.
- `router_jitter_noise` is left out with a warning; unknown keys of the section are ignored without one.
- An engine for a model that AutoEP has changed before finds no blocks and fails.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from ...ds_configs.legality.expert import expert_faults
from ...ds_configs.specs.errors import Fault, UsageError
from ..transformers.training_arguments import deepspeed_configuration

SECTION = "expert_parallel"
_BLOCK = re.compile(r"model\.layers\.\d+\.mlp")
"""What AutoEP's presets look for (auto_ep_presets/)."""
_LEAF_MODULE = "deepspeed.module_inject.auto_ep_layer.AutoEPMoELayer"
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CHANGES_THE_MODEL = (
    *("expert_activation", "num_expert_groups", "num_limited_groups", "route_norm", "route_scale"),
    *("routed_scaling_factor", "score_apply", "score_func", "top_k"),
)


def expert_count(config: Any) -> int:
    """Return the routed experts of a layer by a Transformers configuration, 0 for a dense model."""
    found = (getattr(config, name, None) for name in _EXPERT_COUNTS)
    return next((int(count) for count in found if count), 0)


def configuration_faults(configuration: Mapping[str, Any], model_config: Any, ep: int) -> list[Fault]:
    """Return what a DeepSpeed configuration says against `ep` ranks for the experts of a layer."""
    section = configuration.get(SECTION)
    faults = [] if section is None else _section_faults(section, model_config, ep)
    zero = configuration.get("zero_optimization", {})
    for key in ("reduce_scatter", "contiguous_gradients"):
        if zero.get("stage", 0) in (1, 2) and zero.get(key, True) is False:
            rule = "must be true for experts (deepspeed/runtime/zero/stage_1_and_2.py)"
            faults.append(Fault(where=f"zero_optimization.{key}", value=False, rule=rule, fix="leave it out"))
    return faults


def expert_parallelism_faults(arguments: Any, model_config: Any, ep: int) -> list[Fault]:
    """Return the faults of :func:`..ds_configs.legality.expert.expert_faults` for a run that is about to start.

    `arguments` are `TrainingArguments`.
    """
    configuration = deepspeed_configuration(arguments) or {}
    zero = configuration.get("zero_optimization", {})
    axes = arguments.parallelism_config
    tp, sp, cp = (int(getattr(axes, name, None) or 1) for name in ("tp_size", "sp_size", "cp_size"))
    tp = max(tp, int(configuration.get("tensor_parallel", {}).get("autotp_size", 1) or 1))
    sp = max(sp, int(configuration.get("sequence_parallel_size", 1) or 1))
    return expert_faults(
        ep=ep,
        model_type=model_config.model_type,
        num_experts=expert_count(model_config),
        data_parallel_size=arguments.world_size // (tp * sp * cp),
        engine="deepspeed" if configuration else "fsdp2" if arguments.fsdp else "ddp",
        zero_stage=zero.get("stage", 0),
        tp=tp,
        sp=sp,
        cp=cp,
        hpz_partition_size=zero.get("zero_hpz_partition_size", 1),
        quantized_gradients=bool(zero.get("zero_quantized_gradients")),
        offload_optimizer=(zero.get("offload_optimizer") or {}).get("device", "none"),
        offload_param=(zero.get("offload_param") or {}).get("device", "none"),
        precision="fp32" if arguments.mixed_precision == "no" else arguments.mixed_precision,
    )


def expert_model_faults(model: Any) -> list[Fault]:
    """Return why AutoEP could not take the experts of a model over without changing what it computes."""
    if any(getattr(module, "_is_autoep_layer", False) for module in model.modules()):
        rule = "was divided by an earlier training, and keeps a part of its experts"
        return [Fault(where="model", value=type(model).__name__, rule=rule, fix="load what that training saved")]
    if not expert_count(model.config):
        return []
    faults = []
    parameters = _expert_parameters(model)
    if not parameters:
        rule = "has no layers `model.layers.N.mlp` with fused experts, which AutoEP looks for"
        fix = "use the causal language model itself, without adapters"
        faults.append(Fault(where="model", value=type(model).__name__, rule=rule, fix=fix))
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        rule = f"{frozen[0]} is frozen, and DeepSpeed needs a group of experts that train"
        faults.append(Fault(where="model", rule=rule, fix="train the experts, or train without expert parallelism"))
    if getattr(model.config, "router_jitter_noise", None):
        noise, rule = model.config.router_jitter_noise, "AutoEP's router adds no noise"
        faults.append(
            Fault(where="router_jitter_noise", value=noise, rule=rule, fix="set it to 0 in the model's config")
        )
    return faults


def write_section(configuration: dict[str, Any], model_config: Any, ep: int) -> None:
    """Complete the section for AutoEP, and make its layers leaves of ZeRO-3."""
    section = configuration.setdefault(SECTION, {"enabled": True, "autoep_size": ep})
    section |= _routing(model_config)
    zero = configuration.get("zero_optimization", {})
    if zero.get("stage") == 3:
        leaves = zero.setdefault("leaf_module", {})
        named = leaves.get("classes", [])
        leaves["classes"] = list(dict.fromkeys([*([named] if isinstance(named, str) else named), _LEAF_MODULE]))


def mark_expert_groups(optimizer: Any, model: Any, ep: int) -> None:
    """Give experts groups of their own in a torch optimizer, as DeepSpeed wants them, with all their settings.

    An optimizer of the DeepSpeed configuration gets them from DeepSpeed.

    Raises:
        UsageError: the model has no experts left to divide, because an earlier training divided it.
    """
    faults = expert_model_faults(model)
    if faults:
        raise UsageError(faults)
    experts = {id(parameter) for parameter in _expert_parameters(model).values()}
    marks = {"moe": True, "name": f"ep_size_{ep}"}
    for group in list(getattr(optimizer, "param_groups", ())):
        own = [parameter for parameter in group["params"] if id(parameter) in experts]
        if len(own) == len(group["params"]):
            group.update(marks if own else {})
        elif own:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in experts]
            optimizer.add_param_group({**group, **marks, "params": own})


def moe_layers(model: Any) -> dict[str, Any]:
    """Return AutoEP's layers by their names in a model that an engine has taken over."""
    return {name: module for name, module in model.named_modules() if getattr(module, "_is_autoep_layer", False)}


def clip_by_the_whole_norm(engine: Any) -> None:
    """Let an engine without ZeRO clip fp32 gradients by the norm over dense parameters and the experts of all ranks."""

    def clip() -> None:
        import torch
        import torch.distributed as dist

        # Averaged over their data-parallel ranks already, both kinds.
        gradients = [
            (each.grad, getattr(each, "allreduce", True) is False)
            for each in engine.module.parameters()
            if each.grad is not None
        ]
        # Experts differ between the ranks of their group, dense parameters do not: only the former are added up.
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

    engine.clip_fp32_gradients = clip


def _expert_parameters(model: Any) -> dict[str, Any]:
    """Return the fused weights of experts, before AutoEP replaces them."""
    blocks = (name for name, _ in model.named_modules() if _BLOCK.fullmatch(name))
    prefixes = tuple(f"{name}.experts." for name in blocks)
    return {name: parameter for name, parameter in model.named_parameters() if name.startswith(prefixes)}


def _routing(model_config: Any) -> dict[str, int]:
    """Return the keys without which AutoEP would route otherwise than the model."""
    greedy = getattr(model_config, "topk_method", None) == "greedy"
    return {"num_expert_groups": 1, "num_limited_groups": 1} if greedy else {}


def _section_faults(section: Any, model_config: Any, ep: int) -> list[Fault]:
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig

    if not isinstance(section, dict):
        return [Fault(where=SECTION, value=section, rule="must be an object", fix='write {"autoep_size": N, ...}')]
    faults = []
    for key, wanted in (("enabled", True), ("autoep_size", ep)):
        if section.get(key) != wanted:
            rule = f"contradicts the callback, which divides the experts over {ep} ranks"
            fix = f"write {str(wanted).lower()}, or leave the section out"
            faults.append(Fault(where=f"{SECTION}.{key}", value=section.get(key, "missing"), rule=rule, fix=fix))
    known = {name for name in AutoEPConfig.__dataclass_fields__ if not name.startswith("_")}
    for key in section:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            fix = f"did you mean {nearest[0]!r}?" if nearest else "remove it"
            faults.append(
                Fault(where=f"{SECTION}.{key}", rule="is unknown to DeepSpeed, which would ignore it", fix=fix)
            )
        elif key in _CHANGES_THE_MODEL and section[key] != _routing(model_config).get(key):
            rule = "would train another function than the saved model computes"
            faults.append(Fault(where=f"{SECTION}.{key}", value=section[key], rule=rule, fix="leave it out"))
    return faults
