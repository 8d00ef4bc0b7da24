"""Pure parts of the benchmarks of other engines and libraries: bounds, tables, and omitted cases."""

import math
import subprocess
import sys

import pytest
import serving_matrix
from serving_checkpoints import CASES, ROWS
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


def test_the_worker_gets_what_was_made_without_this_interpreters_packages(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\n"
        "asked = json.load(open(sys.argv[1]))\n"
        "assert 'PYTHONPATH' not in os.environ\n"
        "json.dump({each['name']: len(asked['rows']) for each in asked['checkpoints']}, open(sys.argv[2], 'w'))\n"
    )
    monkeypatch.setattr(serving_matrix, "WORKER", worker)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    entries = [listed("one") | {"options": {}}, listed("two", error="no")]
    assert serving_matrix.serve_all(sys.executable, entries, tmp_path) == {"one": ROWS}
    worker.write_text("raise SystemExit(3)")
    with pytest.raises(subprocess.CalledProcessError):
        serving_matrix.serve_all(sys.executable, entries, tmp_path)


def test_without_avx512_no_engine_runs(monkeypatch, capsys):
    monkeypatch.setattr("shardwright.plugins.serving.engine.processor_flags", lambda: frozenset({"avx2"}))
    assert serving_matrix.main(["--engine-python", "nowhere"]) == 0
    assert "nothing was run" in capsys.readouterr().out
