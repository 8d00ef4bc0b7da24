"""4-bit weights that ZeRO-3 and FSDP2 divide train as whole ones do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm_ranks import OnDemand, run_ranks

pytestmark = pytest.mark.distributed

SIZES = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    directory = tmp_path_factory.mktemp("qlora")
    set_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).to(torch.bfloat16).save_pretrained(directory / "model")

    def train(layout: str) -> dict:
        run_ranks([Path(__file__).with_name("qlora_worker.py"), directory / "model", directory, layout])
        return json.loads((directory / f"{layout}.json").read_text(encoding="utf-8"))

    return OnDemand(train)


@pytest.mark.parametrize(
    ("layout", "tolerance"), [pytest.param("zero3", 5e-4, marks=pytest.mark.once), ("fsdp2", 1e-2)]
)
def test_sharded_quantized_weights_train_like_full_ones(trained, layout, tolerance):
    """FSDP2 returns logits in bf16, whose loss has steps of 0.03 here."""
    whole, divided = trained["ddp"], trained[layout]
    assert whole["layers"] == divided["layers"] == 14
    assert whole["kept"] == 1.0
    assert divided["kept"] == 0.5
    assert divided["losses"] == pytest.approx(whole["losses"], abs=tolerance)
    assert divided["losses"][-1] < divided["losses"][1]
