"""Rates of one CUDA GPU that plans assume, measured: `python benchmarks/gpu_rates.py`.

Products, fused attention, element-wise operations and pinned copies, each the median of CUDA-event times after a
warm-up, beside what `ds_configs/data/step_time.toml` and the datasheet give for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from statistics import median

import torch
from shardwright.ds_configs.specs.hardware import find_gpu, parse_hardware
from shardwright.ds_configs.step_time.rates import constants_of

REPETITIONS = 5


def seconds(work: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Return the median time of `work` on the device."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def products() -> Iterator[tuple[str, float, str]]:
    """Yield TFLOP/s of forward products and of both backward products."""
    for tokens, inner, outer in ((2048, 2048, 8192), (8192, 2048, 8192), (8192, 4096, 14336), (65536, 4096, 14336)):
        x, w, g = (
            torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((tokens, inner), (outer, inner), (tokens, outer))
        )
        for name, work in (
            ("forward", lambda x=x, w=w: x @ w.T),
            ("input gradient", lambda g=g, w=w: g @ w),
            ("weight gradient", lambda g=g, x=x: g.T @ x),
        ):
            yield f"{name} {tokens} x {inner} x {outer}", 2e-12 * tokens * inner * outer / seconds(work), "TFLOP/s"


def attention() -> Iterator[tuple[str, float, str]]:
    """Yield TFLOP/s of causal attention, counting the half that is computed: 2 products forward, 5 backward."""
    for heads, shared, width, lengths in ((32, 8, 128, (4096, 16384, 65536)), (32, 8, 64, (8192,))):
        for length in lengths:
            q, k, v = (
                torch.randn(1, n, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for n in (heads, shared, shared)
            )

            def forward(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            out = forward()
            gradient = torch.randn_like(out)

            def backward(out: torch.Tensor = out, gradient: torch.Tensor = gradient) -> None:
                out.backward(gradient, retain_graph=True)

            operations = 1e-12 * heads * length**2 * width
            yield f"attention forward {length} x {heads} x {width}", 2 * operations / seconds(forward, 3), "TFLOP/s"
            yield f"attention backward {length} x {heads} x {width}", 5 * operations / seconds(backward, 3), "TFLOP/s"
            del out, gradient
            q.grad = k.grad = v.grad = None


def memory() -> Iterator[tuple[str, float, str]]:
    """Yield GB/s of memory-bound operations, counting bytes read and written, and of copies to and from the host."""
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    yield "multiply bf16 8192 x 4096", 4e-9 * x.numel() / seconds(lambda: x * 2), "GB/s"
    big = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    yield "multiply bf16 512M", 4e-9 * big.numel() / seconds(lambda: big * 2), "GB/s"
    yield "cast bf16 to fp32 512M", 6e-9 * big.numel() / seconds(lambda: big.float()), "GB/s"
    host = torch.empty(2**29, dtype=torch.bfloat16, pin_memory=True)
    yield "pinned copy to device", 2e-9 * big.numel() / seconds(lambda: big.copy_(host, non_blocking=True)), "GB/s"
    yield "pinned copy to host", 2e-9 * big.numel() / seconds(lambda: host.copy_(big, non_blocking=True)), "GB/s"


def updates() -> Iterator[tuple[str, float, str]]:
    """Yield GB/s of optimizer steps."""
    weights = [torch.nn.Parameter(torch.randn(2**26, device="cuda")) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    count = sum(weight.numel() for weight in weights)
    for name in ("fused", "foreach"):
        step = torch.optim.AdamW(weights, **{name: True}).step
        yield f"AdamW {name} 512M fp32", 28e-9 * count / seconds(step), "GB/s"


def main() -> None:
    gpu = find_gpu(torch.cuda.get_device_name())
    hardware = parse_hardware(f"1x{gpu}")
    constants = constants_of(hardware.gpu)
    print(
        torch.cuda.get_device_name(),
        torch.__version__,
        "torch.backends.cuda.flash",
        torch.backends.cuda.flash_sdp_enabled(),
    )
    print(json.dumps({name: getattr(constants, name) for name in constants.__slots__ if name != "source"}))
    for part in (products, attention, memory, updates):
        for name, value, unit in part():
            print(f"{name}: {value:.0f} {unit}", flush=True)


if __name__ == "__main__":
    main()
