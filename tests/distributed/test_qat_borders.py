"""Quantization-aware training equals one process until a code lies on a border, where the last bit decides it.

A symmetric scale is `max |w| / 7.5` at 4 bits, as compressed-tensors defines it. The largest number of a group, where
it is negative, therefore lies at -7.5 steps, half-way between two codes, whatever it is. Two runs whose weights differ
in the last bit round it to -8 in one and to -7 in the other, and train on with different weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cases import RANKS
from qat_border_cases import EVERY, OFF_BORDERS, ON_BORDERS, SCHEME, STEPS, Case
from warm_ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.once]

LOSS_TOLERANCE = 1e-5
"""Largest difference of a loss before a code differs. Seen: 1.9e-6."""
BORDER = 1e-6
"""Largest distance of a code's number from a border, in steps. Seen: 9e-16 in fp64."""
LAST_BITS = 4e-6
"""Largest difference of the two numbers, in steps: fp32 keeps 7.5 to 4.8e-7. Seen: 9.5e-7."""


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A code that one process rounded to another integer than the ranks did."""

    name: str
    value: float
    """The number in one process, in steps, computed in fp64."""
    ranks_value: float
    """The same on the ranks."""

    @property
    def distance(self) -> float:
        """Distance of the number in one process from the nearest border, in steps."""
        return abs(abs(self.value) % 1 - 0.5)


@pytest.fixture(scope="module")
def output(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from qat_border_cases import train

    directory = tmp_path_factory.mktemp("borders")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in dict.fromkeys(case.reference for case in EVERY.values()):
            train(case, directory / case.name)
    finally:
        torch.set_num_threads(threads)
    worker = Path(__file__).with_name("qat_border_cases.py")
    run_ranks([worker, directory, *EVERY], ranks=RANKS, timeout_seconds=600)
    return directory


def losses(output: Path, case: Case) -> list[float]:
    found: list[float] = json.loads((output / case.name / "losses.json").read_text())
    return found


def crossings(output: Path, case: Case, step: int) -> Iterator[Crossing]:
    """Yield the codes of all rounded matrices that differ between one process and the ranks before a step."""
    from safetensors.torch import load_file

    alone, ranks = (load_file(output / one.name / f"{step}.safetensors") for one in (case.reference, case))
    assert alone.keys() == ranks.keys()
    for name in alone:
        if "proj" not in name or not name.startswith("model.layers.") or name.endswith("bias"):
            continue
        (codes, steps), (ranks_codes, ranks_steps) = rounded(alone[name]), rounded(ranks[name])
        for index in (codes != ranks_codes).nonzero().tolist():
            value, ranks_value = (float(one[tuple(index)]) for one in (steps, ranks_steps))
            yield Crossing(name=f"{name}{index}", value=value, ranks_value=ranks_value)


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes as training computes them, in fp32, and the numbers before rounding, in fp64."""
    from shardwright.plugins.compressed_tensors.codes import weight_levels, weight_scale_and_zero_point

    matrix = weight.flatten(0, -2)
    scale, _ = weight_scale_and_zero_point(matrix, SCHEME.weights)
    exact = matrix.double()
    exact_scale, _ = weight_scale_and_zero_point(exact, SCHEME.weights)
    steps = exact.unflatten(-1, (-1, SCHEME.weights.group_size)) / exact_scale.unsqueeze(-1)
    return weight_levels(matrix, scale, None, SCHEME.weights), steps.flatten(-2)


@pytest.mark.parametrize("case", ON_BORDERS, ids=lambda case: case.name)
def test_losses_equal_one_process_until_a_code_is_on_a_border(case: Case, output: Path) -> None:
    """The first codes that differ are numbers on a border, and no loss differs before them."""
    differences = [
        abs(one - other) for one, other in zip(losses(output, case), losses(output, case.reference), strict=True)
    ]
    for step in range(STEPS):
        found = list(crossings(output, case, step))
        for crossing in found:
            assert crossing.distance < BORDER, crossing
            assert abs(crossing.value - crossing.ranks_value) < LAST_BITS, crossing
        if found:
            return
        assert differences[step] < LOSS_TOLERANCE, f"step {step}, and every code is the same"


@pytest.mark.parametrize("case", OFF_BORDERS, ids=lambda case: case.name)
def test_losses_equal_one_process_without_numbers_on_a_border(case: Case, output: Path) -> None:
    """With the largest numbers at -7.49997 steps every step is equal: nothing else differs between the layouts."""
    assert losses(output, case) == pytest.approx(losses(output, case.reference), rel=0, abs=LOSS_TOLERANCE)


def test_codes_on_borders_occur_within_these_steps(output: Path) -> None:
    """Otherwise the first test would compare nothing but losses."""
    met = [case.name for case in ON_BORDERS if any(next(crossings(output, case, step), None) for step in range(STEPS))]
    assert met
