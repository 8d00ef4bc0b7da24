"""Named tensor bytes of one rank at each moment of a training step: model states, buffers and activations together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .activations import ActivationEstimate, Adapter, Attention, Mode, UnknownFamilyError, estimate_activations
from .buffers import buffer_terms
from .distillation_memory import distillation_loss_terms, teacher_terms
from .job import TrainingJob
from .model import ModelSpec, adapted_experts
from .model_states import RankParameters, model_state_terms
from .moments import Moment, Phase, Terms, at_moments, fullest_by_phase
from .strategy import Strategy

ActivationSource = Callable[[int, Mode], ActivationEstimate]
"""Activation bytes for a micro-batch size and a precision mode."""


def cached_activations(model: ModelSpec, job: TrainingJob, *, unmasked: Attention = "auto") -> ActivationSource:
    """Return the activation bytes of the traced coefficients that ship with the package.

    `unmasked` is the attention kernel where no mask reaches it.
    """
    window = model.sliding_window
    attention: Attention = "masked" if window and job.seq_len_tokens > window else unmasked

    def estimate(micro_batch_size: int, mode: Mode, adapter: Adapter) -> ActivationEstimate:
        return estimate_activations(
            family=model.model_type,
            dimensions=model.dimensions,
            micro_batch_size=micro_batch_size,
            seq_len_tokens=job.seq_len_tokens,
            mode=mode,
            adapter=adapter,
            lora_rank=0 if adapter == "none" else job.lora_rank,
            chunked_loss=job.loss == "chunked",
            attention=attention,
        )

    def source(micro_batch_size: int, mode: Mode) -> ActivationEstimate:
        try:
            return estimate(micro_batch_size, mode, adapter_name(job))
        except UnknownFamilyError:
            # Full training keeps at least what adapters on frozen weights keep.
            full = estimate(micro_batch_size, mode, "none")
            if mode != "bf16_autocast" or job.method == "full":
                return full
            # Under autocast the frozen weights are 16-bit and only the adapters are copied.
            copies = full.autocast_weight_copy_bytes_per_parameter
            return replace(estimate(micro_batch_size, "bf16", "none"), autocast_weight_copy_bytes_per_parameter=copies)

    return source


def activations_are_stored(model: ModelSpec, job: TrainingJob) -> bool:
    """Return whether the package holds coefficients for every precision mode that the job's layouts may use."""
    modes: tuple[Mode, ...] = ("fp32",) if job.precision == "fp32" else ("bf16", "bf16_autocast")
    source = cached_activations(model, job)
    try:
        for mode in modes:
            source(1, mode)
    except UnknownFamilyError:
        return False
    return model.task == "causal_lm"


def adapter_name(job: TrainingJob) -> Adapter:
    """Return the activation profile of the job's adapters; unusual targets count as all Linear modules."""
    if job.method == "full":
        return "none"
    return "lora_attention" if set(job.lora_targets) <= {"q_proj", "v_proj"} else "lora_all_linear"


def activation_mode(strategy: Strategy, job: TrainingJob) -> Mode:
    """Return how the engine computes: on 16-bit weights (DeepSpeed, FSDP2) or under autocast (one process, DDP)."""
    if job.precision == "fp32":
        return "fp32"
    return "bf16_autocast" if strategy.engine in ("single", "ddp") else "bf16"


def tensor_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters, source: ActivationSource
) -> dict[Phase, Terms]:
    """Return the named tensor bytes of each phase at its fullest moment."""
    return fullest_by_phase(moment_terms(strategy, model, job, parameters, source))


def moment_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters, source: ActivationSource
) -> dict[Moment, Terms]:
    """Return the named tensor bytes of each moment."""
    constant: Terms = {"model_buffers": model.buffer_bytes}
    traced = source(strategy.micro_batch_size, activation_mode(strategy, job))
    parts = (
        model_state_terms(strategy, model, job, parameters),
        buffer_terms(strategy, model, job, parameters),
        _activation_terms(strategy, model, job, traced),
        _weight_copies(strategy, model, job, parameters, traced.autocast_weight_copy_bytes_per_parameter),
        teacher_terms(strategy, job),
    )
    combined: dict[Moment, Terms] = {}
    for moment in parts[0]:
        terms = dict(constant)
        for part in parts:
            for name, count in part[moment].items():
                terms[name] = terms.get(name, 0) + count
        combined[moment] = {name: count for name, count in terms.items() if count}
    return combined


def _activation_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate
) -> dict[Moment, Terms]:
    """Activations and the loss.

    All layers' activations live until the last layer's backward; the first layer's finds only its own.
    """
    layers, ranks = model.dimensions.num_layers, strategy.sp * strategy.cp
    per_layer, transient = _layer_bytes(strategy, model, job, traced)
    transient_terms = {"backward_transient": transient // ranks, **_dequantized(model, job)}

    def kept(count: int) -> Terms:
        return {"activations": (count * per_layer + traced.outside_layer_bytes) // ranks}

    forward = kept(layers)
    if strategy.gradient_checkpointing:
        forward |= {"forward_transient": traced.forward_transient_bytes // ranks}
    loss = _loss_terms(strategy, model, job, traced)
    around = kept(layers) | _dequantized(model, job)
    return at_moments(
        {},
        last_layer_forward=forward,
        forward_end=around | loss["forward_end"],
        loss_backward=around | loss["loss_backward"],
        head_backward=kept(layers) | loss["head_backward"],
        after_head=kept(layers),
        last_layer_backward=kept(layers) | transient_terms,
        after_last_layer=kept(layers - 1),
        first_layer_backward=kept(1) | transient_terms,
        after_first_layer=kept(0),
    )


def _layer_bytes(strategy: Strategy, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate) -> tuple[int, int]:
    """Return what a layer keeps until its backward, and what that needs beyond what is kept."""
    tokens = strategy.micro_batch_size * job.seq_len_tokens
    dropout_masks = model.residual_dropout_masks * tokens * model.dimensions.hidden_size
    if strategy.gradient_checkpointing:
        return traced.checkpointed_bytes_per_layer, traced.recompute_backward_transient_bytes + dropout_masks
    return traced.saved_bytes_per_layer + dropout_masks, traced.backward_transient_bytes


def _weight_copies(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, parameters: RankParameters, copy_bytes: int
) -> dict[Moment, Terms]:
    """Copies of weights that the forward pass makes and the backward pass needs.

    Autocast copies fp32 matrices: with adapters only those, since frozen weights are 16-bit already. PEFT computes an
    adapted expert's weight as base + update and keeps the sum. With checkpointing such sums die with their layer's
    forward pass, autocast's copies with the whole one, and the backward pass makes both again layer by layer.
    """
    matrices = parameters.trainable
    if job.method == "full":
        matrices = model.linear_parameters(include_head=True)
        matrices += model.embedding_parameters if model.tied_embeddings else 0
    adapted = [] if job.method == "full" else adapted_experts(model, job.lora_targets)
    experts = [job.compute_bytes * parameter.numel for parameter in adapted if parameter.kind == "experts"]
    layers = max(1, model.dimensions.num_layers)
    all_layers = {"autocast_weight_copies": copy_bytes * matrices, "adapted_expert_copies": layers * sum(experts)}
    one_layer = {name: count // layers for name, count in all_layers.items()}
    making = {"adapted_expert_update": _update_bytes(experts)}
    if not strategy.gradient_checkpointing:
        return at_moments(
            {},
            last_layer_forward={**all_layers, **making},
            **dict.fromkeys(("forward_end", "loss_backward", "head_backward", "after_head"), all_layers),
            **dict.fromkeys(("last_layer_backward", "after_last_layer"), all_layers),
            **dict.fromkeys(("first_layer_backward", "after_first_layer"), one_layer),
        )
    autocast = {"autocast_weight_copies": all_layers["autocast_weight_copies"]}
    again = one_layer | making
    return at_moments(
        {},
        last_layer_forward={**again, **autocast},
        **dict.fromkeys(("forward_end", "loss_backward", "head_backward", "after_head"), autocast),
        **dict.fromkeys(("last_layer_backward", "first_layer_backward"), again),
    )


def _update_bytes(experts: list[int]) -> int:
    """Bytes of the update from which PEFT makes a layer's sums one after the other, beyond all sums together."""
    fullest = max((sum(experts[: index + 1]) + count for index, count in enumerate(experts)), default=0)
    return fullest - sum(experts)


def _dequantized(model: ModelSpec, job: TrainingJob) -> Terms:
    if job.method != "qlora":
        return {}
    widest = max((p.numel for p in model.parameters if p.kind == "linear" and p.in_layer), default=0)
    return {"dequantized_weight": job.compute_bytes * widest}


def _loss_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate
) -> dict[Moment, Terms]:
    """Head and loss; a chunked one computes the head's gradient in the forward pass, and so does that of a teacher."""
    if job.teacher is not None:
        return distillation_loss_terms(strategy, model, job)
    ranks, more = strategy.sp * strategy.cp, Terms()
    if job.loss == "chunked" and job.method == "full":
        more["head_gradient"] = (2 if activation_mode(strategy, job) == "bf16" else 4) * model.embedding_parameters
    tokens = strategy.micro_batch_size * job.seq_len_tokens // ranks
    logit_gradient = job.compute_bytes * tokens * model.dimensions.vocab_size if job.loss == "eager" else 0
    return at_moments(
        {},
        forward_end=more | {"loss": traced.loss_forward_peak_bytes // ranks},
        loss_backward=more | {"loss": traced.loss_backward_peak_bytes // ranks},
        head_backward={"loss": logit_gradient},
    )
