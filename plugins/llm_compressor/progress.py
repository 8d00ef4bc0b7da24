"""Steps of a run of llm-compressor: phases of the method times parts of the model (seen with 0.14.0.1)."""

from __future__ import annotations

from typing import Any

from ..transformers.quantized_model import LayerProgress, ReportProgress


def count_parts(model: Any) -> int:
    """Return how many parts the sequential pipeline cuts a model into: one for each decoder layer, and the head."""
    from llmcompressor.utils.pytorch.module import infer_sequential_targets

    wanted = infer_sequential_targets(model, None)
    targets = {wanted} if isinstance(wanted, str) else set(wanted)
    return sum(type(module).__name__ in targets for module in model.modules()) + 1


class Steps:
    """Numbers the steps of all phases and reports them."""

    def __init__(self, parts: tuple[int, ...], report: ReportProgress) -> None:
        """`parts[k]` is how many parts phase k goes through."""
        self._parts = parts
        self._report = report

    def tell(self, phase: int, part: int, stage: str, names: tuple[str, ...] = ()) -> None:
        """Report what happens to one part in one phase."""
        index, count = sum(self._parts[:phase]) + part, sum(self._parts)
        self._report(LayerProgress(index=index, count=max(count, index + 1), stage=stage, names=names))

    def done(self) -> None:
        """Report the end."""
        count = sum(self._parts)
        self._report(LayerProgress(index=count - 1, count=count, stage="done"))
