"""Base of the callbacks that change weights of linear layers between optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.deepspeed.engine import named_linear_layers, stages_of
from ...plugins.deepspeed.parameters import WeightEditor, edit_errors
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.transformers.run_settings import run_errors
from .masks import target_layers

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class SparsityCallback(TrainerCallback):
    """Finds the target layers, and checks that the engine keeps changed weights."""

    combined_settings: tuple[str, ...]
    """Rows of this callback in the table of combinations."""
    tiny_changes = False
    """Whether changes may be smaller than a step of 16-bit numbers."""

    def __init__(self, targets: Sequence[str], ignore: Sequence[str]) -> None:
        self._targets, self._ignore = tuple(targets), tuple(ignore)
        self._names: tuple[str, ...] | None = None
        self._layers: dict[str, Any] = {}
        self._editor: WeightEditor | None = None

    @property
    def editor(self) -> WeightEditor:
        """Editor of the target layers' weights, from the beginning of training on."""
        assert self._editor is not None, "training has begun"
        return self._editor

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: object
    ) -> None:
        """Find the layers early, so that a wrong name fails immediately."""
        if model is not None:
            if errors := run_errors(args, model, callbacks=(self,)):
                raise UsageError(errors)
            layers = target_layers(model, self._targets, self._ignore)
            self.check_layers(layers)
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
        """Find the layers of this rank, and check that the engine keeps changed weights."""
        if errors := run_errors(args, model, callbacks=(self,)):
            raise UsageError(errors)
        if stages_of(model) is None:
            self._layers = target_layers(model, self._targets, self._ignore)
        elif self._names is not None:
            layers = named_linear_layers(model)
            self._layers = {name: layers[name] for name in self._names if name in layers}
        else:
            rule = "received pipeline stages without the full model, in which the targets are searched"
            fix = "pass it to PipelineTrainer(callbacks=[...])"
            raise UsageError(ConfigError(where="callback", rule=rule, fix=fix))
        self.check_layers(self._layers)
        weights = {name: module.weight for name, module in self._layers.items()}
        errors = edit_errors(weights, args, optimizer, tiny_changes=self.tiny_changes)
        if errors := errors + self.setting_errors(args, state, model):
            raise UsageError(errors)
        fused = [name for name, value in model.named_parameters() if len(getattr(value, "ds_shape", value.shape)) == 3]
        if fused:
            experts = f"{len(fused)} fused weights of experts stay dense, such as {fused[0]}"
            note_on_first_rank(f"{experts}: only linear layers become sparse")
        self._editor = WeightEditor(weights, optimizer)

    def check_layers(self, layers: dict[str, Any]) -> None:
        """Check the shapes of the target layers.

        Raises:
            UsageError: a layer does not fit.
        """

    def setting_errors(self, args: TrainingArguments, state: TrainerState, model: Any) -> list[ConfigError]:
        """Return why the settings of the run contradict those of the callback."""
        return []
