"""`QATCallback`: quantization-aware training with any Trainer of Transformers, under any engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ...ds_configs.quantization.layers import scheme_warnings
from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.settings import settings_of
from ...plugins.accelerate import engine_from_environment
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.transformers.loading import share_with_zero3
from ...plugins.transformers.training_arguments import run_errors
from ..checkpoints import checkpoints
from .attach import Attachment, attach, attachment_of
from .layers import synchronise
from .settings import QATOptions

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from .export import ExportResult


def training_errors(
    attachment: Attachment, arguments: TrainingArguments, steps: int, optimizer: Any
) -> list[ConfigError]:
    """Return why the training would not produce what is exported, all errors together."""
    config, errors = attachment.config, step_errors(attachment, steps)

    def reject(where: str, value: object, rule: str, fix: str) -> None:
        errors.append(ConfigError(where=where, value=value, rule=rule, fix=fix))

    learned = attachment.parameters
    optimized = {id(each) for group in getattr(optimizer, "param_groups", []) for each in group["params"]}
    # DeepSpeed's optimizers hold flat partitions of all parameters, from which none can be identified.
    is_flat = type(getattr(optimizer, "optimizer", optimizer)).__module__.startswith("deepspeed")
    if optimized and not is_flat and not all(id(parameter) in optimized for parameter in learned):
        errors += foreign_optimizer_errors(attachment)
    changing = {"start_step": config.start_step, "ranges": bool(attachment.ranges)}
    used = ", ".join(name for name, value in changing.items() if value)
    if arguments.load_best_model_at_end and used:
        rule = f"may restore weights of a step whose number formats differ from the last step's ({used})"
        fix = "turn it off, and export the checkpoint that you want in a separate run"
        reject("load_best_model_at_end", True, rule, fix)
    dtypes = {module.weight.dtype for module in attachment.modules.values() if hasattr(module, "weight")}
    for name, dtype in (("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)):
        if getattr(arguments, name) and dtypes - {dtype}:
            rule = "changes the trained weights in place, and therefore the exported codes"
            reject(name, True, rule, "turn it off; bf16=True also evaluates in bf16")
    # Before start_step no forward pass uses the learned scales, and DDP would wait for their gradients.
    has_engine = arguments.deepspeed or arguments.fsdp or engine_from_environment() != "ddp"
    is_ddp = arguments.parallel_mode.name == "DISTRIBUTED" and not has_engine
    finds_unused = arguments.ddp_find_unused_parameters
    if finds_unused is None:
        finds_unused = not arguments.gradient_checkpointing
    if is_ddp and not finds_unused and learned and config.start_step:
        rule = "must be true: learned scales are not used before start_step"
        reject("ddp_find_unused_parameters", finds_unused, rule, "set it to true, or use start_step 0")
    return errors


def foreign_optimizer_errors(attachment: Attachment) -> list[ConfigError]:
    """Return the error of an optimizer that was created before the learned scales."""
    if not attachment.config.learns_scales:
        return []
    rule = "was created before the learned scales, and would not train them"
    fix = "let the Trainer create the optimizer, or call QATCallback.prepare(arguments, model) before you create it"
    return [ConfigError(where="optimizer", rule=rule, fix=fix)]


def step_errors(attachment: Attachment, steps: int) -> list[ConfigError]:
    """Return the error of a training that ends before it rounds."""
    first = attachment.config.start_step
    if first < steps:
        return []
    rule = f"training ends at step {steps}, before anything is rounded"
    return [ConfigError(where="start_step", value=first, rule=rule, fix="use a smaller step")]


def _formats(attachment: Attachment) -> dict[str, Any]:
    """Return what a resumed run cannot change, because it changes the numbers of the checkpoint, as JSON values."""
    scheme = asdict(attachment.scheme)
    parts = {f"scheme.{name}": scheme.pop(name) or {} for name in ("weights", "activations")} | {"scheme": scheme}
    parts["settings"] = {
        "weight_rule": attachment.config.weight_rule,
        "stored_dtype": str(attachment.stored_dtype).removeprefix("torch."),
    }
    flat = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    formats: dict[str, Any] = json.loads(json.dumps(flat))
    return formats


def record_in(stored: Any) -> Mapping[str, Any]:
    """Return the record in the Trainer's state of this callback; empty without one."""
    first = (stored[0] if stored else {}) if isinstance(stored, list) else stored or {}
    record: Mapping[str, Any] = first.get("attributes", {}).get("resumed") or {}
    return record


def resume_errors(
    attachment: Attachment, checkpoint: Path, callback_name: str = "QATCallback", *, demands_record: bool = False
) -> list[ConfigError]:
    """Return how a checkpoint's number formats differ from the training's, before anything is loaded.

    Loading optimizer states of other learned scales fails with an error that does not name the cause.
    """
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    record = record_in(state.get("stateful_callbacks", {}).get(callback_name))
    if record:
        return record_errors(attachment, record)
    if not demands_record and not attachment.config.learns_scales:
        return []
    rule = "was trained without rounding, and contains no ranges and no scheme"
    fix = "start from its weights in another output directory"
    return [ConfigError(where="resume", value=checkpoint.name, rule=rule, fix=fix)]


def record_errors(attachment: Attachment, record: Mapping[str, Any]) -> list[ConfigError]:
    """Return how a record's number formats differ from those of an attachment."""
    stored, current = record.get("formats", {}), _formats(attachment)
    fix = "resume with the checkpoint's value, or start again from the dense model"
    return [
        ConfigError(where=name, value=current.get(name), rule=f"differs from the checkpoint ({value!r})", fix=fix)
        for name, value in (dict.fromkeys(current) | stored).items()
        if current.get(name) != value
    ]


class QATCallback(TrainerCallback, ExportableState):
    """Trains a model with the numbers of its future checkpoint, and writes that checkpoint bit for bit.

    Works with the Trainer of Transformers and its subclasses: on one process, with DDP, ZeRO-1, 2 and 3 and FSDP2, and
    with sequence and context parallelism as listed in docs/reference/combinations.md. Layers change their class when
    the Trainer is created; parameters and checkpoint keys do not change.

    >>> callback = QATCallback("W4A16")  # doctest: +SKIP
    >>> trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[callback])  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    >>> callback.export(trainer, "tuned-w4")  # doctest: +SKIP

    Args:
        scheme: Scheme, or its name as for `shardwright quantize`.
        stored_dtype: Dtype of scales and unquantized tensors, such as `bfloat16`; default: the training dtype.
        options: Fields of `QATOptions`, which are flags of `shardwright qat`, such as `group_size` and `weight_rule`.

    Raises:
        UsageError: a setting is unknown, or settings contradict one another; all errors together.
    """

    @property
    def combined_settings(self) -> tuple[str, ...]:
        """Rows of this callback in the table of combinations."""
        names = {
            "qat": True,
            "qat_inputs": self.config.scheme.activations is not None,
            "qat_ranges": self.config.scheme.activations_are_static,
            "learned_scales": self.config.learns_scales,
        }
        return tuple(name for name, is_set in names.items() if is_set)

    resumed: dict[str, Any] | None = None
    """Record of the checkpoint from which the Trainer recreated this callback; `None` otherwise."""

    def __init__(
        self, scheme: str | QuantizationScheme = "W4A16", *, stored_dtype: str | None = None, **options: Any
    ) -> None:
        named, other = ({"scheme": scheme}, None) if isinstance(scheme, str) else ({}, scheme)
        self.config = settings_of(QATOptions, options | named).config(scheme=other, stored_dtype=stored_dtype)
        self.attachment: Attachment | None = None

    def prepare(self, training_arguments: TrainingArguments, model: Any) -> Attachment:
        """Attach before the Trainer is created; required with `deepspeed.zero.Init` or a model of your own.

        Raises:
            UsageError: the scheme does not fit the model.
        """
        attachment = attachment_of(model)
        if attachment is None:
            dtype = None
            if getattr(training_arguments, "bf16", False):
                dtype = torch.bfloat16
            elif getattr(training_arguments, "fp16", False):
                dtype = torch.float16
            attachment = attach(model, self.config, stored_dtype=dtype)
            for warning in scheme_warnings(attachment.scheme, attachment.layers):
                note_on_first_rank(warning)
        elif attachment.config != self.config and self.resumed is None:
            rule = f"rounds as {attachment.config.scheme.name} already, with settings that differ from this callback's"
            raise UsageError(ConfigError(where="model", value=type(model).__name__, rule=rule, fix="load it again"))
        self.attachment = attachment
        return attachment

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: object,
    ) -> None:
        """Attach before the optimizer is created, so that it trains the learned scales."""
        if model is None:
            return
        _raise(run_errors(args, model, callbacks=(self,)))
        is_new = attachment_of(model) is None
        attachment = self.prepare(args, model)
        if is_new and optimizer is not None:
            _raise(foreign_optimizer_errors(attachment))
        checkpoint = args.resume_from_checkpoint
        if checkpoint is True:
            # All checkpoints of a run have the same number formats.
            checkpoint = next(reversed(checkpoints(Path(args.output_dir)).values()), None)
        if checkpoint:
            _raise(resume_errors(attachment, Path(checkpoint), type(self).__name__))

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: object,
    ) -> None:
        """Attach to a model from `model_init`, restore a resumed run, and check the training."""
        is_new = attachment_of(model) is None
        attachment = self.prepare(args, model)
        name = type(self).__name__
        if state.global_step:
            if record := record_in(state.stateful_callbacks.get(name)):
                _raise(record_errors(attachment, record))
                attachment.state.trained_steps = record["trained_steps"]
                for matrix, bounds in record["ranges"].items():
                    if bounds is not None:
                        attachment.ranges[matrix].set_bounds(*bounds)
                # A run that resumes after its last step exports without a forward pass.
                if dtype := record.get("forward_dtype"):
                    for quantizer in attachment.quantizers():
                        quantizer.forward_dtype = getattr(torch, dtype)
            else:
                note_on_first_rank("the checkpoint was trained without rounding; training continues with rounding")
        # transformers 5.17 `_save_checkpoint` fails (KeyError) if a resumed checkpoint lacks the callback.
        state.stateful_callbacks.setdefault(name, {})
        _raise(run_errors(args, model, callbacks=(self,)))
        errors = training_errors(attachment, args, state.max_steps, optimizer)
        _raise(foreign_optimizer_errors(attachment) if is_new else errors)
        if args.weight_decay and attachment.config.learns_scales:
            note_on_first_rank(f"weight_decay = {args.weight_decay} also decays learned scales towards zero")
        share_with_zero3(attachment.modules.values())
        self._set_state(state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Set whether this optimizer step rounds and observes."""
        self._set_state(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Combine the observed ranges of all ranks."""
        attachment = self._attached()
        attachment.state.trained_steps += int(attachment.state.enabled)
        synchronise(attachment.ranges.values())
        self._set_state(state.global_step)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, which the Trainer writes into `trainer_state.json`."""
        record: dict[str, Any] = {}
        if (attachment := self.attachment) is not None:
            dtypes = {quantizer.forward_dtype for quantizer in attachment.quantizers()}
            dtype = dtypes.pop() if len(dtypes) == 1 else None
            # JSON represents fp32 numbers exactly.
            record = {
                "formats": _formats(attachment),
                "trained_steps": attachment.state.trained_steps,
                "ranges": {name: input_range.bounds for name, input_range in attachment.ranges.items()},
                "forward_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
            }
        return {"args": {}, "attributes": {"resumed": record}}

    def export(self, trainer: Any, output_dir: str | Path, *, tokenizer: Any = None, **options: Any) -> ExportResult:
        """Write the trained codes as a compressed-tensors checkpoint; every rank must call it.

        Args:
            trainer: The Trainer after training.
            output_dir: Directory of the checkpoint.
            tokenizer: Tokenizer to write; default: the Trainer's `processing_class`.
            options: `source`, `verify`, `probe` and `force`, as for `export`.

        Raises:
            UsageError: the model was not trained with these number formats, or the directory is in use.
            RefusedInputError: weights or scales are NaN or infinite.
        """
        from .export import export

        tokenizer = tokenizer or getattr(trainer, "processing_class", None)
        return export(trainer.model, self._attached(), output_dir, tokenizer=tokenizer, **options)

    def _attached(self) -> Attachment:
        if self.attachment is None:
            rule, fix = "is not attached to a model", "pass it to a Trainer, or call prepare"
            raise UsageError(ConfigError(where="QATCallback", rule=rule, fix=fix))
        return self.attachment

    def _set_state(self, step: int) -> None:
        attachment = self._attached()
        attachment.state.enabled, attachment.state.observing = step >= attachment.config.start_step, True


def _raise(errors: list[ConfigError]) -> None:
    if errors:
        raise UsageError(errors)
