"""`MagnitudePruningCallback`: sets the smallest weights to zero during training, and keeps them zero."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.quantization.layers import DEFAULT_IGNORE
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.deepspeed.engine import whole_shape
from ...plugins.deepspeed_pipeline.stage import StageGroup
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.transformers.sound_model import gathered
from ..formats.bit_packing import pack_bits
from .callback import SparsityCallback
from .masks import (
    FILE_NAME,
    Pattern,
    PruningSchedule,
    chosen,
    load_masks,
    magnitudes,
    save_masks,
    smallest,
    unpacked_mask,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import TrainerControl, TrainerState, TrainingArguments


class MagnitudePruningCallback(SparsityCallback):
    """Sets the weights of least magnitude to zero by the schedule of Zhu & Gupta (arXiv 1710.01878), in any Trainer.

    Works on one process, DDP, ZeRO-1, 2 and 3, FSDP2, with tensor, expert and pipeline parallelism, and together with
    `QATCallback`, whose grid contains zero. The smallest weights are determined on full matrices. Zeros are set again
    after every optimizer step, also in the optimizer's fp32 copies. Zeros of `end_step` are final. Checkpoints contain
    the masks, one bit per weight, and a resumed run continues with them.

    >>> callback = MagnitudePruningCallback(0.5, end_step=2000, pattern="2:4")  # doctest: +SKIP
    >>> Trainer(model, arguments, train_dataset=samples, callbacks=[callback]).train()  # doctest: +SKIP

    Args:
        final_sparsity: Fraction of zeros from `end_step` on.
        end_step: Optimizer steps before the last update of zeros.
        start_step: Optimizer steps before the first update; 0: before training.
        every: Optimizer steps between two updates.
        initial_sparsity: Fraction of zeros at `start_step`.
        pattern: `unstructured`; or `2:4`, two zeros among each four neighbours in a row, for sparse tensor cores.
        scope: Whether each matrix has this fraction of zeros, or all matrices together.
        targets: Names of linear layers, `re:` patterns of names, or `Linear` for all.
        ignore: Names or patterns of layers that stay dense.

    Raises:
        UsageError: values are out of range or contradict one another; all errors together.
    """

    resume_from: str | Path | None = None
    """Checkpoint to resume from, if it is not in `output_dir`."""

    def __init__(
        self,
        final_sparsity: float,
        *,
        end_step: int,
        start_step: int = 0,
        every: int = 100,
        initial_sparsity: float = 0.0,
        pattern: Pattern = "unstructured",
        scope: Literal["matrix", "global"] = "matrix",
        targets: Sequence[str] = ("Linear",),
        ignore: Sequence[str] = DEFAULT_IGNORE,
    ) -> None:
        super().__init__(targets, ignore)
        self.schedule = PruningSchedule(
            final_sparsity=final_sparsity,
            end_step=end_step,
            start_step=start_step,
            every=every,
            initial_sparsity=initial_sparsity,
        )
        self._pattern, self._scope = pattern, scope
        self.combined_settings = ("pruning",) if scope == "matrix" else ("global_pruning",)
        errors = self.schedule.errors()
        if pattern not in ("unstructured", "2:4"):
            errors.append(ConfigError(where="pattern", value=pattern, rule="must be unstructured or 2:4"))
        elif pattern == "2:4" and final_sparsity != 0.5:
            rule = "2:4 has two zeros among four"
            errors.append(ConfigError(where="final_sparsity", value=final_sparsity, rule=rule, fix="write 0.5"))
        if errors:
            raise UsageError(errors)
        self._stages = StageGroup(None)
        self._masks: dict[tuple[str, int, int], Tensor] = {}
        self._full_masks: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self.sparsity = 0.0
        """Current fraction of zeros in the target layers."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: object,
    ) -> None:
        """Check that the engine keeps zeros, and restore the masks of a resumed run or set the first zeros."""
        super().on_train_begin(args, state, control, model=model, optimizer=optimizer)
        self._shapes = {name: whole_shape(module) for name, module in self._layers.items()}
        self._stages = StageGroup(model, should_save=args.should_save)
        self._masks, self._full_masks, self.sparsity = {}, {}, 0.0
        if state.global_step and self._restore(args, state):
            return
        if state.global_step >= self.schedule.start_step:
            self._update(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Set weights to zero again that the optimizer changed, and update the zeros if scheduled."""
        if self._masks:
            self._apply()
        if self.schedule.is_update(state.global_step):
            self._update(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write the masks into the checkpoint, one pipeline stage after another."""
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE_NAME

        def write() -> None:
            if self._full_masks:
                save_masks(path, self._full_masks, self._settings(), self._shapes)

        self._stages.in_turn(write)

    def check_layers(self, layers: dict[str, Any]) -> None:
        """Check that 2:4 fits the number of inputs of every layer."""
        widths = {name: whole_shape(module)[1] for name, module in layers.items()}
        unfit = [name for name, width in widths.items() if self._pattern == "2:4" and width % 4]
        if unfit:
            rule = f"the number of inputs must be a multiple of 4, but {unfit[0]} has {widths[unfit[0]]}"
            fix = f"add to ignore: {', '.join(unfit[:8])}"
            raise UsageError(ConfigError(where="pattern", value=self._pattern, rule=rule, fix=fix))

    def setting_errors(self, args: TrainingArguments, state: TrainerState, model: Any) -> list[ConfigError]:
        """Return why the run would end with other zeros than those of the last update."""
        from ..qat.rounding.attach import attachment_of

        end, errors = self.schedule.end_step, []
        if end > state.max_steps:
            rule = f"training ends at step {state.max_steps}, before the last update of zeros"
            fix = f"use end_step {max(state.max_steps * 3 // 4, 1)}"
            errors.append(ConfigError(where="end_step", value=end, rule=rule, fix=fix))
        if args.load_best_model_at_end:
            rule = f"may restore a checkpoint from before step {end}, with fewer zeros"
            errors.append(ConfigError(where="load_best_model_at_end", value=True, rule=rule, fix="set it to False"))
        attachment = attachment_of(model)
        if attachment is not None and attachment.config.weight_rule == "binary":
            rule = "has the values -1 and 1, and no zero"
            errors.append(ConfigError(where="weight_rule", value="binary", rule=rule, fix="use ternary"))
        return errors

    def _update(self, step: int) -> None:
        """Set the zeros of a step, equally on all ranks."""
        share = self.schedule.sparsity_at(step)
        limits = self._global_limits(share) if self._scope == "global" else {}
        zeros = 0
        for name, (rows, columns) in self._shapes.items():
            numbers = self._magnitudes(name)
            count = round(share * rows * columns)
            last, equal = limits[name] if limits else smallest(partial(list, [numbers]), count)
            mask = chosen(numbers, last, equal)
            zeros += int(mask.sum())
            self._store(name, mask)
        self._apply(zeros)

    def _global_limits(self, share: float) -> dict[str, tuple[int, int]]:
        """Return the arguments of `chosen` for each matrix, where all matrices are pruned together."""
        import torch

        # Stages know the names of all layers of the model, and full models their own.
        names = list(dict.fromkeys([*(self._names or ()), *self._shapes]))
        total = round(share * self._sum_over_stages(self._weights()))
        last, equal = smallest(lambda: map(self._magnitudes, self._shapes), total, add_up=self._stages.add_up)
        # Among equal numbers the first count as smaller, in the order of the full model's layers.
        equals = torch.zeros(len(names), dtype=torch.int64)
        for name in self._shapes:
            equals[names.index(name)] = int((self._magnitudes(name) == last).sum())
        equals = self._stages.add_up(equals)
        left = (equal - (equals.cumsum(0) - equals)).clamp(min=0)
        return {name: (last, int(left[names.index(name)])) for name in self._shapes}

    def _weights(self) -> int:
        return sum(rows * columns for rows, columns in self._shapes.values())

    def _sum_over_stages(self, count: int) -> int:
        import torch

        return int(self._stages.add_up(torch.tensor(count)))

    def _magnitudes(self, name: str) -> Tensor:
        return magnitudes(self.editor.whole(name), self._pattern)

    def _store(self, name: str, mask: Tensor) -> None:
        own = self.editor.part(name, mask.reshape(self._shapes[name])).reshape(-1)
        for region in self.editor.regions(name):
            piece = pack_bits(own[region.start : region.start + region.length], 1)
            self._masks[name, region.start, region.length] = piece.to(region.device)
        if self._stages.writes:
            self._full_masks[name] = pack_bits(mask, 1).cpu()

    def _apply(self, zeros: int | None = None) -> None:
        """Set the weights of all masks to zero; with their number also update `sparsity`."""
        if zeros is not None:
            self.sparsity = self._sum_over_stages(zeros) / self._sum_over_stages(self._weights())

        def set_to_zero(name: str, flat: Tensor, start: int) -> None:
            packed = self._masks[name, start, flat.numel()].to(flat.device)
            flat.masked_fill_(unpacked_mask(packed, flat.numel()), 0)

        for name in self._shapes:
            self.editor.edit(name, set_to_zero, survives_rounding=True)
        self.editor.finish()

    def _settings(self) -> dict[str, object]:
        names = ("final_sparsity", "initial_sparsity", "start_step", "end_step", "every")
        schedule = {name: getattr(self.schedule, name) for name in names}
        return schedule | {"pattern": self._pattern, "scope": self._scope}

    def _restore(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Restore the masks of a checkpoint; return `False` if it has none."""
        checkpoint = self.resume_from or args.resume_from_checkpoint
        own = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        path = (Path(checkpoint) if isinstance(checkpoint, str | Path) else own) / FILE_NAME
        if state.global_step < self.schedule.start_step:
            return True
        # Nodes may not share a disk.
        if not all(gathered(path.is_file())):
            missing = f"{path.parent} contains no masks, or not on every node"
            note_on_first_rank(f"{missing}: the smallest weights are set to zero again, existing zeros first")
            return False
        packed = load_masks(path, self._settings(), self._shapes)
        lengths = {name: rows * columns for name, (rows, columns) in self._shapes.items()}
        # One matrix at a time: all unpacked masks would take a byte per weight.
        for name, length in lengths.items():
            weight = self.editor.whole(name).reshape(-1)
            others = int(weight[unpacked_mask(packed[name], length).to(weight.device)].count_nonzero())
            if others:
                rule = f"marks {others} weights of {name} as zero that are not: it belongs to another run"
                fix = "set resume_from to the checkpoint that you resume from"
                raise UsageError(ConfigError(where=str(path), rule=rule, fix=fix))
        zeros = 0
        for name, length in lengths.items():
            mask = unpacked_mask(packed[name], length)
            zeros += int(mask.sum())
            self._store(name, mask)
        self._apply(zeros)
        return True
