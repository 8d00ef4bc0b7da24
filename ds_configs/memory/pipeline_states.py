"""Model states of a pipeline stage without ZeRO, as DeepSpeed 0.19.8 keeps them on 2 and 4 ranks.

In 16 bit the engine takes `BF16_Optimizer` (`runtime/engine.py:2320`), which divides master weights and optimizer
states over the data-parallel ranks as ZeRO-1 does and adds each micro-batch's gradients to flat ones of their own.
"""

from __future__ import annotations

from ..specs.job import TrainingJob
from ..specs.strategy import Strategy
from .moments import Moment, Terms, at_moments
from .rank_parameters import RankParameters, growing_gradients

_REDUCED_AT_ONCE = 500_000_000
"""Elements of gradients that a pipeline flattens into one copy to reduce them (`MEMORY_OPT_ALLREDUCE_SIZE`)."""


def pipeline_stage0(
    strategy: Strategy, job: TrainingJob, parameters: RankParameters, states: int, transient: int
) -> dict[Moment, Terms]:
    """Return the named bytes of model states, and of the copy that the reduction after the last backward pass makes.

    Args:
        strategy: The layout.
        job: What is trained.
        parameters: What the stage holds.
        states: Bytes of optimizer states for all of it.
        transient: Bytes that the optimizer's update needs besides, for all of it.
    """
    width, trainable = job.compute_bytes, parameters.trainable
    full, copy = width * trainable, width * min(trainable, _REDUCED_AT_ONCE)
    found = growing_gradients(strategy, parameters, full)
    whole = full - found.get("backward", {}).get("gradients", 0)
    found["embedding_backward"] = {"gradients": whole, "reduce_copy": copy}
    rest = {"weights": full + parameters.frozen_bytes}
    if width == 4:
        rest["optimizer_states"] = states
        # The norm over all stages squares one gradient at a time.
        step = {"gradients": full, "optimizer_transient": max(transient, 4 * parameters.largest_trainable)}
        return at_moments(rest, **found, step=step)
    shard = parameters.shard(strategy)
    rest |= {
        "master_weights": 4 * shard,
        "optimizer_states": parameters.state_shard(states, strategy),
        "flat_gradients": full,
    }
    step = {
        "gradients": full,
        "fp32_gradients": 4 * shard,
        "optimizer_transient": transient * shard // max(1, trainable),
    }
    return at_moments(rest, **found, step=step)
