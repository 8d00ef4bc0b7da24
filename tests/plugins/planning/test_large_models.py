"""Plans of the largest public models, whose weights no host holds once per rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import shardwright

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


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
