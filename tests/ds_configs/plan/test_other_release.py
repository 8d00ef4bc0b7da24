"""A plan and the release of Transformers that it is made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.plan.plan import Plan, make_plan, release_difference
from shardwright.ds_configs.specs.errors import RefusedInputError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.model import newest_tested_release
from shardwright.plugins import planning as models
from shardwright.plugins import releases
from shardwright.plugins.planning import plan

GEMMA2: dict[str, Any] = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
}
MIXTRAL: dict[str, Any] = GEMMA2 | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def planned(config: dict[str, Any], release: str) -> Plan:
    model = model_spec_from_config(config, name="m", release=release)
    assert model is not None
    return make_plan(model, parse_hardware("1xA100-80GB"), TrainingJob(seq_len_tokens=2048, micro_batch_size=2))


def config_file(directory: Path, config: dict[str, Any]) -> str:
    path = directory / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_gemma2_is_planned_with_the_attention_of_its_release() -> None:
    fused, eager = planned(GEMMA2, "5.20.2"), planned(GEMMA2, "5.21.0")
    assert (fused.model.attention, eager.model.attention) == (None, "eager")
    assert fused.chosen.memory.gpu.peak_bytes < eager.chosen.memory.gpu.peak_bytes
    assert fused.chosen.time.seconds < eager.chosen.time.seconds


def test_a_release_that_changes_the_memory_is_reported() -> None:
    found = release_difference(planned(GEMMA2, "5.17.0"), "5.23.0")
    assert found is not None
    assert found.startswith("the plan is for transformers 5.17.0, but 5.23.0 is installed: attention is eager")
    assert "a layer keeps" in found and found.endswith("; plan again")
    assert "attention is sdpa instead of eager" in str(release_difference(planned(GEMMA2, "5.23.0"), "5.17.0"))


@pytest.mark.parametrize(
    ("config", "made_for", "installed"),
    [
        (GEMMA2, "5.21.0", "5.23.0"),
        (GEMMA2, "5.17.0", "5.17.0"),
        # One byte of some thousand is far within the interval that a plan states.
        (MIXTRAL, "5.17.0", "5.23.0"),
    ],
)
def test_a_release_that_changes_nothing_is_not_reported(config: dict[str, Any], made_for: str, installed: str) -> None:
    assert release_difference(planned(config, made_for), installed) is None


def test_sdpa_is_rejected_if_the_release_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config_file(tmp_path, GEMMA2 | {"attn_implementation": "sdpa"})
    monkeypatch.setattr(models, "transformers_release", lambda: "5.20.0")
    assert models.load_model_spec(path).spec.attention == "sdpa"
    monkeypatch.setattr(models, "transformers_release", lambda: "5.21.0")
    with pytest.raises(RefusedInputError, match=r"attn_implementation = 'sdpa'.*5\.21\.0 has no SDPA.*write eager"):
        models.load_model_spec(path)


def test_a_plan_without_transformers_reports_the_assumed_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (releases, models):
        monkeypatch.setattr(module, "installed_version", lambda package: None)
    path = config_file(tmp_path, GEMMA2)
    made = plan(path, "1xA100-80GB", TrainingJob(seq_len_tokens=2048), calibration=None)
    newest = newest_tested_release()
    assert made.model.release == newest
    assert f"transformers is not installed; the plan is for {newest}, the newest tested release" in caplog.messages
