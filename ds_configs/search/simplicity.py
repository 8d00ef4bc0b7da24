"""Number of mechanisms that a layout uses: among layouts that are equally fast, the plan takes the simplest."""

from __future__ import annotations

from ..specs.strategy import Strategy

_STAGE_OF_ENGINE = {"single": 0, "ddp": 0, "fsdp2": 3}


def mechanisms(strategy: Strategy, *, chunked_loss: bool = False) -> tuple[str, ...]:
    """Return what a layout does beyond plain data parallelism, by name.

    >>> mechanisms(Strategy(engine="deepspeed", zero_stage=2, dp_shard=8, gradient_checkpointing=True))
    ('gradient checkpointing',)
    """
    found = [axis.upper() for axis in strategy.axes]
    if strategy.offload_optimizer != "none":
        found.append("optimizer offload")
    if strategy.offload_param != "none":
        found.append("parameter offload")
    if "nvme" in (strategy.offload_optimizer, strategy.offload_param):
        found.append("NVMe")
    if strategy.gradient_checkpointing:
        found.append("gradient checkpointing")
    if strategy.zero.hpz_partition_size > 1:
        found.append("hpZ")
    if strategy.engine == "fsdp2" and strategy.dp_replicate > 1:
        found.append("hybrid sharding")
    if chunked_loss:
        found.append("chunked loss")
    return tuple(found)


def complexity(strategy: Strategy, *, chunked_loss: bool = False) -> tuple[int, int, bool]:
    """Return a key that grows with mechanisms, then with the stage, then beside DeepSpeed's defaults."""
    stage = _STAGE_OF_ENGINE.get(strategy.engine, strategy.zero_stage or 0)
    return len(mechanisms(strategy, chunked_loss=chunked_loss)), stage, strategy.engine == "fsdp2"
