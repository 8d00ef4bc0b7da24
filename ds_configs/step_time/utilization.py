"""Model FLOPs utilization (MFU) of a predicted step, and what takes the time if it is low."""

from __future__ import annotations

from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from .estimate import StepTime, time_term_name
from .model_work import model_work
from .rates import hardware_constants

LOW_UTILIZATION = 0.15
"""MFU below which a plan says what takes the time. Published pretraining reaches 30 to 60 %."""
_NAMED_SHARE = 0.1
"""Share of a step from which a term is named as a cause."""


def utilization(time: StepTime, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> float:
    """Return the FLOPs that the model needs, divided by those that the accelerators could do in the same time.

    Counts matrix products and attention of the forward pass once and of the backward pass twice (once for frozen
    weights), without recomputation, masked scores of causal models, experts that a token does not visit, and teachers.
    """
    forward, constants = _forward_flops(model, job), hardware_constants(hardware)
    peak = hardware.flops_per_s * (constants.fp32_share if job.precision == "fp32" else 1.0)
    products, attention = forward
    passes = 3 if job.method == "full" else 2
    needed = time.tokens_per_second * (passes * products + 3 * attention)
    return needed / (peak * hardware.world_size)


def _forward_flops(model: ModelSpec, job: TrainingJob) -> tuple[float, float]:
    """Return the FLOPs of a token's forward pass: products with weights, and attention."""
    work = model_work(model)
    weights = work.num_layers * (
        sum(product.weight * product.count for product in work.products)
        + work.experts_per_token * sum(product.weight * product.count for product in work.expert_products)
    )
    seen = min(job.seq_len_tokens, work.window or job.seq_len_tokens) * (0.5 if work.causal else 1.0)
    attention = 4.0 * work.num_layers * seen * work.query_size
    return 2.0 * (weights + work.head_rows * work.hidden_size), attention


def low_utilization_reason(
    strategy: Layout, time: StepTime, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob
) -> str | None:
    """Return a sentence about what takes the time of a step; `None` if its MFU is at least `LOW_UTILIZATION`.

    CPU ranks, whose peak is a measured rate, have none.
    """
    reached = utilization(time, model, hardware, job)
    if reached >= LOW_UTILIZATION or hardware.gpu == "CPU":
        return None
    tokens = strategy.micro_batch_size * job.seq_len_tokens / (strategy.sp * strategy.cp)
    step_tokens = tokens * strategy.gradient_accumulation_steps / strategy.tp / strategy.pp
    sizes = model.dimensions
    products = f"matrix products of {tokens:,.0f} tokens per micro-batch"
    if sizes.num_experts:
        routed = tokens * strategy.ep * sizes.experts_per_token / sizes.num_experts
        products += f", {routed:,.0f} for each expert"
    causes = {
        "matrix_products": products,
        "kernel_launches": f"kernel launches by the host for {tokens:,.0f} tokens per micro-batch",
        "optimizer": f"the memory-bound optimizer step after only {step_tokens:,.0f} tokens per accelerator",
        "gradient_reduction": f"the reduction of gradients after only {step_tokens:,.0f} tokens per accelerator",
        "parameter_updates": f"gathers of updated parameters after only {step_tokens:,.0f} tokens per accelerator",
        "parameter_gathers": f"gathers of weights and reductions of gradients for {tokens:,.0f} tokens per micro-batch",
        "memory_operations": "memory-bound operations"
        + (", which include expanding 4-bit weights" if job.method == "qlora" else ""),
        "attention": "eager attention, which writes every score" if model.attention == "eager" else "attention",
    }
    ranked = sorted(time.terms.items(), key=lambda term: -term[1])
    named = [(term, value / time.seconds) for term, value in ranked if value >= _NAMED_SHARE * time.seconds]
    shares = ", ".join(f"{causes.get(term, time_term_name(term))} ({share:.0%})" for term, share in named)
    return f"Model FLOPs utilization is only {reached:.1%}: a step consists of {shares}."
