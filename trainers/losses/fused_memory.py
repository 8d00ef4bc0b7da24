"""How many bytes the fused loss takes at most, and the sizes that it chooses from a budget of bytes."""

from __future__ import annotations

CHUNK_BYTES = 512 * 2**20
"""The products of student and teacher for one chunk stay below this."""
BLOCK_BYTES = {"cpu": 4 * 2**20, "cuda": 32 * 2**20}
"""One fp32 temporary of a block stays below this: small for a CPU's cache, large enough to keep a GPU busy."""
HEAD_ROWS = 8192
"""Rows of the head whose gradient is added at once."""
SCALED_ROWS = 1024
"""Rows of a 16-bit gradient that are multiplied at once in the backward pass."""
_BYTES_OF_A_ROW = 32
"""A weight and seven values, in fp32."""
_BLOCK_BYTES_OF_A_LOGIT = 45
"""11 fp32 temporaries and a mask, where τ ≠ 1 and all telemetry is wanted; every divergence needs that many."""


def default_chunk_rows(bytes_of_a_row: int) -> int:
    """Return how many rows' products, of student and teacher together, fit `CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // bytes_of_a_row)


def default_block_rows(columns: int, device: str) -> int:
    """Return how many rows of fp32 logits fit `BLOCK_BYTES`."""
    return max(1, BLOCK_BYTES.get(device, BLOCK_BYTES["cuda"]) // (4 * columns))


def even_chunk_rows(rows: int, limit_rows: int) -> int:
    """Return the rows of a chunk of an even split: a short last one would move the head's gradient for little."""
    return max(1, -(-rows // max(1, -(-rows // limit_rows))))


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
    as many columns, and has a soft-cap where the student has one. With n rows in a chunk, b in a block, e and e_t
    bytes per element::

        forward   N (H e + 32) + 4 V H + n V (e + e_t) + b V (45 + 4 [e = 2 or soft-cap] + 4 [e_t = 2] + e_t [soft-cap])
        backward  N (H e + 32) + 4 V H + V H e [e = 2]

    without the terms in V H where the head is frozen. It is metered, not derived, that a block takes so much; without
    telemetry or at τ = 1 it takes less. `device` is "cpu" or "cuda".
    """
    limit = chunk_rows or default_chunk_rows(columns * (element_bytes + teacher_element_bytes))
    chunk = even_chunk_rows(rows, limit)
    block = min(chunk, default_block_rows(columns, device))
    short = element_bytes < 4
    more = 4 * (short or soft_cap) + 4 * (teacher_element_bytes < 4) + teacher_element_bytes * soft_cap
    elementwise = chunk * columns * teacher_element_bytes + block * columns * (_BLOCK_BYTES_OF_A_LOGIT + more)
    product_bytes = 4 if device == "cuda" else element_bytes
    head_part = min(HEAD_ROWS, columns) * hidden_width * product_bytes * (short and trains_head)
    gradients = rows * (hidden_width * element_bytes + _BYTES_OF_A_ROW) + 4 * columns * hidden_width * trains_head
    scaled = 4 * min(SCALED_ROWS, rows) * hidden_width * short
    cast = columns * hidden_width * element_bytes * (short and trains_head)
    return gradients + max(chunk * columns * element_bytes + max(elementwise, head_part), scaled, cast)
