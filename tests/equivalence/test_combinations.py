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
MENDED = [
    Combination(layout="zero3", settings=("moving_average_teacher",)),
    Combination(layout="tp2-zero1", settings=("frozen",)),
    Combination(layout="ep2-zero2", settings=("global_pruning",)),
    Combination(layout="ddp", settings=("balance_loss",), accumulation=2),
    Combination(layout="ddp", settings=("last_batch",)),
]
"""Pairs that once trained something else, or failed, run beside those that are drawn."""
STILL_REFUSED = [Combination(layout="tp2-pp2-zero1", settings=("qat_inputs",))]
"""Pairs that are proven alone, and were taken where one hid behind the other."""
REFUSED = {
    ("adafactor", "zero1"): "another optimizer",
    ("dropout", "cp"): "DTensors",
    ("balance_loss", "cp"): "a part of it",
    ("learned_scales", "tp"): "parameters of layers",
    ("label_smoothing", "fsdp2"): "renames the class",
    ("sgd", "zero_offload"): "CPU Adam",
    ("moving_average_teacher", "ep"): "divided or renamed",
}
"""Pairs that are silent or fail in a library, and what is said of them."""


def test_every_pair_is_proven_by_a_test_that_exists_or_refused_with_a_reason() -> None:
    for one in table.every_cell():
        assert bool(one.proven_by) != bool(one.reason), one
        assert not one.proven_by or (REPOSITORY / one.proven_by).is_file(), one


def test_no_pair_stands_twice() -> None:
    pairs = [pair for pair, _ in table._cells()]
    assert len(pairs) == len(set(pairs))
    assert {setting for setting, _ in pairs} <= table.SETTINGS.keys()
    assert {column for _, column in pairs} <= table.COLUMNS.keys()


@pytest.mark.parametrize(("pair", "words"), REFUSED.items(), ids=map("-".join, REFUSED))
def test_what_is_silent_in_a_library_is_refused_with_what_was_seen(pair: tuple[str, str], words: str) -> None:
    assert words in table.cell(*pair).reason
    (fault,) = table.incompatibility_faults([pair[0]], [pair[1]])
    assert words in fault.rule


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
def test_what_is_mended_or_drawn_trains_as_one_process_does_or_is_refused(
    deepspeed_cpu_ops: None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    drawn_now = drawn(request.config.getoption("--draw"), request.config.getoption("--seed"))
    chosen = list(dict.fromkeys([*MENDED, *STILL_REFUSED, *drawn_now]))
    assert all(one.is_proven for one in MENDED) and not any(one.is_proven for one in STILL_REFUSED)
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
