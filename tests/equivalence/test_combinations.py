"""The table of combinations: every pair is decided."""

from __future__ import annotations

from pathlib import Path

import pytest
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
