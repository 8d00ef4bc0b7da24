"""Bytes and seconds of the fused token loss beside the plain one on a GPU: `python benchmarks/kd_memory.py`.

At 8,192 tokens, vocabulary 128,256, width 4,096 of both models, bf16, with Liger's JSD loss where `liger_kernel` is
installed. `--equality` instead compares the fused loss of every divergence with the plain one in fp64, on the GPU or
with `--device cpu`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

import torch
from shardwright.ds_configs.memory.loss import HEAD_ROWS, block_rows, even_chunk_rows, most_chunk_rows
from shardwright.plugins.transformers.output_heads import OutputHead
from shardwright.trainers.losses.fused_loss import ALIGNED_ROWS, BLOCK_BYTES, SCALED_ROWS, fused_token_loss
from shardwright.trainers.losses.objective import HiddenTargets, LogitTargets, TokenObjective, plain_token_loss
from shardwright.trainers.losses.token_objective import Divergence

REPETITIONS = 2
TARGET_BYTES = 3.0e9
LARGEST_ERROR = 1e-5
_BYTES_OF_A_ROW = 32
"""A weight and seven values, in fp32."""
_BLOCK_BYTES_OF_A_LOGIT = 45
"""11 fp32 temporaries and a mask, where τ ≠ 1; every divergence needs that many."""
OBJECTIVE = TokenObjective(alpha=0.5, temperature=2.0, divergence="jsd", mixture=0.5)


def fused_peak_bytes(
    *,
    rows: int,
    hidden_width: int,
    columns: int,
    element_bytes: int = 2,
    teacher_element_bytes: int = 2,
    trains_head: bool = True,
    soft_cap: bool = False,
    chunk_rows: int | None = None,
    device: str = "cuda",
) -> int:
    """Return the most bytes that forward and backward of `fused_token_loss` hold, gradients returned included.

    Hidden states and heads of both models exist before and are not counted; the teacher is one of `HiddenTargets` with
    as many columns, and has a soft-cap where the student has one. With n rows in a chunk, b in a block of a CPU, e and
    e_t bytes per element::

        forward   N (H e + 32) + 4 V H + n V (e + e_t) + b V (45 + 4 [e = 2 or soft-cap] + 4 [e_t = 2] + e_t [soft-cap])
        on a GPU  N (H e + 32) + 4 V H + n V (e + e_t)
        backward  N (H e + 32) + 4 V H + (4 + e) min(1024, N) H [e = 2]

    without the terms in V H where the head is frozen. In 16 bit, 4 V H is (4 (V - r) + 2 V) H, r the V / 2 rows rounded
    down to a multiple of 8. It is metered, not derived, that a block takes so much; at τ = 1
    it takes less.
    """
    chunk = even_chunk_rows(rows, chunk_rows or most_chunk_rows(columns * (element_bytes + teacher_element_bytes)))
    short = element_bytes < 4
    # In 16 bit, the sums of up to half of the rows are in the memory of the result.
    summed = columns - columns // 2 // ALIGNED_ROWS * ALIGNED_ROWS * short
    head = (4 * summed + 2 * columns * short) * hidden_width * trains_head
    taught = chunk * columns * teacher_element_bytes
    if device == "cuda":
        temporary = taught
    else:
        block = min(chunk, block_rows(columns, BLOCK_BYTES[device]))
        more = 4 * (short or soft_cap) + 4 * (teacher_element_bytes < 4) + teacher_element_bytes * soft_cap
        head_part = min(HEAD_ROWS, summed) * hidden_width * element_bytes * (short and trains_head)
        temporary = max(taught + block * columns * (_BLOCK_BYTES_OF_A_LOGIT + more), head_part)
    gradients = rows * (hidden_width * element_bytes + _BYTES_OF_A_ROW) + head
    scaled = (4 + element_bytes) * min(SCALED_ROWS, rows) * hidden_width * short
    return gradients + max(chunk * columns * element_bytes + temporary, scaled)


@dataclass(frozen=True, kw_only=True)
class KdCase:
    """One size of the problem; both models are equally wide."""

    rows: int
    """Tokens N."""
    columns: int
    """Vocabulary V."""
    hidden_width: int
    """Width H."""
    dtype: str
    """"bfloat16" or "float32": hidden states and heads of both models."""


FULL = KdCase(rows=8192, columns=128_256, hidden_width=4096, dtype="bfloat16")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one loss took for forward and backward."""

    loss: str
    """"plain", "fused" or "liger"."""
    peak_bytes: int
    """Most bytes beyond hidden states and heads, gradients included."""
    seconds: float


def tensors(case: KdCase, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return hidden states and head of the student, the same of the teacher, and labels."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": getattr(torch, case.dtype), "device": device}
    made = []
    for trains in (True, False):
        made.append(torch.randn(case.rows, case.hidden_width, **options).requires_grad_(trains))
        weight = torch.randn(case.columns, case.hidden_width, **options).mul_(case.hidden_width**-0.5)
        made.append(weight.requires_grad_(trains))
    return made, torch.randint(0, case.columns, (case.rows,), device=device)


def losses() -> tuple[dict[str, Callable[[], None]], list[torch.Tensor]]:
    """Return a step of each loss, and the tensors that are there before it."""
    made, labels = tensors(FULL, "cuda")
    hidden, weight, taught_hidden, taught_weight = made
    targets = HiddenTargets(hidden_NH=taught_hidden, head=OutputHead(weight_VH=taught_weight))

    def plain() -> None:
        with torch.no_grad():
            taught = LogitTargets(logits_NV=torch.nn.functional.linear(taught_hidden, taught_weight))
        logits = torch.nn.functional.linear(hidden, weight)
        plain_token_loss(logits, labels, taught, OBJECTIVE).loss.div(FULL.rows).backward()

    def fused() -> None:
        sums = fused_token_loss(hidden, OutputHead(weight_VH=weight), labels, targets, OBJECTIVE)
        sums.loss.div(FULL.rows).backward()

    steps = {"plain": plain, "fused": fused}
    if (liger := _liger(made, labels)) is not None:
        steps["liger"] = liger
    return steps, [*made, labels]


def _liger(made: Sequence[torch.Tensor], labels: torch.Tensor) -> Callable[[], None] | None:
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError:
        return None
    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, temperature=2.0)
    return lambda: loss(made[0], made[1], made[2], made[3], labels).backward()


def measure() -> list[Measurement]:
    """Meter one step of each loss, then time some."""
    steps, present = losses()
    found = []
    for name, step in steps.items():
        try:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            peak = torch.cuda.max_memory_allocated() - before
            taken = min(_seconds(step, present) for _ in range(REPETITIONS))
        except torch.cuda.OutOfMemoryError:
            print(f"{name}: out of memory", file=sys.stderr)
            continue
        finally:
            _forget_gradients(present)
        found.append(Measurement(loss=name, peak_bytes=peak, seconds=taken))
    return found


def _seconds(step: Callable[[], None], present: list[torch.Tensor]) -> float:
    _forget_gradients(present)
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _forget_gradients(present: list[torch.Tensor]) -> None:
    for tensor in present:
        tensor.grad = None


def equality(case: KdCase, device: str) -> dict[str, float]:
    """Return the largest error of loss and gradients of each divergence and temperature, relative to the largest value.

    The reference is the plain loss in fp64 on the CPU; a narrower teacher compares the columns that both have.
    """
    made, labels = tensors(case, device)

    def fused(objective: TokenObjective, *inputs: torch.Tensor) -> torch.Tensor:
        hidden, weight, taught, head = inputs
        targets = HiddenTargets(hidden_NH=taught, head=OutputHead(weight_VH=head))
        return fused_token_loss(hidden, OutputHead(weight_VH=weight), labels, targets, objective).loss

    def plain(objective: TokenObjective, *inputs: torch.Tensor) -> torch.Tensor:
        hidden, weight, taught, head = inputs
        targets = LogitTargets(logits_NV=taught @ head.T)
        return plain_token_loss(hidden @ weight.T, labels.cpu(), targets, objective).loss

    errors = {}
    for divergence, temperature, columns in product(get_args(Divergence), (1.0, 2.0), (case.columns, case.columns - 8)):
        objective = TokenObjective(alpha=0.3, temperature=temperature, divergence=divergence)
        inputs = [tensor.detach() for tensor in (*made[:3], made[3][:columns])]
        values = []
        for loss, given in ((fused, inputs), (plain, [tensor.double().cpu() for tensor in inputs])):
            leaves = [tensor.clone().requires_grad_() for tensor in given[:2]]
            summed = loss(objective, *leaves, *given[2:])
            values.append([summed.detach(), *torch.autograd.grad(summed, leaves)])
        errors[f"{divergence}, temperature {temperature:g}, {columns} columns"] = max(
            ((own.double().cpu() - exact).abs().max() / exact.abs().max()).item()
            for own, exact in zip(*values, strict=True)
        )
    return errors


def table(found: Sequence[Measurement]) -> str:
    """Return the figures as Markdown, beside what the formula gives of the fused loss."""
    by_loss = {one.loss: one for one in found}
    fused, plain = by_loss["fused"], by_loss.get("plain")
    predicted = fused_peak_bytes(rows=FULL.rows, hidden_width=FULL.hidden_width, columns=FULL.columns)
    sizes = f"{FULL.rows:,} × {FULL.columns:,} × {FULL.hidden_width:,}"
    cells = (
        *(sizes, FULL.dtype, "none" if plain is None else _gb(plain.peak_bytes), _gb(fused.peak_bytes), _gb(predicted)),
        f"{predicted / fused.peak_bytes - 1:+.1%}",
        *("none" if plain is None else f"{plain.seconds:.3g}", f"{fused.seconds:.3g}"),
    )
    lines = [
        "| tokens × vocabulary × width | dtype | plain GB | fused GB | formula GB | error | plain s | fused s |",
        "|---" * 8 + "|",
        f"| {' | '.join(cells)} |",
    ]
    if "liger" in by_loss:
        liger = by_loss["liger"]
        lines.append(f"\nLiger's chunked JSD loss: {_gb(liger.peak_bytes)} GB, {liger.seconds:.3g} s.")
    return "\n".join(lines)


def _gb(count: float) -> str:
    return f"{count / 1e9:.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and return 1 where the full size misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="of --equality")
    parser.add_argument("--equality", action="store_true", help="compare values with fp64, and nothing else")
    options = parser.parse_args(arguments)
    if (options.device == "cuda" or not options.equality) and not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed: --equality --device cpu compares values without one")
    if options.equality:
        errors = equality(KdCase(rows=300, columns=5000, hidden_width=64, dtype="float32"), options.device)
        lines = [f"| {name} | {error:.1e} |" for name, error in errors.items()]
        print("| loss | largest error |\n|---|---|", *lines, sep="\n")
        return int(max(errors.values()) > LARGEST_ERROR)
    found = measure()
    print(table(found))
    return int(max(one.peak_bytes for one in found if one.loss == "fused") > TARGET_BYTES)


if __name__ == "__main__":
    sys.exit(main())
