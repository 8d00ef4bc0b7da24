"""Stored tensor shapes against the models that Transformers builds, and what is left to it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from planning import RELEASE
from shardwright.ds_configs.memory.activations import KINDS_FILE, load_coefficients
from shardwright.ds_configs.models.model_config import SIZED_FAMILIES
from shardwright.ds_configs.models.stored_shapes import evaluated, load_shapes, model_spec_from_config
from shardwright.ds_configs.specs.model import FIRST_RELEASE, stored_facts
from shardwright.plugins.transformers.meta_model import model_spec_from_meta
from shardwright.tools.class_on_meta import TEXT_SIZES
from shardwright.tools.parameter_shapes import differences, drawn_sizes

CLASSES = load_shapes(RELEASE)["classes"]
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645},
    **{"decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu"},
    **{"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": []},
    **{"moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512},
    **{"num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False},
    **{"partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000},
    **{"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": True, "vocab_size": 151936},
}
"""As Qwen published it."""


def drawn_config(architecture: str, seed: int) -> dict[str, Any]:
    stored, choose = CLASSES[architecture], random.Random(seed)
    stated: dict[str, Any] = {}
    sizes = [name for name, kinds in stored["varied"].items() if "number" in kinds]
    for name, value in drawn_sizes(stored["values"], sizes, choose).items():
        if stored["values"][name] or choose.random() < 0.5:
            stated[name] = value
    kept = [name for name in stated if "layers" in name or name.endswith(("heads", "hidden_size"))]
    stated = {name: value for name, value in stated.items() if name in kept or choose.random() < 0.8}
    for name, kinds in stored["varied"].items():
        if {"true", "false"} & set(kinds) and choose.random() < 0.5:
            stated[name] = choose.choice([kind == "true" for kind in kinds])
    stated |= {name: stored["values"][name] for name in stored["required"]}
    config: dict[str, Any] = {"model_type": stored["model_type"], "architectures": [architecture.partition(" ")[0]]}
    config |= {part: {} for part in stored["names"] if part}
    if texts := stored.get("texts"):
        declared = texts["types"][texts["usual"]][2]
        config[stored["text"]] = {name: size for name, size in TEXT_SIZES.items() if name in declared}
    for name, value in stated.items():
        part, _, leaf = name.rpartition(".")
        (config[part] if part else config)[leaf] = value
    return config


@pytest.mark.parametrize("architecture", CLASSES)
def test_stored_shapes_match_the_meta_device(architecture: str) -> None:
    configs = (drawn_config(architecture, seed) for seed in range(40))
    covered = ((config, model_spec_from_config(config, name="m", release=RELEASE)) for config in configs)
    config, found = next((config, found) for config, found in covered if found is not None)
    assert differences(found, model_spec_from_meta(config, name="m")) == [], config


COUNTED_BY_TRANSFORMERS = {
    *("ElectraForSequenceClassification", "ElectraForTokenClassification", "Glm4vForConditionalGeneration"),
    *("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "ModernBertForMaskedLM", "NemotronHForCausalLM"),
    "Qwen3_5ForConditionalGeneration",
    *("ModernBertForSequenceClassification", "ModernBertForTokenClassification"),
}
"""Classes whose shapes are not stored."""


def test_every_family_with_activation_coefficients_has_its_shapes() -> None:
    types = {stored["model_type"] for stored in CLASSES.values()} | set(SIZED_FAMILIES)
    assert set(load_coefficients(RELEASE)["tables"]) <= types
    # Other releases may leave a class to Transformers.
    families = {name.partition(" ")[0] for name in stored_facts(KINDS_FILE, RELEASE)["families"]}
    shapes = {name.partition(" ")[0] for name in load_shapes(FIRST_RELEASE)["classes"]}
    assert families - shapes <= COUNTED_BY_TRANSFORMERS


def test_published_config_is_counted_exactly() -> None:
    found = model_spec_from_config(QWEN3_NEXT, name="m", release=RELEASE)
    assert found is not None and found.parameter_count == 79_674_391_296
    assert differences(found, model_spec_from_meta(QWEN3_NEXT, name="m")) == []


BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    **{"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12},
    **{"max_position_embeddings": 512, "type_vocab_size": 2, "vocab_size": 28996, "layer_norm_eps": 1e-12},
    **{"gradient_checkpointing": False, "position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0"},
    "id2label": {str(label): f"LABEL_{label}" for label in range(7)},
    "label2id": {f"LABEL_{label}": label for label in range(7)},
}
DEBERTA_V3 = {
    "model_type": "deberta-v2",
    **{"attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768},
    **{
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "norm_rel_ebd": "layer_norm",
    },
    **{"relative_attention": True, "position_buckets": 256, "share_att_key": True, "pos_att_type": "p2c|c2p"},
    **{"layer_norm_eps": 1e-7, "max_relative_positions": -1, "position_biased_input": False},
    **{"num_attention_heads": 12, "num_hidden_layers": 12, "type_vocab_size": 0, "vocab_size": 128100},
}
"""As Microsoft published it, without `architectures`."""
DEBERTA_XXLARGE = DEBERTA_V3 | {
    **{"hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 24, "num_hidden_layers": 48},
    **{"attention_head_size": 64, "conv_kernel_size": 3, "conv_act": "gelu"},
}


@pytest.mark.parametrize(
    "config",
    [
        BERT,
        BERT | {"architectures": ["BertForTokenClassification"], "id2label": {"0": "O"}, "label2id": {"O": 0}},
        {name: value for name, value in BERT.items() if "label" not in name},
        DEBERTA_V3,
        DEBERTA_V3 | {"architectures": ["DebertaV2ForSequenceClassification"], "pos_att_type": ["p2c", "c2p"]},
        DEBERTA_XXLARGE,
        DEBERTA_XXLARGE | {"architectures": ["DebertaV2ForMaskedLM"]},
    ],
    ids=["labels", "one label", "default labels", "no architectures", "kinds as a list", "convolution", "masked lm"],
)
def test_published_encoders_and_classifiers_are_counted_exactly(config: dict[str, Any]) -> None:
    found = model_spec_from_config(config, name="m", release=RELEASE)
    assert found is not None
    assert differences(found, model_spec_from_meta(config, name="m")) == []


@pytest.mark.parametrize(("moe_layers", "step"), [([0, 1, 2, 3], 1), ([1, 3], 2), ([0, 2], 1)])
def test_listed_moe_layers_are_those_of_the_step_or_declined(moe_layers: list[int], step: int) -> None:
    config = {
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        **{"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512},
        **{"num_hidden_layers": 4, "interleave_moe_layer_step": step, "moe_layers": moe_layers},
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    }
    found = model_spec_from_config(config, name="m", release=RELEASE)
    # Every other layer is left to Transformers.
    assert (found is not None) == (step == 1 and len(moe_layers) == 4)
    assert found is None or differences(found, model_spec_from_meta(config, name="m")) == []


@pytest.mark.parametrize("change", [{"share_att_key": False}, {"attention_head_size": 32}, {"norm_rel_ebd": "none"}])
def test_a_variant_declines_configs_it_does_not_cover(change: dict[str, Any]) -> None:
    assert model_spec_from_config(DEBERTA_V3 | change, name="m", release=RELEASE) is None


@pytest.mark.parametrize(
    "change",
    [
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
        {"num_experts": 0},
        {"hidden_size": None},
        {"partial_rotary_factor": 0.5},
        {"layer_types": ["full_attention"] * 48},
        {"layer_types": ["other"] * 48},
        {"architectures": ["Qwen3NextForSequenceClassification"]},
        {"architectures": None},
        {"vision_config": {"hidden_size": 8}},
    ],
)
def test_stored_class_declines_configs_it_does_not_cover(change: dict[str, Any]) -> None:
    assert model_spec_from_config(QWEN3_NEXT | change, name="m") is None


def test_expressions_are_sums_of_products_and_quotients() -> None:
    sizes = {"heads": 3, "width": 10}
    assert evaluated("2*heads*width + -1*heads + 4", sizes) == 61
    assert [evaluated(f"{how}width//heads", sizes) for how in ("", "ceil ", "round ", "min ")] == [3, 4, 3, 3]


def test_planning_a_stored_class_does_not_import_torch(tmp_path: Path) -> None:
    program = (
        "import json, sys; from shardwright import plan; config = json.loads(sys.argv[1]);"
        "path = sys.argv[2] + '/config.json'; open(path, 'w').write(json.dumps(config));"
        "made = plan(path, '16x8xH100-80GB', calibration=None);"
        "assert made.model.parameter_count == 79_674_391_296;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    argv = [sys.executable, "-c", program, json.dumps(QWEN3_NEXT), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("text", [{}, {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 40}])
def test_published_llava_is_counted_exactly_and_with_other_text_models_declined(text: dict[str, Any]) -> None:
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064, **text}
    config: dict[str, Any] = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, "vocab_size": 32000},
        "vision_feature_layer": -2,
    }
    stored = model_spec_from_config(config, name="llava", release=RELEASE)
    assert stored is not None
    built = model_spec_from_meta(config, name="llava")
    assert (stored.parameters, stored.buffer_bytes) == (built.parameters, built.buffer_bytes)
    for part, other in (("text_config", "bloom"), ("vision_config", "siglip_vision_model")):
        changed = config | {part: config[part] | {"model_type": other}}
        assert model_spec_from_config(changed, name="llava", release=RELEASE) is None


def seeing(model_type: str, name: str, vision: dict[str, Any], text: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "architectures": [f"{name}ForConditionalGeneration"],
        **top,
        "text_config": text,
        "vision_config": vision,
    }


QWEN_2_5 = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
QWEN_2_5 |= {"num_key_value_heads": 2, "vocab_size": 151936, "max_window_layers": 70, "use_sliding_window": False}
QWEN_2_5_VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3}
QWEN_2_5_VISION |= {"out_hidden_size": 2048, "patch_size": 14, "spatial_patch_size": 14, "tokens_per_second": 2}
QWEN_3 = {"model_type": "qwen3_vl_text", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
QWEN_3 |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "rope_theta": 5000000}
MISTRAL = {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": None}
MISTRAL |= {"vocab_size": 32064, "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2"}
SMOL = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "head_dim": 64}
SMOL |= {"vocab_size": 49280, "perceiver_config": {"model_type": "vllama3"}, "pixel_shuffle_factor": 3}
CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, "num_hidden_layers": 24}
CLIP |= {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "projection_dim": 768}


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (
            # The text part at the top level, as the files of this model have it.
            {**QWEN_2_5, **seeing("qwen2_5_vl", "Qwen2_5_VL", QWEN_2_5_VISION, {}, tie_word_embeddings=True)},
            3.754622976,
        ),
        (
            seeing(
                *("qwen3_vl", "Qwen3VL"),
                {"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024, "num_heads": 16}
                | {"intermediate_size": 4096, "out_hidden_size": 2560},
                QWEN_3,
                tie_word_embeddings=True,
            ),
            4.437815808,
        ),
        (seeing("llava_next", "LlavaNext", CLIP, MISTRAL, image_grid_pinpoints=[[336, 672]]), 7.566747648),
        (
            seeing(
                *("smolvlm", "SmolVLM"),
                {"model_type": "smolvlm_vision", "image_size": 384, "intermediate_size": 4304, "patch_size": 14}
                | {"num_hidden_layers": 27, "size": {"longest_edge": 1920}},
                SMOL,
                vocab_size=49280,
                scale_factor=3,
            ),
            2.24678488,
        ),
    ],
    ids=["qwen2.5-vl", "qwen3-vl", "llava-next with mistral", "smolvlm"],
)
def test_vision_language_models_combine_their_text_class(config: dict[str, Any], billions: float) -> None:
    if not config["text_config"]:
        del config["text_config"]
    found = model_spec_from_config(config, name="m", release=RELEASE)
    # Other releases may leave a class to Transformers.
    assert (found is None) == (config["architectures"][0] not in CLASSES)
    if found is None:
        return
    built = model_spec_from_meta(config, name="m")
    assert differences(found, built) == []
    assert found.parameter_count == round(billions * 1e9)
