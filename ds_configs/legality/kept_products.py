"""Rule of layers that keep their products and attention when they are recomputed (`selective`)."""

from __future__ import annotations

from ..memory.activation_source import activation_mode, cached_activations
from ..memory.activations import UnknownFamilyError
from ..specs.errors import Fault
from .candidate import Candidate

_FIX = "use --gradient-checkpointing auto"


def kept_products_are_counted(candidate: Candidate) -> Fault | None:
    """Layers keep their products in full training, beside data parallelism alone, where the bytes were traced.

    Tensor parallelism adds ranks' results up in place (deepspeed 0.19.8, `inference_all_reduce` in
    `module_inject/layers.py`): the kept result would be added up twice, with losses 1e-4 from right.
    """
    strategy, model, job = candidate.strategy, candidate.model, candidate.job
    if not strategy.keeps_products:
        return None
    rule = ""
    if strategy.axes:
        rule = "keeps products beside data parallelism alone"
    elif job.method != "full":
        rule = f"keeps products of whole models, whose bytes with {job.method} were not traced"
    elif not _is_traced(candidate):
        rule = f"keeps products whose bytes were traced, not those of {model.model_type} in {job.precision}"
    if not rule:
        return None
    return Fault(where="gradient_checkpointing", value="selective", rule=rule, fix=_FIX)


def _is_traced(candidate: Candidate) -> bool:
    source = cached_activations(candidate.model, candidate.job)
    try:
        return source(1, activation_mode(candidate.strategy, candidate.job)).selective is not None
    except UnknownFamilyError:
        return False
