"""`TrainingArguments` with every key checked, what they imply for saving and precision, and a byte tokenizer.

Seen with transformers 5.17.0 and accelerate 1.15.0:

- A DeepSpeed configuration without ``stage3_gather_16bit_weights_on_model_save`` makes ``Trainer.save_model``
  write DeepSpeed's own checkpoint instead of a model directory, at the end of the training.
- ``SHARDED_STATE_DICT`` makes ``Trainer.save_model`` write no weights, without a warning.
- With CPU optimizer offload every optimizer object becomes ``DeepSpeedCPUAdam``, with L2 instead of decoupled
  weight decay unless it was torch AdamW (accelerate/utils/deepspeed.py, ``map_pytorch_optim_to_deepspeed``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.legality.combinations import columns_of, incompatibility_errors
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.layout import Layout, ZeroOptions
from ...ds_configs.specs.optimizers import OPTIMIZERS
from ...ds_configs.specs.tasks import TASKS, TaskName
from .. import patches
from ..launching.messages import note_on_first_rank
from ..safetensors import named_write_errors, save_tensors
from .loading import refuse_nonfinite_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainingArguments

# The tokenizer that needs no download: one token per byte.
BYTE_COUNT = 256
END_OF_TEXT = "<|endoftext|>"
SURVIVES_OPTIMIZER_OFFLOAD = frozenset(name for name, spec in OPTIMIZERS.items() if spec.cpu_kernel)
"""`optim` names whose update rule DeepSpeed's CPU optimizers preserve."""


def class_of_task(name: str) -> Any:
    """Return a class of Transformers or TRL by its full name, such as `trl.DPOConfig`.

    Raises:
        UsageError: TRL is not installed.
    """
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        rule, fix = "needs the package trl, which is not installed", "pip install 'trl>=1.16,<2'"
        raise UsageError(ConfigError(where="task", value=name, rule=rule, fix=fix)) from None


def training_arguments(settings: Mapping[str, Any], overrides: Mapping[str, Any], *, task: TaskName = "sft") -> Any:
    """Build a task's training arguments from ``settings`` and what the host requires (`configure_cpu_ranks`).

    Raises:
        UsageError: A key is unknown, or a setting contradicts an override; or TRL is not installed.
    """
    kind = class_of_task(TASKS[task].config or "transformers.TrainingArguments")
    errors = unknown_argument_errors(settings, kind)
    merged = dict(settings)
    for key, required in overrides.items():
        if isinstance(required, dict) and isinstance(settings.get(key), dict):
            merged[key] = {**settings[key], **required}
        elif settings.get(key, required) in (required, None):
            merged[key] = required
        else:
            rule = f"ranks without an accelerator need {key} = {required!r}"
            errors.append(_argument_error(key, settings[key], rule, "remove the key"))
    if overrides.get("use_cpu") and settings.get("fp16"):
        errors.append(_argument_error("fp16", True, "fp16 needs an accelerator", "set bf16: true, or train in fp32"))
    if errors:
        raise UsageError(errors)
    if merged.get("optim") == "muon":
        accept_muon()
    return kind(**merged)


def accept_muon() -> None:
    """Let every `TrainingArguments` of this process have `optim="muon"`, as plans write it.

    `optimizers.py` creates it, or DeepSpeed from a section of its configuration.
    """

    def accepting(check: Callable[..., None]) -> Callable[..., None]:
        def check_other_names(arguments: Any) -> None:
            name = arguments.optim
            if name == "muon":
                arguments.optim = "adamw_torch"
            check(arguments)
            if name == "muon":
                arguments.optim = name

        return check_other_names

    patches.apply("muon-name", accepting)


def unknown_argument_errors(settings: Mapping[str, Any], kind: Any = None) -> list[ConfigError]:
    """Return an error for every key that a class of training arguments does not have, by default the stock one."""
    from transformers import TrainingArguments

    kind = kind or TrainingArguments
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    errors = []
    for key in settings:
        if key not in names:
            nearest = get_close_matches(key, names, n=1)
            fix = f"did you mean {nearest[0]!r}?" if nearest else "remove it"
            errors.append(_argument_error(key, None, f"is not a key of {kind.__name__}", fix))
    return errors


def _argument_error(key: str, value: object, rule: str, fix: str) -> ConfigError:
    return ConfigError(where=f"training arguments: {key}", value=value, rule=rule, fix=fix)


def deepspeed_configuration(arguments: TrainingArguments) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration that ``arguments`` will train with; ``None`` without DeepSpeed."""
    plugin = getattr(arguments, "deepspeed_plugin", None)
    return None if plugin is None else plugin.deepspeed_config


OPTIMIZER_MODULES = {
    "torchao": "torchao",
    "schedulefree": "schedulefree",
    "torch-optimi": "optimi",
    "galore-torch": "galore_torch",
    "apollo-torch": "apollo_torch",
    "lomo-optim": "lomo_optim",
}
"""Modules of the packages of `OptimizerSpec.package`."""

PACKAGES = {"use_liger_kernel": ("liger-kernel", "liger_kernel", "it needs a GPU; or plan with --loss eager")}
"""Package, its module and what it needs, by the key of `TrainingArguments` that a plan may set and that needs it."""


def missing_packages(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the packages that are needed and not installed, by the key of `TrainingArguments` that needs each."""
    needed = {key: package for key, (package, module, _) in PACKAGES.items() if find_spec(module) is None}
    return {key: package for key, package in needed.items() if settings.get(key)}


def package_errors(settings: Mapping[str, Any]) -> list[ConfigError]:
    """Return an error for each package that the keys of `TrainingArguments` need and that is not installed."""
    name = str(settings.get("optim"))
    package = OPTIMIZERS[name].package if name in OPTIMIZERS else ""
    missing = {"optim": package} if package and find_spec(OPTIMIZER_MODULES[package]) is None else {}
    errors = []
    for key, package in (missing | missing_packages(settings)).items():
        rule, fix = f"needs the package {package}, which is not installed", f"pip install {package}"
        fix += f" ({PACKAGES[key][2]})" if key in PACKAGES else ""
        errors.append(_argument_error(key, settings[key], rule, fix))
    return errors


def refuse_replaced_optimizer(arguments: TrainingArguments) -> None:
    """Reject an optimizer that CPU offload would replace with another update rule.

    Raises:
        UsageError: ``optim`` does not survive ``offload_optimizer`` with ``zero_force_ds_cpu_optimizer``.
    """
    configuration = deepspeed_configuration(arguments)
    if configuration is None or "optimizer" in configuration:
        return
    offload = configuration["zero_optimization"].get("offload_optimizer") or {}
    optimizer = getattr(arguments.optim, "value", str(arguments.optim))
    if offload.get("device", "none") == "none" or not configuration.get("zero_force_ds_cpu_optimizer", True):
        return
    if optimizer not in SURVIVES_OPTIMIZER_OFFLOAD:
        rule = "optimizer offload would replace it with DeepSpeedCPUAdam and L2 weight decay"
        fix = "use adamw_torch, or set zero_force_ds_cpu_optimizer: false in ds_config.json"
        raise UsageError(_argument_error("optim", optimizer, rule, fix))


def warn_of_zero0_in_16_bit(arguments: TrainingArguments) -> None:
    """Warn that DeepSpeed 0.19.8 takes one optimizer step with zero gradients before training at stage 0 in 16 bit.

    ``initialize_optimizer_states`` steps to allocate Adam's moments, so the bias correction starts at step 2: two steps
    later the loss of a small Llama was 0.09 above that of DDP and of ZeRO-1.
    """
    configuration = deepspeed_configuration(arguments)
    if configuration is None or arguments.mixed_precision == "no":
        return
    if configuration["zero_optimization"].get("stage", 0) == 0:
        note_on_first_rank(
            "ZeRO stage 0 in 16 bit starts with an optimizer step on zero gradients, which reduces Adam's first "
            "updates (deepspeed 0.19.8): use ZeRO stage 1 or plain DDP"
        )


def prepare_model_directory_save(arguments: TrainingArguments) -> None:
    """Make sure, before training, that a ZeRO-3 run can save a normal model directory.

    Raises:
        UsageError: The DeepSpeed configuration disables gathering.
    """
    configuration = deepspeed_configuration(arguments)
    if configuration is None or configuration["zero_optimization"].get("stage") != 3:
        return
    key = "stage3_gather_16bit_weights_on_model_save"
    section = configuration["zero_optimization"]
    if section.get(key) is True:
        return
    # Accelerate has already replaced "auto" by false.
    if key in section:
        rule, fix = "must be true to save a model directory under ZeRO-3", "set it to true, or train with --no-save"
        raise UsageError(ConfigError(where=f"zero_optimization.{key}", value=section[key], rule=rule, fix=fix))
    section[key] = True
    note_on_first_rank(f"zero_optimization.{key} was missing: set to true, so that the model can be saved")


def save_model_directory(
    trainer: Trainer, directory: str, *, allow_nonfinite: bool = False, starting: Path | None = None
) -> None:
    """Write a model directory with safetensors and no pickle; every rank must call it.

    `starting` is the directory of the model that training started from: weights that it stores in 16 bit are saved in
    that type, whatever the type of the trained copy.

    Raises:
        RefusedInputError: weights are NaN or infinite, and `allow_nonfinite` is false.
        ShardwrightError: the disk is full or cannot be written.
    """
    refuse_nonfinite_weights(trainer.model, what="the trained model", allowed=allow_nonfinite)
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    with named_write_errors(Path(directory)):
        trainer.save_model(directory)
    if trainer.args.should_save:
        # A pickle of the arguments, which can run code when it is loaded.
        (Path(directory) / "training_args.bin").unlink(missing_ok=True)
        if starting is not None:
            with named_write_errors(Path(directory)):
                _convert_to_stored_types(Path(directory), starting)


def _convert_to_stored_types(directory: Path, starting: Path) -> None:
    """Convert saved fp32 weights to the 16-bit types that the starting model stores them in, one file at a time."""
    import torch
    from safetensors import safe_open

    from .loading import stored_types

    stored = {name: dtype for name, (dtype, _) in stored_types(map(str, starting.glob("*.safetensors"))).items()}
    saved_bytes, converted = 0, set()
    for file in sorted(directory.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata()
        changed = {
            name: tensor.to(stored[name])
            for name, tensor in tensors.items()
            if tensor.dtype == torch.float32 and stored.get(name) is not None
        }
        tensors |= changed
        saved_bytes += sum(tensor.nbytes for tensor in tensors.values())
        converted |= {tensor.dtype for tensor in changed.values()}
        if changed:
            save_tensors(tensors, file, metadata)
    if len(converted) != 1:
        return
    dtype = str(converted.pop()).removeprefix("torch.")
    note_on_first_rank(f"the model is saved in {dtype}, the type of the checkpoint that training started from")
    index, config = directory / "model.safetensors.index.json", directory / "config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    for part in (content, *content.values()):
        if isinstance(part, dict) and "dtype" in part:
            part["dtype"] = dtype
    config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["metadata"]["total_size"] = saved_bytes
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def weights_dtype(arguments: TrainingArguments, *, method: str, trained: str = "fp32") -> Any:
    """Return the dtype in which weights must be loaded so that mixed precision has fp32 master weights.

    DDP and FSDP2 compute in 16 bit from fp32 weights. DeepSpeed keeps an fp32 copy of 16-bit weights, and frozen
    weights need none. `trained` is `TrainingJob.weights_dtype`: with bf16 there are no fp32 weights.
    """
    import torch

    if trained == "bf16":
        return torch.bfloat16
    keeps_master_copy = deepspeed_configuration(arguments) is not None
    return compute_dtype(arguments) if keeps_master_copy or method != "full" else torch.float32


def compute_dtype(arguments: TrainingArguments) -> Any:
    """Return the dtype in which a run computes, and in which it loads second models."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(arguments.mixed_precision, torch.float32)


def byte_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer with one id per byte, and end-of-text as id 256 if the vocabulary has more than 256 ids.

    Raises:
        UsageError: The vocabulary is smaller than the number of bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < BYTE_COUNT:
        rule = f"splitting text into bytes needs at least {BYTE_COUNT} ids"
        raise UsageError(ConfigError(where="vocab_size", value=vocab_size, rule=rule, fix="pass --tokenizer"))
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": END_OF_TEXT} if vocab_size > BYTE_COUNT else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


_PACKAGES = {"azure_ml": "azureml-core", "flyte": "flytekit"}
"""Trackers whose distribution has another name."""


def tracker_errors(names: Sequence[str]) -> list[ConfigError]:
    """Return an error for each tracker that is unknown or not installed."""
    if not names:
        return []
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    available = {"none", "all", *get_available_reporting_integrations()}
    errors = []
    for name in names:
        if name not in available and name in INTEGRATION_TO_CALLBACK:
            fix = f"pip install {_PACKAGES.get(name, name)}, or remove it"
            errors.append(ConfigError(where="report_to", value=name, rule="is not installed", fix=fix))
        elif name not in available:
            near = get_close_matches(name, INTEGRATION_TO_CALLBACK, n=1)
            fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
            errors.append(ConfigError(where="report_to", value=name, rule="is not a tracker of Transformers", fix=fix))
    return errors


def check_first_of_its_kind(callback: Any, trainer: Trainer) -> None:
    """Check that a Trainer has no other callback of this class, whose hooks the new one would replace.

    Raises:
        UsageError: it has one.
    """
    kind = type(callback)
    handler = getattr(trainer, "callback_handler", None)
    if any(isinstance(other, kind) for other in getattr(handler, "callbacks", ())):
        rule = "is already attached to this trainer, and a second one would replace its hooks"
        fix = f"attach one {kind.__name__} per trainer, or call trainer.remove_callback({kind.__name__}) first"
        raise UsageError(ConfigError(where=kind.__name__, rule=rule, fix=fix))


_DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout")


def run_errors(
    arguments: TrainingArguments,
    model: PreTrainedModel,
    *,
    callbacks: Iterable[Any] = (),
    settings: Iterable[str] = (),
    pipeline: bool = False,
    stage_tensor_ranks: int = 1,
    has_own_optimizer: bool = False,
) -> list[ConfigError]:
    """Return an error for each combination of the run's settings and its layout that is not supported.

    `settings` have the names of the table of combinations, in which callbacks of ours name their rows as
    `combined_settings`. No argument of the Trainer contains `stage_tensor_ranks`, the tensor-parallel ranks of each
    pipeline stage.
    """
    named = [name for callback in callbacks for name in getattr(callback, "combined_settings", ())]
    rows = [*named, *settings, *stated_settings(arguments, model, has_own_optimizer=has_own_optimizer)]
    layout = layout_of(arguments, pipeline=pipeline, stage_tensor_ranks=stage_tensor_ranks)
    errors = incompatibility_errors(rows, columns_of(layout))
    if arguments.neftune_noise_alpha is not None and arguments.world_size > 1:
        rule = "scales the noise by the padded length of each rank's own batch, not of all ranks (transformers 5.17.0)"
        fix = "omit it, or train in one process"
        errors.append(ConfigError(where="neftune_noise_alpha", value=arguments.neftune_noise_alpha, rule=rule, fix=fix))
    kind = str(getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type))
    if layout.zero_stage and (kind == "polynomial" or "min_lr" in (arguments.lr_scheduler_kwargs or {})):
        rule = "reads the optimizer's defaults, which ZeRO optimizers lack (deepspeed 0.19.8)"
        fix = "use linear or cosine, or min_lr_rate instead of min_lr"
        errors.append(ConfigError(where="lr_scheduler_type", value=kind, rule=rule, fix=fix))
    return errors


def trainer_errors(trainer: Trainer) -> list[ConfigError]:
    """Return `run_errors` for a Trainer."""
    extra = list(getattr(trainer, "combined_settings", ()))
    # Trainers of TRL add a balance loss regardless of the model's configuration, and record it in this attribute.
    balances = balances_experts(trainer.model) or getattr(trainer, "aux_loss_enabled", False)
    if balances and not getattr(trainer, "corrects_balance_loss", False):
        extra.append("balance_loss")
    data = trainer.train_dataset
    if data is not None and not hasattr(data, "__len__"):
        extra.append("streams")
    return run_errors(
        trainer.args,
        trainer.model,
        callbacks=trainer.callback_handler.callbacks,
        settings=extra,
        has_own_optimizer=has_own_optimizer(trainer),
    )


def own_class(trainer: Any) -> Any:
    """Return the class of a Trainer as its author wrote it, without the class that Shardwright puts in front."""
    return getattr(type(trainer), "own_class", type(trainer))


def has_own_optimizer(trainer: Trainer) -> bool:
    """Return whether a Trainer received an optimizer, so that `args.optim` has no effect."""
    return getattr(trainer, "has_own_optimizer", False) or trainer.optimizer_cls_and_kwargs is not None


def stated_settings(
    arguments: TrainingArguments, model: PreTrainedModel, *, has_own_optimizer: bool = False
) -> list[str]:
    """Return the settings of training arguments and a model, by the table's names."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    adapted = hasattr(model, "peft_config")
    trains = [parameter.requires_grad for parameter in model.parameters()] if hasattr(model, "parameters") else []
    stated = {
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "label_smoothing": arguments.label_smoothing_factor,
        "compile": arguments.torch_compile,
        "bf16": arguments.bf16,
        "fp16": arguments.fp16,
        "split_batches": arguments.accelerator_config.split_batches,
        "lora": adapted,
        "frozen": not adapted and not all(trains),
        "dropout": any(isinstance(rate := getattr(text, name, 0), float) and rate > 0 for name in _DROPOUTS),
    }
    settings = [name for name, is_set in stated.items() if is_set]
    if has_own_optimizer:
        return settings
    # An optimizer of the DeepSpeed configuration has precedence over the Trainer's.
    section = (deepspeed_configuration(arguments) or {}).get("optimizer")
    if section is None:
        return [str(getattr(arguments.optim, "value", arguments.optim)), *settings]
    name = str(section.get("type", ""))
    rows = {"adam": "adamw_torch", "adamw": "adamw_torch", "sgd": "sgd", "muon": "muon"}
    return [rows.get(name.lower(), name), *settings]


def balances_experts(model: PreTrainedModel) -> bool:
    """Return whether a mixture adds a load-balancing loss to its own."""
    config = getattr(model, "config", None)
    strength = getattr(model, "router_aux_loss_coef", None)
    return bool(getattr(config, "output_router_logits", False) and strength)


def layout_of(arguments: TrainingArguments, *, pipeline: bool = False, stage_tensor_ranks: int = 1) -> Layout:
    """Return engine, offload and axes of a run; `pp` is 2 for a pipeline of any number of stages."""
    configuration = deepspeed_configuration(arguments) or {}
    zero = configuration.get("zero_optimization", {})
    axes = arguments.parallelism_config
    sizes = {
        "sp": max(_size(axes, "sp_size"), int(configuration.get("sequence_parallel_size", 1) or 1)),
        "cp": _size(axes, "cp_size"),
        "tp": max(stage_tensor_ranks, int((configuration.get("tensor_parallel") or {}).get("autotp_size", 1) or 1)),
        "ep": int((configuration.get("expert_parallel") or {}).get("autoep_size", 1) or 1),
        "pp": 2 if pipeline else 1,
    }
    stated: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1}
    if configuration:
        offloads: dict[str, Any] = {}
        # Without this the optimizer is the user's own, on any device.
        if configuration.get("zero_force_ds_cpu_optimizer", True):
            for part in ("offload_optimizer", "offload_param"):
                device = (zero.get(part) or {}).get("device", "none")
                offloads[part] = str(getattr(device, "value", device))
        options = ZeroOptions(
            hpz_partition_size=zero.get("zero_hpz_partition_size", 1),
            quantized_gradients=bool(zero.get("zero_quantized_gradients")),
        )
        return Layout(engine="deepspeed", zero_stage=int(zero.get("stage", 0)), zero=options, **offloads, **stated)
    if arguments.fsdp:
        offloaded: Any = "cpu" if (arguments.fsdp_config or {}).get("offload_params") else "none"
        return Layout(engine="fsdp2", offload_optimizer=offloaded, offload_param=offloaded, **stated)
    return Layout(engine="single" if arguments.world_size == 1 else "ddp", **stated)


def _size(axes: Any, name: str) -> int:
    return int(getattr(axes, name, None) or 1)
