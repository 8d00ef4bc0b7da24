"""Base of the callbacks that change weights of linear layers between optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ...ds_configs.quantization.layers import DEFAULT_IGNORE, is_match, pattern_errors
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.deepspeed.engine import named_linear_layers, stages_of
from ...plugins.deepspeed.parameters import WeightEditor, edit_errors
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.transformers.run_settings import run_errors

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


def target_layers(
    model: Any, targets: Sequence[str] = ("Linear",), ignore: Sequence[str] = DEFAULT_IGNORE
) -> dict[str, Any]:
    """Return linear layers by their names in the checkpoint, without adapters and a tied output head.

    Args:
        model: Transformers model, or any module.
        targets: Module names, `re:` patterns of names, or `Linear` for all, as in a quantization scheme.
        ignore: Names or patterns of layers that stay dense.

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
