"""The pure parts of `benchmarks/gpu_memory.py`: its grid, its predictions, and the figures of an H100."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, replace

import families
import gpu_memory
import torch
from gpu_memory import FEATURES, OPTIMIZERS, VALUES, GpuCase, case_of, cases, predicted_fields, stored, table
from shardwright.ds_configs.legality.rules import legality_errors
from shardwright.ds_configs.specs.hardware import parse_hardware

H100 = parse_hardware("1xH100-80GB")
T4 = parse_hardware("1xT4")
CASE = GpuCase(model="Llama-3.2-1B", layout="zero2", method="full", seq_len_tokens=2048, checkpointing=True)


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


def test_it_rejects_without_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_memory.main(["--limit", "1", "--into", str(tmp_path / "out.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "CUDA" in captured.err
    assert not (tmp_path / "out.json").exists()


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
