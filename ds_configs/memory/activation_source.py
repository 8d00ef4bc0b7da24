"""Sources of activation bytes: stored traced coefficients, an upper bound without them, or a trace of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..specs.errors import UsageError
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from .activation_bound import BOUND_SOURCE, bounded_activations
from .activation_kinds import estimate_kinds
from .activations import (
    ActivationEstimate,
    Adapter,
    Attention,
    Mode,
    UnknownFamilyError,
    attention_path,
    estimate_activations,
    load_coefficients,
)

ActivationSource = Callable[[int, Mode], ActivationEstimate]
"""Activation bytes for a micro-batch size and a precision mode."""


def cached_activations(model: ModelSpec, job: TrainingJob, *, unmasked: Attention = "auto") -> ActivationSource:
    """Return the activation bytes of the traced coefficients that ship with the package.

    A family without any, and a model trained for something else, has an upper bound from its structure instead.
    `unmasked` is the attention kernel where no mask reaches it.
    """
    attention = attention_of(model, job.seq_len_tokens, unmasked=unmasked)

    def estimate(micro_batch_size: int, mode: Mode, adapter: Adapter) -> ActivationEstimate:
        rank = 0 if adapter == "none" else job.lora_rank
        if not _has_family(model):
            return estimate_kinds(
                model,
                micro_batch_size=micro_batch_size,
                seq_len_tokens=job.seq_len_tokens,
                mode=mode,
                adapter=adapter,
                lora_rank=rank,
                attention=attention_path(model.dimensions, mode, attention),
            )
        return estimate_activations(
            family=model.model_type,
            dimensions=model.dimensions,
            micro_batch_size=micro_batch_size,
            seq_len_tokens=job.seq_len_tokens,
            mode=mode,
            adapter=adapter,
            lora_rank=rank,
            chunked_loss=job.loss == "chunked",
            attention=attention,
        )

    def source(micro_batch_size: int, mode: Mode) -> ActivationEstimate:
        for adapter in _profiles(job):
            try:
                found = estimate(micro_batch_size, mode, adapter)
            except UnknownFamilyError:
                continue
            if mode != "bf16_autocast" or (adapter == "none") == (job.method == "full"):
                return found
            # Under autocast the frozen weights are 16-bit and only the adapters are copied.
            copies = found.autocast_weight_copy_bytes_per_parameter
            return replace(estimate(micro_batch_size, "bf16", "none"), autocast_weight_copy_bytes_per_parameter=copies)
        return bounded_activations(model, job, micro_batch_size=micro_batch_size, mode=mode)

    return source


def attention_of(model: ModelSpec, seq_len_tokens: int, *, unmasked: Attention = "auto") -> Attention:
    """Return the kind of attention that a model's training on sequences of some length runs."""
    if model.attention == "eager":
        return "eager"
    window = model.sliding_window
    return "masked" if window and seq_len_tokens > window else unmasked


def outside_without_norm(
    traced: ActivationEstimate, model: ModelSpec, job: TrainingJob, micro_batch_size: int, mode: Mode
) -> ActivationEstimate:
    """Return activations of layers that no final norm follows: rotary tables and masks alone lie around them.

    A family without stored coefficients keeps the norm, which is little beside a layer.
    """
    bare = replace(model, dimensions=replace(model.dimensions, hidden_size=0))
    try:
        rest = cached_activations(bare, replace(job, loss="eager"))(micro_batch_size, mode)
    except UnknownFamilyError:
        return traced
    return replace(traced, outside_layer_bytes=rest.outside_layer_bytes)


def activation_mode(strategy: Strategy, job: TrainingJob) -> Mode:
    """Return how the engine computes: on 16-bit weights (DeepSpeed, FSDP2) or under autocast (one process, DDP)."""
    if job.precision == "fp32":
        return "fp32"
    return "bf16_autocast" if strategy.engine in ("single", "ddp") else "bf16"


def activations_are_stored(model: ModelSpec, job: TrainingJob, strategy: Strategy | None = None) -> bool:
    """Return whether the package holds coefficients for the precision mode of a layout, or of all that a job allows."""
    modes: tuple[Mode, ...] = ("fp32",) if job.precision == "fp32" else ("bf16", "bf16_autocast")
    if strategy is not None:
        modes = (activation_mode(strategy, job),)
    source = cached_activations(model, job)
    try:
        return not any(source(1, mode).source.startswith(BOUND_SOURCE) for mode in modes)
    except UsageError:
        return False


def _has_family(model: ModelSpec) -> bool:
    """Whether tables by the model's dimensions are stored; others are by the kinds of its layers."""
    return model.task == "causal_lm" and model.model_type in load_coefficients()["tables"]


def _profiles(job: TrainingJob) -> tuple[Adapter, ...]:
    """Return the profiles that bound what the job keeps, closest first: each keeps at least what those before do."""
    asked = adapter_name(job)
    order: tuple[Adapter, ...] = ("lora_attention", "lora_all_linear", "none")
    return order[order.index(asked) :]


def adapter_name(job: TrainingJob) -> Adapter:
    """Return the activation profile of the job's adapters; unusual targets count as all Linear modules."""
    if job.method == "full":
        return "none"
    return "lora_attention" if set(job.lora_targets) <= {"q_proj", "v_proj"} else "lora_all_linear"
