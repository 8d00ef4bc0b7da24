"""`MagnitudePruningCallback`: zeros in the weights of linear layers, set between optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from transformers import TrainerCallback

from ..ds_configs.quantization.layers import DEFAULT_IGNORE, is_match, pattern_errors
from ..ds_configs.specs.errors import ConfigError, UsageError
from ..plugins.deepspeed.engine import named_linear_layers, stages_of, whole_shape
from ..plugins.deepspeed.parameters import WeightEditor, edit_errors
from ..plugins.deepspeed_pipeline.stage import add_over_stages
from ..plugins.launching.messages import note_on_first_rank
from ..plugins.transformers.training_arguments import run_errors
from .formats.spqr import pack_bits

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import TrainerControl, TrainerState, TrainingArguments

Pattern = Literal["unstructured", "2:4"]


class MagnitudePruningCallback(TrainerCallback):
    """Sets the weights of least magnitude to zero by the schedule of Zhu & Gupta (arXiv 1710.01878), in any Trainer.

    After t optimizer steps, a fraction ``s(t) = s_f · (1 - (1 - (t - t_0) / (t_1 - t_0))³)`` of each matrix is zero
    (eq. 1), constant between updates at t_0, t_0 + every, … and t_1. The zeros of t_1 are final.

    Works on one process, DDP, ZeRO-1, 2 and 3, FSDP2, with tensor, expert and pipeline parallelism, and together with
    `QATCallback`, whose grid contains zero. The smallest weights are determined on full matrices. Zeros are set again
    after every optimizer step, also in the optimizer's fp32 copies. There is no state to save: in a checkpoint the
    zeros are the smallest weights, so a resumed run finds them again.

    >>> callback = MagnitudePruningCallback(0.5, end_step=2000, pattern="2:4")  # doctest: +SKIP
    >>> Trainer(model, arguments, train_dataset=samples, callbacks=[callback]).train()  # doctest: +SKIP

    Args:
        final_sparsity: Fraction of zeros from `end_step` on, s_f.
        end_step: Optimizer steps before the last update of zeros, t_1.
        start_step: Optimizer steps before the first update, t_0; 0: before training.
        every: Optimizer steps between two updates.
        pattern: `unstructured`; or `2:4`, two zeros among each four neighbours in a row, for sparse tensor cores.
        targets: Names of linear layers, `re:` patterns of names, or `Linear` for all.
        ignore: Names or patterns of layers that stay dense.

    Raises:
        UsageError: values are out of range or contradict one another; all errors together.
    """

    combined_settings = ("pruning",)
    """Rows of this callback in the table of combinations."""

    def __init__(
        self,
        final_sparsity: float,
        *,
        end_step: int,
        start_step: int = 0,
        every: int = 100,
        pattern: Pattern = "unstructured",
        targets: Sequence[str] = ("Linear",),
        ignore: Sequence[str] = DEFAULT_IGNORE,
    ) -> None:
        self._targets, self._ignore = tuple(targets), tuple(ignore)
        self._final, self._start, self._end, self._every = final_sparsity, start_step, end_step, every
        self._pattern = pattern
        errors = []
        if not (math.isfinite(final_sparsity) and 0 <= final_sparsity < 1):
            fix = f"write {final_sparsity / 100:g} for {final_sparsity:g} %" if 1 < final_sparsity <= 99 else ""
            rule = "must be a fraction, at least 0 and below 1"
            errors.append(ConfigError(where="final_sparsity", value=final_sparsity, rule=rule, fix=fix))
        if start_step < 0:
            errors.append(ConfigError(where="start_step", value=start_step, rule="must be at least 0"))
        if every < 1:
            errors.append(ConfigError(where="every", value=every, rule="must be at least 1"))
        if end_step < start_step:
            rule = f"must not be before start_step = {start_step}"
            errors.append(ConfigError(where="end_step", value=end_step, rule=rule))
        if pattern not in ("unstructured", "2:4"):
            errors.append(ConfigError(where="pattern", value=pattern, rule="must be unstructured or 2:4"))
        elif pattern == "2:4" and final_sparsity != 0.5:
            rule = "2:4 has two zeros among four"
            errors.append(ConfigError(where="final_sparsity", value=final_sparsity, rule=rule, fix="write 0.5"))
        if errors:
            raise UsageError(errors)
        self._names: tuple[str, ...] | None = None
        self._editor: WeightEditor
        self._masks: dict[tuple[str, int, int], Tensor] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._model: Any = None
        self.sparsity = 0.0
        """Current fraction of zeros in the target layers."""

    def sparsity_at(self, step: int) -> float:
        """Return the fraction of zeros after this many optimizer steps."""
        if step < self._start:
            return 0.0
        if step >= self._end:
            return self._final
        last = step - (step - self._start) % self._every
        left = 1 - (last - self._start) / (self._end - self._start)
        return self._final - self._final * left**3

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: object
    ) -> None:
        """Find the layers early, so that a wrong name fails immediately."""
        if model is not None:
            if errors := run_errors(args, model, callbacks=(self,)):
                raise UsageError(errors)
            layers = target_layers(model, self._targets, self._ignore)
            self._check_layers(layers)
            self._names = tuple(layers)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: object,
    ) -> None:
        """Check that the engine keeps zeros, and set the first zeros, or those of a resumed run."""
        if errors := run_errors(args, model, callbacks=(self,)):
            raise UsageError(errors)
        if stages_of(model) is None:
            layers = target_layers(model, self._targets, self._ignore)
        elif self._names is not None:
            # Of this rank's stages.
            own = named_linear_layers(model)
            layers = {name: own[name] for name in self._names if name in own}
        else:
            rule = "received pipeline stages without the full model, in which the targets are searched"
            fix = "pass it to PipelineTrainer(callbacks=[...])"
            raise UsageError(ConfigError(where="callback", rule=rule, fix=fix))
        self._check_layers(layers)
        weights = {name: module.weight for name, module in layers.items()}
        if errors := edit_errors(weights, args, optimizer) + self._setting_errors(args, state, model):
            raise UsageError(errors)
        fused = [name for name, value in model.named_parameters() if len(getattr(value, "ds_shape", value.shape)) == 3]
        if fused:
            experts = f"{len(fused)} fused weights of experts stay dense, such as {fused[0]}"
            note_on_first_rank(f"{experts}: only linear layers become sparse")
        self._editor = WeightEditor(weights)
        self._shapes = {name: whole_shape(module) for name, module in layers.items()}
        self._model, self._masks, self.sparsity = model, {}, 0.0
        if state.global_step >= self._start:
            self._update(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Set weights to zero again that the optimizer changed, and update the zeros if scheduled."""
        if self._masks:
            self._apply()
        step = state.global_step
        if self._start <= step <= self._end and (step == self._end or (step - self._start) % self._every == 0):
            self._update(step)

    def _check_layers(self, layers: dict[str, Any]) -> None:
        """Check that 2:4 fits the number of inputs of every layer."""
        widths = {name: whole_shape(module)[1] for name, module in layers.items()}
        unfit = [name for name, width in widths.items() if self._pattern == "2:4" and width % 4]
        if unfit:
            rule = f"the number of inputs must be a multiple of 4, but {unfit[0]} has {widths[unfit[0]]}"
            fix = f"add to ignore: {', '.join(unfit[:8])}"
            raise UsageError(ConfigError(where="pattern", value=self._pattern, rule=rule, fix=fix))

    def _setting_errors(self, args: TrainingArguments, state: TrainerState, model: Any) -> list[ConfigError]:
        """Return why the run would end with other zeros than those of the last update."""
        from .qat.attach import attachment_of

        end, errors = self._end, []
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
        import torch

        counts = torch.zeros(2, dtype=torch.int64)
        for name, (rows, columns) in self._shapes.items():
            count = round(self.sparsity_at(step) * rows * columns)
            mask_N = smallest_weights(self._editor.whole(name), count, self._pattern)
            counts += torch.tensor([count, rows * columns])
            own = self._editor.part(name, mask_N.view(rows, columns)).reshape(-1)
            for region in self._editor.regions(name):
                # One bit per weight, because masks stay in memory.
                piece = pack_bits(own[region.start : region.start + region.length], 1)
                self._masks[name, region.start, region.length] = piece.to(region.device)
        self._apply()
        zeros, weights = add_over_stages(self._model, counts).tolist()
        self.sparsity = zeros / weights

    def _apply(self) -> None:
        """Set the weights of all masks to zero."""
        import torch

        def set_to_zero(name: str, flat: Tensor, start: int) -> None:
            packed = self._masks[name, start, flat.numel()].to(flat.device)
            shifts = torch.arange(8, dtype=torch.uint8, device=flat.device)
            mask = ((packed.unsqueeze(1) >> shifts) & 1).bool().reshape(-1)
            flat.masked_fill_(mask[: flat.numel()], 0)

        for name in self._shapes:
            self._editor.edit(name, set_to_zero)


def smallest_weights(weight_OI: Tensor, count: int, pattern: Pattern = "unstructured") -> Tensor:
    """Return the mask of the `count` weights of least magnitude, flattened; among equal ones the first are selected.

    With ``2:4``, the two largest of each four neighbours in a row are never selected.
    """
    import torch

    magnitudes = weight_OI.float().abs()
    if pattern == "2:4":
        groups_G4 = magnitudes.reshape(-1, 4)
        largest_G2 = groups_G4.argsort(dim=-1, stable=True)[:, 2:]
        magnitudes = groups_G4.scatter(-1, largest_G2, float("inf"))
    magnitudes = magnitudes.reshape(-1)
    if count == 0:
        return torch.zeros_like(magnitudes, dtype=torch.bool)
    # Which index `kthvalue` returns is not deterministic on CUDA, so that PyTorch rejects it for the value too.
    source = magnitudes.cpu() if torch.are_deterministic_algorithms_enabled() else magnitudes
    largest = source.kthvalue(count).values.to(magnitudes.device)
    smaller, equal = magnitudes < largest, magnitudes == largest
    return smaller | (equal & (equal.cumsum(0) <= count - smaller.sum()))


def target_layers(
    model: Any, targets: Sequence[str] = ("Linear",), ignore: Sequence[str] = DEFAULT_IGNORE
) -> dict[str, Any]:
    """Return linear layers by their names in the checkpoint, without adapters and a tied output head.

    Raises:
        UsageError: a target or an entry of `ignore` matches no layer, or no layer is left; all errors together.
    """
    import torch

    layers = {name: module for name, module in named_linear_layers(model).items() if ".lora_" not in name}
    errors = pattern_errors(targets, ignore, list(layers))
    embeddings = ("VocabParallelEmbedding", "HiddenParallelEmbedding")
    embedded = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) or type(module).__name__ in embeddings
    }
    selected = {}
    for name, module in layers.items():
        is_target = any(is_match(name, target) for target in targets)
        if not is_target or any(is_match(name, pattern) for pattern in ignore):
            continue
        if id(module.weight) not in embedded:
            selected[name] = module
        elif name in targets:
            rule = "shares its weight with the token embedding"
            errors.append(ConfigError(where="targets", value=name, rule=rule, fix="remove it from targets"))
    if not selected and not errors:
        rule = "selects no linear layer of the model (Conv1D of GPT-2 and quantized layers do not count)"
        errors.append(ConfigError(where="targets", value=", ".join(targets), rule=rule))
    if errors:
        raise UsageError(errors)
    return selected
