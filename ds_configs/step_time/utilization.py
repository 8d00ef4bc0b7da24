"""Model FLOPs utilization (MFU) of a predicted step, and what takes the time if it is low."""

from __future__ import annotations

from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.tasks import TASKS
from .estimate import StepTime, term_title
from .model_work import model_work
from .rates import constants_of

LOW_UTILIZATION = 0.15
"""MFU below which a plan names what takes the time. Published pretraining reaches 30 to 60 %."""
_NAMED_SHARE, _MOST_CAUSES = 0.05, 3
"""Share of a step from which a term is named as a cause, and how many are."""


def utilization(time: StepTime, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> float:
    """Return the FLOPs that the job needs, divided by those that the accelerators could do in the same time.

    Counts matrix products and attention of the forward pass once and of the backward pass twice (products with frozen
    weights once), and forward passes of second models, without recomputation, masked scores of causal models, and
    experts that a token skips.
    """
    return sum(_needed_seconds(time, model, hardware, job).values()) / time.seconds


def _needed_seconds(time: StepTime, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> dict[str, float]:
    """Return the seconds of a step at the peak of the accelerators, by term."""
    peak = hardware.flops_per_s * (constants_of(hardware.gpu).fp32_share if job.precision == "fp32" else 1.0)
    tokens = time.tokens_per_second * time.seconds / (peak * hardware.world_size)
    products, attention, head = _forward_flops(model, job)
    passes = 3 if job.method == "full" else 2
    needed = {"matrix_products": passes * products, "attention": 3 * attention, "head_and_loss": passes * head}
    mismatched = TASKS[job.task].mismatched_passes
    if mismatched:
        needed["mismatched_forward"] = mismatched * (products + attention + head)
    for second in job.second_models:
        if second.trained:
            needed[f"{second.role}_step"] = passes * sum(_forward_flops(second.spec, job))
        elif second.planned_placement != "cached":
            needed[f"{second.role}_forward"] = (1 + mismatched) * sum(_forward_flops(second.spec, job))
    return {term: tokens * flops for term, flops in needed.items()}


def _forward_flops(model: ModelSpec, job: TrainingJob) -> tuple[float, float, float]:
    """Return the FLOPs of a token's forward pass: products in the layers, attention, and the head."""
    work = model_work(model)
    weights = sum(product.weight * product.count for product in work.products)
    weights += work.whole.experts_per_token * sum(product.weight * product.count for product in work.expert_products)
    seen = min(job.seq_len_tokens, work.window or job.seq_len_tokens) * (0.5 if work.causal else 1.0)
    layers = work.whole.num_layers
    return (
        2.0 * layers * weights,
        4.0 * layers * seen * work.share.query_size,
        2.0 * work.head_rows * work.whole.hidden_size,
    )


def low_utilization_reason(time: StepTime, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> str | None:
    """Return what takes the time of a step; `None` if its MFU is at least `LOW_UTILIZATION`, and for CPU ranks."""
    needed = _needed_seconds(time, model, hardware, job)
    reached = sum(needed.values()) / time.seconds
    if reached >= LOW_UTILIZATION or hardware.gpu == "CPU":
        return None
    lost = {term: max(0.0, seconds - needed.get(term, 0.0)) for term, seconds in time.terms.items()}
    most = sorted(lost.items(), key=lambda term: -term[1])[:_MOST_CAUSES]
    shares = [
        f"{term_title(term)} ({seconds / time.seconds:.0%})"
        for term, seconds in most
        if seconds >= _NAMED_SHARE * time.seconds
    ]
    return f"MFU is {reached:.1%}; the rest of a step is mostly {', '.join(shares)}."
