"""Every parameter of the installed Trainer and of TRL's trainers is decided under every layout."""

from __future__ import annotations

import inspect
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from shardwright.ds_configs.legality import trainer_parameters as table
from shardwright.ds_configs.legality.combinations import COLUMNS

REPOSITORY = Path(__file__).parents[3]
TRL_TRAINERS = ("SFT", "DPO", "Reward", "KTO", "GKD")


def trainer_class(name: str) -> Any:
    """Return a trainer of TRL, which moves those that are not stable to a package of their own."""
    kind = f"{name}Trainer"
    try:
        return getattr(import_module("trl"), kind)
    except AttributeError:
        return getattr(import_module(f"trl.experimental.{name.lower()}"), kind)


def undecided(kind: Any) -> list[tuple[str, str]]:
    parameters = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    pairs = [(name, layout) for name in parameters for layout in table.LAYOUTS]
    return [pair for pair in pairs if pair not in table.TABLE]


def test_every_parameter_of_the_trainer_is_decided() -> None:
    from transformers import Trainer

    assert undecided(Trainer) == []


@pytest.mark.needs("trl")
@pytest.mark.parametrize("name", TRL_TRAINERS)
def test_every_parameter_of_a_trl_trainer_is_decided(name: str) -> None:
    assert undecided(trainer_class(name)) == []


def test_each_pair_is_honored_by_a_test_or_rejected_with_a_fix() -> None:
    assert table.TABLE.keys() == set(product(table.PARAMETERS, (table.SINGLE, *COLUMNS)))
    for cell in table.TABLE.values():
        assert bool(cell.proven_by) != bool(cell.reason and cell.fix), cell
        assert not cell.proven_by or (REPOSITORY / cell.proven_by).is_file(), cell


def test_rejection_names_parameter_layout_and_fix() -> None:
    assert table.parameter_errors(table.PARAMETERS, ()) == [], "one process rejects nothing"
    (error,) = table.parameter_errors(["optimizers", "callbacks"], ["pp"])
    assert error.where == "optimizers" and "pipeline" in error.rule and "optimizer_cls_and_kwargs" in error.fix
