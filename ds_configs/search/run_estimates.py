"""Estimates about a complete run: time and cost, deadline, checkpoint interval, batch sizes, unequal nodes, doubts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, sqrt

from ..memory.terms import KERNEL_MEANINGS
from ..specs.errors import ConfigError, ShardwrightError, UsageError
from ..specs.hardware import HardwareSpec, with_gpus
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..step_time.estimate import StepTime, estimate_step_time
from ..step_time.rates import hardware_constants

_HOUR = 3600.0
_LARGEST_WORLD = 16_384

MEAN_HOURS_BETWEEN_FAILURES_OF_A_GPU = 50_000.0
"""Mean hours between interruptions of one accelerator with its share of the node: 419 unexpected interruptions of
16,384 H100 in 54 days (Llama 3, arXiv 2407.21783, section 3.3.4), 50,700 hours each."""

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
"""Power of a server divided by that of its accelerators, without cooling of the building. A DGX H100 draws at most
10.2 kW with eight accelerators of 700 W, and less in use (datasheet)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCost:
    """Time, price and energy of training on a number of tokens."""

    tokens: float
    steps: int
    seconds: float
    """Expected time without interruptions."""
    low_seconds: float
    high_seconds: float
    gpu_hours: float
    energy_kwh: float | None
    """Energy of the servers; `None` for an accelerator whose board power is unknown."""
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
    """Return time, price and energy of training on `tokens` with a predicted step time.

    Raises:
        UsageError: `tokens` or `gpu_hour_price` is not positive.

    >>> step = StepTime(seconds=2, low_seconds=1, high_seconds=4, tokens_per_second=500, terms={})
    >>> from ..specs.hardware import parse_hardware
    >>> run_cost(step, parse_hardware("8xA100-80GB"), tokens=1e6, gpu_hour_price=2).gpu_hours
    4.444444444444445
    """
    errors = [
        ConfigError(where=where, value=value, rule="must be above zero")
        for where, value in (("tokens", tokens), ("gpu_hour_price", gpu_hour_price))
        if value is not None and not value > 0
    ]
    if errors:
        raise UsageError(errors)
    tokens_of_a_step = time.tokens_per_second * time.seconds
    steps = ceil(tokens / tokens_of_a_step)
    gpu_hours = steps * time.seconds * hardware.world_size / _HOUR
    watts = BOARD_WATTS.get(hardware.gpu.split("-")[0])
    return RunCost(
        tokens=tokens,
        steps=steps,
        seconds=steps * time.seconds,
        low_seconds=steps * time.low_seconds,
        high_seconds=steps * time.high_seconds,
        gpu_hours=gpu_hours,
        energy_kwh=None if watts is None else gpu_hours * watts * GPU_WATTS * NODE_OVERHEAD / 1000,
        price=None if gpu_hour_price is None else gpu_hours * gpu_hour_price,
    )


def checkpoint_interval_seconds(*, save_seconds: float, world_size: int, mtbf_hours: float | None = None) -> float:
    """Return the seconds between checkpoints that lose the least time, with `d` to save and `M` between failures.

    Young (1974): `sqrt(2 d M)`. With Daly's first-order correction (2006):
    `sqrt(2 d M) * (1 + sqrt(d / 2M) / 3 + d / 18M) - d`, and `M` if `d >= 2M`.

    `mtbf_hours` is that of the whole run, by default that of one GPU divided by `world_size`.

    Raises:
        UsageError: a time is not positive.

    >>> round(checkpoint_interval_seconds(save_seconds=60, world_size=16384))
    1089
    """
    mean = (mtbf_hours or MEAN_HOURS_BETWEEN_FAILURES_OF_A_GPU / world_size) * _HOUR
    if not save_seconds > 0 or not mean > 0:
        raise UsageError(
            ConfigError(where="save_seconds", value=save_seconds, rule="must be above zero, as must mtbf_hours")
        )
    if save_seconds >= 2 * mean:
        return mean
    first = sqrt(2 * save_seconds * mean)
    return first * (1 + sqrt(save_seconds / (2 * mean)) / 3 + save_seconds / (18 * mean)) - save_seconds


def lost_to_failures(*, save_seconds: float, world_size: int, mtbf_hours: float | None = None) -> float:
    """Return the share of time lost to saving and to repeated work at the best checkpoint interval.

    A save costs `d / (interval + d)`, a failure half an interval and a save: `(interval / 2 + d) / M`.
    """
    mean = (mtbf_hours or MEAN_HOURS_BETWEEN_FAILURES_OF_A_GPU / world_size) * _HOUR
    interval = checkpoint_interval_seconds(save_seconds=save_seconds, world_size=world_size, mtbf_hours=mtbf_hours)
    return min(1.0, save_seconds / (interval + save_seconds) + (interval / 2 + save_seconds) / mean)


def plain_batch_sizes(*, global_batch_size: int, ranks: int, micro_batch_size: int = 1) -> tuple[int, ...]:
    """Return the nearest global batch sizes that data parallelism can divide; only the size itself if it can.

    >>> plain_batch_sizes(global_batch_size=7, ranks=8), plain_batch_sizes(global_batch_size=100, ranks=8)
    ((8,), (96, 104))
    """
    unit = ranks * micro_batch_size
    if global_batch_size % unit == 0:
        return (global_batch_size,)
    lower = global_batch_size // unit * unit
    return tuple(size for size in (lower, lower + unit) if size)


def slowest_node(nodes: list[HardwareSpec]) -> tuple[HardwareSpec, tuple[str, ...]]:
    """Return one hardware specification for unequal nodes, and what each node limits.

    Every step waits for the slowest rank and every layout must fit the smallest accelerator, so each rate and each
    memory is the lowest. All nodes use as many accelerators as the node with the fewest.

    Raises:
        UsageError: there is no node.
    """
    if not nodes:
        raise UsageError(ConfigError(where="hardware", rule="needs at least one node"))
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
            notes.append(f"{name}: limited to {value:.4g} by {slow.gpu}; nodes with more: {faster}")
    idle = sum((node.gpus_per_node - per_node) * node.nodes for node in nodes)
    if idle:
        notes.append(f"gpus_per_node: {idle} accelerators stay idle, because every node uses {per_node}")
    weakest = min(nodes, key=lambda node: (node.flops_per_s, node.gpu_bytes))
    total = sum(node.nodes for node in nodes)
    name = " + ".join(node.name for node in nodes)
    bf16 = all(node.supports_bf16 for node in nodes)
    cluster = replace(weakest, name=name, nodes=total, gpus_per_node=per_node, supports_bf16=bf16, **lowest)
    return cluster, tuple(notes)


Solve = Callable[[HardwareSpec], StepTime | None]
"""Returns the step time of a job on a cluster; `None` if nothing fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineAnswer:
    """The smallest cluster that finishes in time, and the cost of the run on it."""

    hardware: HardwareSpec
    cost: RunCost


def clusters(hardware: HardwareSpec, *, most: int = _LARGEST_WORLD) -> Iterator[HardwareSpec]:
    """Yield growing clusters of the same machines: one accelerator, its doublings, then doubled numbers of nodes."""
    gpus = 1
    while gpus < hardware.gpus_per_node:
        yield with_gpus(hardware, nodes=1, gpus_per_node=gpus)
        gpus *= 2
    nodes = 1
    while nodes * hardware.gpus_per_node <= most:
        yield with_gpus(hardware, nodes=nodes, gpus_per_node=hardware.gpus_per_node)
        nodes *= 2


def smallest_for_deadline(
    hardware: HardwareSpec, solve: Solve, *, tokens: float, deadline_seconds: float, gpu_hour_price: float | None = None
) -> DeadlineAnswer:
    """Return the smallest number of the same machines whose expected time meets the deadline.

    Doubles the cluster until it is fast enough, then bisects whole nodes.

    Raises:
        ShardwrightError: no cluster up to 16,384 accelerators is fast enough; the message names the fastest.
        UsageError: the deadline is not positive.
    """
    if not deadline_seconds > 0:
        raise UsageError(ConfigError(where="deadline", value=deadline_seconds, rule="must be above zero"))

    def answer(cluster: HardwareSpec) -> DeadlineAnswer | None:
        time = solve(cluster)
        if time is None:
            return None
        cost = run_cost(time, cluster, tokens=tokens, gpu_hour_price=gpu_hour_price)
        return DeadlineAnswer(hardware=cluster, cost=cost)

    fastest: DeadlineAnswer | None = None
    slow_nodes = 0
    for cluster in clusters(hardware):
        best = answer(cluster)
        if best is None or best.cost.seconds > deadline_seconds:
            slow_nodes = cluster.nodes
            if best is not None and (fastest is None or best.cost.seconds < fastest.cost.seconds):
                fastest = best
            continue
        low, high = slow_nodes, cluster.nodes
        while high - low > 1:
            middle = (low + high) // 2
            smaller = answer(with_gpus(hardware, nodes=middle, gpus_per_node=cluster.gpus_per_node))
            if smaller is not None and smaller.cost.seconds <= deadline_seconds:
                high, best = middle, smaller
            else:
                low = middle
        return best
    if fastest is None:
        raise ShardwrightError(f"deadline: the job does not fit on up to {_LARGEST_WORLD:,} x {hardware.gpu}")
    days, limit = fastest.cost.seconds / _HOUR / 24, deadline_seconds / _HOUR / 24
    raise ShardwrightError(
        f"deadline = {limit:.4g} days: no cluster of {hardware.gpu} meets it; the fastest, {fastest.hardware.name}, "
        f"takes {days:,.1f} days; train on fewer tokens or allow more time"
    )


_TRUSTED_RANKS = 3360
"""Accelerators of the largest published step used to fit the constants (MT-NLG)."""

_TRUSTED_TOKENS = 262_144
"""Tokens of the longest published sequence used to fit them (torchtitan)."""


def doubts(strategy: Layout, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> tuple[str, ...]:
    """Return warnings about inputs of a plan that are assumed, or outside the range checked against measurements."""
    sentences = []
    if model.source == "structure":
        sentences.append(
            f"{model.architecture} has custom code, which was not run; memory and time are derived from its structure"
        )
    if lender := hardware_constants(hardware).borrowed_from:
        sentences.append(f"no step times of {hardware.gpu} were available; the constants of {lender} are used")
    if hardware.world_size > _TRUSTED_RANKS:
        sentences.append(f"{hardware.world_size:,} ranks: predictions were checked on up to {_TRUSTED_RANKS:,}")
    if job.seq_len_tokens > _TRUSTED_TOKENS:
        longest = f"predictions were checked on up to {_TRUSTED_TOKENS:,}"
        sentences.append(f"sequences of {job.seq_len_tokens:,} tokens: {longest}")
    if model.dimensions.num_experts:
        sentences.append("predictions were not checked on mixtures of experts")
    used = {
        "torch_compile": job.torch_compile,
        "use_liger_kernel": job.use_liger_kernel,
        "zenflow": strategy.offload_variant == "zenflow",
        "superoffload": strategy.offload_variant == "superoffload",
        "fp8": job.precision == "fp8",
    }
    sentences += [meaning for name, meaning in KERNEL_MEANINGS.items() if used[name]]
    if "network_bytes_per_s" in hardware.assumed:
        half = replace(hardware, network_bytes_per_s=hardware.network_bytes_per_s / 2)
        times = [estimate_step_time(strategy, model, cluster, job).seconds for cluster in (half, hardware)]
        sentences.append(
            f"the network is assumed to provide {hardware.network_bytes_per_s / 1e9:g} GB/s per accelerator; with "
            f"half of that a step of this layout takes {times[0] / times[1]:.2f} times as long"
        )
    return tuple(sentences)


def parse_duration(text: str, *, where: str = "deadline") -> float:
    """Return the seconds of a duration with a unit: `5d`, `36h`, `90m`, `30s`.

    Raises:
        UsageError: the number or the unit is invalid.

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
        raise UsageError(ConfigError(where=where, value=text, rule="must be a number with s, m, h, d or w, such as 5d"))
    return value * units[unit]
