"""Memory of a teacher and of the distillation loss, on an accelerator and on the host, term by term.

The teacher runs before the student, so temporaries of its layers and activations of the student never exist together.
Only the input of the teacher's output head is kept. The fused loss computes the logits of a chunk of rows, so no
[tokens × vocabulary] tensor of either model exists (`trainers/losses/fused_loss.py`).
"""

from __future__ import annotations

from ..specs.job import TeacherPlacement, TrainingJob
from ..specs.layout import Layout, ZeroOptions
from ..specs.model import ModelSpec
from ..specs.units import pinned_block_bytes
from .activations import UnknownFamilyError, attention_of, estimate_activations, norm_backward_bytes
from .model_states import forward_gathered_elements
from .rank_parameters import NF4_BYTES, Moment, Terms, at_moments

TEACHER_ZERO = ZeroOptions(stage3_param_persistence_threshold=0)
"""ZeRO-3 options of a sharded teacher's engine: DeepSpeed's defaults, without persistent parameters."""

CHUNK_BYTES = 320 * 2**20
"""Largest size of the logits of both heads that the fused loss computes at a time."""

BLOCK_BYTES = 32 * 2**20
"""Largest fp32 tensor of logits rows that it processes at a time on an accelerator, if kernels cannot be compiled."""

COMPILED_BYTES_OF_A_LOGIT = 12
"""Most that compiled kernels keep of a chunk: three fp32 temporaries (JSD; none to two for other divergences)."""

_BLOCK_BYTES_OF_A_LOGIT = 45 + 4
"""Eleven fp32 temporaries and a mask, measured, and one for a soft-cap or 16-bit products."""

_BYTES_OF_A_ROW = 32
"""A weight and seven values of each row, in fp32."""

HEAD_ROWS = 8192
"""Rows of the head per addition of its fp32 gradient on a CPU; GPUs add within the product."""

CACHED_TOP_K = 50
"""Assumed number of cached tokens per distribution."""
_CACHED_BYTES_PER_TOKEN = (4 + 2) * CACHED_TOP_K + 2
"""Bytes of a cache per token: an int32 id and an fp16 logit per entry, and the mass of all others in fp16."""
# `TopKTargets` holds an int64 id and an fp32 log-probability per entry.
_TOP_K_ENTRY_BYTES = 8 + 4


def placement_of(job: TrainingJob) -> TeacherPlacement:
    """Return the placement of the job's teacher; `auto` counts as `replica`."""
    return "replica" if job.teacher_placement == "auto" else job.teacher_placement


def teacher_terms(strategy: Layout, job: TrainingJob) -> dict[Moment, Terms]:
    """Return the named bytes of the teacher on one accelerator at each moment; empty without a teacher."""
    teacher = job.teacher
    if teacher is None:
        return at_moments({})
    tokens = strategy.micro_batch_size * job.seq_len_tokens
    if placement_of(job) == "cached":
        targets = {"teacher_targets": CACHED_TOP_K * _TOP_K_ENTRY_BYTES * tokens}
        return at_moments({}, last_layer_forward=targets, forward_end=targets)
    # The loss needs the complete weight of the head on every rank, in addition to the shards.
    gathered_head_bytes = (
        job.compute_bytes * teacher.embedding_parameters if placement_of(job) in ("sharded", "offloaded") else 0
    )
    outputs = {
        "teacher_hidden_states": job.compute_bytes * tokens * teacher.dimensions.hidden_size,
        "teacher_head": gathered_head_bytes,
    }
    running = {
        "teacher_activations": _forward_bytes(strategy, teacher, job),
        "teacher_gathered": _gathered_bytes(strategy, teacher, job),
    }
    placement, count = placement_of(job), teacher.parameter_count
    if placement == "quantized":
        weights = _four_bit_bytes(teacher, job)
    else:
        share = {"offloaded": 0, "sharded": -(-count // strategy.world_size)}.get(placement, count)
        weights = job.compute_bytes * share
    always = {"teacher_weights": weights + teacher.buffer_bytes}
    return at_moments(always, teacher_forward=running, last_layer_forward=outputs, forward_end=outputs)


def teacher_gpu_bytes(strategy: Layout, job: TrainingJob) -> int:
    return max(sum(terms.values()) for terms in teacher_terms(strategy, job).values())


def _four_bit_bytes(teacher: ModelSpec, job: TrainingJob) -> int:
    quantized = teacher.linear_parameters(include_head=False)
    return round(quantized * NF4_BYTES) + (teacher.parameter_count - quantized) * job.compute_bytes


def _gathered_bytes(strategy: Layout, teacher: ModelSpec, job: TrainingJob) -> int:
    """Bytes of gathered parameters while the teacher runs.

    FSDP2 keeps its root unit (embeddings, final norm, head) gathered, and a layer with the all-gather of the next one.
    A single process copies from the host module by module (accelerate 1.15.0, hooks.py `AlignDevicesHook`).
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


def _forward_bytes(strategy: Layout, teacher: ModelSpec, job: TrainingJob) -> int:
    """Activations of one layer without gradients: temporaries of a checkpointed layer, its input and its output.

    Without traced coefficients, attention and MLP count in compute precision. With sequence parallelism the teacher
    still reads complete sequences.
    """
    tokens, sizes = strategy.micro_batch_size * job.seq_len_tokens, teacher.dimensions
    residual = 2 * job.compute_bytes * tokens * sizes.hidden_size
    try:
        traced = estimate_activations(
            family=teacher.model_type,
            release=teacher.release,
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


def distillation_loss_terms(strategy: Layout, model: ModelSpec, job: TrainingJob) -> dict[Moment, Terms]:
    """Return the bytes of the fused loss: temporaries, gradient of the hidden states, fp32 gradient of the head.

    The gradient of a trained head is computed in the forward pass and cast to the dtype of the weight in the backward
    pass.
    """
    assert job.teacher is not None, "only distillation has this loss"
    ranks = strategy.sp * strategy.cp
    tokens = strategy.micro_batch_size * job.seq_len_tokens // ranks
    hidden = model.dimensions.hidden_size
    hidden_gradient = job.compute_bytes * tokens * hidden
    forward = {"loss": hidden_gradient + fused_temporary_bytes(model, job.teacher, tokens, job)}
    backward = {"loss": hidden_gradient + norm_backward_bytes(job.compute_bytes) * tokens * hidden}
    if job.method == "full":
        sixteen_bit = job.precision != "fp32" and strategy.engine in ("deepspeed", "fsdp2")
        forward["head_gradient"] = 4 * model.embedding_parameters
        backward["head_gradient"] = (4 + (2 if sixteen_bit else 0)) * model.embedding_parameters
    return at_moments({}, forward_end=forward, loss_backward=backward)


def most_chunk_rows(bytes_of_a_row: int) -> int:
    """Return the number of rows whose logits of student and teacher together fit `CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // bytes_of_a_row)


def even_chunk_rows(rows: int, most: int) -> int:
    """Return the rows of a chunk in an even split; a short last chunk would still add a complete head gradient."""
    return max(1, -(-rows // max(1, -(-rows // most))))


def block_rows(columns: int, block_bytes: int) -> int:
    return max(1, block_bytes // (4 * columns))


def fused_temporary_bytes(
    student: ModelSpec, teacher: ModelSpec, tokens: int, job: TrainingJob, *, block_bytes: int | None = None
) -> int:
    """Return the temporary bytes of the fused loss, with n rows per chunk and b rows per block.

    `c n V_s` for the logits of the student and `c n V_t` for the teacher, with `12 n V` for compiled kernels. Without
    them, on CPU ranks with their `block_bytes`, `b V (49 + c + 4 [c = 2])` for a block; if less than that, the rows of
    the head whose gradient is added.
    """
    width, columns, taught_columns = job.compute_bytes, student.dimensions.vocab_size, teacher.dimensions.vocab_size
    rows = even_chunk_rows(tokens, most_chunk_rows(width * (columns + taught_columns)))
    widest, added = max(columns, taught_columns), 0
    if block_bytes is None:
        elementwise = rows * widest * COMPILED_BYTES_OF_A_LOGIT
    else:
        block = min(rows, block_rows(columns, block_bytes))
        elementwise = block * widest * (_BLOCK_BYTES_OF_A_LOGIT + width + (4 if width == 2 else 0))
        adds = job.method == "full" and width == 2
        added = 4 * min(HEAD_ROWS, columns) * student.dimensions.hidden_size if adds else 0
    return _BYTES_OF_A_ROW * tokens + width * rows * columns + max(width * rows * taught_columns + elementwise, added)


def teacher_loading_bytes(strategy: Layout, job: TrainingJob, ranks: int) -> int:
    """Return the host memory of a node with `ranks` ranks while the teacher is loaded.

    Sharded loading copies from memory-mapped files module by module, and 4-bit loading quantizes on the accelerator.
    Otherwise every rank holds the complete model.
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


def teacher_host_terms(strategy: Layout, job: TrainingJob, ranks: int) -> Terms:
    """Return the named host bytes of the teacher on a node during training.

    Each rank holds its shard of an offloaded teacher, in one pinned block per tensor.
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


def teacher_host_bytes(strategy: Layout, job: TrainingJob, ranks: int) -> int:
    resident = sum(teacher_host_terms(strategy, job, ranks).values())
    return max(resident, teacher_loading_bytes(strategy, job, ranks))
