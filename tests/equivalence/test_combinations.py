"""The table of combinations: every pair is decided, and drawn combinations match one process or are rejected.

`pytest tests/equivalence/test_combinations.py --draw 50 --seed 7` draws fifty layouts with settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equivalence.combinations import ALL_LAYOUTS, METHODS, OPTIMIZERS, SETTINGS, SWITCHES, Combination
from equivalence.drawn import drawn, outcome, verdict
from equivalence.records import records_of
from shardwright.ds_configs.legality import combinations as table
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.optimizers import OPTIMIZERS as PLANNED

REPOSITORY = Path(__file__).parents[2]
FIXED = [
    Combination(layout="tp2-zero1", settings=("frozen",)),
    Combination(layout="ep2-zero2", settings=("global_pruning",)),
    Combination(layout="ddp", settings=("balance_loss",), accumulation=2),
    Combination(layout="ddp", settings=("last_batch",)),
    Combination(layout="zero3", settings=("balance_loss", "label_smoothing"), accumulation=2),
    Combination(layout="fsdp2", settings=("adafactor",), accumulation=2),
    Combination(layout="fsdp2", settings=("muon",)),
    Combination(layout="zero2", settings=("muon",)),
]
"""Combinations that once failed or computed something else; they always run."""
STILL_REJECTED = [Combination(layout="tp2-pp2-zero1", settings=("qat_inputs",))]
"""Combinations whose settings are proven separately but not together."""
REJECTED = {
    ("adafactor", "zero1"): "other updates",
    ("dropout", "cp"): "DTensors",
    ("balance_loss", "cp"): "only a part",
    ("learned_scales", "tp"): "neither shards nor keeps the scales",
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
    assert [error.where for error in table.incompatibility_errors(["lomo"], ["zero1"])] == ["lomo"]
    assert table.incompatibility_errors(["lomo"], table.columns_of(Layout(engine="single"))) == []


def test_the_planner_and_the_table_know_the_same_optimizers() -> None:
    assert PLANNED.keys() <= table.SETTINGS.keys() | table.ONLY_ON_ACCELERATORS


def test_every_proven_setting_can_be_drawn() -> None:
    assert {*METHODS, *SWITCHES, *OPTIMIZERS} == SETTINGS.keys()
    drawable = {column for layout in ALL_LAYOUTS for column in Combination(layout=layout, settings=()).columns}
    wanted = {one.column for one in table.every_cell() if one.proven_by == table.DRAWN}
    assert wanted <= drawable
    assert {one.setting for one in table.every_cell() if one.proven_by == table.DRAWN} <= SETTINGS.keys()


@pytest.mark.distributed
def test_drawn_combinations_match_one_process_or_are_rejected(
    deepspeed_cpu_ops: None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    drawn_now = drawn(request.config.getoption("--draw"), request.config.getoption("--seed"))
    chosen = list(dict.fromkeys([*FIXED, *STILL_REJECTED, *drawn_now]))
    assert all(one.is_proven for one in FIXED) and not any(one.is_proven for one in STILL_REJECTED)
    references = [one.reference() for one in chosen if one.is_proven]
    records = records_of([*references, *chosen], tmp_path, Path(__file__).with_name("drawn_worker.py"))
    wrong: dict[str, Any] = {}
    for one in chosen:
        reference = records.get(one.reference().name, {})
        found, said = outcome(one, records[one.name], reference)
        if not verdict(one, found):
            wrong[one.name] = (found, said)
        print(f"{one.name}: {found} {said.splitlines()[-1][:160] if said else ''}")
    assert not wrong
