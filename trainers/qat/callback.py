"""`QATCallback`: quantization-aware training with any Trainer of Transformers, under any engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from ...ds_configs.quantization.mixtures import mixture_remarks
from ...ds_configs.quantization.scheme import QuantizationScheme, scheme_named
from ...ds_configs.specs.errors import Fault, UsageError
from ...plugins.deepspeed.engine import share_with_zero3
from ...plugins.deepspeed.engine_layers import stages_of
from ...plugins.launching.notes import note_on_first_rank
from ...plugins.transformers.run_settings import run_faults
from ..checkpoints.agreement import on_first_rank
from ..checkpoints.record import RECORD
from ..checkpoints.selection import checkpoints, newest_whole
from .checkpoint_record import checkpoint_record, record_in, resume_faults, take_up
from .rounding.attach import attach
from .rounding.attachment import ATTRIBUTE, Attachment, attachment_of
from .rounding.config import QATConfig
from .rounding.engine_layers import follow_engine
from .training_checks import first_rank_loading_faults, foreign_optimizer_faults, training_faults

if TYPE_CHECKING:
    from .export.checkpoint import ExportResult


class QATCallback(TrainerCallback, ExportableState):
    """Trains a model with the numbers of its future checkpoint, and writes that checkpoint bit for bit.

    Works with the Trainer of Transformers and every subclass, on one process, DDP, ZeRO-1, 2 and 3 and FSDP2, and with
    sequence, context, tensor, expert and pipeline parallelism as far as docs/reference/combinations.md says. The layers
    change their class when the Trainer is made; parameters and the keys of checkpoints stay as they are.

    >>> callback = QATCallback("W4A16")  # doctest: +SKIP
    >>> trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[callback])  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    >>> callback.export(trainer, "tuned-w4")  # doctest: +SKIP

    Args:
        scheme: Name of a scheme, as for `shardwright quantize`, or a scheme.
        calibration: Batches that give stored ranges of activations their values, as the model takes them; or a file
            that `save_ranges` wrote. Needed for schemes such as W8A8_STATIC with ranges that are calibrated or learned.
        notify: Receives remarks; default: standard error, of the first rank alone.
        options: Fields of `QATConfig`.

    Raises:
        UsageError: the configuration contradicts itself; all faults at once.
    """

    @property
    def combined_settings(self) -> tuple[str, ...]:
        """Its rows in the table of combinations."""
        names = {
            "qat": True,
            "qat_inputs": self.config.scheme.activations is not None,
            "qat_ranges": self.config.stores_ranges,
            "learned_scales": self.config.learns_scales,
        }
        return tuple(name for name, is_set in names.items() if is_set)

    resumed: dict[str, Any] | None = None
    """Record of a checkpoint, where the Trainer made this callback anew from one; `None` otherwise."""

    def __init__(
        self,
        scheme: str | QuantizationScheme = "W4A16",
        *,
        calibration: Iterable[Any] | str | Path | None = None,
        notify: Callable[[str], None] = note_on_first_rank,
        **options: Any,
    ) -> None:
        found = scheme_named(scheme) if isinstance(scheme, str) else scheme
        self.config = QATConfig(scheme=found, **options)
        faults = self.config.faults()
        if calibration is not None and not self.config.stores_ranges:
            rule = f"finds stored ranges of activations, and {found.name} has none"
            faults.append(Fault(where="calibration", rule=rule, fix="drop it, or use W8A8_STATIC or kv_cache"))
        _raise(faults)
        self._calibration = calibration
        self._notify = notify
        self.attachment: Attachment | None = None

    def prepare(self, training_arguments: Any, model: Any) -> Attachment:
        """Attach before the Trainer is made: needed where `deepspeed.zero.Init` or a model of one's own comes first.

        Raises:
            UsageError: the scheme does not fit the model.
        """
        found = attachment_of(model)
        if found is None:
            found = attach(model, self.config, stored_dtype=_training_dtype(training_arguments))
            for remark in mixture_remarks(found.scheme, found.layers):
                self._notify(remark)
        elif found.config != self.config and self.resumed is None:
            rule = f"rounds as {found.config.scheme.name} already, with other settings than this callback's"
            raise UsageError(Fault(where="model", value=type(model).__name__, rule=rule, fix="load it anew"))
        self._fill_ranges(model, found)
        self.attachment = found
        return found

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Attach before the optimizer is made, so that it sees scales that are learned."""
        if model is None:
            return
        _raise(run_faults(args, model, callbacks=(self,)))
        fresh = attachment_of(model) is None
        attachment = self.prepare(args, model)
        if fresh and optimizer is not None:
            _raise(foreign_optimizer_faults(attachment))
        place = args.resume_from_checkpoint
        if isinstance(place, bool) and place:
            place = on_first_rank(lambda: _newest(Path(args.output_dir)))
        if place:
            _raise(resume_faults(attachment, Path(place), type(self).__name__))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Attach to a model that `model_init` made, take up a resumed run, and check that nothing stands in the way."""
        fresh = self._carried_over(model) is None
        attachment = self.prepare(args, model)
        follow_engine(model, attachment)
        self._take_up(state)
        _raise(run_faults(args, model, callbacks=(self,)))
        faults = training_faults(attachment, args, state.max_steps, optimizer)
        _raise(foreign_optimizer_faults(attachment) if fresh else faults)
        if args.weight_decay and attachment.config.learns_scales:
            self._notify(f"weight_decay = {args.weight_decay} draws learned scales towards zero too")
        share_with_zero3(attachment.modules.values())
        self._follow(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set what this optimizer step rounds to."""
        self._follow(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let all ranks agree on observed ranges."""
        attachment = self._attached()
        current = attachment.state
        at_its_bits = current.bits in (None, attachment.scheme.weights.bits)
        current.trained_steps += int(current.enabled and at_its_bits)
        if current.observing:
            from .rounding.input_ranges import synchronise

            synchronise(attachment.ranges.values())
        self._follow(state.global_step)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; the Trainer writes it into `trainer_state.json`."""
        record = {} if self.attachment is None else checkpoint_record(self.attachment)
        return {"args": {}, "attributes": {"resumed": record}}

    def export(self, trainer: Any, output_dir: str | Path, **how: Any) -> ExportResult:
        """Write the trained codes as a compressed-tensors checkpoint; every rank must call it.

        Args:
            trainer: The Trainer that has trained.
            output_dir: Where the checkpoint goes.
            how: `tokenizer`, `source`, `verify`, `probe` and `force`, as for `export`.

        Raises:
            UsageError: the model was not trained with these numbers, or the directory is in use.
            RefusedInputError: weights or scales are NaN or infinite.
        """
        from .export.checkpoint import export

        tokenizer = how.pop("tokenizer", None) or getattr(trainer, "processing_class", None)
        return export(trainer.model, self._attached(), Path(output_dir), tokenizer=tokenizer, **how)

    def _carried_over(self, model: Any) -> Attachment | None:
        """Return what rounds in a model, in stages what rounds in the model that they were cut from.

        Raises:
            UsageError: stages came without one.
        """
        if stages_of(model) is None:
            return attachment_of(model)
        if self.attachment is None:
            rule, fix = "has seen stages of a model alone", "give it to PipelineTrainer(callbacks=[...])"
            raise UsageError(Fault(where="QATCallback", rule=rule, fix=fix))
        setattr(model, ATTRIBUTE, self.attachment)
        return self.attachment

    def _attached(self) -> Attachment:
        if self.attachment is None:
            rule, fix = "has met no model yet", "give it to a Trainer, or call prepare"
            raise UsageError(Fault(where="QATCallback", rule=rule, fix=fix))
        return self.attachment

    def _follow(self, step: int) -> None:
        attachment = self._attached()
        config, current = attachment.config, attachment.state
        current.enabled = step >= config.start_step
        current.bits = config.bits_at(step)
        frozen = config.freeze_step is not None and step >= config.freeze_step
        current.observing = config.observes and not frozen

    def _fill_ranges(self, model: Any, attachment: Attachment) -> None:
        empty = any(one.scale is None for one in attachment.ranges.values())
        if not empty or self._calibration is None:
            return
        from .rounding.input_ranges import calibrate_inputs, load_ranges
        from .rounding.learned_scales import start_from_ranges

        if isinstance(self._calibration, str | Path):
            load_ranges(Path(self._calibration), attachment)
        else:
            _raise(first_rank_loading_faults())
            calibrate_inputs(model, attachment, self._calibration)
        if attachment.config.ranges == "learned":
            start_from_ranges(attachment)

    def _take_up(self, state: Any) -> None:
        name = type(self).__name__
        if state.global_step:
            record = record_in(state.stateful_callbacks.get(name))
            if record:
                take_up(self._attached(), record)
            else:
                self._notify("the checkpoint was trained without rounding: training goes on with it")
        # transformers 5.17 `_save_checkpoint` fails (KeyError) where a resumed checkpoint did not know the callback.
        state.stateful_callbacks.setdefault(name, {})


def _raise(faults: list[Fault]) -> None:
    if faults:
        raise UsageError(faults)


def _training_dtype(arguments: Any) -> torch.dtype | None:
    if getattr(arguments, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(arguments, "fp16", False) else None


def _newest(output_dir: Path) -> str | None:
    """Return the newest whole checkpoint; where `CheckpointCallback` marked none, the one that the Trainer takes."""
    if any((path / RECORD).is_file() for path in checkpoints(output_dir).values()):
        return str(newest_whole(output_dir).path)
    found: str | None = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
    return found
