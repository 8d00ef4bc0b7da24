"""Plans of the largest public models, whose weights no host holds once per rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import shardwright
from planning import DEEPSEEK_V3, GPT_OSS

GPT_OSS_120B = GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}


@pytest.mark.parametrize(
    ("config", "hardware", "strategy", "billions"),
    [
        pytest.param(DEEPSEEK_V3, "128x8xH100-80GB", "auto", 671.0, id="deepseek-v3"),
        pytest.param(GPT_OSS_120B, "8x8xH100-80GB", "fsdp2", 116.8, id="gpt-oss-120b"),
    ],
)
def test_mixtures_fit_because_the_first_rank_alone_reads_weights(
    config: dict[str, Any], hardware: str, strategy: str, billions: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = shardwright.plan(str(tmp_path), hardware, strategy=strategy)
    assert plan.model.parameter_count / 1e9 == pytest.approx(billions, abs=0.1)
    host = plan.chosen.memory.host
    assert 2.0 <= host.terms["checkpoint_loading"] / plan.model.parameter_count < 2.1
    assert host.peak_bytes_per_node < host.capacity_bytes_per_node
