"""Questions that a plan answers beside its layout: how long, how many, how much, how often to save, which batch.

Pure functions on numbers and specifications; each result says in words what it rests on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, sqrt

from ..specs.errors import Fault, ShardwrightError, UsageError
from ..specs.hardware import HardwareSpec, with_gpus
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from ..step_time.constants import hardware_constants
from ..step_time.estimate import StepTime, estimate_step_time

_HOUR = 3600.0
_LARGEST_WORLD = 16_384

MEAN_HOURS_BETWEEN_FAILURES_OF_A_GPU = 50_000.0
"""Hours that one accelerator with its share of the node runs between interruptions: 419 unexpected ones of 16,384
H100 in 54 days (Llama 3, arXiv 2407.21783, section 3.3.4), 50,700 hours each."""

GPU_WATTS = 1.0
"""Share of an accelerator's board power that training draws (arXiv 2104.10350 measures 0.9 to 1.0)."""

BOARD_WATTS = {
    "V100": 300,
    "T4": 70,
    "A100": 400,
    "H100": 700,
    "H200": 700,
    "B200": 1000,
    "A10": 150,
    "L4": 72,
    "L40S": 350,
    "RTX3090": 350,
    "RTX4090": 450,
    "RTX5090": 575,
    "MI250X": 560,
    "MI300X": 750,
    "Gaudi2": 600,
    "Gaudi3": 900,
}
"""Board power of each accelerator in watts, from its datasheet."""

NODE_OVERHEAD = 1.45
"""Power of a server over that of its accelerators: a DGX H100 draws 10.2 kW with eight of 700 W at most, less in use
(datasheet); cooling of the building is not in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCost:
    """Time, price and energy of training on a number of tokens."""

    tokens: float
    """Tokens of the run."""
    steps: int
    """Optimizer steps."""
    seconds: float
    """Expected time without interruptions."""
    low_seconds: float
    """Lower end of the interval."""
    high_seconds: float
    """Upper end of the interval."""
    gpu_hours: float
    """Accelerators times hours."""
    energy_kwh: float | None
    """Energy of the servers; `None` for an accelerator whose board power is not known."""
    price: float | None
    """GPU hours times the price of one; `None` without a price."""

    def __str__(self) -> str:
        days = self.seconds / _HOUR / 24
        parts = [
            f"{self.tokens:,.0f} tokens take {self.steps:,} steps, {days:,.1f} days "
            f"({self.low_seconds / _HOUR / 24:,.1f} to {self.high_seconds / _HOUR / 24:,.1f}), "
            f"{self.gpu_hours:,.0f} GPU hours"
        ]
        if self.energy_kwh is not None:
            parts.append(f"{self.energy_kwh:,.0f} kWh")
        if self.price is not None:
            parts.append(f"a price of {self.price:,.0f}")
        return ", ".join(parts)


def run_cost(time: StepTime, hardware: HardwareSpec, *, tokens: float, gpu_hour_price: float | None = None) -> RunCost:
    """Return what a run of so many tokens takes with a step time.

    Raises:
        UsageError: the tokens or the price are not positive.

    >>> step = StepTime(seconds=2, low_seconds=1, high_seconds=4, tokens_per_second=500, terms={})
    >>> from ..specs.hardware import parse_hardware
    >>> run_cost(step, parse_hardware("8xA100-80GB"), tokens=1e6, gpu_hour_price=2).gpu_hours
    4.444444444444445
    """
    faults = [
        Fault(where=where, value=value, rule="must be above zero")
        for where, value in (("tokens", tokens), ("gpu_hour_price", gpu_hour_price))
        if value is not None and not value > 0
    ]
    if faults:
        raise UsageError(faults)
    tokens_of_a_step = time.tokens_per_second * time.seconds
    steps = ceil(tokens / tokens_of_a_step)
    gpu_hours = steps * time.seconds * hardware.world_size / _HOUR
    watts = board_watts(hardware.gpu)
    return RunCost(
        tokens=tokens,
        steps=steps,
        seconds=steps * time.seconds,
        low_seconds=steps * time.low_seconds,
        high_seconds=steps * time.high_seconds,
        gpu_hours=gpu_hours,
        energy_kwh=None if watts is None else gpu_hours * watts * NODE_OVERHEAD / 1000,
        price=None if gpu_hour_price is None else gpu_hours * gpu_hour_price,
    )


def board_watts(gpu: str) -> float | None:
    """Return the board power of an accelerator by its catalog name, `None` where it is not known."""
    watts = BOARD_WATTS.get(gpu.split("-")[0])
    return None if watts is None else watts * GPU_WATTS


def checkpoint_interval_seconds(*, save_seconds: float, world_size: int, mtbf_hours: float | None = None) -> float:
    """Return how often to save, `sqrt(2 * save * mtbf)` (Young 1974), with Daly's correction of the first order.

    `mtbf_hours` is the mean time between failures of the whole run; without one it is that of a GPU over their number.
    Daly (2006): `sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + d / 18M) - d`, and `M` where a save takes half as long as that.

    Raises:
        UsageError: a time is not positive.

    >>> round(checkpoint_interval_seconds(save_seconds=60, world_size=16384))
    1089
    """
    mean = (mtbf_hours or MEAN_HOURS_BETWEEN_FAILURES_OF_A_GPU / world_size) * _HOUR
    if not save_seconds > 0 or not mean > 0:
        raise UsageError(Fault(where="save_seconds", value=save_seconds, rule="must be above zero, and so the MTBF"))
    if save_seconds >= 2 * mean:
        return mean
    first = sqrt(2 * save_seconds * mean)
    return first * (1 + sqrt(save_seconds / (2 * mean)) / 3 + save_seconds / (18 * mean)) - save_seconds


def lost_to_failures(*, save_seconds: float, world_size: int, mtbf_hours: float | None = None) -> float:
    """Return the share of the time that saving and repeated work cost at the best interval.

    A save costs `d / (interval + d)`, a failure half an interval and a save: `(interval / 2 + d) / M`.
    """
    mean = (mtbf_hours or MEAN_HOURS_BETWEEN_FAILURES_OF_A_GPU / world_size) * _HOUR
    interval = checkpoint_interval_seconds(save_seconds=save_seconds, world_size=world_size, mtbf_hours=mtbf_hours)
    return min(1.0, save_seconds / (interval + save_seconds) + (interval / 2 + save_seconds) / mean)


def plain_batch_sizes(*, global_batch_size: int, ranks: int, micro_batch_size: int = 1) -> tuple[int, ...]:
    """Return the nearest global batch sizes that plain data parallelism divides; the size itself where it does.

    >>> plain_batch_sizes(global_batch_size=7, ranks=8), plain_batch_sizes(global_batch_size=100, ranks=8)
    ((8,), (96, 104))
    """
    unit = ranks * micro_batch_size
    if global_batch_size % unit == 0:
        return (global_batch_size,)
    lower = global_batch_size // unit * unit
    return tuple(size for size in (lower, lower + unit) if size)


def slowest_node(nodes: list[HardwareSpec]) -> tuple[HardwareSpec, tuple[str, ...]]:
    """Return the cluster that unequal nodes make, and what each of them holds back.

    Every step waits for the slowest rank and every layout must fit the smallest, so each rate and each memory counts as
    its lowest. Nodes with other counts of accelerators take part with as many as the smallest has.

    Raises:
        UsageError: there is no node.
    """
    if not nodes:
        raise UsageError(Fault(where="hardware", rule="needs at least one node"))
    per_node = min(node.gpus_per_node for node in nodes)
    names = (
        "gpu_bytes",
        "flops_per_s",
        "memory_bytes_per_s",
        "link_bytes_per_s",
        "network_bytes_per_s",
        "host_bytes_per_node",
        "nvme_bytes_per_node",
    )
    lowest = {name: min(getattr(node, name) for node in nodes) for name in names}
    notes = []
    for name, value in lowest.items():
        faster = sum(node.nodes for node in nodes if getattr(node, name) > value)
        if faster:
            slow = next(node for node in nodes if getattr(node, name) == value)
            notes.append(f"{name}: {slow.gpu} rules with {value:.4g}; nodes that have more: {faster}")
    idle = sum((node.gpus_per_node - per_node) * node.nodes for node in nodes)
    if idle:
        notes.append(f"gpus_per_node: {idle} accelerators stay idle, since every node takes part with {per_node}")
    weakest = min(nodes, key=lambda node: (node.flops_per_s, node.gpu_bytes))
    total = sum(node.nodes for node in nodes)
    name = " + ".join(node.name for node in nodes)
    bf16 = all(node.supports_bf16 for node in nodes)
    cluster = replace(weakest, name=name, nodes=total, gpus_per_node=per_node, supports_bf16=bf16, **lowest)
    return cluster, tuple(notes)


Solve = Callable[[HardwareSpec], StepTime | None]
"""The step time that a cluster reaches for a job; `None` where nothing fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineAnswer:
    """The smallest cluster that trains on the tokens in time."""

    hardware: HardwareSpec
    """The cluster."""
    cost: RunCost
    """What the run takes on it."""


def clusters(hardware: HardwareSpec, *, most: int = _LARGEST_WORLD) -> Iterator[HardwareSpec]:
    """Yield the same machines in growing number: one accelerator and its doublings, then whole nodes."""
    gpus = 1
    while gpus < hardware.gpus_per_node:
        yield with_gpus(hardware, nodes=1, gpus_per_node=gpus)
        gpus *= 2
    nodes = 1
    while nodes * hardware.gpus_per_node <= most:
        yield with_gpus(hardware, nodes=nodes, gpus_per_node=hardware.gpus_per_node)
        nodes *= 2


def smallest_for_deadline(
    hardware: HardwareSpec,
    solve: Solve,
    *,
    tokens: float,
    deadline_seconds: float,
    gpu_hour_price: float | None = None,
) -> DeadlineAnswer:
    """Return the smallest number of the same machines that trains on the tokens before the deadline.

    The expected time counts, and the answer's interval says how sure that is. Doublings come first; between the last
    that is too slow and the first that is fast enough, whole nodes are bisected.

    Raises:
        ShardwrightError: no cluster up to 16,384 accelerators is fast enough; the fastest is named.
        UsageError: the deadline is not positive.
    """
    if not deadline_seconds > 0:
        raise UsageError(Fault(where="deadline", value=deadline_seconds, rule="must be above zero"))

    def answer(cluster: HardwareSpec) -> DeadlineAnswer | None:
        time = solve(cluster)
        if time is None:
            return None
        cost = run_cost(time, cluster, tokens=tokens, gpu_hour_price=gpu_hour_price)
        return DeadlineAnswer(hardware=cluster, cost=cost)

    fastest: DeadlineAnswer | None = None
    slow_nodes = 0
    for cluster in clusters(hardware):
        found = answer(cluster)
        if found is None or found.cost.seconds > deadline_seconds:
            slow_nodes = cluster.nodes
            if found is not None and (fastest is None or found.cost.seconds < fastest.cost.seconds):
                fastest = found
            continue
        low, high = slow_nodes, cluster.nodes
        while high - low > 1:
            middle = (low + high) // 2
            tried = answer(with_gpus(hardware, nodes=middle, gpus_per_node=cluster.gpus_per_node))
            if tried is not None and tried.cost.seconds <= deadline_seconds:
                high, found = middle, tried
            else:
                low = middle
        return found
    if fastest is None:
        raise ShardwrightError(f"deadline: nothing fits on up to {_LARGEST_WORLD:,} of {hardware.gpu}")
    days, wanted = fastest.cost.seconds / _HOUR / 24, deadline_seconds / _HOUR / 24
    raise ShardwrightError(
        f"deadline = {wanted:.4g} days: nothing meets it with {hardware.gpu}; the fastest, {fastest.hardware.name}, "
        f"takes {days:,.1f} days; train on fewer tokens or allow more time"
    )


_TRUSTED_RANKS = 3360
"""Accelerators of the largest published step that the constants were fitted to (MT-NLG)."""

_TRUSTED_TOKENS = 262_144
"""Tokens of the longest published sequence among them (torchtitan)."""


def doubts(strategy: Strategy, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> tuple[str, ...]:
    """Return where a predicted step time goes beyond what was checked or stated; empty where it does not."""
    found = []
    if model.source == "structure":
        found.append(
            f"{model.architecture} needs code of its own, which was not run: memory and time are of its structure"
        )
    if hardware_constants(hardware).assumed:
        found.append(f"no step times of {hardware.gpu} are published here: the constants of A100 stand in")
    if hardware.world_size > _TRUSTED_RANKS:
        ranks = f"{hardware.world_size:,} ranks are more than the {_TRUSTED_RANKS:,}"
        found.append(f"{ranks} that predictions were checked on")
    if job.seq_len_tokens > _TRUSTED_TOKENS:
        found.append(f"sequences of {job.seq_len_tokens:,} tokens are longer than any that were checked")
    if model.dimensions.num_experts:
        found.append("no published step of a mixture of experts was checked")
    if "network_bytes_per_s" in hardware.assumed:
        half = replace(hardware, network_bytes_per_s=hardware.network_bytes_per_s / 2)
        times = [estimate_step_time(strategy, model, cluster, job).seconds for cluster in (half, hardware)]
        found.append(
            f"the network is assumed to give {hardware.network_bytes_per_s / 1e9:g} GB/s to each accelerator; with "
            f"half of that a step of this layout takes {times[0] / times[1]:.2f} times as long"
        )
    return tuple(found)


def parse_duration(text: str, *, where: str = "deadline") -> float:
    """Return the seconds of a duration with a unit: `5d`, `36h`, `90m`, `30s`.

    Raises:
        UsageError: it cannot be read.

    >>> parse_duration("5d"), parse_duration("1.5h")
    (432000.0, 5400.0)
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
    number, unit = text.strip()[:-1], text.strip()[-1:].lower()
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if unit not in units or not value > 0:
        raise UsageError(Fault(where=where, value=text, rule="must be a number with s, m, h, d or w", fix="such as 5d"))
    return value * units[unit]
