"""What quantization-aware training gains over quantizing afterwards, on a small Llama that was trained on real text.

The full comparison is in docs/measurements/qat.md; here it is short. Margins were set after this was measured, wide of
what was found.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import qat_comparison
import qat_overhead
import torch
from qat_overhead import Run
from qat_ways import WAYS, Comparison, compare_qat
from qat_ways_report import LABELS, comparison_page, comparison_table, draw_comparison, verdicts
from qat_ways_result import Measurement
from qat_ways_runs import Job, _qat_callback
from shardwright.ds_configs.quantization.scheme import scheme_named
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.huggingface_hub.push import title_of
from shardwright.trainers.reports.runs import checkpoint_facts
from small_llama import shared_llama
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.once]
CACHE = pytest.mark.needs("rounded-cache")

STEPS, BATCH_SIZE, LEARNING_RATE, ROWS = 60, 2, 4e-4, 32
"""Sixty steps brought back 0.69 of what rounding loses, 17.9 standard errors ahead of it; half, and five, are asked."""


def samples(rows_NS: torch.Tensor) -> list[dict[str, list[int]]]:
    return [{"input_ids": row.tolist()} for row in rows_NS]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return shared_llama(tmp_path_factory)


@pytest.fixture(scope="module")
def measured(llama) -> Comparison:
    return compare_qat(
        llama.copy().requires_grad_(True),
        "W2A16",
        train_samples=samples(llama.train_NS),
        evaluation_samples=samples(llama.evaluation_NS[:ROWS]),
        steps=STEPS,
        learning_rate=LEARNING_RATE,
        seeds=(0,),
        batch_size=BATCH_SIZE,
        ways=("qat-learned",),
        qat={"stored_dtype": "bfloat16"},
    )


@pytest.mark.needs("llmcompressor")
def test_learned_scales_recover_most_of_what_rounding_loses(measured):
    """Margin: half of the gap. How they compare with GPTQ takes more steps and seeds: benchmarks/qat_comparison.py."""
    learned = measured.recovered("qat-learned")
    assert learned is not None
    assert learned.value > 0.5
    rounding = measured.advantage("qat-learned", "ft-rtn")
    assert rounding.value > 5 * rounding.standard_error > 0


@pytest.mark.needs("llmcompressor")
def test_the_exported_model_is_the_trained_one(measured):
    """Embeddings and norms are rounded to bf16 beside the packed codes; that is all."""
    assert measured.export_difference("qat-learned") < 1e-3
    assert measured.export_difference("ft") is None


@pytest.mark.needs("llmcompressor")
def test_rounding_adds_the_work_on_one_matrix_and_no_copy_of_the_model(measured, llama):
    """3.4 of the largest matrices were found, and parameters of the scales with their two moments."""
    matrices = [4 * weight.numel() for weight in llama.model.model.layers.parameters() if weight.ndim == 2]
    added = measured.peak_bytes("qat-learned") - measured.peak_bytes("ft")
    assert added <= 5 * max(matrices) < 0.8 * sum(matrices)


def measurement(way, seed, *losses, exported=None, seconds=1.0, peak_bytes=1000):
    return Measurement(
        way=way,
        seed=seed,
        loss_sums=tuple(map(float, losses)),
        exported_loss_sums=exported,
        seconds=seconds,
        seconds_per_step=seconds / 10,
        peak_bytes=peak_bytes,
    )


def made(*more: Measurement) -> Comparison:
    """Three windows of 10, 20 and 10 tokens; rounding costs 4, 8 and 4.8 nats, GPTQ a half of that."""
    return Comparison(
        scheme="W2A16",
        steps=10,
        learning_rate=1e-3,
        seeds=(0, 1),
        token_counts=(10, 20, 10),
        untrained_loss_sums=(40.0, 80.0, 40.0),
        measurements=(
            *(measurement("ft", seed, 20, 40, 20) for seed in (0, 1)),
            *(measurement("ft-rtn", seed, 24, 48, 24.8) for seed in (0, 1)),
            *(measurement("ft-gptq", seed, 22, 44, 22.4) for seed in (0, 1)),
            *more,
        ),
    )


QAT = (
    measurement("qat", 0, 21, 42, 21.2, exported=(21.0, 42.0, 21.24), peak_bytes=1040),
    measurement("qat", 1, 20.6, 41.2, 20.72, exported=(20.6, 41.2, 20.72)),
)


def test_shares_and_their_errors():
    found = made(*QAT)
    assert found.ways == ("ft", "ft-rtn", "ft-gptq", "qat")
    assert found.recovered("ft-rtn").value == 0
    assert found.recovered("ft").value == 1
    assert found.recovered("ft-gptq").value == pytest.approx(0.5)
    assert found.recovered("ft-gptq").standard_error == pytest.approx(0, abs=1e-12), "the same share of every window"
    assert found.recovered("qat", 0).value == pytest.approx(1 - 4.2 / 16.8)
    assert found.recovered_by_seed("qat") == pytest.approx((0.75, 0.85))
    assert found.recovered("qat").value == pytest.approx(0.8)
    assert found.excess("ft-rtn").value == pytest.approx(16.8 / 40)
    assert found.advantage("qat", "ft-gptq").value == pytest.approx((8.4 - 3.36) / 40)
    assert found.perplexity("ft").value == pytest.approx(torch.tensor(2.0).exp().item())
    assert found.perplexity(None).value == pytest.approx(torch.tensor(4.0).exp().item())
    assert found.export_difference("qat") == pytest.approx(0.04 / 40)
    assert (found.peak_bytes("qat"), found.peak_bytes("ft")) == (1040, 1000)


def test_a_configuration_is_compared_only_with_its_own_seed():
    other = measurement("ft", 2, 0, 0, 0), measurement("ft-rtn", 2, 100, 200, 100.8)
    found = replace(made(QAT[0], *other), seeds=(0, 1, 2))
    assert found.recovered("qat").value == pytest.approx(0.75)
    assert found.excess("qat").value == pytest.approx(4.2 / 40)


def test_recovered_share_is_undefined_if_rounding_costs_nothing():
    alike = replace(made(), measurements=tuple(measurement(way, 0, 20, 40, 20) for way in ("ft", "ft-rtn", "qat")))
    assert alike.recovered("qat") is None
    assert alike.recovered_by_seed("qat") == ()
    assert any("no gap" in line for line in comparison_table(alike))


def test_table_words_and_picture(tmp_path):
    found = made(*QAT)
    lines = comparison_table(found)
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "before training",
        *(LABELS[way] for way in found.ways),
    ]
    assert "80.0 ± " in lines[-1] and "75, 85" in lines[-1]
    assert verdicts(found) == ["- QAT ends 126.0 ± 6.9 thousandths of a nat below FT → GPTQ, more than chance."]
    page = comparison_page(found, "picture.png")
    assert all(line in page for line in lines) and "![Gap recovered by each way](picture.png)" in page
    draw_comparison(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert Comparison.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_all_errors_are_reported_together(llama):
    with pytest.raises(UsageError) as error:
        compare_qat(
            llama.model,
            "FP8_DYNAMIC",
            train_samples=[],
            evaluation_samples=[],
            steps=0,
            learning_rate=0.0,
            seeds=(1, 1),
            batch_size=0,
            ways=("qat", "gptq"),
            calibration_samples=0,
            training={"max_steps": 5},
        )
    named = {config_error.where for config_error in error.value.errors}
    assert named >= {"steps", "learning_rate", "seeds", "batch_size", "ways", "calibration_samples", "training"}
    assert named >= {"train_samples", "evaluation_samples", "model", "scheme"}


ROWS_OF_TOKENS = [{"input_ids": [1, 2, 3, 4]}] * 4


def untrained_llama() -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


@pytest.mark.parametrize(
    ("qat", "reported"),
    [
        (
            {"nonsense": 5, "kv_cach": "fp8", "scheme": "W8A16"},
            ["fields are weight_rule, ranges", "did you mean kv_cache?", "is the same for every way"],
        ),
        ({"start_step": 2}, ["training ends at step 2, before anything is rounded"]),
        ({"bit_schedule": ((0, 8), (2, 4))}, ["before it reaches the 4 bits", "bits of learned scales"]),
    ],
)
def test_errors_of_a_configuration_are_found_before_training(qat, reported, monkeypatch):
    monkeypatch.setattr("qat_ways.run_all", lambda _: pytest.fail("training began"))
    model = untrained_llama()
    how = {"train_samples": ROWS_OF_TOKENS, "evaluation_samples": ROWS_OF_TOKENS, "learning_rate": 1e-3}
    with pytest.raises(UsageError) as error:
        compare_qat(model, "W4A16", steps=2, qat=qat, **how)
    errors = [str(config_error) for config_error in error.value.errors]
    assert len(errors) == len(reported) and all(
        part in config_error for part, config_error in zip(reported, errors, strict=True)
    )
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear, "the model stays as it is"


@pytest.mark.parametrize(
    ("scheme", "qat", "calibrates"),
    [
        pytest.param("W4A16", {"kv_cache": "fp8"}, True, marks=CACHE),
        pytest.param("W4A16", {"kv_cache": "int8", "ranges": "moving_average"}, False, marks=CACHE),
        ("W8A8_STATIC", {"ranges": "learned"}, True),
        ("W8A8_STATIC", {"ranges": "minmax"}, False),
        ("W4A16", {}, False),
    ],
)
def test_ranges_that_are_not_observed_are_calibrated(scheme, qat, calibrates):
    job = Job(
        model=untrained_llama(),
        scheme=scheme,
        train_samples=ROWS_OF_TOKENS,
        evaluation_samples=ROWS_OF_TOKENS,
        steps=2,
        learning_rate=1e-3,
        seeds=(0,),
        batch_size=1,
        ways=("qat",),
        calibration_samples=2,
        training={},
        qat=qat,
        distillation=None,
        export=False,
        on_progress=lambda _: None,
    )
    ranges = _qat_callback(job, "qat").prepare(None, job.model).ranges
    assert bool(ranges) == (scheme == "W8A8_STATIC" or "kv_cache" in qat)
    assert [found.scale is not None for found in ranges.values()] == [calibrates] * len(ranges)


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("models/llama-3.2/", "llama-3.2"),
        ("students/half-0.5B/config.json", "half-0.5B"),
        ("students/half.json", "half"),
    ],
)
def test_titles_of_model_cards_keep_the_full_name(model, title):
    assert title_of(model) == title


def test_a_relative_directory_is_titled_by_its_absolute_name(tmp_path, monkeypatch):
    (tmp_path / "model-1.5").mkdir()
    monkeypatch.chdir(tmp_path / "model-1.5")
    assert [title_of(name) for name in (".", "config.json")] == ["model-1.5"] * 2


def test_missing_comparisons_are_reported():
    scheme = scheme_named("W4A16")
    data = {"scheme": asdict(scheme) | {"format": scheme.format}, "quantized_layers": 14}
    facts = checkpoint_facts(data | {"weight_difference": 0.0, "logit_difference": None})
    assert [value for _, value in facts[-2:]] == ["0", "not compared"]


def test_the_document_shows_what_was_measured():
    """Table, picture and text come from runs of both benchmarks."""
    found, document = qat_comparison.stored(), qat_comparison.DOCUMENT.read_text(encoding="utf-8")
    assert qat_comparison.updated(document, found) == document
    assert qat_overhead.updated(document, qat_overhead.stored()) == document
    assert qat_comparison.PICTURE.read_bytes().startswith(b"\x89PNG")
    assert found.seeds == qat_comparison.SEEDS and found.steps == qat_comparison.STEPS
    assert set(found.ways) == set(WAYS)
    assert not qat_comparison.misses(found)
    for seed in found.seeds:
        assert found.recovered("qat", seed).value > found.recovered("ft-gptq", seed).value
    assert found.advantage("qat", "ft-gptq").is_significant
    assert found.advantage("qat-learned", "qat").value > 0
    assert not qat_overhead.misses(qat_overhead.stored())


def overhead_run(way: str, cpu_seconds: float, peak_bytes: int) -> Run:
    return Run(
        way=way,
        precision="fp32",
        wall_seconds=2 * cpu_seconds,
        cpu_seconds=cpu_seconds,
        peak_bytes=peak_bytes,
        resident_bytes=2 * peak_bytes,
        version="1",
    )


def test_overhead_is_in_units_of_the_plain_step():
    runs = [overhead_run("plain", 2.0, 10**8), overhead_run("Shardwright", 2.5, 104 * 10**6)]
    assert qat_overhead.misses(runs) == []
    shown = qat_overhead.table(runs).splitlines()
    assert shown[3] == "| fp32 | Shardwright | 2.50 (1.25) | 5.00 (1.25) | 104 (1.04) | 208 (1.04) |"
    assert shown[4] == "| fp32 | torchao | not installed |  |  |  |"
    slow = [*runs[:1], overhead_run("Shardwright", 2.7, 2 * 10**8)]
    assert qat_overhead.misses(slow) == ["fp32, cpu_seconds", "fp32, peak_bytes"]


@pytest.mark.parametrize("way", ["plain", "Shardwright"])
def test_overhead_is_measured(way):
    found = qat_overhead.measure(
        way, "fp32", steps=2, hidden_size=128, intermediate_size=256, layers=1, batch_size=1, seq_len=16
    )
    assert found.cpu_seconds > 0
    assert found.peak_bytes > 4 * 2 * qat_overhead.VOCAB_SIZE * 128, "weights, gradients and two moments"
