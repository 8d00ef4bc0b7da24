"""Tells how far llm-compressor's sequential pipeline is (seen with 0.14.0.1)."""

from __future__ import annotations

from typing import Any

from llmcompressor.modifiers import Modifier
from pydantic import ConfigDict, PrivateAttr

from ..quantized_model import LayerProgress


def count_subgraphs(model: Any) -> int:
    """Return how many parts the pipeline cuts a model into: one for each decoder layer, and the head."""
    from llmcompressor.utils.pytorch.module import infer_sequential_targets

    targets = infer_sequential_targets(model, None)
    kinds = {type(module).__name__ for module in model.modules()} & set(targets or ())
    return sum(type(module).__name__ in kinds for module in model.modules()) + 1


class ProgressModifier(Modifier):  # type: ignore[misc]
    """Changes nothing; stands last in a recipe and hears when a part of the model is done."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    report: Any
    """Receives a `LayerProgress`."""
    _count: int = PrivateAttr(default=0)
    _done: int = PrivateAttr(default=0)

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        """Count the parts."""
        self._count = count_subgraphs(state.model)
        return True

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        """Tell that the first part begins."""
        self.report(LayerProgress(index=0, count=self._count, stage="calibrating"))

    def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any, **kwargs: Any) -> None:
        """Tell that a part is quantized."""
        self._done += 1
        self.report(LayerProgress(index=self._done - 1, count=max(self._count, self._done), stage="quantized"))

    def on_calibration_end(self, state: Any, event: Any, **kwargs: Any) -> None:
        """Tell that every part is done."""
        self.report(LayerProgress(index=self._count - 1, count=self._count, stage="done"))
