"""The pure parts of `benchmarks/gpu_memory.py`: its grid, what it computes from figures, and the table."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import families
import gpu_memory
import pytest
import torch
from gpu_memory import VALUES, GpuCase, GpuResult, cases, predicted_fields, record, result_of, table
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
    }
    return GpuResult(**(values | changes))


def test_grid_is_complete_and_named_once():
    every = cases()
    assert len(every) == len({case.name for case in every}) == 3 * 4 * 2 * 2 * 2
    for name, values in VALUES.items():
        assert {getattr(case, name) for case in every} == set(values)


def test_cases_are_chosen_by_name_and_number():
    assert [case.name for case in cases("^Llama-3B-zero3.offload-lora", 2)] == [
        "Llama-3B-zero3+offload-lora-2k-ckpt",
        "Llama-3B-zero3+offload-lora-2k-stored",
    ]
    assert not cases("no such case")


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_case_is_legal_and_predicted(case):
    assert not legality_errors(case.spec(), case.strategy(), case.job(), H100)
    predicted = case.predicted(H100)
    trained_bytes = 16 * case.spec().parameter_count
    if case.method == "full" and case.layout == "zero2":
        assert predicted.allocated_bytes > trained_bytes, "weights, gradients, fp32 copy and two moments"
    if case.layout == "zero3+offload" and case.checkpointing:
        assert predicted.allocated_bytes < case.predicted(H100).high_bytes
        assert predicted.allocated_bytes < replace(case, layout="zero3").predicted(H100).allocated_bytes


def test_shapes_are_those_of_the_model_cards():
    parameters = {case.model: case.spec().parameter_count for case in cases()}
    assert parameters == {"Qwen2.5-0.5B": 494_032_768, "Llama-3.2-1B": 1_235_814_400, "Llama-3B": 3_212_749_824}


def test_transformers_reads_every_configuration():
    from transformers import AutoConfig, AutoModelForCausalLM

    for model in VALUES["model"]:
        case = replace(CASE, model=model)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case.config), trust_remote_code=False)
        assert sum(parameter.numel() for parameter in built.parameters()) == case.spec().parameter_count


def test_a_small_gpu_is_reported_as_too_small():
    assert predicted_fields(CASE.predicted(T4))["predicted_fit"] == "does not fit"
    assert predicted_fields(CASE.predicted(H100))["predicted_fit"] == "fits"
    predicted = CASE.predicted(H100)
    between = (predicted.low_bytes + predicted.high_bytes) // 2
    assert predicted_fields(replace(predicted, capacity_bytes=between))["predicted_fit"] == "may fit"


def test_figures_that_follow_from_others():
    result = trained()
    assert result.allocated_peak_bytes == 20 * 10**9, "of a step, not between steps"
    assert result.predicted_allocated_bytes == 21 * 10**9
    assert result.allocated_error == pytest.approx(0.05)
    assert result.used_bytes == 21_500_000_000
    assert result.used_error == pytest.approx(22 / 21.5 - 1)
    assert result.fragmentation == pytest.approx(1.05)
    written = json.loads(json.dumps(record(result)))
    assert written["case"] == asdict(CASE)
    assert written["name"] == "Llama-3.2-1B-zero2-full-2k-ckpt"
    assert written["fragmentation"] == pytest.approx(1.05)


def test_what_a_process_leaves_behind_when_it_ends_early():
    values = {"device": "GPU", **predicted_fields(CASE.predicted(H100))}
    stopped = result_of(CASE, dict(values), "timed out")
    assert (stopped.outcome, stopped.predicted_fit, stopped.used_bytes) == ("timed out", "fits", None)
    short = result_of(CASE, {**values, "outcome": "out of memory", "reserved_peak_bytes": 5, "context_bytes": 2}, "")
    assert (short.outcome, short.used_bytes, short.used_error) == ("out of memory", 7, None)
    assert result_of(CASE, {}, "").outcome.startswith("failed")


def test_table():
    short = trained(outcome="out of memory", predicted_fit="may fit", allocated_phases={}, reserved_peak_bytes=None)
    missed = replace(short, predicted_fit="fits", outcome="out of memory")
    lucky = trained(predicted_fit="does not fit", predicted_high_bytes=21 * 10**9)
    text = table([trained(), short, missed, lucky, GpuResult(case=CASE, outcome="failed: a | b")])
    lines = text.splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert lines[2] == (
        "| Llama-3.2-1B-zero2-full-2k-ckpt | trained | fits | 20.0 | 21.0 | +5.0% | 21.0 | 1.050 | 0.500 | 21.5 | 22.0 "
        "| +2.3% | inside |"
    )
    assert lines[5].endswith("| outside |")
    assert "2 of 5 cases trained." in lines
    assert "Allocated: mean error 5.0%, worst 5.0%." in lines
    assert "Out of memory: 2, of which the plan said does not fit: 0, may fit: 1, fits: 1." in lines
    assert "Trained although the plan said that it does not fit: 1." in lines


def test_it_rejects_without_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_memory.main(["--limit", "1", "--json", str(tmp_path / "out.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "CUDA" in captured.err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("arguments", [["--only", "no such case"], ["--only", "("], ["--limit", "0"]])
def test_it_rejects_what_chooses_nothing(arguments):
    with pytest.raises(SystemExit) as error:
        gpu_memory.main(arguments)
    assert error.value.code == 2


def test_cases_run_one_after_the_other(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_memory, "measure", lambda case, *, limit_seconds: trained(case=case))
    file = tmp_path / "figures.json"
    assert gpu_memory.main(["--only", "0.5B-zero2-full", "--json", str(file)]) == 0
    assert [entry["name"] for entry in json.loads(file.read_text(encoding="utf-8"))] == [
        case.name for case in cases("0.5B-zero2-full")
    ]
    assert "4 of 4 cases trained." in capsys.readouterr().out


def test_the_process_of_a_case_is_the_only_rank_on_one_gpu():
    environment = gpu_memory.gpu_environment({"CUDA_VISIBLE_DEVICES": "3,4"})
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "1")
    assert gpu_memory.gpu_environment({})["CUDA_VISIBLE_DEVICES"] == "0"


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
