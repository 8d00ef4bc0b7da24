"""What a run on ranks must have in common with the run of one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from equivalence.cases import LAYOUTS, WEIGHT_TOLERANCE, Case
from equivalence.records import Record
from equivalence.settings import loss_tolerance, reference_of
from safetensors.torch import load_file

EXACT = 2e-6
"""Largest difference of an evaluation's loss, in nats: one number to six digits."""
NORM_TOLERANCE = 1e-4
"""Of a gradient norm, over that."""
UNEQUAL = ("stopped_early", "muon", "bf16", "dropout", "drawing", "other_dropout")
"""Settings whose runs have rounding or random numbers of their own: only losses are compared, if anything."""
PROBES = ("probe", "probe_adam")
"""Settings with which one process sees the micro-batches of both ranks, of other lengths."""


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))


def assert_equal(case: Case, records: Mapping[str, Record], directory: Path) -> None:
    """Compare losses, gradient norms, rates, evaluations, counts, events and weights of a case and of one process."""
    record, reference = records[case.name], records[reference_of(case).name]
    assert "losses" in record and "losses" in reference, (record, reference)
    assert record["world_size"] == LAYOUTS[case.layout].world_size
    assert record["held"] <= reference["held"] * (0.8 if case.full_layout.tp > 1 else 1)
    assert record.get("differing", []) == []
    if "teacher" in record:
        sharded = {"teacher_sharded", "teacher_offloaded"} & set(case.settings)
        assert record["teacher"]["share"] == pytest.approx(0.5 if sharded else 1.0, rel=0.01)
        assert not record["teacher"]["changes"]
        assert not record["teacher"]["replaces linear"] or "zero3" in case.columns
    if "whole" in record:
        assert record["losses"] == record["whole"]
    if {"drawing", "other_dropout"} & set(case.settings):
        return
    tolerance, probes = loss_tolerance(case), set(case.settings) & set(PROBES)
    assert record["losses"] == pytest.approx(reference["losses"], rel=0, abs=tolerance)
    if "resumed" not in case.settings:
        assert record["train_loss"] == pytest.approx(reference["train_loss"], abs=tolerance)
    assert record["best"] == pytest.approx(reference["best"], abs=tolerance)
    assert record["eval_losses"] == pytest.approx(reference["eval_losses"], abs=tolerance)
    if set(case.settings) & set(UNEQUAL):
        return
    if record["grad_norms"] or not probes:
        assert record["grad_norms"] == pytest.approx(reference["grad_norms"], rel=NORM_TOLERANCE, abs=1e-6)
    assert record.get("kl_per_token", []) == pytest.approx(reference.get("kl_per_token", []), rel=1e-5)
    assert record["rates"] == pytest.approx(reference["rates"])
    if "evaluations" in record:
        expected = reference["evaluations"]
        for name, value in record["evaluations"].items():
            assert value == pytest.approx(expected[name], abs=EXACT) if name != "no labels" else value == expected[name]
        assert expected["held out"] == pytest.approx(reference["evaluation"]["loss"], abs=EXACT)
        assert expected["no labels"].startswith("eval_dataset: has no token with a label")
    for name, values in record["routing"].items():
        if values and reference["routing"]:
            assert values == pytest.approx(reference["routing"][name], rel=1e-5), name
    # The last bit of a trained weight can change its code.
    evaluation = {} if probes else record.get("evaluation", {})
    for name, value in evaluation.items():
        assert value == pytest.approx(reference["evaluation"][name], abs=tolerance), name
    # The collator of distillation on shared sequences pads to another length; rows with numbers as labels are removed.
    shares = "sp" in case.columns and "kl_per_token" in record
    if not shares and not {"numbers", "several"} & set(case.settings) and not probes:
        assert record["tokens"] == reference["tokens"]
    if "resumed" not in case.settings and not probes:
        assert record["events"] == reference["events"]
    weights, trained = (load_file(directory / one.name / "weights") for one in (case, reference_of(case)))
    # Stages save a tied head once.
    assert weights.keys() ^ trained.keys() <= ({"lm_head.weight"} if "tied" in case.settings else set())
    differences = {name: difference(weights[name], trained[name]) for name in weights.keys() & trained.keys()}
    assert {name: value for name, value in differences.items() if not value <= WEIGHT_TOLERANCE} == {}
    if any("pruning" in name for name in case.settings):
        zeros = [{name: int((each == 0).sum()) for name, each in one.items()} for one in (weights, trained)]
        assert zeros[0] == zeros[1] and sum(zeros[1].values()) > 0
