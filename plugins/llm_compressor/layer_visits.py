"""Second moments of each linear layer's inputs by llm-compressor's sequential pipeline, for our own methods.

In 0.14.0.1 `oneshot` accepts a modifier of any class, runs the model one decoder layer at a time, calls
`on_sequential_epoch_end` when a layer has seen all samples, and then passes the samples through the changed layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .engine import Steps, run_oneshot
from .quiet import import_upstream

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

VisitLayer = Callable[[str, Any, Any], Any]
"""Takes a layer's name, weight and mean of `x xᵀ` (`None` for a layer without input), and returns its new weight."""


def visit_layers(
    model: PreTrainedModel,
    names: Collection[str],
    *,
    calibration: Sequence[Mapping[str, Sequence[int]]],
    batch_size: int,
    visit: VisitLayer,
) -> None:
    """Replace the weights of linear layers, one decoder layer after another; inputs come from changed layers.

    Args:
        model: Transformers model; changed in place.
        names: Modules to visit.
        calibration: Samples with `input_ids`.
        batch_size: Samples per forward pass.
        visit: Returns the new weight of a layer.
    """
    import_upstream()
    import torch
    from compressed_tensors.utils import get_execution_device, update_offload_parameter
    from llmcompressor.modifiers import Modifier

    layers = {name: model.get_submodule(name) for name in names}
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    steps = Steps(model, [True])

    def summing(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            inputs_TI = arguments[0].detach().flatten(0, -2).float()
            if name not in sums:
                size, device = inputs_TI.shape[-1], get_execution_device(module)
                sums[name], counts[name] = torch.zeros(size, size, device=device), 0
            sums[name].addmm_(inputs_TI.t(), inputs_TI)
            counts[name] += len(inputs_TI)

        return hook

    class VisitModifier(Modifier):
        requires_calibration_data: bool = True

        def on_initialize(self, state: Any, **kwargs: object) -> bool:
            return True

        def on_calibration_start(self, state: Any, event: Any, **kwargs: object) -> None:
            for name, module in layers.items():
                self.register_hook(module, summing(name), "forward")
            steps.report("calibrating")

        def on_sequential_epoch_end(self, state: Any, event: Any, modules: Sequence[Any], **kwargs: object) -> None:
            here = {id(module) for module in modules}
            visited = tuple(name for name, module in layers.items() if id(module) in here)
            steps.report("quantizing")
            for name in visited:
                module, count = layers[name], counts.pop(name, 0)
                hessian_II = sums.pop(name).div_(count) if count else None
                update_offload_parameter(module, "weight", visit(name, module.weight.detach(), hessian_II))
            steps.finish()

        def on_calibration_end(self, state: Any, event: Any, **kwargs: object) -> None:
            self.remove_hooks()

    run_oneshot(model, [VisitModifier()], calibration, batch_size)
