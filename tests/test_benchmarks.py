"""The pure parts of `benchmarks/gpu_memory.py`: its grid, what it computes from figures, and the table."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, replace

import families
import gpu_memory
import pytest
import torch
from gpu_memory import FEATURES, OPTIMIZERS, VALUES, GpuCase, GpuResult, case_of, cases, predicted_fields, stored, table
from shardwright.ds_configs.legality.rules import legality_errors
from shardwright.ds_configs.specs.hardware import parse_hardware

H100 = parse_hardware("1xH100-80GB")
T4 = parse_hardware("1xT4")
CASE = GpuCase(model="Llama-3.2-1B", layout="zero2", method="full", seq_len_tokens=2048, checkpointing=True)


def trained(**changes: object) -> GpuResult:
    values = {
        "case": CASE,
        "outcome": "trained",
        "predicted_phases": {"init": 99 * 10**9, "backward": 21 * 10**9, "step": 20 * 10**9},
        "predicted_low_bytes": 20 * 10**9,
        "predicted_peak_bytes": 22 * 10**9,
        "predicted_high_bytes": 24 * 10**9,
        "predicted_fit": "fits",
        "allocated_phases": {"backward": 20 * 10**9, "step": 18 * 10**9, "other": 50 * 10**9},
        "reserved_peak_bytes": 21 * 10**9,
        "context_bytes": 10**9 // 2,
        "predicted_seconds": 0.9,
        "phase_seconds": {"forward": 0.25, "backward": 0.5},
    }
    return GpuResult(**(values | changes))


def test_grid_is_complete_and_named_once():
    every = cases()
    grid = [case for case in every if not case.features and case.optimizer == "adamw_torch_fused"]
    grid = [case for case in grid if case.model in VALUES["model"] and case.method in VALUES["method"]]
    assert len(grid) == 3 * 5 * 2 * 2 * 2
    assert len(every) == len({case.name for case in every})
    assert {feature for case in every for feature in case.features} == set(FEATURES)
    assert {case.optimizer for case in every} == {"adamw_torch_fused", *OPTIMIZERS}
    for case in every:
        assert case_of(json.loads(json.dumps(asdict(case)))) == case


def test_every_case_is_legal_and_predicted():
    for case in cases():
        assert not legality_errors(case.spec(), case.strategy(), case.job(), H100), case.name
        predicted = case.predicted(H100)
        if case.method == "full" and case.layout == "zero2":
            states = 16 * case.spec().parameter_count
            assert predicted.allocated_bytes > states, "weights, gradients, fp32 copy and two moments"
        if case.layout == "zero3+offload" and case.checkpointing:
            assert predicted.allocated_bytes < predicted.high_bytes
            assert predicted.allocated_bytes < replace(case, layout="zero3").predicted(H100).allocated_bytes


def test_shapes_are_those_of_the_model_cards():
    parameters = {case.model: case.spec().parameter_count for case in cases()}
    layers = 2 * 218_112_000 + 2 * 128_256 * 4096 + 4096
    assert parameters == {
        "Qwen2.5-0.5B": 494_032_768,
        "Llama-3.2-1B": 1_235_814_400,
        "Llama-3B": 3_212_749_824,
        "2 layers of Llama-3.1-8B": layers,
    }


def test_transformers_reads_every_configuration():
    from transformers import AutoConfig, AutoModelForCausalLM

    for model in VALUES["model"]:
        case = replace(CASE, model=model)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.config), trust_remote_code=False)
        assert sum(parameter.numel() for parameter in built.parameters()) == case.spec().parameter_count


def test_a_small_gpu_is_reported_as_too_small():
    time = CASE.predicted_time(H100)
    assert predicted_fields(CASE.predicted(T4), time)["predicted_fit"] == "does not fit"
    assert predicted_fields(CASE.predicted(H100), time)["predicted_fit"] == "fits"
    predicted = CASE.predicted(H100)
    between = (predicted.low_bytes + predicted.high_bytes) // 2
    assert predicted_fields(replace(predicted, capacity_bytes=between), time)["predicted_fit"] == "may fit"


def test_figures_that_follow_from_others():
    result = trained()
    assert result.allocated_peak_bytes == 20 * 10**9, "of a step, not between steps"
    assert result.predicted_allocated_bytes == 21 * 10**9
    assert result.allocated_error == pytest.approx(0.05)
    assert result.used_bytes == 21_500_000_000
    assert result.used_error == pytest.approx(22 / 21.5 - 1)
    assert result.fragmentation == pytest.approx(1.05)
    assert result.step_seconds == pytest.approx(0.75)
    assert result.time_error == pytest.approx(0.9 / 0.75 - 1)
    assert CASE.name == "Llama-3.2-1B-zero2-full-2k-ckpt"


def test_a_file_of_lines_is_predicted_again(tmp_path):
    file = tmp_path / "measured.jsonl"
    measured = {"device": "NVIDIA H100 80GB HBM3", "allocated_phases": {}, "reserved_peak_bytes": 5, "context_bytes": 2}
    lines = [
        {"case": asdict(CASE), "outcome": "timed out"},
        {"case": asdict(CASE), "outcome": "out of memory", **measured},
        {"case": asdict(replace(CASE, layout="single")), "outcome": "failed: exit code 1"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    short, failed = stored(file)
    assert (short.outcome, short.predicted_fit, short.used_bytes, short.used_error) == (
        "out of memory",
        "fits",
        7,
        None,
    )
    assert (failed.case.layout, failed.predicted_fit, failed.used_bytes) == ("single", "", None)


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


def test_table():
    short = trained(outcome="out of memory", predicted_fit="may fit", allocated_phases={}, reserved_peak_bytes=None)
    missed = replace(short, predicted_fit="fits", outcome="out of memory")
    lucky = trained(predicted_fit="does not fit", predicted_high_bytes=21 * 10**9)
    text = table([trained(), short, missed, lucky, GpuResult(case=CASE, outcome="failed: a | b")])
    lines = text.splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert lines[2] == (
        "| Llama-3.2-1B-zero2-full-2k-ckpt | trained | fits | 20.0 | 21.0 | +5.0% | 21.0 | 1.050 | 0.500 | 21.5 | 22.0 "
        "| +2.3% | inside | 0.75 | 0.9 | +20.0% |"
    )
    assert "| outside |" in lines[5]
    assert "2 of 5 cases trained." in lines
    assert "Allocated: mean error 5.0%, worst 5.0%." in lines
    assert "Out of memory: 2, of which the plan said does not fit: 0, may fit: 1, fits: 1." in lines
    assert "Trained although the plan said that it does not fit: 1." in lines


def test_it_rejects_without_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_memory.main(["--limit", "1", "--into", str(tmp_path / "out.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "CUDA" in captured.err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("ends_early", [False, True])
def test_cases_run_in_processes_of_one_kind_until_all_are_done(monkeypatch, capsys, tmp_path, ends_early):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    file, launches = tmp_path / "figures.jsonl", []

    def launch(launch, *, timeout_seconds, on_line):
        asked = json.loads(launch.arguments[1])
        launches.append(len(asked))
        assert timeout_seconds == 9 * len(asked)
        with file.open("a", encoding="utf-8") as lines:
            for case in asked[: 1 if ends_early else None]:
                lines.write(json.dumps({"case": case, "outcome": "out of memory"}) + "\n")

    monkeypatch.setattr(gpu_memory, "launch_ranks", launch)
    only = "0.5B-(zero2|single)-full"
    assert gpu_memory.main(["--only", only, "--into", str(file), "--seconds", "9"]) == 0
    assert launches == ([4, 3, 2, 1] * 2 if ends_early else [4, 4])
    assert {result.case.name for result in stored(file)} == {case.name for case in cases(only)}
    assert "0 of 8 cases trained." in capsys.readouterr().out


def test_family_page_counts_results_and_groups_reasons() -> None:
    rule = "layers carry a state or an index along the sequence, which would restart in every shard"
    rows = [(f"Class{n}", "sp", "refused", f"sp = 2: kind{n} {rule}; use sp = 1") for n in range(families.FREQUENT)]
    rows += [
        ("Class9", "sp", "refused", "model = 'X': has an attention sink; use another"),
        ("Class9", "tp", "passes", "0"),
    ]
    rows += [("Class8", "quantize", "refused", "the checkpoint did not pass verification: logits differ")]
    rows += [("Class7", "build", "no", "ValueError: too large")]
    page, details = families.page(rows), families.details(rows)
    assert f"The {families.FREQUENT + 3} causal" in page and f"{families.FREQUENT + 2} of them were built" in page
    assert f"| rejected before work | 0 | 0 | 0 | {families.FREQUENT + 1} | 0 | 0 |" in page
    assert "| rejected by the check | 0 | 0 | 1 | 0 | 0 | 0 |" in page and "| passes | 0 | 0 | 0 | 0 | 1 | 0 |" in page
    assert f"| sp | {families.FREQUENT} | {rule} |" in page and "The other 2 rejections have 2 reasons." in page
    assert "| Class9 |  |  |  | rejected" in details and "kind0" in details and "- Class7: ValueError" in details
