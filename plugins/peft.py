"""LoRA and QLoRA through peft and bitsandbytes.

Seen with peft 0.21.2 and bitsandbytes 0.50.2: FSDP2 shards 4-bit weights only when their storage dtype is a floating
one (uint8 storage is replicated with a warning, accelerate/utils/fsdp_utils.py:789), so the storage follows the
compute dtype. PEFT makes adapters fp32; under `zero.Init` DeepSpeed 0.19.8 leaves them so and runs without autocast,
and each adapted layer then keeps an fp32 copy of its input (seen on two CPU ranks).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ds_configs.specs.errors import ConfigError, RefusedInputError, UsageError
from ..ds_configs.specs.images import ImagePart, image_part, names_of_parts
from ..ds_configs.specs.job import LoraVariant
from ..ds_configs.specs.model import ALL_LINEAR, EXPERT_MODULES, EXPERTS, adapted_mixtures
from ..ds_configs.specs.texts import strict_json
from . import patches
from .releases import transformers_release
from .safetensors import StoredTensor, read_header

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter."""

# What `TrainingJob.lora_rank` plans with.
DEFAULT_RANK = 16


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int | None,
    targets: str | None,
    fp32_adapters: bool,
    alpha: float | None = None,
    variant: LoraVariant = "lora",
    plus_ratio: float | None = None,
    dropout: float = 0.0,
    frozen: Collection[ImagePart] = (),
    whole: Collection[ImagePart] = (),
) -> Any:
    """Freeze the model and add trainable low-rank adapters (Hu et al. 2021, arXiv:2106.09685).

    The scale is `alpha` / `rank`, and `alpha` / sqrt(`rank`) with rsLoRA (arXiv:2312.03732); `alpha` is twice the rank
    by default. DoRA (arXiv:2402.09353) also trains the norm of each row of a weight. PiSSA (arXiv:2404.02948) starts
    with the largest singular vectors of a weight and subtracts them from it. `plus_ratio` is the learning rate of B
    over that of A (LoRA+, arXiv:2402.12354), which `raise_rates_of_b` applies. `targets` are the `lora_targets` of a
    job, separated by commas. `fp32_adapters` is for engines that keep no other fp32 copy of them; DeepSpeed keeps one
    in its optimizer. `frozen` parts for images get no adapters, nor do `whole` ones, whose weights are trained and
    saved beside them.

    Raises:
        UsageError: no module has one of the names, or experts are adapted with dropout.
    """
    from peft import LoraConfig, get_peft_model

    chosen_rank, chosen_targets = rank or DEFAULT_RANK, targets or ALL_LINEAR
    modules, parameters = _modules_and_parameters(model, [name.strip() for name in chosen_targets.split(",")])
    adapts_mixture = modules == ALL_LINEAR and model.config.model_type in adapted_mixtures(transformers_release())
    if dropout and (parameters or adapts_mixture):
        raise UsageError(dropout_error(dropout))
    # PEFT's class for causal language models asks for `prepare_inputs_for_generation`, which encoders lack.
    task = "CAUSAL_LM" if model.can_generate() and not model.config.is_encoder_decoder else None
    if type(model).__name__.endswith("ForSequenceClassification"):
        # The head, which is new, is trained and saved beside the adapters.
        task = "SEQ_CLS"
    excluded = {*frozen, *whole}
    lora = LoraConfig(
        r=chosen_rank,
        lora_alpha=2 * chosen_rank if alpha is None else alpha,
        lora_dropout=dropout,
        use_rslora=variant == "rslora",
        use_dora=variant == "dora",
        init_lora_weights="pissa" if variant == "pissa" else True,
        exclude_modules=names_of_parts(excluded) if excluded and hasattr(model.config, "vision_config") else None,
        target_modules=modules,
        target_parameters=parameters or None,
        task_type=task,
    )
    try:
        adapted = get_peft_model(model, lora, autocast_adapter_dtype=fp32_adapters)
    except ValueError as error:
        known = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module).__name__ == "Linear"}
        if modules == ALL_LINEAR or parameters or known & set(modules):
            raise
        rule, fix = "is not a module of the model", f"use {', '.join(sorted(known))}, or {ALL_LINEAR}"
        raise UsageError(ConfigError(where="lora_targets", value=chosen_targets, rule=rule, fix=fix)) from error
    adapted.lora_plus_ratio = plus_ratio
    if whole:
        for name, weight in adapted.named_parameters():
            if image_part(name) in whole:
                weight.requires_grad_(True)
                if fp32_adapters:
                    weight.data = weight.data.float()
        patches.apply("trained-parts-beside-adapters", _with_trained_parts)
    return adapted


def _with_trained_parts(upstream: Any) -> Any:
    """Add the weights that are trained beside the adapters to those that PEFT saves."""

    def adapter_state_dict(
        cls: type, model: Any, config: Any, adapter_name: str, state_dict: Mapping[str, Any], *others: Any, **named: Any
    ) -> Any:
        found = upstream(model, config, adapter_name, state_dict, *others, **named)
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad and ".lora_" not in name}
        return found | {name: value for name, value in state_dict.items() if name in trained and image_part(name)}

    return classmethod(adapter_state_dict)


def raise_rates_of_b(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Move the B matrices of LoRA+ adapters to groups of their own, with their learning rate."""
    ratio = getattr(model, "lora_plus_ratio", None)
    if ratio is None:
        return
    raised = {id(weight) for name, weight in model.named_parameters() if ".lora_B." in name}
    for group in list(optimizer.param_groups):
        matrices = [weight for weight in group["params"] if id(weight) in raised]
        if matrices:
            group["params"] = [weight for weight in group["params"] if id(weight) not in raised]
            optimizer.add_param_group({**group, "params": matrices, "lr": ratio * group["lr"]})


def dropout_error(dropout: float) -> ConfigError:
    """Return the error of dropout with adapted experts: PEFT 0.21 adds their adapters to the weights."""
    rule = "is not supported for fused experts: PEFT adds their adapters to the weights, not to the outputs"
    fix = "omit it, or use --lora-targets with names of Linear modules"
    return ConfigError(where="lora_dropout", value=dropout, rule=rule, fix=fix)


def _modules_and_parameters(model: PreTrainedModel, targets: list[str]) -> tuple[str | list[str], list[str]]:
    """Return the `target_modules` and `target_parameters` of PEFT for the `lora_targets` of a job.

    A name of no Linear module is that of a fused expert matrix (`adapted_experts` plans the same).
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
    if model.config.model_type in adapted_mixtures(transformers_release()):
        linears = {name for name in linears if name.rpartition(".")[2] not in EXPERT_MODULES}
    # Under ZeRO-3 the shape of a parameter is that of its shard.
    shapes = {name: getattr(weight, "ds_shape", weight.shape) for name, weight in model.named_parameters()}
    experts = {name for name, shape in shapes.items() if "expert" in name.lower() and len(shape) == 3}
    modules, parameters = [], set()
    for target in targets:
        matches = {name for name in experts if target == EXPERTS or name.endswith(f".{target}")}
        if target == ALL_LINEAR or not matches or any(f".{name}".endswith(f".{target}") for name in linears):
            modules.append(target)
        else:
            # Such as `experts.down_proj`: the same name in every layer.
            parameters |= {re.sub(r".*?([^.]*expert)", r"\1", name, count=1, flags=re.IGNORECASE) for name in matches}
    return ALL_LINEAR if ALL_LINEAR in modules else modules, sorted(parameters)


def four_bit_loading(dtype: torch.dtype) -> Any:
    """Return the quantization config of QLoRA: NF4 with double quantization (arXiv:2305.14314).

    `dtype` is the dtype of computations, and of the storage that packs the 4-bit values.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraAdapter:
    """A LoRA adapter in a directory, from its configuration and the header of its weights."""

    directory: Path
    base: str | None
    """Hub id or path of the base model, as the adapter records it."""
    base_revision: str | None
    """Commit, branch or tag of a base model on the Hub."""
    settings: Mapping[str, Any]
    """Contents of `adapter_config.json`."""
    tensors: Mapping[str, StoredTensor]


def read_adapter(directory: Path) -> LoraAdapter:
    """Read the configuration of a LoRA adapter, and the header of its weights.

    Raises:
        UsageError: the directory is not an adapter, or one of another type.
        RefusedInputError: its files are missing, truncated or damaged.
    """
    where, again = str(directory), "download or save the adapter again"
    if not (directory / CONFIG).is_file():
        rule, fix = f"has no {CONFIG}", "pass the directory of a LoRA adapter"
        raise UsageError(ConfigError(where="adapter", value=where, rule=rule, fix=fix))
    try:
        config = strict_json((directory / CONFIG).read_bytes())
    except ValueError as error:
        rule = f"is not valid JSON ({error})"
        raise RefusedInputError(ConfigError(where=str(directory / CONFIG), rule=rule, fix=again)) from None
    if not isinstance(config, dict):
        raise RefusedInputError(ConfigError(where=str(directory / CONFIG), rule="must be a JSON object", fix=again))
    if (kind := config.get("peft_type")) != "LORA":
        rule, fix = f"has the PEFT type {kind}, but only LORA is supported", "merge it with PEFT itself"
        raise UsageError(ConfigError(where="adapter", value=where, rule=rule, fix=fix))
    tensors = read_header(directory / WEIGHTS).tensors
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    return LoraAdapter(
        directory=directory,
        base=base if isinstance(base, str) and base else None,
        base_revision=revision if isinstance(revision, str) else None,
        settings=config,
        tensors=tensors,
    )


def check_adapter_fits(adapter: LoraAdapter, meta: PreTrainedModel, base: str, *, fix: str) -> None:
    """Check that an adapter has exactly the tensors that its base needs, by name and shape.

    `meta` is the base model on the meta device; adapters are added to it. `fix` says how to select another base.

    Raises:
        RefusedInputError: the adapter is of another base, or lacks tensors.
    """
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    where = f"adapter {adapter.directory}"
    fix = f"use the model that it was trained on: {fix}"
    own_shapes = {f"base_model.model.{name}": tuple(weight.shape) for name, weight in meta.named_parameters()}
    try:
        config = LoraConfig.from_pretrained(str(adapter.directory))
        # Initial values can be singular vectors of the base, which has none on the meta device.
        config.init_lora_weights, config.base_model_name_or_path = False, None
        adapted = get_peft_model(meta, config, autocast_adapter_dtype=False)
    except (ValueError, TypeError, KeyError) as error:
        rule = f"cannot be added to {base} ({' '.join(str(error).split())[:200]})"
        raise RefusedInputError(ConfigError(where=where, rule=rule, fix=fix)) from None
    needed = {
        name: tuple(tensor.shape)
        for name, tensor in get_peft_model_state_dict(adapted, save_embedding_layers=False).items()
    }
    stored = {name: tensor.shape for name, tensor in adapter.tensors.items()}
    # PEFT also stores whole embeddings, such as of a vocabulary with new tokens.
    other = [name for name, shape in stored.items() if needed.get(name, own_shapes.get(name)) != shape]
    if other:
        rule = f"does not belong to {base}: {len(other)} tensors have another name or shape, such as {min(other)}"
        raise RefusedInputError(ConfigError(where=where, rule=rule, fix=fix))
    if missing := needed.keys() - stored.keys():
        rule, fix = f"lacks {len(missing)} tensors, such as {min(missing)}", "download or save the adapter again"
        raise RefusedInputError(ConfigError(where=where, rule=rule, fix=fix))


def merge_adapter(model: PreTrainedModel, adapter: LoraAdapter) -> tuple[Any, float]:
    """Add an adapter to the weights of its base, in place.

    Returns:
        The model without adapters, and the relative rounding error of the merged matrices: the Frobenius norm, over all
        of them, of the change from fp32 to the stored dtype, divided by their norm in fp32.
    """
    import torch
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    adapted = PeftModel.from_pretrained(model, str(adapter.directory))
    squared_error = squared_norm = 0.0
    for module in adapted.modules():
        if not isinstance(module, LoraLayer):
            continue
        # Each fused expert matrix has a wrapper around the module that owns it.
        weight = getattr(module.get_base_layer(), getattr(module, "parameter_name", "weight"), None)
        if not isinstance(weight, torch.nn.Parameter):
            module.merge(safe_merge=True)
            continue
        # PEFT 0.21.2 rounds the product to the dtype of the weight before it adds both (`lora/layer.py`, `merge`).
        dtype = weight.dtype
        weight.data = weight.data.float()
        module.merge(safe_merge=True)
        exact = weight.data
        weight.data = exact.to(dtype)
        squared_error += float((weight.data.float() - exact).double().square().sum())
        squared_norm += float(exact.double().square().sum())
    return adapted.unload(), (squared_error / squared_norm) ** 0.5 if squared_norm else 0.0
