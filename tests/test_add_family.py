"""A family is added with coefficients that explain every traced byte, or refused with nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shardwright.tools import activation_trace, add_family

SMALL = {
    "model_type": "granite",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The coefficients of added families without Granite's."""
    stored = json.loads(activation_trace.ADDED_PATH.read_text(encoding="utf-8"))
    del stored["tables"]["granite"]
    path = tmp_path / "added.json"
    path.write_text(activation_trace.render(stored), encoding="utf-8")
    return path


def config(tmp_path: Path, **values: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | values), encoding="utf-8")
    return str(path)


@pytest.mark.trace
def test_an_added_family_is_traced_and_written(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    derive, before = activation_trace.derive_coefficients, data.read_text()
    monkeypatch.setattr(activation_trace, "attention_paths", lambda *_: ("fused",))
    monkeypatch.setattr(
        add_family, "derive_coefficients", lambda name: derive(name, modes=("bf16",), adapters=("none",))
    )
    assert add_family.add_family(config(tmp_path), data=data) == "granite"
    added = json.loads(data.read_text())["tables"].pop("granite")
    known = json.loads(activation_trace.ADDED_PATH.read_text())["tables"]["granite"]
    assert added == {"bf16": {"none": {"fused": known["bf16"]["none"]["fused"]}}}
    assert len(data.read_text()) > len(before)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"model_type": "qwen3", "head_dim": 8}, "is stored; python tools/activation_trace.py --write qwen3"),
        ({"model_type": "roformer", "architectures": ["RoFormerForMaskedLM"]}, "only causal language models"),
        ({"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}, "is a mixture of experts"),
        ({"model_type": "persimmon"}, "has no num_key_value_heads of its own"),
        ({"num_hidden_layers": -1}, "must be an integer from 1"),
    ],
)
def test_what_cannot_be_added_is_rejected(
    values: dict[str, Any], rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add_family.main([config(tmp_path, **values)]) in (2, 4)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert rule in line
