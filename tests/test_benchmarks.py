"""The pure parts of `benchmarks/gpu_memory.py`: its grid, its predictions, and the figures of an H100."""

from __future__ import annotations

import statistics
from dataclasses import replace

import gpu_memory
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
