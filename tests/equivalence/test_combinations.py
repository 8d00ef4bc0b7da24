"""The table of combinations: nothing in it is open, and what is drawn of it trains as one process does or is refused.

`pytest tests/equivalence/test_combinations.py --draw 50 --seed 7` draws fifty layouts with settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equivalence.combinations import ALL_LAYOUTS, METHODS, OPTIMIZERS, SETTINGS, SWITCHES, Combination
from equivalence.drawn import drawn, outcome, records_of, verdict
from shardwright.ds_configs.legality import combinations as table
from shardwright.ds_configs.specs.job import OPTIMIZERS as PLANNED
from shardwright.ds_configs.specs.strategy import Strategy

REPOSITORY = Path(__file__).parents[2]


def test_every_pair_is_proven_by_a_test_that_exists_or_refused_with_a_reason() -> None:
    for one in table.every_cell():
        assert bool(one.proven_by) != bool(one.reason), one
        assert not one.proven_by or (REPOSITORY / one.proven_by).is_file(), one


def test_no_pair_stands_twice() -> None:
    pairs = [pair for pair, _ in table._cells()]
    assert len(pairs) == len(set(pairs))
    assert {setting for setting, _ in pairs} <= table.SETTINGS.keys()
    assert {column for _, column in pairs} <= table.COLUMNS.keys()


def test_an_unknown_setting_is_refused_wherever_there_is_more_than_one_process() -> None:
    assert not table.cell("telepathy", "ddp").is_proven
    assert [fault.where for fault in table.incompatibility_faults(["lomo"], ["zero1"])] == ["lomo"]
    assert table.incompatibility_faults(["lomo"], table.columns_of(Strategy(engine="single"))) == []


def test_the_planner_and_the_table_know_the_same_optimizers() -> None:
    assert PLANNED.keys() <= table.SETTINGS.keys() | table.ONLY_ON_ACCELERATORS


def test_everything_that_the_runs_below_prove_can_be_drawn() -> None:
    assert {*METHODS, *SWITCHES, *OPTIMIZERS} == SETTINGS.keys()
    drawable = {column for layout in ALL_LAYOUTS for column in Combination(layout=layout, settings=()).columns}
    wanted = {one.column for one in table.every_cell() if one.proven_by == table.DRAWN}
    assert wanted <= drawable
    assert {one.setting for one in table.every_cell() if one.proven_by == table.DRAWN} <= SETTINGS.keys()


@pytest.mark.distributed
def test_what_is_drawn_trains_as_one_process_does_or_is_refused(
    deepspeed_cpu_ops: None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    chosen = drawn(request.config.getoption("--draw"), request.config.getoption("--seed"))
    references = [one.reference() for one in chosen if one.is_proven]
    records = records_of([*references, *chosen], tmp_path)
    wrong: dict[str, Any] = {}
    for one in chosen:
        reference = records.get(one.reference().name, {})
        found, said = outcome(one, records[one.name], reference)
        if not verdict(one, found):
            wrong[one.name] = (found, said)
        print(f"{one.name}: {found} {said.splitlines()[-1][:160] if said else ''}")
    assert not wrong
