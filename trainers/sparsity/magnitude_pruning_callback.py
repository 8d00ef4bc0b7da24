"""`MagnitudePruningCallback`: the smallest weights become zero while a model trains, and stay zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import TrainerCallback

from ...ds_configs.quantization.layers import DEFAULT_IGNORE
from ...ds_configs.specs.errors import Fault, UsageError
from ...plugins.deepspeed.engine_layers import whole_shape
from ...plugins.deepspeed.parameter_edit import WeightEditor, edit_faults
from ...plugins.deepspeed_pipeline.stage_group import StageGroup
from ...plugins.launching.notes import note_on_first_rank
from ...plugins.transformers.run_settings import run_faults
from .mask_file import FILE_NAME, load_masks, save_masks
from .masks import Pattern, chosen, magnitudes, packed_mask, set_to_zero, smallest, unpacked_mask
from .schedule import PruningSchedule
from .targets import fused_experts_remark, layers_to_train, target_layers

if TYPE_CHECKING:
    from torch import Tensor


class MagnitudePruningCallback(TrainerCallback):
    """Sets the weights of least magnitude to zero by the schedule of Zhu & Gupta (arXiv 1710.01878), in any Trainer.

    Works on one process, DDP, ZeRO-1, 2 and 3, FSDP2, and with tensor, expert and pipeline parallelism, beside
    `QATCallback` too: zeros are codes of the grid. Which weights are the smallest is decided on whole matrices, by the
    names of the checkpoint. Zeros are set again after every optimizer step, in the optimizer's own fp32 copies as well;
    those of `end_step` stay to the end. Checkpoints hold the masks, one bit for each weight, and a resumed run goes on
    with them.

    >>> callback = MagnitudePruningCallback(0.5, end_step=2000, pattern="2:4")  # doctest: +SKIP
    >>> Trainer(model, arguments, train_dataset=samples, callbacks=[callback]).train()  # doctest: +SKIP

    Args:
        final_sparsity: Share of zeros from `end_step` on.
        end_step: Optimizer steps after which the last zeros are chosen.
        start_step: Optimizer steps after which the first zeros are chosen; 0: before training.
        every: Optimizer steps between two choices.
        initial_sparsity: Share of zeros at `start_step`.
        pattern: `unstructured`; or `2:4`, two zeros among each four neighbours in a row, for sparse tensor cores.
        scope: Whether every matrix gets its share of zeros, or all together, the smallest of all matrices first.
        targets: Names of linear layers, `re:` patterns of names, or `Linear` for all.
        ignore: Likewise, what stays dense.
        notify: Receives remarks; default: standard error, of the first rank alone.

    Raises:
        UsageError: the numbers contradict themselves; all faults at once.
    """

    resume_from: str | Path | None = None
    """Checkpoint that a run is resumed from, if it lies outside of `output_dir`."""

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
        notify: Callable[[str], None] = note_on_first_rank,
    ) -> None:
        self.schedule = PruningSchedule(
            final_sparsity=final_sparsity,
            end_step=end_step,
            start_step=start_step,
            every=every,
            initial_sparsity=initial_sparsity,
        )
        self._pattern, self._scope = pattern, scope
        self._targets, self._ignore = tuple(targets), tuple(ignore)
        self._notify = notify
        faults = [*self.schedule.faults(), *_pattern_faults(pattern, final_sparsity)]
        if faults:
            raise UsageError(faults)
        self._names: tuple[str, ...] | None = None
        self._editor: WeightEditor | None = None
        self._stages = StageGroup(None)
        self._masks: dict[tuple[str, int, int], Tensor] = {}
        self._whole: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self.sparsity = 0.0
        """Share of zeros in the targets that the masks hold now."""

    @property
    def combined_settings(self) -> tuple[str, ...]:
        """Its rows in the table of combinations."""
        return ("pruning",) if self._scope == "matrix" else ("global_pruning",)

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Find the layers, so that a wrong name costs no time."""
        if model is not None:
            if faults := run_faults(args, model, callbacks=(self,)):
                raise UsageError(faults)
            layers = target_layers(model, self._targets, self._ignore)
            self._check_widths(layers)
            self._names = tuple(layers)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Check that zeros will last, take up the masks of a resumed run, or choose the first zeros."""
        if combined := run_faults(args, model, callbacks=(self,)):
            raise UsageError(combined)
        layers = layers_to_train(model, self._names, self._targets, self._ignore)
        self._check_widths(layers)
        weights = {name: module.weight for name, module in layers.items()}
        faults = [*edit_faults(weights, args, optimizer), *self._run_faults(args, state, model)]
        if faults:
            raise UsageError(faults)
        remark = fused_experts_remark(model)
        if remark:
            self._notify(remark)
        self._shapes = {name: whole_shape(module) for name, module in layers.items()}
        self._editor = WeightEditor(weights, optimizer)
        self._stages = StageGroup(model, should_save=args.should_save)
        self._masks, self._whole, self.sparsity = {}, {}, 0.0
        if state.global_step and self._resume(args, state):
            return
        if state.global_step >= self.schedule.start_step:
            self._choose(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set zeros again that the optimizer moved, then choose more if it is time."""
        if self._masks:
            self._apply()
        if self.schedule.is_update(state.global_step):
            self._choose(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the masks into the checkpoint, those of each stage in its turn."""
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE_NAME

        def write() -> None:
            if self._whole:
                save_masks(path, self._whole, self._settings(), self._shapes)

        self._stages.in_turn(write)

    def _check_widths(self, layers: dict[str, Any]) -> None:
        widths = {name: whole_shape(module)[1] for name, module in layers.items()}
        unfit = [name for name, width in widths.items() if self._pattern == "2:4" and width % 4]
        if unfit:
            rule = f"needs inputs that 4 divides, and {unfit[0]} has {widths[unfit[0]]}"
            fix = f"add to ignore: {', '.join(unfit[:8])}"
            raise UsageError(Fault(where="pattern", value=self._pattern, rule=rule, fix=fix))

    def _run_faults(self, args: Any, state: Any, model: Any) -> Iterator[Fault]:
        from ..qat.rounding.attachment import attachment_of

        end = self.schedule.end_step
        if end > state.max_steps:
            rule = f"training ends at step {state.max_steps}, before the last zeros are chosen"
            yield Fault(where="end_step", value=end, rule=rule, fix=f"end at {max(state.max_steps * 3 // 4, 1)}")
        if args.load_best_model_at_end:
            rule = f"may bring back a checkpoint from before step {end}, with fewer zeros"
            yield Fault(where="load_best_model_at_end", value=True, rule=rule, fix="set it to False")
        attachment = attachment_of(model)
        if attachment is not None and attachment.config.weight_rule == "binary":
            rule = "has the values -1 and 1 alone, and no zero"
            yield Fault(where="weight_rule", value="binary", rule=rule, fix="use ternary")

    def _choose(self, step: int) -> None:
        """Choose the zeros of a step on all ranks alike, and set them."""
        share = self.schedule.sparsity_at(step)
        counts = {name: rows * columns for name, (rows, columns) in self._shapes.items()}
        found = self._smallest_of_all(share) if self._scope == "global" else None
        zeros = 0
        for name, count in counts.items():
            numbers = self._numbers(name)
            last, equal = found[name] if found else smallest(lambda only=numbers: [only], round(share * count))  # type: ignore[misc]
            mask = chosen(numbers, last, equal)
            zeros += int(mask.sum())
            self._keep(name, mask)
        self.sparsity = self._share_of_all(zeros)
        self._apply()

    def _smallest_of_all(self, share: float) -> dict[str, tuple[int, int]]:
        """Return for each matrix the number that the smallest of all end at, and how many equal to it are its own."""
        import torch

        # Stages know all layers of the model by name, and whole models theirs.
        names = list(dict.fromkeys([*(self._names or ()), *self._shapes]))
        total = round(share * self._total_of_all(sum(rows * columns for rows, columns in self._shapes.values())))
        last, equal = smallest(lambda: map(self._numbers, self._shapes), total, add_up=self._stages.add_up)
        # Of equal numbers the first are the smaller, in the order of the whole model's layers.
        equals = torch.zeros(len(names), dtype=torch.int64)
        for name in self._shapes:
            equals[names.index(name)] = int((self._numbers(name) == last).sum())
        equals = self._stages.add_up(equals)
        left = (equal - (equals.cumsum(0) - equals)).clamp(min=0)
        return {name: (last, int(left[names.index(name)])) for name in self._shapes}

    def _share_of_all(self, zeros: int) -> float:
        weights = sum(rows * columns for rows, columns in self._shapes.values())
        return self._total_of_all(zeros) / self._total_of_all(weights)

    def _total_of_all(self, count: int) -> int:
        import torch

        return int(self._stages.add_up(torch.tensor(count)))

    def _numbers(self, name: str) -> Tensor:
        assert self._editor is not None, "training has begun"
        return magnitudes(self._editor.whole(name), self._pattern)

    def _keep(self, name: str, mask: Tensor) -> None:
        assert self._editor is not None, "training has begun"
        own = self._editor.part(name, mask.reshape(self._shapes[name])).reshape(-1)
        for region in self._editor.regions(name):
            piece = packed_mask(own[region.start : region.start + region.length])
            self._masks[name, region.start, region.length] = piece.to(region.device)
        if self._stages.writes:
            self._whole[name] = packed_mask(mask).cpu()

    def _apply(self) -> None:
        assert self._editor is not None, "training has begun"
        for name in self._shapes:
            self._editor.edit(name, self._set_to_zero, survives_rounding=True)
        self._editor.finish()

    def _set_to_zero(self, name: str, flat: Tensor, start: int) -> None:
        set_to_zero(flat, self._masks[name, start, flat.numel()].to(flat.device))

    def _settings(self) -> dict[str, Any]:
        schedule = self.schedule
        return {
            "final_sparsity": schedule.final_sparsity,
            "initial_sparsity": schedule.initial_sparsity,
            "start_step": schedule.start_step,
            "end_step": schedule.end_step,
            "every": schedule.every,
            "pattern": self._pattern,
            "scope": self._scope,
        }

    def _resume(self, args: Any, state: Any) -> bool:
        """Take up the masks of a checkpoint; `False` if it has none."""
        resumed = self.resume_from or args.resume_from_checkpoint
        own = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        path = (Path(resumed) if isinstance(resumed, str | Path) else own) / FILE_NAME
        if state.global_step < self.schedule.start_step:
            return True
        if not _on_every_rank(path.is_file(), args.device):
            where = f"{path.parent} holds no masks, or not on every node"
            self._notify(f"{where}: the smallest weights become zero anew, zeros first")
            return False
        masks = load_masks(path, self._settings(), self._shapes)
        self._check_weights(masks, path)
        zeros = 0
        for name, (rows, columns) in self._shapes.items():
            mask = unpacked_mask(masks[name], rows * columns)
            zeros += int(mask.sum())
            self._keep(name, mask)
        self.sparsity = self._share_of_all(zeros)
        self._apply()
        return True

    def _check_weights(self, masks: dict[str, Tensor], path: Path) -> None:
        """Refuse masks of another run: what they call zero is zero in the checkpoint that they belong to."""
        assert self._editor is not None, "training has begun"
        for name, (rows, columns) in self._shapes.items():
            weight = self._editor.whole(name).reshape(-1)
            others = int(weight[unpacked_mask(masks[name], rows * columns).to(weight.device)].count_nonzero())
            if others:
                rule = f"calls {others} weights of {name} zero that are not: it belongs to another run"
                fix = "name the checkpoint that is resumed from in resume_from"
                raise UsageError(Fault(where=str(path), rule=rule, fix=fix))


def _on_every_rank(holds: bool, device: Any) -> bool:
    """Return on all ranks alike whether something holds on each: nodes may not share a disk."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return holds
    flag = torch.tensor(int(holds), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def _pattern_faults(pattern: str, final_sparsity: float) -> list[Fault]:
    if pattern not in ("unstructured", "2:4"):
        return [Fault(where="pattern", value=pattern, rule="is one of unstructured, 2:4")]
    if pattern == "2:4" and final_sparsity != 0.5:
        rule = "2:4 has two zeros among four"
        return [Fault(where="final_sparsity", value=final_sparsity, rule=rule, fix="write 0.5")]
    return []
