"""Memory of a teacher and of the distillation loss, on an accelerator and on the host, term by term.

The teacher's forward pass comes before the student's, so that its layers' temporaries never meet the student's
activations. What stays is the input of its output head: the fused loss makes logits of some rows at a time, and no
[tokens × vocabulary] of either model exists (`trainers/losses/fused_loss.py`).
"""

from __future__ import annotations

from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy, ZeroOptions
from ..specs.teacher_placement import TeacherPlacement
from ..specs.units import pinned_block_bytes
from .activation_source import attention_of
from .activations import UnknownFamilyError, estimate_activations
from .moments import Moment, Terms, at_moments
from .rank_parameters import NF4_BYTES
from .zero3_gathers import forward_gathered_elements

TEACHER_ZERO = ZeroOptions(stage3_param_persistence_threshold=0)
"""What a sharded teacher's own ZeRO-3 engine runs with: DeepSpeed's defaults, and no tensor whole on every rank."""

CHUNK_BYTES = 512 * 2**20
"""The fused loss makes both heads' products for as many rows at a time as these bytes hold."""

BLOCK_BYTES = 32 * 2**20
"""On an accelerator it works on as many of these rows at a time as one fp32 tensor of this size holds."""

_BLOCK_BYTES_OF_A_LOGIT = 45 + 4
"""Eleven fp32 temporaries and a mask, metered, and one for a soft-cap or 16-bit products."""

_BYTES_OF_A_ROW = 32
"""A weight and seven values of each row, in fp32."""

HEAD_ROWS = 8192
"""Rows of the head whose gradient is added at once, in fp32."""

_NORM_BACKWARD_BYTES = 18
"""Bytes for each element of the hidden states while the final norm is differentiated (traced, 16-bit RMSNorm)."""

CACHED_TOP_K = 50
"""Tokens of a cached distribution that are counted on."""
_CACHED_BYTES_PER_TOKEN = 130
"""Bytes that a cache stores for each token at k = 50: 2.6 for each kept token."""
# `TopKTargets` holds an int64 id and an fp32 log-probability for each kept token.
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
    next one's all-gather. One process copies from the host module by module (accelerate 1.15.0, hooks.py
    `AlignDevicesHook`).
    """
    placement = placement_of(job)
    if placement == "offloaded" and strategy.world_size == 1:
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
    try:
        traced = estimate_activations(
            family=teacher.model_type,
            dimensions=sizes,
            micro_batch_size=strategy.micro_batch_size,
            seq_len_tokens=job.seq_len_tokens,
            mode="fp32" if job.precision == "fp32" else "bf16",
            attention=attention_of(teacher, job.seq_len_tokens),
        )
    except UnknownFamilyError:
        experts = sizes.experts_per_token * sizes.expert_intermediate_size
        widths = 4 * sizes.hidden_size + 2 * sizes.query_size + 2 * sizes.key_value_size
        widest = widths + 3 * max(sizes.intermediate_size, experts)
        return residual + job.compute_bytes * tokens * widest
    return residual + traced.forward_transient_bytes


def distillation_loss_terms(strategy: Strategy, model: ModelSpec, job: TrainingJob) -> dict[Moment, Terms]:
    """Return the fused loss's own bytes: its temporaries, the hidden gradient, the head's fp32 gradient.

    The head's gradient is computed in the forward pass and cast to the weight's dtype in the backward pass; a head
    that is not trained has none.
    """
    assert job.teacher is not None, "only distillation has this loss"
    ranks = strategy.sp * strategy.cp
    tokens = strategy.micro_batch_size * job.seq_len_tokens // ranks
    hidden = model.dimensions.hidden_size
    hidden_gradient = job.compute_bytes * tokens * hidden
    forward = {"loss": hidden_gradient + fused_temporary_bytes(model, job.teacher, tokens, job)}
    backward = {"loss": max(hidden_gradient, _NORM_BACKWARD_BYTES * tokens * hidden)}
    if job.method == "full":
        sixteen_bit = job.precision != "fp32" and strategy.engine in ("deepspeed", "fsdp2")
        forward["head_gradient"] = 4 * model.embedding_parameters
        backward["head_gradient"] = (4 + (2 if sixteen_bit else 0)) * model.embedding_parameters
    return at_moments({}, forward_end=forward, loss_backward=backward)


def most_chunk_rows(bytes_of_a_row: int) -> int:
    """Return how many rows' products, of student and teacher together, fit `CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // bytes_of_a_row)


def even_chunk_rows(rows: int, most: int) -> int:
    """Return the rows of a chunk of an even split: a short last one would move the head's gradient for little."""
    return max(1, -(-rows // max(1, -(-rows // most))))


def block_rows(columns: int, block_bytes: int) -> int:
    """Return how many rows of fp32 logits fit a block."""
    return max(1, block_bytes // (4 * columns))


def fused_temporary_bytes(
    student: ModelSpec, teacher: ModelSpec, tokens: int, job: TrainingJob, *, block_bytes: int = BLOCK_BYTES
) -> int:
    """Return what the fused loss holds only while it runs, with n rows in a chunk and b in a block.

    `c n V_s` of the student's product, and the larger of the teacher's `c n V_t` with a block's
    `b V (49 + c + 4 [c = 2])` and of the rows of the head whose gradient is added.
    """
    width, columns, taught_columns = job.compute_bytes, student.dimensions.vocab_size, teacher.dimensions.vocab_size
    rows = even_chunk_rows(tokens, most_chunk_rows(width * (columns + taught_columns)))
    block = min(rows, block_rows(columns, block_bytes))
    bytes_of_a_logit = _BLOCK_BYTES_OF_A_LOGIT + width + (4 if width == 2 else 0)
    elementwise = width * rows * taught_columns + block * max(columns, taught_columns) * bytes_of_a_logit
    adds = job.method == "full" and width == 2
    added = 4 * min(HEAD_ROWS, columns) * student.dimensions.hidden_size if adds else 0
    return _BYTES_OF_A_ROW * tokens + width * rows * columns + max(elementwise, added)


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
    shared = placement == "sharded" or (placement == "offloaded" and strategy.world_size > 1)
    if shared and strategy.engine != "fsdp2" and not job.teacher.weight_conversion:
        return 0
    return ranks * job.compute_bytes * job.teacher.parameter_count


def teacher_host_terms(strategy: Strategy, job: TrainingJob, ranks: int) -> Terms:
    """Return the named bytes that the teacher keeps in the host memory of a node while the student trains.

    Each rank holds its share of an offloaded teacher, in pinned blocks of one tensor each.
    """
    placement = placement_of(job)
    if job.teacher is None:
        return {}
    if placement == "offloaded":
        if strategy.world_size == 1:
            return {"offloaded_teacher": job.compute_bytes * job.teacher.parameter_count}
        shares = ((-(-p.numel // strategy.world_size), p.count) for p in job.teacher.parameters)
        pinned = sum(count * pinned_block_bytes(job.compute_bytes * share) for share, count in shares)
        return {"offloaded_teacher": ranks * pinned}
    if placement == "cached":
        tokens = strategy.micro_batch_size * job.seq_len_tokens
        return {"teacher_cache_reads": ranks * _CACHED_BYTES_PER_TOKEN * tokens}
    return {}


def teacher_host_bytes(strategy: Strategy, job: TrainingJob, ranks: int) -> int:
    """Return the most that the teacher holds in the host memory of one node."""
    kept = sum(teacher_host_terms(strategy, job, ranks).values())
    return max(kept, teacher_loading_bytes(strategy, job, ranks))
