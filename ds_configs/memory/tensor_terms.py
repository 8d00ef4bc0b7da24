"""Named tensor bytes of one rank at each moment of a training step: model states, buffers and activations together."""

from __future__ import annotations

from collections.abc import Mapping

from ..specs.errors import Fault, UsageError
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec, adapted_experts
from ..specs.strategy import Strategy
from .activation_source import ActivationSource, activation_mode, cached_activations, outside_without_norm
from .activations import ActivationEstimate, Attention, SelectiveBytes
from .buffers import buffer_terms
from .distillation_memory import distillation_loss_terms, teacher_terms
from .model_states import model_state_terms
from .moments import PHASES, Moment, Terms, at_moments
from .rank_parameters import RankParameters, share_parameters
from .shares import RankShare

_ONLY_ON_THE_LAST = ("loss", "head_gradient")


def share_moment_terms(
    strategy: Strategy,
    share: RankShare,
    job: TrainingJob,
    activations: ActivationSource | None = None,
    *,
    unmasked: Attention = "auto",
) -> dict[Moment, Terms]:
    """Return the named tensor bytes of a rank's share at each moment of a training step.

    A trace that `activations` gives is one of the whole model: under tensor parallelism it counts too much.

    Raises:
        UnknownFamilyError: no cached coefficients and no `activations` given.
    """
    source = activations or cached_activations(share.model, job, unmasked=unmasked)
    parameters = share_parameters(share.model, job, ep=strategy.ep)
    return _moment_terms(strategy, share, job, parameters, source)


def _moment_terms(
    strategy: Strategy, share: RankShare, job: TrainingJob, parameters: RankParameters, source: ActivationSource
) -> dict[Moment, Terms]:
    model = share.model
    constant: Terms = {"model_buffers": model.buffer_bytes}
    traced = source(strategy.micro_batch_size, activation_mode(strategy, job))
    if not share.has_head:
        traced = outside_without_norm(traced, model, job, strategy.micro_batch_size, activation_mode(strategy, job))
    parts = (
        model_state_terms(strategy, model, job, parameters),
        buffer_terms(strategy, model, job, parameters),
        _activation_terms(strategy, share, job, traced),
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
    strategy: Strategy, share: RankShare, job: TrainingJob, traced: ActivationEstimate
) -> dict[Moment, Terms]:
    moments = _micro_batch_terms(strategy, share.model, job, traced)
    if share.stage is None:
        return moments
    kept = _kept_bytes(strategy, share.model, job, traced, share.model.dimensions.num_layers)
    return _stage_terms(moments, share, strategy, job, traced, kept)


def _micro_batch_terms(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate
) -> dict[Moment, Terms]:
    """Activations and the loss.

    All layers' activations live until the last layer's backward; the first layer's finds only its own.
    """
    layers, ranks = model.dimensions.num_layers, strategy.sp * strategy.cp
    recomputed = strategy.recomputed_layers(layers)
    gathered = _gathered_keys_and_values_bytes(strategy, model, job)

    def kept(count: int) -> Terms:
        count_bytes = _kept_bytes(strategy, model, job, traced, count)
        return {"activations": (count_bytes + traced.outside_layer_bytes) // ranks}

    def backward(*, again: bool) -> Terms:
        _, transient = _layer_bytes(strategy, model, job, traced, recomputed=again)
        return {"backward_transient": transient // ranks + gathered, **_dequantized(model, job)}

    forward = kept(layers)
    if recomputed or gathered:
        # The last layer, at which most is kept, runs without recomputation unless all layers have it.
        own = 0
        if recomputed == layers:
            own = _kept_products(traced).forward_transient_bytes if strategy.keeps_products else 0
            own = own or traced.forward_transient_bytes
        forward |= {"forward_transient": own // ranks + gathered}
    loss = _loss_terms(strategy, model, job, traced)
    step: Terms = {}
    if strategy.engine == "deepspeed" and strategy.gradient_checkpointing and job.method != "full":
        # The loss lives through DeepSpeed's step, and with it the embedding's output and the gradient that
        # checkpointing lets it have (transformers 5.17.0, `enable_input_require_grads`).
        tokens = strategy.micro_batch_size * job.seq_len_tokens
        step["activations"] = 2 * job.compute_bytes * tokens * model.dimensions.hidden_size // ranks
    around = kept(layers) | _dequantized(model, job)
    return at_moments(
        {},
        last_layer_forward=forward,
        forward_end=around | loss["forward_end"],
        loss_backward=around | loss["loss_backward"],
        head_backward=kept(layers) | loss["head_backward"],
        after_head=kept(layers),
        last_layer_backward=kept(layers) | backward(again=recomputed == layers),
        after_last_layer=kept(layers - 1),
        first_layer_backward=kept(1) | backward(again=recomputed > 0),
        after_first_layer=kept(0),
        step=step,
    )


def _gathered_keys_and_values_bytes(strategy: Strategy, model: ModelSpec, job: TrainingJob) -> int:
    """Return what context parallelism gathers of a layer: `2 * key_value_size` elements for each token of the sequence.

    The rotation that plans write (`cp_comm_strategy: allgather`, torch's default too) collects the keys and values of
    all ranks at once, forward and backward (torch 2.13.0, `_context_parallel/_attention.py`, `_AllGatherRotater`).
    """
    if strategy.cp == 1:
        return 0
    tokens = strategy.micro_batch_size * job.seq_len_tokens
    return 2 * model.dimensions.key_value_size * tokens * job.compute_bytes


def _kept_bytes(strategy: Strategy, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate, layers: int) -> int:
    """Return what the first `layers` keep until their backward passes: recomputed ones come first."""
    recomputed = min(layers, strategy.recomputed_layers(model.dimensions.num_layers))
    saved, _ = _layer_bytes(strategy, model, job, traced, recomputed=False)
    checkpointed, _ = _layer_bytes(strategy, model, job, traced, recomputed=True)
    return recomputed * checkpointed + (layers - recomputed) * saved


def _layer_bytes(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate, *, recomputed: bool
) -> tuple[int, int]:
    """Return what a layer keeps until its backward, and what that needs beyond what is kept."""
    tokens = strategy.micro_batch_size * job.seq_len_tokens
    more = model.residual_dropout_masks * tokens * model.dimensions.hidden_size
    if strategy.sp > 1:
        # What attention returns is saved for whole sequences and, after the exchange of heads, for all heads.
        more += job.compute_bytes * tokens * model.dimensions.query_size
    if recomputed and strategy.keeps_products:
        kept = _kept_products(traced)
        return kept.kept_bytes_per_layer, kept.backward_transient_bytes + more
    if recomputed:
        return traced.checkpointed_bytes_per_layer, traced.recompute_backward_transient_bytes + more
    return traced.saved_bytes_per_layer + more, traced.backward_transient_bytes


def _kept_products(traced: ActivationEstimate) -> SelectiveBytes:
    if traced.selective is None:
        rule = "keeps products whose bytes were not traced with this model"
        fix = "use --gradient-checkpointing auto, without --trace-activations"
        raise UsageError(Fault(where="gradient_checkpointing", value="selective", rule=rule, fix=fix))
    return traced.selective


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
    recomputed = strategy.recomputed_layers(layers)
    if not recomputed:
        return at_moments(
            {},
            last_layer_forward={**all_layers, **making},
            **dict.fromkeys(("forward_end", "loss_backward", "head_backward", "after_head"), all_layers),
            **dict.fromkeys(("last_layer_backward", "after_last_layer"), all_layers),
            **dict.fromkeys(("first_layer_backward", "after_first_layer"), one_layer),
        )
    again = one_layer | making
    # Layers that are not recomputed keep theirs for the backward pass.
    held = {name: count * (layers - recomputed) // layers for name, count in all_layers.items()}
    autocast = held | {"autocast_weight_copies": all_layers["autocast_weight_copies"]}
    return at_moments(
        {},
        last_layer_forward={**again, **autocast} if recomputed == layers else {**making, **autocast},
        **dict.fromkeys(("forward_end", "loss_backward", "head_backward", "after_head"), autocast),
        last_layer_backward=again if recomputed == layers else held,
        after_last_layer={name: max(0, count - one_layer[name]) for name, count in held.items()},
        first_layer_backward=again,
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
    logit_gradient = job.compute_bytes * tokens * model.dimensions.vocab_size if job.loss != "chunked" else 0
    return at_moments(
        {},
        forward_end=more | {"loss": traced.loss_forward_peak_bytes // ranks},
        loss_backward=more | {"loss": traced.loss_backward_peak_bytes // ranks},
        head_backward={"loss": logit_gradient},
    )


def _stage_terms(
    moments: Mapping[Moment, Terms],
    share: RankShare,
    strategy: Strategy,
    job: TrainingJob,
    traced: ActivationEstimate,
    layer_bytes: int,
) -> dict[Moment, Terms]:
    """Return the activation terms of a stage, from those of one micro-batch on its layers.

    Follows `runtime/pipe/engine.py` of DeepSpeed 0.19.8: a stage keeps the tensor that it received until the gradient
    for it is sent, clones it for the forward pass, keeps the tensor that it sent until its backward pass, and receives
    through one buffer that lives on.

    Args:
        moments: Terms of one micro-batch as if the stage were a whole model.
        share: The stage.
        strategy: The layout.
        job: What is trained.
        traced: Activation bytes of one micro-batch.
        layer_bytes: What the stage's layers keep of one micro-batch.
    """
    stage = share.stage
    assert stage is not None, "only a pipeline has stages"
    border = job.compute_bytes * strategy.micro_batch_size * job.seq_len_tokens * share.model.dimensions.hidden_size
    kept = (0 if stage.has_embedding else border) + (0 if stage.has_head else border)
    others = share.micro_batches_in_flight - 1
    of_others = others * (layer_bytes + traced.outside_layer_bytes + kept)
    found: dict[Moment, Terms] = {}
    for moment, terms in moments.items():
        here = {name: count for name, count in terms.items() if stage.has_head or name not in _ONLY_ON_THE_LAST}
        here["stage_borders"] = border
        if PHASES[moment] in ("loss", "backward"):
            here["stage_borders"] += kept
            here["activations_in_flight"] = of_others
        found[moment] = here
    return found
