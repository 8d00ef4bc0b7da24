"""Second moments of each linear layer's inputs by llm-compressor's sequential pipeline, for our own methods.

In 0.14.0.1 `oneshot` accepts a modifier of any class, runs the model one decoder layer at a time, calls
`on_sequential_epoch_end` when a layer has seen all samples, and then passes the samples through the changed layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..transformers.quantized_model import ReportProgress
from .engine import Steps, calibration_loader, count_parts
from .quiet import all_fixes, named_by_directory, quiet_upstream

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VisitLayer = Callable[[str, Any, Any], Any]
"""Takes a layer's name, weight and mean of `x xᵀ` (`None` for a layer without input), and returns its new weight."""


def visit_layers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: Collection[str],
    *,
    calibration: Sequence[Mapping[str, Sequence[int]]],
    batch_size: int,
    visit: VisitLayer,
    finish_part: Callable[[int], None],
    finished_parts: int,
    report: ReportProgress,
) -> None:
    """Replace the weights of linear layers, one decoder layer after another; inputs come from changed layers.

    Args:
        model: Transformers model; changed in place.
        tokenizer: Required by `oneshot`; may be `None`.
        names: Modules to visit.
        calibration: Samples with `input_ids`.
        batch_size: Samples per forward pass.
        visit: Returns the new weight of a layer.
        finish_part: Called with the index of a part of the model after its layers were visited.
        finished_parts: Parts whose layers already have their new weights.
        report: Called with the progress.
    """
    from llmcompressor import oneshot
    from llmcompressor.core import reset_session
    from llmcompressor.modifiers import Modifier

    class VisitModifier(_Visits, Modifier):
        requires_calibration_data: bool = True

    steps = Steps((count_parts(model),), report)
    modifier = VisitModifier()
    modifier.attach(names=names, visit=visit, finish_part=finish_part, finished_parts=finished_parts, steps=steps)
    with quiet_upstream(), all_fixes(), named_by_directory(model):
        reset_session()
        try:
            oneshot(
                model=model,
                # `oneshot` requires a processor for any data, and does not use it for tokens.
                processor=tokenizer or object(),
                recipe=[modifier],
                dataset=calibration_loader(calibration, batch_size),
            )
        finally:
            modifier.remove_hooks()
            reset_session()
            vars(model).pop("save_pretrained", None)
    model.eval()
    steps.done()


class _Visits:
    """Mixin placed before `Modifier`: collects second moments and passes each layer's to the visitor."""

    names: ClassVar[Any]
    visit: ClassVar[Any]
    finish_part: ClassVar[Any]
    finished_parts: ClassVar[Any]
    steps: ClassVar[Any]
    part: ClassVar[Any]
    sums: ClassVar[Any]
    counts: ClassVar[Any]
    found: ClassVar[Any]

    def attach(self, **settings: object) -> None:
        """Set the arguments of `visit_layers`."""
        # Bypass pydantic, which accepts only the modifier's own fields.
        for name, value in (settings | {"part": 0, "sums": {}, "counts": {}}).items():
            object.__setattr__(self, name, value)

    def on_initialize(self, state: Any, **kwargs: object) -> bool:
        """Find the modules."""
        object.__setattr__(self, "found", {name: state.model.get_submodule(name) for name in self.names})
        return True

    def on_calibration_start(self, state: Any, event: Any, **kwargs: object) -> None:
        """Add hooks on the modules' inputs."""
        for name, module in self.found.items():
            self.register_hook(  # type: ignore[attr-defined]
                module, self._add_inputs(name), "forward"
            )
        self.steps.tell(0, 0, "calibrating")

    def _add_inputs(self, name: str) -> Callable[..., None]:
        import torch
        from compressed_tensors.utils import get_execution_device

        def hook(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if self.part < self.finished_parts:
                return
            inputs_TI = arguments[0].detach().flatten(0, -2).float()
            if name not in self.sums:
                size, device = inputs_TI.shape[-1], get_execution_device(module)
                self.sums[name] = torch.zeros(size, size, device=device)
                self.counts[name] = 0
            self.sums[name].addmm_(inputs_TI.t(), inputs_TI)
            self.counts[name] += len(inputs_TI)

        return hook

    def on_sequential_epoch_end(self, state: Any, event: Any, modules: Sequence[Any], **kwargs: object) -> None:
        """Visit the layers of a part."""
        from compressed_tensors.utils import update_offload_parameter

        part, here = self.part, {id(module) for module in modules}
        object.__setattr__(self, "part", part + 1)
        names = tuple(name for name, module in self.found.items() if id(module) in here)
        if part < self.finished_parts:
            self.steps.tell(0, part, "restored", names)
            return
        self.steps.tell(0, part, "quantizing", names)
        for name in names:
            module, count = self.found[name], self.counts.pop(name, 0)
            hessian_II = self.sums.pop(name).div_(count) if count else None
            weight_OI = self.visit(name, module.weight.detach(), hessian_II)
            update_offload_parameter(module, "weight", weight_OI)
        self.finish_part(part)
        self.steps.tell(0, part, "propagating", names)

    def on_calibration_end(self, state: Any, event: Any, **kwargs: object) -> None:
        """Remove the hooks."""
        self.remove_hooks()  # type: ignore[attr-defined]
