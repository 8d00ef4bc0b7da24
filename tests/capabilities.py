"""The runs of every grid by name: what the suite shows of layouts, losses, schemes and models.

`python tests/capabilities.py` writes `tests/data/capabilities.txt`, which a test holds against the grids, so that a
case can only go where somebody sees it.
"""

from __future__ import annotations

import sys
from pathlib import Path

STORED = Path(__file__).parent / "data" / "capabilities.txt"


def collected() -> list[str]:
    """Return `grid: case` for every run on ranks."""
    import cases
    import distillation_cases
    import expert_cases
    import pipeline_cases
    import qat_cases
    import sequence_cases
    import sparsity_cases
    import teacher_worker
    import tensor_parallel_cases
    from equivalence.cases import CASES as EQUIVALENT

    grids = {
        "equivalence": EQUIVALENT,
        "bf16": cases.BF16_CASES,
        "distillation": distillation_cases.EVERY,
        "qat": [*qat_cases.CASES, *qat_cases.IN_BF16, *qat_cases.OFFLOADED],
        "sequence": [*sequence_cases.TWO_RANKS, *sequence_cases.FOUR_RANKS],
        "tensor": [*tensor_parallel_cases.TWO_RANKS, *tensor_parallel_cases.FOUR_RANKS],
        "expert": expert_cases.CASES,
        "pipeline": [*pipeline_cases.TWO_RANKS, *pipeline_cases.FOUR_RANKS],
        "sparsity": sparsity_cases.EVERY,
        "teacher": teacher_worker.CASES,
    }
    return sorted(f"{grid}: {case.name}" for grid, found in grids.items() for case in found)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent / "distributed")]
    STORED.write_text("\n".join(collected()) + "\n")
