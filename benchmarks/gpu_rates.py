"""Rates of the kernels that step times are made of, on one accelerator.

    python benchmarks/gpu_rates.py [--json FILE] [--device cpu]

Each operation runs for a fifth of a second, after three runs that are not timed; the rate is that of the median run.
`--device cpu` measures the same operations at small sizes, to try the program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

WARM_UPS, LEAST_SECONDS, MOST_RUNS = 3, 0.2, 200
EXPERT_TOKENS = (64, 128, 256, 512, 1024, 2048)
SEQUENCES = (2048, 8192, 32768)
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What one operation reached."""

    operation: str
    size: str
    per_second: float
    unit: str
    """`FLOP`, `B` or `elements`."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A kernel, and how much it computes or moves."""

    name: str
    size: str
    run: Callable[[], object]
    amount: float
    unit: str


def operations(device: str, *, small: bool) -> Iterator[Operation]:
    """Yield each operation when its tensors exist; those of the one before are free then."""
    share = 100 if small else 1

    def random(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device, requires_grad=grad)

    products = ((2048, 8192, 2048), (8192, 14336, 4096), (65536, 14336, 4096))
    for rows, columns, inner in ((64, 64, 64),) if small else products:
        left, right = random(rows, inner), random(inner, columns)
        yield Operation(
            name="product",
            size=f"{rows} x {inner} x {columns}",
            run=lambda left=left, right=right: left @ right,
            amount=2.0 * rows * columns * inner,
            unit="FLOP",
        )
    experts, width, inner = (4, 64, 32) if small else (128, 2048, 768)
    for tokens in EXPERT_TOKENS[:1] if small else EXPERT_TOKENS:
        rows, weights = random(experts * tokens, width), random(experts, width, 2 * inner)
        ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * tokens
        yield Operation(
            name="grouped product",
            size=f"{experts} experts x {tokens} tokens x {width} x {2 * inner}",
            run=lambda rows=rows, weights=weights, ends=ends: torch.nn.functional.grouped_mm(rows, weights, offs=ends),
            amount=2.0 * experts * tokens * width * 2 * inner,
            unit="FLOP",
        )
    routed = torch.randint(0, experts, (8 * 16384 // share,), device=device)
    order = torch.randperm(len(routed), device=device)
    hidden = random(len(routed), width)
    yield Operation(name="sort", size=f"{len(routed)}", run=routed.argsort, amount=len(routed), unit="elements")
    yield Operation(
        name="permutation",
        size=f"{len(routed)} x {width}",
        run=lambda: hidden[order],
        amount=2.0 * hidden.nbytes,
        unit="B",
    )
    heads = 1 if small else 32
    for length in (64,) if small else SEQUENCES:
        query, key, value = (random(1, heads, length, 128, grad=True) for _ in range(3))
        # The causal half of two products.
        flops = 2.0 * heads * length**2 * 128
        for backend in (SDPBackend.MATH,) if device == "cpu" else BACKENDS:

            def forward(
                backend: SDPBackend = backend, inputs: tuple[torch.Tensor, ...] = (query, key, value)
            ) -> torch.Tensor:
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)

            label = f"causal attention, {backend.name.removesuffix('_ATTENTION').lower()}"
            yield Operation(name=f"{label}, forward", size=f"{length}", run=forward, amount=flops, unit="FLOP")
            yield Operation(
                name=f"{label}, both passes",
                size=f"{length}",
                run=lambda forward=forward: forward().sum().backward(),
                amount=3.5 * flops,
                unit="FLOP",
            )
    for elements in (2**20 // share,) if small else (2**22, 2**25, 2**29):
        plain = random(elements)
        yield Operation(
            name="element-wise", size=f"{elements}", run=lambda plain=plain: plain + 1, amount=4.0 * elements, unit="B"
        )
        yield Operation(
            name="cast to fp32",
            size=f"{elements}",
            run=lambda plain=plain: plain.float(),
            amount=6.0 * elements,
            unit="B",
        )
    for pinned in (False, True) if device == "cuda" else (False,):
        host = torch.empty(2**30 // share, dtype=torch.uint8, pin_memory=pinned)
        there = torch.empty_like(host, device=device)
        for name, target, source in (("to the device", there, host), ("to the host", host, there)):
            yield Operation(
                name=f"{'pinned' if pinned else 'pageable'} copy {name}",
                size=f"{host.nbytes}",
                run=lambda target=target, source=source: target.copy_(source, non_blocking=True),
                amount=host.nbytes,
                unit="B",
            )


def measure(operation: Operation, device: str) -> Rate | None:
    """Return the rate of an operation; `None` if this device or release does not have it."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    taken: list[float] = []
    try:
        for run in range(WARM_UPS + MOST_RUNS):
            synchronize()
            start = time.perf_counter()
            operation.run()
            synchronize()
            if run >= WARM_UPS:
                taken.append(time.perf_counter() - start)
            if sum(taken) > LEAST_SECONDS:
                break
    except (RuntimeError, NotImplementedError) as error:
        print(f"{operation.name}, {operation.size}: {str(error).splitlines()[0]}")
        return None
    seconds = statistics.median(taken)
    return Rate(
        operation=operation.name,
        size=operation.size,
        per_second=operation.amount / seconds,
        unit=operation.unit,
        seconds=seconds,
    )


def table(rates: Sequence[Rate]) -> str:
    """Return the rates as Markdown."""
    lines = ["| operation | size | rate | seconds |", "|---|---|---|---|"]
    for rate in rates:
        scale, prefix = (1e12, "T") if rate.unit == "FLOP" else (1e9, "G")
        unit = f"{prefix}{rate.unit}/s" if rate.unit != "elements" else "G elements/s"
        lines.append(f"| {rate.operation} | {rate.size} | {rate.per_second / scale:,.1f} {unit} | {rate.seconds:.3g} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print every rate; with `--json`, also store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU; --device cpu tries the program")
    found = []
    for operation in operations(options.device, small=options.device == "cpu"):
        if rate := measure(operation, options.device):
            found.append(rate)
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps([asdict(rate) for rate in found], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
