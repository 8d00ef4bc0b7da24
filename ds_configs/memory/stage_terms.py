"""Activations of a pipeline stage: several micro-batches at once, and what lies at its borders.

Follows `runtime/pipe/engine.py` of DeepSpeed 0.19.8: a stage keeps the tensor that it received until the gradient for
it is sent, clones it for the forward pass, keeps the tensor that it sent until its backward pass, and receives through
one buffer that lives on.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..specs.job import TrainingJob
from ..specs.strategy import Strategy
from .activations import ActivationEstimate
from .moments import PHASES, Moment, Terms
from .shares import RankShare

_ONLY_ON_THE_LAST = ("loss", "head_gradient")


def stage_terms(
    moments: Mapping[Moment, Terms],
    share: RankShare,
    strategy: Strategy,
    job: TrainingJob,
    traced: ActivationEstimate,
    layer_bytes: int,
) -> dict[Moment, Terms]:
    """Return the activation terms of a stage, from those of one micro-batch on its layers.

    Args:
        moments: Terms of one micro-batch as if the stage were a whole model.
        share: The stage.
        strategy: The layout.
        job: What is trained.
        traced: Activation bytes of one micro-batch.
        layer_bytes: What one layer keeps of one micro-batch.
    """
    stage = share.stage
    assert stage is not None, "only a pipeline has stages"
    border = job.compute_bytes * strategy.micro_batch_size * job.seq_len_tokens * share.model.dimensions.hidden_size
    kept = (0 if stage.has_embedding else border) + (0 if stage.has_head else border)
    others = share.micro_batches_in_flight - 1
    of_others = others * (stage.num_layers * layer_bytes + traced.outside_layer_bytes + kept)
    found: dict[Moment, Terms] = {}
    for moment, terms in moments.items():
        here = {name: count for name, count in terms.items() if stage.has_head or name not in _ONLY_ON_THE_LAST}
        here["stage_borders"] = border
        if PHASES[moment] in ("loss", "backward"):
            here["stage_borders"] += kept
            here["activations_in_flight"] = of_others
        found[moment] = here
    return found
