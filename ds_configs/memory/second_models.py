"""Memory of second models: on an accelerator, on the host, and while they are loaded.

They run before the trained model, so temporaries of their layers never exist together with its activations. Those that
are trained take their step before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from ..specs.job import TrainingJob
from ..specs.layout import Layout, ZeroOptions
from ..specs.model import ModelSpec
from ..specs.second_models import TRAINED_ROLES, SecondModel, SecondModelRole
from ..specs.tasks import TASKS
from ..specs.terms import StepTerm, Term
from ..specs.units import pinned_block_bytes
from . import communication, layers, loss, model_states
from .activations import activation_mode, attention_of, estimate_activations
from .communication import forward_gathered_elements
from .rank_parameters import NF4_BYTES, PHASES, Moment, Terms, at_moments

TERMS = tuple(
    term
    for role in get_args(SecondModelRole)
    for term in (
        Term(
            f"{role}_weights",
            f"the frozen {role}: in compute precision, complete or sharded over all ranks, or in 4 bit; in host memory "
            "in pinned blocks",
            role="weights",
        ),
        Term(
            f"{role}_gathered",
            f"the {role}'s parameters in use: gathered, copied from the host, or dequantized from 4 bit",
            role="buckets",
        ),
        Term(
            f"{role}_activations",
            f"temporaries of one {role} layer; the {role} runs before the trained model",
            role="activations",
        ),
        Term(
            f"{role}_hidden_states",
            f"the input of the {role}'s output head for all tokens, until the loss has read it",
            role="activations",
        ),
        Term(
            f"{role}_head",
            f"the weight of the {role}'s output head, gathered until the loss has read it",
            role="buckets",
        ),
        Term(f"{role}_targets", f"ids and log-probabilities of a cached {role}'s likeliest tokens", role="activations"),
        Term(f"{role}_cache_reads", f"cached {role} outputs of one micro-batch", lives_on="host"),
        StepTerm(f"{role}_forward", f"the forward pass of the {role} in every micro-batch"),
    )
) + tuple(
    term
    for role in TRAINED_ROLES
    for term in (
        Term(f"{role}_gradients", f"gradients of the trained {role}", role="gradients"),
        Term(
            f"{role}_optimizer_states",
            f"master weights and optimizer states of the trained {role}",
            role="optimizer",
        ),
        StepTerm(f"{role}_step", f"the training step of the {role}, with its communication and update"),
    )
)
_TERM_OF_KIND = {"gradients": "gradients", "optimizer": "optimizer_states", "buckets": "gathered"} | {
    kind: kind for kind in ("weights", "activations")
}

SHARDED_ZERO = ZeroOptions(stage3_param_persistence_threshold=0)
"""ZeRO-3 options of a sharded second model's engine: DeepSpeed's defaults, without persistent parameters."""

CACHED_TOP_K = 50
"""Assumed number of cached tokens per distribution."""
_CACHED_BYTES_PER_TOKEN = (4 + 2) * CACHED_TOP_K + 2
"""Bytes of a cache per token: an int32 id and an fp16 logit per entry, and the mass of all others in fp16."""
# `TopKTargets` holds an int64 id and an fp32 log-probability per entry.
_TOP_K_ENTRY_BYTES = 8 + 4


def trained_model_terms(role: SecondModelRole, step: Mapping[Moment, Terms]) -> dict[Moment, Terms]:
    """Return the named bytes of a trained second model at each moment, from those of its own step.

    Before its step the trained model has states only. After it the second model keeps what every moment of it has.
    """
    named = {moment: terms_of_role(role, terms) for moment, terms in step.items()}
    steps = [terms for moment, terms in named.items() if moment != "init"]
    kept = {name: min(terms.get(name, 0) for terms in steps) for name in steps[0]}
    fullest = max(steps, key=lambda terms: sum(terms.values()))
    return dict.fromkeys(PHASES, kept) | {"init": named["init"], "second_models_forward": fullest}


def terms_of_role(role: SecondModelRole, terms: Terms) -> Terms:
    """Return the bytes of a trained second model by its own terms, from those of a model that is trained alone."""
    groups = (model_states, communication, layers, loss)
    kinds = {term.name: term.role for group in groups for term in group.TERMS}
    named: Terms = {}
    for name, count in terms.items():
        own = f"{role}_{_TERM_OF_KIND.get(kinds.get(name, 'other'), 'weights')}"
        named[own] = named.get(own, 0) + count
    return named


def frozen_model_terms(
    second: SecondModel, layout: Layout, job: TrainingJob, *, gpu: bool = True
) -> dict[Moment, Terms]:
    """Return the named bytes of a frozen second model on one accelerator at each moment."""
    role, spec, placement, width = second.role, second.spec, second.planned_placement, job.compute_bytes
    tokens, task = layout.micro_batch_size * job.seq_len_tokens, TASKS[job.task]
    always: Terms = {}
    if placement not in ("shared", "cached"):
        shares = {"offloaded": 0, "sharded": -(-spec.parameter_count // layout.world_size)}
        element = width
        if role == "reference" and layout.engine in ("single", "ddp") and job.method == "full":
            # TRL loads it with the type of the trained weights (trl 1.16.0, dpo_trainer.py:924).
            element = 4 if job.precision == "fp32" else job.trained_weight_bytes
        weights = element * shares.get(placement, spec.parameter_count)
        if placement == "quantized":
            weights = _four_bit_bytes(spec, job)
        always = {f"{role}_weights": weights + spec.buffer_bytes}
    if placement == "cached" and task.head != "model":
        # Two log-probabilities per pair.
        return at_moments({})
    if placement == "cached":
        targets = {f"{role}_targets": CACHED_TOP_K * _TOP_K_ENTRY_BYTES * tokens}
        return at_moments({}, last_layer_forward=targets, forward_end=targets)
    running = running_terms(second, layout, job, gpu=gpu)
    if task.head != "model":
        # A task that generates runs its reference and reward models before the update, and imitated logits are part of
        # the loss. Other references run after the forward pass of the trained model, whose kept activations exist
        # meanwhile; only one log-probability per token remains.
        runs_before = task.generates and not second.is_imitated
        return at_moments(always) if runs_before else at_moments(always, forward_end=running)
    # The loss reads the input of the output head, and on every rank its complete weight, in addition to the shards.
    outputs = {
        f"{role}_hidden_states": width * tokens * spec.dimensions.hidden_size,
        f"{role}_head": width * spec.embedding_parameters if placement in ("sharded", "offloaded") else 0,
    }
    if placement == "shared" and layout.shards_parameters:
        outputs[f"{role}_head"] = width * spec.embedding_parameters
    return at_moments(always, second_models_forward=running, last_layer_forward=outputs, forward_end=outputs)


def running_terms(second: SecondModel, layout: Layout, job: TrainingJob, *, gpu: bool) -> Terms:
    """Return the named bytes that the forward pass of a frozen second model adds.

    A reference computes log-probabilities after its layers, from the input of its head.
    """
    spec = second.spec
    layers = forward_bytes(layout, spec, job), _gathered_bytes(second, layout, job)
    if second.role != "reference":
        activations, gathered = layers
    else:
        activations, gathered = max(layers, head_pass(layout, spec, job, is_divided=layers[1] > 0, gpu=gpu), key=sum)
    return {f"{second.role}_activations": activations, f"{second.role}_gathered": gathered}


def head_pass(layout: Layout, spec: ModelSpec, job: TrainingJob, *, is_divided: bool, gpu: bool) -> tuple[int, int]:
    """Return the bytes of a head that computes log-probabilities without gradients, and of what it gathers.

    ZeRO-3 gathers the weight of the head, FSDP2 its last unit with the token embedding.
    """
    element = 2 if activation_mode(layout, job) == "bf16" else 4
    hidden = element * layout.micro_batch_size * job.seq_len_tokens * spec.dimensions.hidden_size
    head, _, _ = loss.head_bytes(layout, spec, job, element=element, on_gpu=gpu, scores=True)
    unit = spec.parameters_outside_layers if layout.engine == "fsdp2" else spec.embedding_parameters
    return hidden + head, job.compute_bytes * unit if is_divided else 0


def _four_bit_bytes(spec: ModelSpec, job: TrainingJob) -> int:
    quantized = sum(parameter.total for parameter in spec.packed_parameters)
    return round(quantized * NF4_BYTES) + (spec.parameter_count - quantized) * job.compute_bytes


def _gathered_bytes(second: SecondModel, layout: Layout, job: TrainingJob) -> int:
    """Bytes of gathered parameters while the model runs.

    A single process copies from the host module by module (accelerate 1.15.0, hooks.py `AlignDevicesHook`). The base of
    the trained model is gathered with the options of its layout.
    """
    spec, placement = second.spec, second.planned_placement
    zero = SHARDED_ZERO
    if placement == "shared":
        zero = layout.zero
        placement = "sharded" if layout.shards_parameters else "quantized" if job.method == "qlora" else "replica"
    if placement == "offloaded" and layout.world_size == 1:
        return job.compute_bytes * spec.largest_gather_unit()
    if placement == "quantized":
        return job.compute_bytes * spec.largest_layer_matrix
    if placement == "replica":
        return 0
    return job.compute_bytes * forward_gathered_elements(layout.engine, spec, zero)


def forward_bytes(layout: Layout, spec: ModelSpec, job: TrainingJob) -> int:
    """Return the bytes of one layer without gradients: temporaries of a checkpointed layer, its input and its output.

    Without traced coefficients, attention and MLP count in compute precision. With sequence parallelism the model
    still reads complete sequences.
    """
    tokens, sizes = layout.micro_batch_size * job.seq_len_tokens, spec.dimensions
    residual = 2 * job.compute_bytes * tokens * sizes.hidden_size
    traced = estimate_activations(
        family=spec.model_type,
        release=spec.release,
        dimensions=sizes,
        micro_batch_size=layout.micro_batch_size,
        seq_len_tokens=job.seq_len_tokens,
        mode="fp32" if job.precision == "fp32" else "bf16",
        attention=attention_of(spec, job.seq_len_tokens),
    )
    if traced is None:
        experts = sizes.experts_per_token * sizes.expert_intermediate_size
        widths = 4 * sizes.hidden_size + 2 * sizes.query_size + 2 * sizes.key_value_size
        widest = widths + 3 * max(sizes.intermediate_size, experts)
        return residual + job.compute_bytes * tokens * widest
    return residual + traced.forward_transient_bytes


def frozen_model_host_terms(second: SecondModel, layout: Layout, job: TrainingJob, ranks: int) -> tuple[int, Terms]:
    """Return the host memory of a node with `ranks` ranks for a frozen second model: while it is loaded, and by name.

    Sharded loading copies from memory-mapped files module by module, and 4-bit loading quantizes on the accelerator.
    Otherwise every rank loads the complete model. Each rank holds its shard of an offloaded model, in one pinned block
    per tensor.
    """
    role, spec, placement, width = second.role, second.spec, second.planned_placement, job.compute_bytes
    complete = width * spec.parameter_count
    if placement == "cached":
        tokens = layout.micro_batch_size * job.seq_len_tokens
        return 0, {f"{role}_cache_reads": ranks * _CACHED_BYTES_PER_TOKEN * tokens}
    if placement == "shared":
        return 0, {}
    if placement == "quantized":
        return ranks * _four_bit_bytes(spec, job), {}
    if placement == "offloaded" and layout.world_size == 1:
        return ranks * complete, {f"{role}_weights": complete}
    is_read_by_module = placement != "replica" and layout.engine != "fsdp2" and not spec.weight_conversion
    loaded = 0 if is_read_by_module else ranks * complete
    if placement != "offloaded":
        return loaded, {}
    shares = ((-(-p.numel // layout.world_size), p.count) for p in spec.parameters)
    pinned = sum(count * pinned_block_bytes(width * share) for share, count in shares)
    return loaded, {f"{role}_weights": ranks * pinned}
