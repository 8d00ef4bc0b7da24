"""What a teacher and the distillation loss hold on an accelerator and on the host, term by term.

The teacher's forward pass comes before the student's, so that its layers' temporaries never meet the student's
activations. What stays is the input of its output head: the fused loss makes logits of some rows at a time, and no
[tokens × vocabulary] of either model exists (`trainers/distillation/fused_loss.py`).
"""

from __future__ import annotations

from .activations import Attention, UnknownFamilyError, estimate_activations
from .job import TrainingJob
from .model import ModelSpec
from .model_states import NF4_BYTES
from .moments import Moment, Terms, at_moments
from .strategy import Strategy, ZeroOptions
from .teacher_placement import TeacherPlacement
from .zero3_gathers import forward_gathered_elements

TEACHER_ZERO = ZeroOptions(stage3_param_persistence_threshold=0)
"""What a sharded teacher's own ZeRO-3 engine runs with: DeepSpeed's defaults, and no tensor whole on every rank."""

CHUNK_BYTES = 512 * 2**20
"""The fused loss works on `CHUNK_BYTES / (16 · vocabulary)` rows at a time."""
_BYTES_PER_CHUNK_LOGIT = 16

CHUNK_TENSORS = 16
"""fp32 tensors of [rows, vocabulary] that live at once in a chunk: 12 to 15.25 metered, by divergence and precision, and
one with a soft-cap."""

_HEAD_ROWS = 8192
"""Rows of the head whose gradient is added at once, in fp32."""

_NORM_BACKWARD_BYTES = 18
"""Bytes for each element of the hidden states while the final norm is differentiated (traced, 16-bit RMSNorm)."""

CACHED_TOP_K = 50
"""Tokens of a cached distribution that are counted on."""
_CACHED_BYTES_PER_TOKEN = 130
"""Bytes that a cache stores for each token at k = 50: 2.6 for each kept token."""
_TOP_K_ENTRY_BYTES = 8 + 4


def placement_of(job: TrainingJob) -> TeacherPlacement:
    """Return where the job's teacher lives; an open choice counts as the first."""
    return "replica" if job.teacher_placement == "auto" else job.teacher_placement


def teacher_terms(strategy: Strategy, job: TrainingJob) -> dict[Moment, Terms]:
    """Return the named bytes of the teacher on one accelerator at each moment; empty without one."""
    teacher = job.teacher
    if teacher is None:
        return at_moments({})
    tokens = strategy.micro_batch_size * job.seq_len_tokens
    if placement_of(job) == "cached":
        targets = {"teacher_targets": CACHED_TOP_K * _TOP_K_ENTRY_BYTES * tokens}
        return at_moments({}, last_layer_forward=targets, forward_end=targets)
    kept = {
        "teacher_hidden_states": job.compute_bytes * tokens * teacher.dimensions.hidden_size,
        "teacher_head": _gathered_head_bytes(teacher, job),
    }
    running = {
        "teacher_activations": _forward_bytes(strategy, teacher, job),
        "teacher_gathered": _gathered_bytes(strategy, teacher, job),
    }
    always = {"teacher_weights": _weight_bytes(strategy, teacher, job) + teacher.buffer_bytes}
    return at_moments(always, teacher_forward=running, last_layer_forward=kept, forward_end=kept)


def teacher_gpu_bytes(strategy: Strategy, job: TrainingJob) -> int:
    """Return the most that the teacher holds on one accelerator at any moment."""
    return max(sum(terms.values()) for terms in teacher_terms(strategy, job).values())


def _weight_bytes(strategy: Strategy, teacher: ModelSpec, job: TrainingJob) -> int:
    placement, count = placement_of(job), teacher.parameter_count
    if placement == "offloaded":
        return 0
    if placement == "sharded":
        return job.compute_bytes * -(-count // strategy.world_size)
    if placement == "quantized":
        return _four_bit_bytes(teacher, job)
    return job.compute_bytes * count


def _four_bit_bytes(teacher: ModelSpec, job: TrainingJob) -> int:
    quantized = teacher.linear_parameters(include_head=False)
    return round(quantized * NF4_BYTES) + (teacher.parameter_count - quantized) * job.compute_bytes


def _gathered_bytes(strategy: Strategy, teacher: ModelSpec, job: TrainingJob) -> int:
    """Bytes of whole parameters while the teacher runs.

    FSDP2 keeps its root unit (embeddings, final norm, head) from the first module to the last, and a layer with the
    next one's all-gather. Host memory is copied module by module (accelerate 1.15.0, hooks.py `AlignDevicesHook`).
    """
    placement = placement_of(job)
    if placement == "offloaded":
        return job.compute_bytes * teacher.largest_gather_unit()
    if placement == "quantized":
        widest = max((p.numel for p in teacher.parameters if p.kind == "linear" and p.in_layer), default=0)
        return job.compute_bytes * widest
    if placement == "replica":
        return 0
    if strategy.engine == "fsdp2":
        return job.compute_bytes * (teacher.parameters_outside_layers + 2 * teacher.layer_parameter_count)
    return job.compute_bytes * forward_gathered_elements(teacher, TEACHER_ZERO)


def _gathered_head_bytes(teacher: ModelSpec, job: TrainingJob) -> int:
    """The head's weight is whole on every rank while the loss reads it, beside what the placement holds anyway."""
    return job.compute_bytes * teacher.embedding_parameters if placement_of(job) in ("sharded", "offloaded") else 0


def _forward_bytes(strategy: Strategy, teacher: ModelSpec, job: TrainingJob) -> int:
    """Activations of one layer without gradients: what a checkpointed layer needs, its input, and the next one's.

    The closed form of families without traced coefficients counts attention and MLP in compute precision. With
    sequence parallelism the teacher still reads whole sequences.
    """
    tokens, sizes = strategy.micro_batch_size * job.seq_len_tokens, teacher.dimensions
    residual = 2 * job.compute_bytes * tokens * sizes.hidden_size
    masked = teacher.sliding_window is not None and job.seq_len_tokens > teacher.sliding_window
    attention: Attention = "masked" if masked else "auto"
    try:
        traced = estimate_activations(
            family=teacher.model_type,
            dimensions=sizes,
            micro_batch_size=strategy.micro_batch_size,
            seq_len_tokens=job.seq_len_tokens,
            mode="fp32" if job.precision == "fp32" else "bf16",
            attention=attention,
        )
    except UnknownFamilyError:
        experts = sizes.experts_per_token * sizes.expert_intermediate_size
        widths = 4 * sizes.hidden_size + 2 * sizes.query_size + 2 * sizes.key_value_size
        widest = widths + 3 * max(sizes.intermediate_size, experts)
        return residual + job.compute_bytes * tokens * widest
    return residual + traced.forward_transient_bytes


def distillation_loss_terms(strategy: Strategy, model: ModelSpec, job: TrainingJob) -> dict[Moment, Terms]:
    """Return the fused loss's own bytes: a chunk's temporaries, the hidden gradient, the head's fp32 gradient.

    The head's gradient is computed in the forward pass and cast to the weight's dtype in the backward pass; a head
    that is not trained has none.
    """
    assert job.teacher is not None, "only distillation has this loss"
    ranks = strategy.sp * strategy.cp
    tokens = strategy.micro_batch_size * job.seq_len_tokens // ranks
    sizes, hidden = model.dimensions, model.dimensions.hidden_size
    rows = min(tokens, chunk_rows(sizes.vocab_size))
    columns = max(sizes.vocab_size, job.teacher.dimensions.vocab_size)
    temporaries = 4 * CHUNK_TENSORS * rows * columns
    hidden_gradient = job.compute_bytes * tokens * hidden
    forward = {"loss": temporaries + hidden_gradient}
    backward = {"loss": max(hidden_gradient, _NORM_BACKWARD_BYTES * tokens * hidden)}
    if job.method == "full":
        sixteen_bit = job.precision != "fp32" and strategy.engine in ("deepspeed", "fsdp2")
        forward["head_gradient"] = 4 * model.embedding_parameters
        forward["loss"] += 4 * min(_HEAD_ROWS, sizes.vocab_size) * hidden
        backward["head_gradient"] = (4 + (2 if sixteen_bit else 0)) * model.embedding_parameters
    return at_moments({}, forward_end=forward, loss_backward=backward)


def chunk_rows(vocab_size: int) -> int:
    """Return the rows that the fused loss works on at a time.

    >>> chunk_rows(128_256)
    261
    """
    return max(1, CHUNK_BYTES // (_BYTES_PER_CHUNK_LOGIT * vocab_size))


def teacher_loading_bytes(strategy: Strategy, job: TrainingJob, ranks: int) -> int:
    """Return what loading the teacher holds in the host memory of a node with this many ranks.

    Partitioned loading copies from memory-mapped shards module by module, and 4-bit loading goes through the
    accelerator; elsewhere every rank holds the whole model.
    """
    placement = placement_of(job)
    if job.teacher is None or placement == "cached":
        return 0
    if placement == "quantized":
        return ranks * _four_bit_bytes(job.teacher, job)
    if placement == "sharded" and strategy.engine != "fsdp2" and not job.teacher.weight_conversion:
        return 0
    return ranks * job.compute_bytes * job.teacher.parameter_count


def teacher_host_terms(strategy: Strategy, job: TrainingJob, ranks: int) -> Terms:
    """Return the named bytes that the teacher keeps in the host memory of a node while the student trains.

    An offloaded teacher is whole in the memory of every rank: its hooks copy from a state dict of that process.
    """
    placement = placement_of(job)
    if job.teacher is None:
        return {}
    if placement == "offloaded":
        return {"offloaded_teacher": ranks * job.compute_bytes * job.teacher.parameter_count}
    if placement == "cached":
        tokens = strategy.micro_batch_size * job.seq_len_tokens
        return {"teacher_cache_reads": ranks * _CACHED_BYTES_PER_TOKEN * tokens}
    return {}


def teacher_host_bytes(strategy: Strategy, job: TrainingJob, ranks: int) -> int:
    """Return the most that the teacher holds in the host memory of one node."""
    kept = sum(teacher_host_terms(strategy, job, ranks).values())
    return max(kept, teacher_loading_bytes(strategy, job, ranks))
