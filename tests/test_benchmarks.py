"""Programs for GPUs: grid, predictions and stored figures, and what of the suite runs without an accelerator."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path

import gpu_memory
import gpu_rates
import gpu_suite
import kd_memory
import pytest
from gpu_memory import cases, stored, table
from shardwright.ds_configs.legality.rules import legality_errors
from shardwright.ds_configs.specs.hardware import parse_hardware

H100 = parse_hardware("1xH100-80GB")


def test_every_case_is_legal_and_predicted():
    for case in cases():
        assert not legality_errors(case.spec(), case.full_layout(), case.job(), H100), case.name
        predicted = case.predicted(H100)
        if case.method == "full" and case.layout == "zero2":
            states = 16 * case.spec().parameter_count
            assert predicted.allocated_bytes > states, "weights, gradients, fp32 copy and two moments"
        if case.layout == "zero3+offload" and case.checkpointing:
            assert predicted.allocated_bytes < predicted.high_bytes
            assert predicted.allocated_bytes < replace(case, layout="zero3").predicted(H100).allocated_bytes


def test_runs_on_an_h100_are_predicted():
    results = stored(gpu_memory.MEASURED)
    assert table(results) in gpu_memory.DOCUMENT.read_text(encoding="utf-8"), "run gpu_memory.py --write"
    trained = [result for result in results if result.trained]
    assert len(trained) >= 12 and len(results) - len(trained) == 1
    for result in trained:
        assert abs(result.allocated_error) <= 0.03, result.case.name
    assert statistics.mean(abs(result.allocated_error) for result in trained) < 0.01
    # Nothing is fitted to these times; the smallest run waits for the host.
    assert statistics.mean(abs(result.time_error) for result in trained) < 0.1
    assert max(abs(result.time_error) for result in trained) < 0.25


def test_every_rate_is_measured_without_an_accelerator_too():
    operations = list(gpu_rates.operations("cpu", small=True))
    rates = [gpu_rates.measure(operation, "cpu") for operation in operations]
    assert len({rate.operation for rate in rates if rate and rate.per_second > 0}) == len(operations) >= 9
    product = next(rate for rate in rates if rate.operation == "product")
    assert abs(product.per_second * product.seconds - 2 * 64**3) < 1


def test_a_part_of_the_suite_that_fails_or_hangs_loses_only_its_own_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hangs = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']).wait()"
    )
    parts = {
        name: gpu_suite.Part(arguments=(sys.executable, "-c", code), limit_seconds=limit)
        for name, code, limit in (
            ("rates", "print('| a |')", 60),
            ("memory", hangs, 1),
            ("distillation", "print('| b |'); raise SystemExit(1)", 60),
        )
    }
    outcomes = gpu_suite.run(parts, tmp_path / "suite.json")
    assert [outcome.result for outcome in outcomes.values()] == ["passed", "too slow", "failed"]
    assert outcomes["memory"].seconds < 30
    page = gpu_suite.DOCUMENT.read_text(encoding="utf-8")
    copy = tmp_path / "gpu.md"
    copy.write_text(page, encoding="utf-8")
    monkeypatch.setattr(gpu_suite, "DOCUMENT", copy)
    assert gpu_suite.main(["--stored", str(tmp_path / "suite.json")]) == 1
    shown = copy.read_text(encoding="utf-8")
    assert "<!-- suite: rates -->\n| a |\n<!--" in shown and "| b |" not in shown
    assert sum(part.limit_seconds for part in gpu_suite.parts(tmp_path).values()) <= 540
    assert all(f"<!-- suite: {name} -->" in page for name in gpu_suite.parts(tmp_path))
    selected = {case.name for case in gpu_memory.cases(gpu_suite.MEMORY_CASES)}
    assert len(selected) == 6


def test_every_divergence_is_compared_with_fp64():
    errors = kd_memory.equality(kd_memory.KdCase(rows=20, columns=50, hidden_width=8, dtype="float32"), "cpu")
    assert len(errors) == 12 and max(errors.values()) < kd_memory.LARGEST_ERROR
