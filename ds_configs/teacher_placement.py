"""Where a frozen teacher lives while a student trains, and what each place costs."""

from __future__ import annotations

from typing import Literal

TeacherPlacement = Literal["replica", "sharded", "offloaded", "quantized", "cached"]
"""`replica`: whole on every rank; `sharded`: over all ranks, gathered layer by layer; `offloaded`: in host memory,
gathered layer by layer; `quantized`: 4-bit weights on every rank; `cached`: not there, its answers were stored before."""
