"""`PlanCallback`: what a run used beside what its plan predicted; and the message of an out-of-memory error."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any

from ...ds_configs.plan.measurement import (
    FILE_NAME,
    FIRST_STEPS,
    RankMeasurement,
    RunMeasurement,
    log_values,
    measurement_text,
    planned_run,
    predicted_memory,
    report_lines,
)
from ...ds_configs.plan.out_of_memory import OutOfMemory, out_of_memory_text
from ...ds_configs.plan.output import write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.rendering import (
    DEEPSPEED_FILE,
    checkpointing_kwargs,
    copied_configuration,
    differing_keys,
    task_arguments,
)
from ...ds_configs.specs.errors import DoesNotFitError, ShardwrightError
from ...ds_configs.specs.images import IMAGE_PARTS, image_part
from ...ds_configs.step_time.learning import published_time
from ...plugins.accelerate import engine_from_environment
from ...plugins.bitsandbytes import read_weights_in_backward
from ...plugins.metering import Meter
from ...plugins.planning import installed_release_difference, installed_versions
from ...plugins.transformers.attention import attend_by_document
from ...plugins.transformers.gradient_checkpointing import checkpoint_first_layers, keep_towers, unmark_frozen_towers
from ...plugins.transformers.loading import gathered
from ...plugins.transformers.output_heads import base_model
from ...plugins.transformers.training_arguments import deepspeed_configuration
from ..checkpoints import full_disk_errors
from ..parallel.planned import attach_long_sequences
from .clock import LATER_STEPS, StepClock

LIMIT_VARIABLE = "SHARDWRIGHT_CPU_TENSOR_BYTES"
"""Environment variable with the bytes of tensors that a CPU rank may have: it stands in for an accelerator's memory."""
_HOST_ERRORS = ("DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory")

_EVALUATION = ("evaluation_loop", "prediction_step", "held_out_cross_entropy", "evaluate")
_PHASES = {"backward": "backward", "compute_loss": "forward", "training_step": "forward"}
_STEP_FILES = ("/torch/optim/", "/accelerate/optimizer.py", "/deepspeed/runtime/", "/bitsandbytes/optim/")


class RunOutOfMemoryError(DoesNotFitError):
    """A run that needed more memory than its plan predicted, or than there is."""


@contextmanager
def memory_errors(plan: Plan, *, command: str = "", options: Collection[str] = ()) -> Iterator[None]:
    """Raise `RunOutOfMemoryError` for a failed allocation inside the block.

    `command` and `options` are those of `out_of_memory_text`. Inner blocks have converted the error already. With
    `SHARDWRIGHT_CPU_TENSOR_BYTES`, a rank without an accelerator fails when its tensors need more bytes.
    """
    import torch

    from ...plugins.metering import ByteMeter

    has_accelerator = torch.cuda.is_available()
    limit = None if has_accelerator else os.environ.get(LIMIT_VARIABLE)
    meter = None if limit is None else ByteMeter(limit_bytes=int(limit))
    try:
        with meter or nullcontext():
            yield
    except (RuntimeError, MemoryError) as error:
        on_device = isinstance(error, torch.OutOfMemoryError)
        if (
            not on_device
            and not isinstance(error, MemoryError)
            and not any(text in str(error) for text in _HOST_ERRORS)
        ):
            raise
        peak_bytes = limit_bytes = None
        if meter is not None:
            peak_bytes, limit_bytes = max(meter.reading().peaks.values()), int(limit or 0)
        elif on_device and has_accelerator:
            peak_bytes = torch.cuda.max_memory_allocated()
            free_bytes, _ = torch.cuda.mem_get_info()
            limit_bytes = free_bytes + torch.cuda.memory_reserved()
        failure = OutOfMemory(
            phase=phase_of(error.__traceback__),
            error=(str(error).strip() or type(error).__name__).splitlines()[0],
            peak_bytes=peak_bytes,
            limit_bytes=limit_bytes,
            on_host=not on_device,
        )
        raise RunOutOfMemoryError(out_of_memory_text(plan, failure, command, options)) from error


def phase_of(trace: TracebackType | None) -> str:
    """Return the phase of a run in which an exception was raised: the innermost known function of the traceback.

    Recomputed layers run inside the backward pass; everything outside of a training step and an evaluation is loading.
    """
    phase = "loading"
    for frame, _ in walk_tb(trace):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name in _EVALUATION:
            return "evaluation"
        if "step" in name and any(part in file for part in _STEP_FILES):
            phase = "optimizer step"
        elif name in _PHASES:
            phase = _PHASES[name]
    return phase


TRAINED_TYPE = "type of trained weights"
"""Name in differences from a plan; a rehearsal reports it too."""
_SUMMARY_KEYS = frozenset({"train_runtime", "train_loss"})
"""With `include_num_input_tokens_seen` the log of every step holds `train_runtime`; only the summary holds both."""


class PlanCallback(StepClock):
    """Compares a run with its plan: writes `plan_measurement.json` and prints both on rank 0.

    When training begins, the model recomputes and keeps activations as planned (`keep_planned_memory`). Attached, it
    also tiles MLPs and the loss, and moves checkpoints to host memory, if the plan does.

    Make it before the Trainer, so that what the Trainer allocates counts, and attach it so that the figures reach
    W&B, TensorBoard and Trackio. Without `attach`, `callbacks=[callback]` still writes and prints. A step's time runs
    from `on_step_begin` to `on_step_end`: without data loading, logging, evaluation and saving.

    Args:
        plan: A plan, or the directory that `shardwright plan` wrote.
        meter: Counts memory instead of torch's caching allocator.
        tokens_of: Returns the tokens of a number of steps, for the tokens/s of logged steps.
        seq_len_tokens: Length of the training sequences, compared with the plan's when given.
        method: `full`, `lora` or `qlora`, compared with the plan's when given.
        output_dir: Directory for `plan_measurement.json`, by default that of the Trainer.

    Raises:
        UsageError: there is no plan.
        RefusedInputError: it is not one that this version wrote.

    >>> callback = PlanCallback("plan")  # doctest: +SKIP
    >>> trainer = Trainer(model=model, args=arguments, train_dataset=samples)  # doctest: +SKIP
    >>> callback.attach(trainer)  # doctest: +SKIP
    """

    def __init__(
        self,
        plan: Plan | str | Path,
        *,
        meter: Meter | None = None,
        tokens_of: Callable[[int], int] | None = None,
        seq_len_tokens: int | None = None,
        method: str | None = None,
        output_dir: Path | None = None,
    ) -> None:
        super().__init__(plan if isinstance(plan, Plan) else Plan.load(plan), tokens_of=tokens_of, meter=meter)
        self._directory = None if isinstance(plan, Plan) else Path(plan) if Path(plan).is_dir() else Path(plan).parent
        self._stated = {"seq_len": seq_len_tokens, "method": method}
        self._output_dir = output_dir
        self._finished = False
        self._explained: Path | None = None

    def attach(self, trainer: Any) -> None:
        """Follow a Trainer, with what the plan needs outside of the model, and explain failed allocations.

        A Trainer of `parallelism_of(...).make_trainer` only has to be followed.
        """
        self.follow(trainer)
        layout = self.plan.chosen.layout
        if layout.pp == 1:
            attach_long_sequences(trainer, layout, self.plan.job)
        self._explained = Path(trainer.args.output_dir)

    @contextmanager
    def around_training(self) -> Iterator[None]:
        """Raise `RunOutOfMemoryError` for a failed allocation of an attached Trainer, and name a full disk."""
        if self._explained is None:
            yield
            return
        with full_disk_errors(self._explained), memory_errors(self.plan):
            yield

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Discard the steps of an earlier run, and store the values of the plan.

        Warn when `ds_config.json` was edited but `accelerate.yaml` still embeds the old copy.
        """
        super().on_train_begin(args, state, control, **kwargs)
        self._finished = False
        if self._directory is not None and args.process_index == 0:
            for line in unread_edits(self._directory):
                print(f"note: {line}", file=sys.stderr)
        if (model := kwargs.get("model")) is not None:
            keep_planned_memory(self.plan, args, model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Finish at the Trainer's summary, while reporters are open."""
        super().on_log(args, state, control, **kwargs)
        if self._trainer is not None and not self._finished and (logs or {}).keys() >= _SUMMARY_KEYS:
            self._trainer.log(log_values(self._finish(args, kwargs.get("model"))))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        if not self._finished:
            self._finish(args, kwargs.get("model"))

    def _finish(self, args: Any, model: Any) -> RunMeasurement:
        """Gather all ranks' figures; rank 0 writes and prints them. Every rank must call it.

        A run that took no step, because all were done, keeps the file of the run that took them.
        """
        import torch

        self._finished = True
        reading = None if self.meter is None else self.meter.reading()
        seconds = self.steps.read(waits=True)
        first, later = seconds[:FIRST_STEPS], seconds[FIRST_STEPS:]
        tenths = statistics.quantiles(later, n=10, method="inclusive") if len(later) > 1 else [0.0]
        present = torch.cuda.is_available()
        free_bytes, device_bytes = torch.cuda.mem_get_info() if present else (0, 0)
        own = RankMeasurement(
            rank=args.process_index,
            device=torch.cuda.get_device_name() if present else "cpu",
            peak_allocated_bytes=self.peak_bytes(),
            peak_reserved_bytes=None if reading is None else reading.reserved_peak_bytes,
            later_peak_allocated_bytes=None if reading is None else reading.peaks.get(LATER_STEPS),
            reserved_at_end_bytes=torch.cuda.memory_reserved() if present else None,
            device_used_bytes=device_bytes - free_bytes if present else None,
            device_bytes=device_bytes if present else None,
            steps=len(seconds),
            first_step_seconds=tuple(first),
            median_step_seconds=statistics.median(later) if later else None,
            mean_step_seconds=statistics.fmean(later) if later else None,
            step_spread=(tenths[-1] - tenths[0]) / statistics.median(later) if later else None,
        )
        ranks = gathered(own)
        differences = argument_differences(self.plan, args, model, ranks=len(ranks), stated=self._stated)
        sizes = [rank.device_bytes for rank in ranks if rank.device_bytes is not None]
        planned_bytes = self.plan.hardware.gpu_bytes
        if sizes and abs(min(sizes) - planned_bytes) > 0.1 * planned_bytes:
            differences.append(
                f"the accelerator has {min(sizes) / 1e9:.1f} GB, but the plan has {planned_bytes / 1e9:.1f} GB"
            )
        if (difference := installed_release_difference(self.plan)) is not None:
            differences.append(difference)
        measurement = RunMeasurement(
            plan=planned_run(self.plan),
            predicted=predicted_memory(self.plan),
            measured=tuple(sorted(ranks, key=lambda rank: rank.rank)),
            predicted_step_seconds=published_time(self.plan.chosen.time).seconds,
            differences=tuple(differences),
            versions=dict(installed_versions()),
        )
        if args.process_index == 0 and self.steps.read():
            # The first line break leaves the progress bar's line.
            print("", *report_lines(measurement), sep="\n", file=sys.stderr)
            try:
                directory = self._output_dir or Path(args.output_dir)
                (path,) = write_files({FILE_NAME: measurement_text(measurement)}, directory, force=True)
                print(f"written to {path}", file=sys.stderr)
            except ShardwrightError as error:
                # The trained model is still to be saved, and the other ranks wait for this one.
                print(f"the measurement was not written: {error}", file=sys.stderr)
        return measurement


def keep_planned_memory(plan: Plan, args: Any, model: Any) -> None:
    """Make a Trainer's model recompute and keep activations as planned, from the beginning of training; idempotent.

    Raises:
        UsageError: the model's layers cannot be recomputed in part.
    """
    layout = plan.chosen.layout
    attend_by_document(base_model(model))
    if args.gradient_checkpointing:
        unmark_frozen_towers(model)
        if plan.job.vision_checkpointing == "off":
            keep_towers(model)
    if layout.checkpointed_layers is not None and args.gradient_checkpointing:
        checkpoint_first_layers(model, layout.checkpointed_layers)
    if layout.zero_stage == 3 and plan.job.method == "qlora":
        read_weights_in_backward(model)


def argument_differences(
    plan: Plan, args: Any, model: Any, *, ranks: int, stated: Mapping[str, Any] | None = None
) -> list[str]:
    """Return a line for each value of a Trainer's run that differs from the plan's.

    `stated` has the script's `seq_len` and `method`, if known.
    """
    layout, stated = plan.chosen.layout, stated or {}
    optimizer = getattr(args.optim, "value", args.optim)
    deepspeed = deepspeed_configuration(args)
    engine = "deepspeed" if deepspeed else "fsdp2" if args.fsdp else engine_from_environment()
    stage = deepspeed.get("zero_optimization", {}).get("stage", 0) if deepspeed else None
    config, model_type = getattr(model, "config", None), None
    if config is not None:
        # The planned family may be that of the language model inside another one.
        families = [part.model_type for part in (config, config.get_text_config()) if hasattr(part, "model_type")]
        model_type = plan.model.model_type if plan.model.model_type in families else next(iter(families), None)
    planned_type = trained_type = None
    if deepspeed is None and plan.job.method == "full" and hasattr(model, "parameters"):
        # DeepSpeed converts what a script loads.
        planned_type = "bf16" if plan.job.weights_dtype == "bf16" else "fp32"
        types = {str(weight.dtype) for weight in model.parameters() if weight.requires_grad}
        names = {"torch.bfloat16": "bf16", "torch.float32": "fp32"}
        trained_type = names.get(types.pop()) if len(types) == 1 else None
    autocasts = plan.job.weights_dtype != "bf16"
    kwargs = (args.gradient_checkpointing_kwargs or {}) if args.gradient_checkpointing else {}
    fixes = {
        (TRAINED_TYPE, "fp32"): ': load the model with dtype="float32", or plan with --weights-dtype bf16',
        (TRAINED_TYPE, "bf16"): ': load the model with dtype="bfloat16", or plan without --weights-dtype',
    }
    facts: dict[str, tuple[Any, Any]] = {
        TRAINED_TYPE: (trained_type, planned_type),
        "ranks": (ranks, plan.hardware.world_size),
        "engine": (engine, "ddp" if layout.engine == "single" else layout.engine),
        "zero_stage": (stage, layout.zero_stage),
        "offload_optimizer": (_offload(deepspeed, "optimizer"), layout.offload_optimizer),
        "offload_param": (_offload(deepspeed, "param"), layout.offload_param),
        "per_device_train_batch_size": (args.per_device_train_batch_size, layout.micro_batch_size),
        "gradient_accumulation_steps": (args.gradient_accumulation_steps, layout.gradient_accumulation_steps),
        "gradient_checkpointing": (args.gradient_checkpointing, layout.gradient_checkpointing),
        **{
            name: (kwargs.get(name, default), checkpointing_kwargs(plan).get(name, default))
            for name, default in {"use_reentrant": False, "offload": False, "every_n_layers": 1}.items()
        },
        "precision": (
            {"no": "fp32"}.get(args.mixed_precision, args.mixed_precision),
            plan.job.precision if autocasts else "fp32",
        ),
        "torch_compile": (args.torch_compile, plan.job.torch_compile),
        # Liger's norms, not only head and loss.
        "use_liger_kernel": (
            bool(args.use_liger_kernel) and (args.liger_kernel_config or {}).get("rms_norm", True) is not False,
            plan.job.use_liger_kernel,
        ),
        "optim": (optimizer, plan.job.optimizer),
        "sequence length": (stated.get("seq_len"), plan.job.seq_len_tokens),
        "method": (stated.get("method"), plan.job.method),
        "model_type": (model_type, plan.model.model_type),
    } | {name: (getattr(args, name, None), planned) for name, planned in task_arguments(plan).items()}
    named = list(model.named_parameters()) if hasattr(model, "named_parameters") else []
    for part in IMAGE_PARTS:
        if trains := {name: weight.requires_grad for name, weight in named if image_part(name) == part}:
            is_whole = any(trained for name, trained in trains.items() if ".lora_" not in name)
            ran = "full" if is_whole and plan.job.method != "full" else "trained" if any(trains.values()) else "frozen"
            planned = getattr(plan.job, part)
            facts[part] = (ran, "trained" if planned == "full" and plan.job.method == "full" else planned)
            fixes[part, "frozen"] = ": call requires_grad_(False) on it, or plan with it trained"
    return [
        f"{name} was {ran}, but the plan has {planned}{fixes.get((name, planned), '')}"
        for name, (ran, planned) in facts.items()
        if ran is not None and ran != planned
    ]


def unread_edits(directory: Path) -> list[str]:
    """Return what a plan's `ds_config.json` says otherwise than the copy with which Accelerate launched this run."""
    copy = copied_configuration(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none"))
    keys = [] if copy is None else differing_keys(copy, directory)
    if not keys:
        return []
    return [f"{', '.join(keys)} of {directory / DEEPSPEED_FILE} is not read: this run has accelerate.yaml's copy"]


def _offload(deepspeed: dict[str, Any] | None, what: str) -> str | None:
    """Return the device of a DeepSpeed offload section; `None`, which compares with nothing, without DeepSpeed."""
    if deepspeed is None:
        return None
    section = deepspeed.get("zero_optimization", {}).get(f"offload_{what}") or {}
    return str(getattr(section.get("device", "none"), "value", section.get("device", "none")))
