"""Tensor bytes of one CPU rank, where a rehearsal can count them: the plan's terms, without what only a GPU has.

A CPU rank has no runtime context, communicator buffers or caching allocator, host and device are one memory, and
attention always takes the fused kernel (`attention_path` picks the math kernel for fp32 with grouped heads on CUDA).
"""

from __future__ import annotations

from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from .activation_source import ActivationSource
from .host_memory import offload_terms
from .moments import Moment, Phase, Terms, at_moments, fullest_by_phase
from .rank_parameters import RankParameters, growing_gradients, share_parameters
from .shares import RankShare, rank_shares
from .tensor_terms import share_moment_terms


def cpu_rank_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, *, activations: ActivationSource | None = None
) -> dict[Phase, Terms]:
    """Return the named tensor bytes of each phase on one CPU rank; what a GPU rank offloads is added to it.

    Raises:
        UnknownFamilyError: no stored coefficients and no `activations` given.
    """
    return max(
        (phases for _, phases in cpu_share_terms(strategy, model, job, activations=activations)),
        key=lambda phases: max(sum(terms.values()) for name, terms in phases.items() if name != "init"),
    )


def cpu_share_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, *, activations: ActivationSource | None = None
) -> list[tuple[RankShare, dict[Phase, Terms]]]:
    """Return the shares of a model among which the fullest CPU rank is, each with its named bytes by phase."""
    found = []
    for share in rank_shares(strategy, model, job):
        device = share_moment_terms(strategy, share, job, activations, unmasked="fused")
        parameters = share_parameters(share.model, job, ep=strategy.ep)
        host = _host_terms(strategy, share.model, job, parameters)
        found.append((share, fullest_by_phase({moment: device[moment] | host[moment] for moment in device})))
    return found


def _host_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters
) -> dict[Moment, Terms]:
    offloaded = offload_terms(strategy, model, job, parameters)
    offloaded.pop("pinned_rounding", None)
    if strategy.engine != "fsdp2" or not offloaded:
        return at_moments(offloaded)
    # FSDP2 makes gradient shards on the host one by one; DeepSpeed allocates them ahead.
    whole = offloaded.pop("offloaded_gradients")
    step = {"gradients": whole}
    return at_moments(offloaded, **growing_gradients(strategy, parameters, whole), step=step)
