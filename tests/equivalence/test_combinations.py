"""The table of combinations: every pair is decided, and drawn combinations match one process or are rejected.

`pytest tests/equivalence/test_combinations.py --draw 50 --seed 7` draws fifty layouts with settings.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from equivalence.cases import LAYOUTS, Case
from equivalence.records import Record, records_of
from equivalence.settings import METHODS, OPTIMIZERS, SETTINGS, SWITCHES, is_proven, loss_tolerance, reference_of
from shardwright.ds_configs.legality import combinations as table
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.optimizers import OPTIMIZERS as PLANNED

REPOSITORY = Path(__file__).parents[2]
REJECTED = {
    ("adafactor", "zero1"): "other updates",
    ("dropout", "cp"): "DTensors",
    ("balance_loss", "cp"): "only a part",
    ("learned_scales", "tp"): "replaces or splits the layers that round",
    ("label_smoothing", "fsdp2"): "which FSDP2 renames",
    ("sgd", "zero_offload"): "CPU Adam",
    ("compile", "zero3"): "released",
    ("DPOTrainer", "sp"): "log-probabilities of full sequences",
    ("adamw_8bit", "fsdp2"): "do not support DTensors",
    ("paged_adamw_32bit", "cp"): "do not support DTensors",
}
"""Pairs that fail in a library, some silently, and words of the reason."""


def test_every_pair_has_an_existing_test_or_a_reason() -> None:
    for one in table.every_cell():
        assert bool(one.proven_by) != bool(one.reason), one
        assert not one.proven_by or (REPOSITORY / one.proven_by).is_file(), one


def test_no_pair_is_listed_twice() -> None:
    lines = [*table._PROVEN, *table._REJECTED]
    assert len(table.TABLE) == sum(len(settings.split()) * len(columns.split()) for _, settings, columns in lines)
    names = {*table.SETTINGS, *table.TRAINERS, *table.ONLY_ON_ACCELERATORS}
    assert {setting for setting, _ in table.TABLE} <= names
    assert {column for _, column in table.TABLE} <= table.COLUMNS.keys()


@pytest.mark.parametrize(("pair", "words"), REJECTED.items(), ids=map("-".join, REJECTED))
def test_silent_failures_of_libraries_are_rejected_with_a_reason(pair: tuple[str, str], words: str) -> None:
    assert words in table.cell(*pair).reason
    (error,) = table.incompatibility_errors([pair[0]], [pair[1]])
    assert words in error.rule


def test_unknown_settings_are_rejected_with_several_processes() -> None:
    assert not table.cell("telepathy", "ddp").is_proven
    assert [error.where for error in table.incompatibility_errors(["telepathy"], ["zero1"])] == ["telepathy"]
    assert table.incompatibility_errors(["telepathy"], table.columns_of(Layout(engine="single"))) == []


def test_the_planner_and_the_table_know_the_same_optimizers() -> None:
    assert PLANNED.keys() <= table.SETTINGS.keys() | table.ONLY_ON_ACCELERATORS


def test_every_proven_setting_can_be_drawn() -> None:
    drawable = {column for layout in LAYOUTS for column in Case(layout=layout).columns}
    proven = [one for one in table.every_cell(table.SETTINGS) if one.proven_by == table.EQUIVALENT]
    assert {one.column for one in proven} <= drawable
    assert {*METHODS, *SWITCHES, *OPTIMIZERS} | {one.setting for one in proven} <= SETTINGS.keys()


def _drawn(count: int, seed: int) -> list[Case]:
    draw = random.Random(seed)
    layouts = [name for name in LAYOUTS if name != "single"]
    found: dict[str, Case] = {}
    while len(found) < count:
        groups = (METHODS, SWITCHES, OPTIMIZERS)
        settings = tuple(draw.choice(group) for group in groups if draw.random() < 0.5) or (draw.choice(METHODS),)
        case = Case(layout=draw.choice(layouts), settings=settings, accumulation=draw.choice((1, 2)))
        # Rounded inputs turn the last bit into whole codes, and have a test of their own.
        if not (is_proven(case) and {"qat_inputs", "qat_ranges"} & set(settings)):
            found[case.name] = case
    return list(found.values())


def _outcome(case: Case, record: Record, reference: Record) -> tuple[str, str]:
    """Return `equal`, `refused`, `late` (refused after a step), `off` or `broken`, and what to say about it."""
    if "refused" in record:
        return ("late" if record["steps"] else "refused"), record["refused"]
    if "losses" not in record or "losses" not in reference:
        return "broken", record.get("error") or f"the reference: {reference}"
    pairs = zip(record["losses"], reference["losses"], strict=True)
    difference = max(abs(own - expected) for own, expected in pairs)
    return ("equal" if difference <= loss_tolerance(case) else "off"), f"{difference:.1e}"


@pytest.mark.distributed
@pytest.mark.full
def test_drawn_combinations_match_one_process_or_are_rejected(
    deepspeed_cpu_ops: None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """What the table rejects is rejected before the first step, and what it proves is equal.

    Several proven settings may reject one another.
    """
    drawn = _drawn(request.config.getoption("--draw"), request.config.getoption("--seed"))
    references = [reference_of(case) for case in drawn if is_proven(case)]
    records = records_of([*references, *drawn], tmp_path, Path(__file__).with_name("runs.py"))
    wrong: dict[str, Any] = {}
    for case in drawn:
        found, said = _outcome(case, records[case.name], records.get(reference_of(case).name, {}))
        allowed = {"equal", "refused"} if len(case.settings) > 1 else {"equal"}
        if found not in (allowed if is_proven(case) else {"refused"}):
            wrong[case.name] = (found, said)
        print(f"{case.name}: {found} {said.splitlines()[-1][:160] if said else ''}")
    assert not wrong
