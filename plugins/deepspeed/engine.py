"""DeepSpeed engines: NVMe offload, batch sizes, gradient norms, sharded linear layers, and resuming on other ranks."""

from __future__ import annotations

import contextlib
import inspect
import io
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.check.effects import effect_errors
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from .. import patches
from ..launching.background import FirstRank
from ..transformers.training_arguments import deepspeed_configuration
from .auto_ep import moe_layers, original_name, saved_tensors
from .compiled_operators import break_abandoned_locks

if TYPE_CHECKING:
    import torch
    from deepspeed import DeepSpeedEngine
    from torch import Tensor
    from transformers import PreTrainedModel, TrainingArguments


def _around_loads(around: Callable[[DeepSpeedEngine, Path, Callable[[Path], Any]], Any]) -> patches.Wrapper:
    """Return a wrapper of `DeepSpeedEngine.load_checkpoint`, in which `around` gets calls that load optimizer states.

    Its arguments are the engine, the directory of the states, and a function that loads from such a directory.
    """

    def loading(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(load_checkpoint)

        @wraps(load_checkpoint)
        def load(
            engine: DeepSpeedEngine, load_dir: str, tag: str | None = None, *args: object, **kwargs: object
        ) -> Any:
            arguments = signature.bind(engine, load_dir, tag, *args, **kwargs).arguments
            loads = arguments.get("load_optimizer_states", True) and not arguments.get("load_module_only", False)
            latest = Path(load_dir) / "latest"
            if tag is None and latest.is_file() and not engine.load_universal_checkpoint():
                tag = latest.read_text(encoding="utf-8").strip()
            if not loads or tag is None or not (Path(load_dir) / tag).is_dir():
                return load_checkpoint(engine, load_dir, tag, *args, **kwargs)

            def load_from(source: Path) -> Any:
                return load_checkpoint(engine, str(source.parent), source.name, *args, **kwargs)

            return around(engine, Path(load_dir) / tag, load_from)

        return load

    return loading


def restore_optimizer_states_from_nvme() -> None:
    """Make every DeepSpeed engine of this process restore its complete optimizer from an NVMe checkpoint."""

    def restoring(engine: DeepSpeedEngine, source: Path, load: Callable[[Path], Any]) -> Any:
        if not engine.zero_nvme_offload_optimizer():
            return load(source)
        import torch.distributed as dist

        _create_nvme_states(engine.optimizer)
        path, client_state = load(source)
        if path is not None:
            rank = dist.get_rank(group=engine.optimizer.dp_process_group)
            shards = engine._get_all_zero_checkpoints(str(source.parent), source.name)
            _restore_nvme_states(engine.optimizer, shards[rank])
        return path, client_state

    patches.apply("nvme-optimizer-states", _around_loads(restoring))


def _create_nvme_states(zero: Any) -> None:
    """Step once with a learning rate of zero: the weights do not change, and the swapper registers every state."""
    import torch

    groups = zero.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    timers: set[str] = set()
    for index, weights in enumerate(zero.fp32_partitioned_groups_flat):
        zero._prepare_sub_group(index, timers)
        gradient, weights.grad = weights.grad, torch.zeros_like(weights)
        zero._optimizer_step(index)
        weights.grad = gradient
        zero._release_sub_group(index, timers)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def _restore_nvme_states(zero: Any, saved: Any) -> None:
    """Restore what the swap files lack: step counts, parameter groups, and sub-groups that are not swapped."""
    base = saved["optimizer_state_dict"]
    for group, values in zip(zero.optimizer.param_groups, base["param_groups"], strict=True):
        group |= {key: value for key, value in values.items() if key != "params"}
    if zero.persistent_parameters:
        zero.persistent_parameters[0].partition(zero.persistent_parameters)
    for index, weights in enumerate(zero.fp32_partitioned_groups_flat):
        swapped = zero._swappable_optimizer_subgroup(index)
        state = zero.optimizer.state[weights]
        for name, value in base["state"][index].items():
            if not hasattr(value, "copy_"):
                state[name] = value
            elif not swapped:
                state[name].copy_(value)
        if not swapped:
            weights.data.copy_(saved["fp32_flat_groups"][index])
            zero._reassign_or_swap_out_partitioned_parameters(index)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def refuse_run_effects(arguments: TrainingArguments) -> None:
    """Reject a DeepSpeed configuration that would end the run early or cannot run under a Trainer.

    Raises:
        UsageError: all errors of `ds_configs.check.effect_errors`.
    """
    if errors := effect_errors(deepspeed_configuration(arguments) or {}):
        raise UsageError(errors)


def refuse_overwritten_rates() -> None:
    """Make every engine reject a scheduler that would give one rate to groups of several, such as those of LoRA+.

    The schedulers of a DeepSpeed configuration overwrite the rates of all groups with one value, unless it is a list.
    """

    def checking(configure: Callable[..., None]) -> Callable[..., None]:
        def configure_and_check(engine: Any) -> None:
            groups = getattr(engine.optimizer, "param_groups", None) or []
            rates = [float(group["lr"]) for group in groups]
            configure(engine)
            scheduler = engine.lr_scheduler
            if type(scheduler).__module__ != "deepspeed.runtime.lr_schedules":
                return
            # `WarmupCosineLR`, which scales the rate of each group, has none of these.
            peaks = getattr(scheduler, "max_lrs", getattr(scheduler, "min_lr", None))
            if peaks is None or len(set(rates)) < 2 or len(set(map(float, peaks))) > 1:
                return
            kind = type(scheduler).__name__
            listed = ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
            rule = f"{kind} would replace the rates of {len(rates)} groups, {listed}, by {float(peaks[0]):g}"
            fix = "remove the scheduler, use WarmupCosineLR, which scales each rate, or list a rate for each group"
            raise UsageError(ConfigError(where="DeepSpeed configuration: scheduler", value=kind, rule=rule, fix=fix))

        return configure_and_check

    patches.apply("rates-of-groups", checking)


def has_libaio() -> bool:
    """Return whether the header that DeepSpeed's async_io build includes is installed."""
    roots = ("/usr/include", "/usr/local/include", str(Path(sys.prefix) / "include"))
    return any((Path(root) / "libaio.h").exists() for root in roots)


def prepare_nvme_offload(arguments: TrainingArguments) -> None:
    """Check that this host can build `async_io` if NVMe offload needs it, and let such a run resume with its states.

    DeepSpeed compiles it at first use, minutes into a run. Ranks also remove operator locks left by killed ranks.

    Raises:
        UsageError: NVMe offload is requested, and libaio's header is missing.
    """
    configuration = deepspeed_configuration(arguments) or {}
    if configuration:
        break_abandoned_locks()
    zero = configuration.get("zero_optimization", {})
    sections = [zero.get(name) for name in ("offload_optimizer", "offload_param")]
    if not any(isinstance(section, dict) and section.get("device") == "nvme" for section in sections):
        return
    restore_optimizer_states_from_nvme()
    if not has_libaio():
        raise UsageError(
            ConfigError(
                where="zero_optimization",
                value="nvme",
                rule="NVMe offload compiles async_io, which needs libaio's header files",
                fix="install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora), or offload to cpu",
            )
        )


def train_batch_size(arguments: TrainingArguments, *, size: int) -> int:
    """Return the samples per optimizer step if groups of `size` ranks read the same samples."""
    micro, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    return int(micro * accumulation * max(1, arguments.world_size // size))


def accept_train_batch_size(arguments: TrainingArguments, *, size: int) -> None:
    """Accept the correct `train_batch_size` of a DeepSpeed configuration, which Transformers reports as a mismatch.

    Transformers 5.17.0 (integrations/deepspeed.py, `trainer_config_process`) multiplies by all ranks; Accelerate 1.15.0
    sets the correct number when it prepares the model.
    """
    configuration = deepspeed_configuration(arguments)
    if configuration is None or configuration.get("train_batch_size") != train_batch_size(arguments, size=size):
        return
    processed = getattr(arguments, "hf_deepspeed_config", None)
    if processed is None:
        configuration["train_batch_size"] = "auto"
    else:
        processed.mismatches = [line for line in processed.mismatches if "train_batch_size (calculated)" not in line]


def keep_gradient_norm(engine: DeepSpeedEngine) -> None:
    """Keep the gradient norm of each step in an fp32 engine without ZeRO, where deepspeed 0.19.8 discards it.

    Engines of pipelines and of expert parallelism compute their own norms.
    """
    if engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled() or hasattr(engine, "grid"):
        return

    def keeping(take_step: Callable[..., None]) -> Callable[..., None]:
        def take_model_step(*args: object, **kwargs: object) -> None:
            from deepspeed.runtime.utils import clip_grad_norm_

            parameters = list(engine.module.parameters())
            engine._global_grad_norm = clip_grad_norm_(parameters, max_norm=float("inf"), mpu=engine.mpu)
            take_step(*args, **kwargs)

        return take_model_step

    patches.apply("gradient-norm-without-zero", keeping, on=engine)


def named_linear_layers(model: PreTrainedModel) -> dict[str, Any]:
    """Return linear layers, sharded or not, by their names in the model's checkpoint; of a pipeline, this rank's."""
    import torch

    kinds: tuple[type, ...] = (torch.nn.Linear,)
    # Sharded layers exist only if their module is imported already.
    if (layers := sys.modules.get("deepspeed.module_inject.layers")) is not None:
        kinds += (layers.LinearLayer, layers.LinearAllreduce)
        kinds += (layers.SubParamLinearLayer, layers.SubParamLinearAllreduce)
    return {name: module for name, module in _named_modules(model) if isinstance(module, kinds)}


def whole_shape(layer: torch.nn.Module) -> tuple[int, int]:
    """Return the output and input features of a linear layer, summed over the ranks that hold its shards."""
    rows, columns = getattr(layer, "_orig_weight_shape", None) or (layer.out_features, layer.in_features)
    return int(rows), int(columns)


def with_all_columns_and_rows(parameter: torch.Tensor, own: Tensor) -> Tensor:
    """Gather a matrix from all ranks of a tensor-parallel group; each of them must call it.

    `own` is this rank's shard; it is returned if the parameter, which knows its sharding, is not sharded.
    """
    gather = getattr(parameter, "gather_params", None)
    if gather is None:
        return own
    whole = own.detach()
    # The layer replaces the data of the list's tensors; the parameter keeps its own.
    gather([whole])
    return whole


def own_part(parameter: torch.Tensor, whole: Tensor) -> Tensor:
    """Return this rank's shard of a matrix [O, I], sharded like a parameter."""
    partition = getattr(parameter, "_tp_partition", None)
    if partition is None:
        return whole
    part = whole.detach()
    partition([part])
    return part


def stages_of(model: PreTrainedModel) -> Any:
    """Return the model if it is a pipeline module, otherwise `None`."""
    return model if hasattr(model, "stages") and hasattr(model, "data_parallel_rank") else None


def _named_modules(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    if stages_of(model) is not None:
        for stage in model.stages:
            yield from _named_modules(stage)
        return
    blocks = moe_layers(model)
    for name, module in model.named_modules():
        plain = name.replace("_orig_mod.", "")
        block = next((prefix for prefix in blocks if name.startswith(f"{prefix}.")), None)
        if block is None:
            yield plain, module
        elif not name.startswith(f"{block}.router."):
            inside = original_name(blocks[block], f"{name[len(block) + 1 :]}.").removesuffix(".")
            yield f"{block}.{inside}".replace("_orig_mod.", ""), module


def load_from_other_ranks() -> None:
    """Make every ZeRO engine of this process load checkpoints that another number of ranks saved.

    All ranks must see the directory above the checkpoint, which takes 12 bytes per trained parameter for the
    conversion.
    """

    def converting(engine: DeepSpeedEngine, source: Path, load: Callable[[Path], Any]) -> Any:
        # 0: the ranks did not shard the optimizer states.
        if _saving_ranks(source) in (0, engine.seq_dp_world_size):
            return load(source)
        _check_conversion(engine, source)
        with _universal(engine, source) as converted, _own_values(engine.optimizer.optimizer):
            return load(converted)

    patches.apply("checkpoints-of-other-ranks", _around_loads(converting))


def _saving_ranks(source: Path) -> int:
    return len(list(source.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt")))


def _check_conversion(engine: DeepSpeedEngine, source: Path) -> None:
    from torch.nn import Parameter

    rules = []
    if engine.zero_nvme_offload_optimizer():
        rules.append("optimizer states on NVMe are separate files of each rank")
    if buffers := [name for name, tensor in saved_tensors(engine.module) if not isinstance(tensor, Parameter)]:
        rules.append(f"DeepSpeed restores no buffers on another number of ranks, and the model saves {buffers[0]}")
    saving_ranks = _saving_ranks(source)
    saved = f"{source.parent.name} was saved by {saving_ranks} ranks: "
    fix = f"launch {saving_ranks} ranks, or start a new run from the checkpoint's weights by passing it as model"
    if rules:
        ranks = engine.seq_dp_world_size
        raise UsageError(
            [ConfigError(where="resume: world_size", value=ranks, rule=saved + rule, fix=fix) for rule in rules]
        )


@contextlib.contextmanager
def _universal(engine: DeepSpeedEngine, source: Path) -> Iterator[Path]:
    """Convert a checkpoint on the first rank, while the others wait, and make the engine load the result."""
    import torch.distributed as distributed

    directory = source.parent.with_name(f".universal-{source.parent.name}")
    target = directory / source.name
    configuration = engine._config
    before = configuration.load_universal_checkpoint

    def convert() -> None:
        from deepspeed.checkpoint import ds_to_universal

        shutil.rmtree(directory, ignore_errors=True)
        target.mkdir(parents=True)
        # Transformers 5.17.0 saves no `universal_checkpoint_info`, which the converter requires: inject an empty one.
        options = Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            ds_to_universal.main(options)

    with FirstRank() as first:
        try:
            try:
                first.does(convert)
            except Exception as error:
                rule = f"{source.parent.name} cannot be converted to another number of ranks"
                raise ShardwrightError(f"{rule}: {error!r}") from error
            configuration.load_universal_checkpoint = True
            yield target
        finally:
            configuration.load_universal_checkpoint = before
            distributed.barrier()
            if first.is_here:
                shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _own_values(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore each parameter group's own values after loading, except the learning rate, and give it a step count."""
    groups = optimizer.param_groups
    before = [{name: value for name, value in group.items() if name not in ("params", "lr")} for group in groups]
    yield
    for group, own in zip(groups, before, strict=True):
        group |= own
    for state in optimizer.state.values():
        if hasattr(state.get("step"), "clone"):
            state["step"] = state["step"].clone()
