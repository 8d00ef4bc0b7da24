"""Small models, activation bytes and strategies that planning tests share."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from paths import CONFIGS
from shardwright.ds_configs.models.model_config import config_errors, parse_config_json
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.plan.gallery import gallery_entry, gallery_plan
from shardwright.ds_configs.specs.hardware import HardwareSpec
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.ds_configs.step_time.model_work import StepInputs, device_of, model_work
from shardwright.ds_configs.step_time.rates import TRANSFORMERS, constants_of
from shardwright.plugins.releases import transformers_release

RELEASE = transformers_release()
"""Of the installed Transformers, with which real models are built."""
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "max_position_embeddings": 163840, "vocab_size": 129280, "bos_token_id": 0, "eos_token_id": 1,
    "rope_theta": 10000, "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "vocab_size": 201088, "attention_bias": True,
    "eos_token_id": 200002, "pad_token_id": 199999,
}  # fmt: skip


def public_model(name: str) -> ModelSpec:
    """The spec of a public model by its Hub id."""
    spec = model_spec_from_config(public_config(name), name=name)
    assert spec is not None
    return spec


def public_config(name: str) -> dict[str, Any]:
    """The config.json of a public model by its Hub id."""
    file = CONFIGS / name.replace("/", "--") / "config.json"
    return parse_config_json(file.read_bytes(), source=name)


@cache
def gallery_directory(name: str = "llama-3.1-8b_8xA100-80GB") -> Path:
    """A directory with the files of a gallery plan, which the session removes."""
    directory = Path(tempfile.mkdtemp()) / name
    gallery_plan(gallery_entry(name)).write(directory)
    return directory


def llama(**changes: Any) -> ModelSpec:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
        "tie_word_embeddings": False,
        **changes,
    }
    assert not config_errors(config, source="test")
    spec = model_spec_from_config(config, name="small-llama")
    assert spec is not None
    return spec


def step_inputs(layout: Layout, model: ModelSpec, hardware: HardwareSpec, **job: Any) -> StepInputs:
    """What every part of a step's time depends on, with Transformers as the software."""
    own, constants = TrainingJob(**job), constants_of(hardware.gpu)
    return StepInputs(
        layout=layout,
        model=model,
        hardware=hardware,
        job=own,
        software=TRANSFORMERS,
        constants=constants,
        device=device_of(hardware, own, TRANSFORMERS, constants),
        work=model_work(model),
        tokens=layout.micro_batch_size * own.seq_len_tokens,
    )
