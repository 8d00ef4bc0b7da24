"""Pure parts of the benchmarks of other engines and libraries: bounds, tables, and omitted cases."""

import math

import gguf_perplexity
import pytest
import quantization_peers
import serving_matrix
from serving_checkpoints import CASES
from serving_matrix import BOUNDS, bound_of, difference, perplexity, row_of, tables


def answers(*values: float, first: int = 3):
    return {"log_probabilities": [list(values)], "greedy": [[first, 4]]}


def listed(name: str, *values: float, error: str | None = None):
    return {"name": name, "path": "nowhere", "error": error, "answers": answers(*values)}


def served(*values: float, first: int = 3, error: str | None = None):
    return {"error": error, "answers": answers(*values, first=first), "load_seconds": 1.0}


def test_cases_have_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama dense", "dense"),
        ("llama W4A16 gptq", "weights"),
        ("llama W8A16 rtn", "weights"),
        ("llama W8A8 rtn", "activations"),
        ("llama W4A16 qat kv_cache fp8", "activations"),
        ("llama FP8_DYNAMIC rtn", "activations"),
    ],
)
def test_bounds_follow_what_is_rounded(name, kind):
    assert bound_of(name) == BOUNDS[kind]


def test_figures_of_a_checkpoint():
    assert difference([[-1.0, -2.0]], [[-1.5, -2.0]]) == 0.25
    assert perplexity([[-1.0, -3.0]]) == pytest.approx(math.exp(2))
    row = row_of(listed("llama W4A16 rtn", -1.0, -2.0), served(-1.5, -2.0, first=9))
    assert (row.difference, row.greedy, row.passed) == (0.25, 0.0, False)


def test_tables_tell_what_missed_and_what_was_rejected():
    entries = [listed("llama W4A16 rtn", -1.0), listed("llama W8A16 rtn", -1.0), listed("llama FP8 rtn", error="no")]
    answered = {"llama W4A16 rtn": served(-1.5), "llama W8A16 rtn": served(error="ValueError: no | kernel\nat all")}
    text, passed = tables(entries, answered)
    assert not passed
    assert "| llama W4A16 rtn | 0.5000 **missed** | 0.06 |" in text
    assert "| llama W8A16 rtn | ValueError: no / kernel at all |" in text
    assert "| llama FP8 rtn | no |" in text
    assert tables(entries[:1], {"llama W4A16 rtn": served(-1.01)})[1]


def test_without_avx512_no_engine_runs(monkeypatch, capsys):
    monkeypatch.setattr("shardwright.plugins.serving.engine.processor_flags", lambda: frozenset({"avx2"}))
    assert serving_matrix.main(["--engine-python", "nowhere"]) == 0
    assert "nothing was run" in capsys.readouterr().out


def test_a_table_of_llama_cpp_fails_for_what_converts_wrongly():
    rows = [
        {"name": "W4A16 gptq", "file": "BF16", "here": [[-1.0]], "there": [[-1.01]], "bytes": 2_000_000},
        # llama.cpp's own rounding on top is shown, and no promise.
        {"name": "W4A16 gptq", "file": "Q4_0", "here": [[-1.0]], "there": [[-1.5]], "bytes": 1_000_000},
    ]
    text, passed = gguf_perplexity.tables(rows, [("W4A16, a scale for each row", "AssertionError")])
    assert passed and "| W4A16 gptq | Q4_0 | 0.5000 |" in text and "each row | `AssertionError` |" in text
    text, passed = gguf_perplexity.tables([{**rows[0], "there": [[-1.1]]}], [])
    assert not passed and "0.1000 **missed**" in text


def test_peers_are_timed_as_a_user_runs_them(tmp_path):
    names = [way.name for way in quantization_peers.ways("somewhere", "python")]
    assert len(set(names)) == len(names) and "GPTQModel, gptq" in names
    assert not any("torchao" in way.name or "GPTQ" in way.name for way in quantization_peers.ways(None, None))
    broken = quantization_peers.Way(name="broken", arguments=("-c", "raise SystemExit('no kernel')"), user_writes="")
    seconds, why = quantization_peers.run(broken, tmp_path, tmp_path, tmp_path / "out")
    assert why == "no kernel" and seconds > 0
    found = {"kl": 2e-3, "kl_error": 1e-4, "excess": 1e-3, "excess_error": 2e-4, "same": 0.97, "bytes": 1e6}
    text = quantization_peers.table([(broken, 3.0, why), (broken, 4.0, found)], 4_000_000)
    assert "| broken | 2.00 ± 0.10 | +1.00 ± 0.20 | 97.0% | 1.00 | 4 |  |" in text
    assert "| broken | `no kernel` |" in text
