"""Parameter counts: public models, stored shapes against the meta device, and LoRA against PEFT."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import CONFIGS
from planning import RELEASE
from shardwright.ds_configs.legality.rules import lora_targets_can_be_adapted
from shardwright.ds_configs.models.model_config import SIZED_FAMILIES, config_errors
from shardwright.ds_configs.models.stored_shapes import model_spec_from_config
from shardwright.ds_configs.specs.errors import RefusedInputError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout
from shardwright.ds_configs.specs.model import (
    MAMBA_TYPES,
    NOT_ADAPTED_IN_MAMBA,
    ModelSpec,
    ParameterShape,
    adapted_mixtures,
    lora_parameter_count,
)
from shardwright.plugins.peft import add_lora, four_bit_loading
from shardwright.plugins.planning import load_model_spec
from shardwright.plugins.transformers.meta_model import build_meta_model, model_spec_from_meta

PUBLIC_COUNTS = {
    "meta-llama--Llama-3.2-1B": 1_235_814_400,
    "meta-llama--Llama-3.1-8B": 8_030_261_248,
    "meta-llama--Llama-3.1-70B": 70_553_706_496,
    "meta-llama--Llama-3.1-405B": 405_853_388_800,
    "meta-llama--Llama-2-7b-hf": 6_738_415_616,
    "Qwen--Qwen2.5-0.5B": 494_032_768,
    "Qwen--Qwen2.5-7B": 7_615_616_512,
    "Qwen--Qwen3-8B": 8_190_735_360,
    "Qwen--Qwen3-30B-A3B": 30_532_122_624,
    "mistralai--Mistral-7B-v0.3": 7_248_023_552,
    "mistralai--Mixtral-8x7B-v0.1": 46_702_792_704,
    "openai-community--gpt2": 124_439_808,
}
SAME_FIELDS = (
    "model_type",
    "architecture",
    "task",
    "dimensions",
    "buffer_bytes",
    "layer_classes",
    "tied_embeddings",
    "learned_positions",
    "sliding_window",
    "weight_conversion",
    "attention",
    "release",
)


def small(model_type: str) -> dict[str, Any]:
    if model_type == "gpt2":
        return {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 100}
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    extra: dict[str, dict[str, Any]] = {
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "phi3": {"pad_token_id": 0},
    }
    return config | extra.get(model_type, {})


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"head_dim": 8},
    {"num_key_value_heads": 4},
    {"sliding_window": 16},
    {"sliding_window": None},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 16},
    {"use_sliding_window": False, "sliding_window": 16},
    {"partial_rotary_factor": 0.5},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"num_hidden_layers": 7},
    {"num_hidden_layers": 6, "sliding_window_pattern": 7},
    {"layer_types": ["sliding_attention", "full_attention"]},
    {"n_inner": 48},
    {"n_inner": None},
    {"add_cross_attention": True},
)
ONLY_TRANSFORMERS_KNOWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3", {"head_dim": None}),
    ("mixtral", {"num_key_value_heads": None}),
    ("qwen3_moe", {"mlp_only_layers": [0]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}),
)


def by_name(spec: ModelSpec) -> dict[str, ParameterShape]:
    names = {parameter.name: parameter for parameter in spec.parameters}
    assert len(names) == len(spec.parameters)
    return names


def assert_same(config: dict[str, Any]) -> None:
    fast = model_spec_from_config(config, name="m", release=RELEASE)
    meta = model_spec_from_meta(config, name="m")
    assert fast is not None
    assert by_name(fast) == by_name(meta), config
    for field in SAME_FIELDS:
        assert getattr(fast, field) == getattr(meta, field), (field, config)


@pytest.mark.parametrize("name", PUBLIC_COUNTS)
def test_public_models_have_their_counts_without_the_meta_device(name: str) -> None:
    spec = load_model_spec(str(CONFIGS / name)).spec
    assert spec.source == "config"
    assert spec.parameter_count == PUBLIC_COUNTS[name]
    assert sum(spec.group_counts().values()) == spec.parameter_count


@pytest.mark.parametrize("model_type", SIZED_FAMILIES)
def test_families_equal_the_meta_device(model_type: str) -> None:
    for variant in VARIANTS:
        if model_type == "phi3" and "rope_scaling" in variant:
            continue  # Phi-3 knows no other rotary scaling than longrope.
        if model_type == "gpt2" and {"head_dim", "sliding_window", "num_hidden_layers"} & variant.keys():
            continue  # GPT-2 ignores them or has its own name, and the meta device repeats what the config says.
        config = small(model_type) | variant
        assert not config_errors(config, source="config.json")
        assert_same(config)


def test_heads_of_latent_attention_need_not_divide_the_hidden_size():
    config = {"model_type": "glm4_moe_lite", "num_hidden_layers": 2, "hidden_size": 2048, "num_attention_heads": 20}
    assert [error.where for error in config_errors(config, source="c")] == ["c: hidden_size"]
    assert not config_errors(config | {"qk_rope_head_dim": 64}, source="c")


@pytest.mark.parametrize(("model_type", "change"), ONLY_TRANSFORMERS_KNOWS)
def test_families_decline_configs_that_only_transformers_knows(model_type: str, change: dict[str, Any]) -> None:
    assert model_spec_from_config(small(model_type) | change, name="m") is None


@pytest.mark.parametrize(
    ("model_type", "architecture", "count"),
    [
        ("bert", "BertForMaskedLM", 109_514_298),
        ("t5", "T5ForConditionalGeneration", 60_506_624),
        ("clip", "CLIPModel", 151_277_313),
        ("opt", "OPTForCausalLM", 125_239_296),
        ("gpt_neox", "GPTNeoXForCausalLM", 20_554_567_680),
        ("deepseek_v3", "DeepseekV3ForCausalLM", 671_026_404_352),
        ("gpt_oss", "GptOssForCausalLM", 116_829_156_672),
    ],
)
def test_other_architectures_have_their_public_counts(model_type: str, architecture: str, count: int) -> None:
    parts: dict[str, Any] = {"text_config": {}} if model_type == "clip" else {}
    spec = model_spec_from_meta({"model_type": model_type, "architectures": [architecture]} | parts, name="m")
    assert (spec.source, spec.architecture, spec.parameter_count) == ("meta", architecture, count)


def test_multimodal_model_has_the_dimensions_of_its_text_model() -> None:
    text = small("gemma3_text") | {"num_hidden_layers": 8}
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "image_size": 28,
        "patch_size": 14,
    }
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "mm_tokens_per_image": 1,
    }
    spec = model_spec_from_meta(config, name="m")
    assert spec.task == "causal_lm"
    assert (spec.dimensions.num_layers, spec.dimensions.hidden_size, spec.dimensions.head_dim) == (8, 64, 256)
    layers = {p.name.split(".*.")[0]: p.count for p in spec.parameters if p.in_layer}
    assert sorted(layers.values()) == [3, 8]
    assert config_errors(config | {"text_config": text | {"num_hidden_layers": -1}}, source="c")[0].where.endswith(
        "text_config: num_hidden_layers"
    )


_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GROUPED = {**_ROUTED, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
_DELTA = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "shared_expert_intermediate_size"), 16)
_CONVOLUTIONS = {"num_dense_layers": 2, "layer_types": ["conv", "full_attention", "conv"] * 2}


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("deepseek_v3", {**_GROUPED, "first_k_dense_replace": 2}),
        ("glm4_moe", {**_GROUPED, "first_k_dense_replace": 3}),
        ("ernie4_5_moe", {"moe_num_experts": 8, "moe_intermediate_size": 48, "moe_layer_end_index": 5}),
        (
            "ernie4_5_moe",
            {
                "moe_num_experts": 8,
                "moe_intermediate_size": 48,
                "moe_layer_start_index": 1,
                "moe_layer_end_index": 3,
            },
        ),
        ("llama4_text", {"intermediate_size_mlp": 300, "num_local_experts": 4, "interleave_moe_layer_step": 2}),
        ("qwen3_moe", {**_ROUTED, "num_experts": 8, "decoder_sparse_step": 3}),
        ("qwen3_moe", {**_ROUTED, "num_experts": 8, "decoder_sparse_step": 4}),
        ("jamba", {"num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "use_mamba_kernels": False}),
        ("qwen3_moe", {**_ROUTED, "num_experts": 8, "mlp_only_layers": [0, 1]}),
        ("qwen3_next", {**_ROUTED, **_DELTA, "num_experts": 8, "full_attention_interval": 3}),
        (
            "lfm2_moe",
            {**_ROUTED, **_CONVOLUTIONS, "num_experts": 8},
        ),
        ("t5", {}),
    ],
)
def test_layers_of_several_kinds_have_the_parameters_of_the_class(model_type: str, values: dict[str, Any]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": model_type, **sizes, "head_dim": 16, "vocab_size": 512, "num_hidden_layers": 6, **values}
    spec, held = model_spec_from_meta(config, name="m"), [0] * 6
    for name, parameter in build_meta_model(config, source="m").named_parameters():
        if (index := re.search(r"\.(\d+)\.", name)) and not name.startswith("encoder."):
            held[int(index[1])] += parameter.numel()
    # The bias of relative positions is in one layer of T5; which one is not known.
    assert list(spec.layer_sizes) == (held if model_type != "t5" else [max(held)] * 6)
    assert spec.layer_parameter_count == max(held)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj"), ("c_attn",)])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "qwen3_moe"])
def test_lora_counts_equal_peft(model_type: str, targets: tuple[str, ...]) -> None:
    from peft import LoraConfig, get_peft_model

    config = small(model_type)
    spec = model_spec_from_config(config, name="m", release=RELEASE)
    assert spec is not None
    expected = lora_parameter_count(spec, rank=3, targets=targets)
    names = "all-linear" if targets == ("all-linear",) else list(targets)
    model = build_meta_model(config, source="m")
    lora = LoraConfig(r=3, target_modules=names, fan_in_fan_out=model_type == "gpt2", task_type="CAUSAL_LM")
    if expected == 0:
        with pytest.raises(ValueError, match=r"[Tt]arget"):
            get_peft_model(model, lora)
        return
    assert get_peft_model(model, lora).get_nb_trainable_parameters()[0] == expected


def stored_classes(kind: str = "") -> list[tuple[str, str]]:
    """Return the text classes whose stored shapes have a kind of parameters, and others with their own layers."""
    classes = json.loads((CONFIGS.parent / "parameter_shapes.json").read_text())["classes"].items()
    stored = [(value["model_type"], name) for name, value in classes if f'"{kind}' in json.dumps(value)]
    return [
        *(names for names in stored if not names[1].split()[0].endswith(("ConditionalGeneration", "CLIPModel"))),
        *(("deepseek_v4", "DeepseekV4ForCausalLM"), ("phimoe", "PhimoeForCausalLM")),
        *(("glm4_moe_lite", "Glm4MoeLiteForCausalLM"), ("granitemoehybrid", "GraniteMoeHybridForCausalLM")),
    ]


@pytest.mark.parametrize(("model_type", "architecture"), stored_classes("experts"))
def test_adapters_of_mixtures_are_counted_as_peft_makes_them_or_rejected(model_type: str, architecture: str) -> None:
    config = {"model_type": model_type, "architectures": [architecture], "num_hidden_layers": 4}
    spec = model_spec_from_meta(config, name="m")
    for target in ("all-linear", "experts", "experts.down_proj"):
        job = TrainingJob(method="lora", lora_targets=(target,), lora_rank=3)
        layout, hardware = Layout(engine="ddp", dp_replicate=8), parse_hardware("8xH100-80GB")
        if errors := list(lora_targets_can_be_adapted(spec, layout, job, hardware)):
            assert errors[0].fix, str(errors[0])
            continue
        model = build_meta_model(config, source="m")
        adapted = add_lora(model, rank=3, targets=target, fp32_adapters=False)
        assert adapted.get_nb_trainable_parameters()[0] == lora_parameter_count(spec, rank=3, targets=[target]), target


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [*stored_classes(), *((name.lower(), f"{name}ForConditionalGeneration") for name in ("T5", "MT5"))],
)
def test_four_bit_weights_are_those_that_bitsandbytes_packs(model_type: str, architecture: str) -> None:
    from bitsandbytes.nn import Linear4bit
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    config: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    if model_type == "hunyuan_v1_dense":
        # Its default configuration has no width of heads.
        config["head_dim"] = 128
    model, spec = build_meta_model(config, source="m"), model_spec_from_meta(config, name="m")
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    replace_with_bnb_linear(model, kept, four_bit_loading(torch.bfloat16))
    packed = [name for name, module in model.named_modules() if isinstance(module, Linear4bit)]
    assert sum(p.total for p in spec.packed_parameters) == sum(sizes[f"{name}.weight"] for name in packed)


def test_adapted_mixtures_match_peft() -> None:
    from peft.utils import transformers_weight_conversion as peft_types

    patterns, mapped = peft_types._MODEL_TO_CONVERSION_PATTERN, peft_types._MOE_TARGET_MODULE_MAPPING
    assert {name for name, pattern in patterns.items() if pattern in mapped} == adapted_mixtures(RELEASE)


@pytest.mark.parametrize(
    ("model_type", "architecture", "sizes"),
    [
        ("falcon", "FalconForCausalLM", {}),
        (
            *("gpt_oss", "GptOssForCausalLM"),
            {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32}
            | {"num_local_experts": 4, "num_experts_per_tok": 2},
        ),
    ],
    ids=["subclasses of Linear", "frozen experts"],
)
def test_adapters_are_counted_as_peft_makes_them(model_type: str, architecture: str, sizes: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    config = {"model_type": model_type, "architectures": [architecture], "hidden_size": 64, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 2, "vocab_size": 64} | sizes
    spec = model_spec_from_meta(config, name="m")
    lora = get_peft_model(build_meta_model(config, source="m"), LoraConfig(r=3, target_modules="all-linear"))
    assert lora.get_nb_trainable_parameters()[0] == lora_parameter_count(spec, rank=3, targets=["all-linear"])


LLAMA4 = {
    "model_type": "llama4_text",
    "architectures": ["Llama4ForCausalLM"],
    **{"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64},
    **{"num_hidden_layers": 1, "intermediate_size": 32, "intermediate_size_mlp": 32, "num_local_experts": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def test_router_is_recognized_by_its_return_value() -> None:
    kinds = {p.name: p.kind for p in model_spec_from_meta(LLAMA4, name="m").parameters}
    assert kinds["model.layers.*.feed_forward.router.weight"] == "router"
    assert kinds["model.layers.*.self_attn.q_proj.weight"] == "linear"


def test_peft_still_fails_on_tuple_outputs() -> None:
    # Once `all-linear` trains Llama 4, `lora_targets_can_be_adapted` can go for routers.
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    def loss(targets: str | list[str]) -> Any:
        model = get_peft_model(AutoModelForCausalLM.from_config(text), LoraConfig(r=2, target_modules=targets))
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        return model(input_ids=tokens, labels=tokens).loss

    text = AutoConfig.for_model(**LLAMA4)
    with pytest.raises(AttributeError, match="dtype"):
        loss("all-linear")
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert loss(names).isfinite()


def test_modules_not_adapted_in_mamba_match_peft() -> None:
    from inspect import getsource

    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    source = getsource(_check_lora_target_modules_mamba)
    assert f"incompatible_modules = {{{', '.join(map(json.dumps, NOT_ADAPTED_IN_MAMBA))}}}" in source
    stated = set(re.findall(r'"(\w+)"', source.partition("mamba_model_types = {")[2].partition("}")[0]))
    assert stated == MAMBA_TYPES


def test_building_keeps_the_config_and_runs_no_remote_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "modeling.py").write_text(f"open({str(marker)!r}, 'w')\n")
    foreign = {"auto_map": {"AutoModelForCausalLM": "modeling.Model", "AutoConfig": "modeling.Config"}}
    kernels = {"attn_implementation": "someone/kernel", "_attn_implementation": "someone/kernel"}
    config = small("llama") | foreign | kernels | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    before = json.dumps(config)
    (tmp_path / "config.json").write_text(before)
    spec = model_spec_from_meta(config, name=str(tmp_path))
    assert json.dumps(config) == before
    assert spec.parameters == load_model_spec(str(tmp_path)).spec.parameters
    nested = {"model_type": "gemma3", "text_config": small("gemma3_text") | kernels}
    assert build_meta_model(nested, source="m").config.get_text_config()._attn_implementation != "someone/kernel"
    assert not marker.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nonsense"}, "is unknown to transformers"),
        ({"model_type": "nonsense", "auto_map": {"AutoModel": "a.B"}}, "which Shardwright does not run"),
        ({"model_type": "detr", "backbone": "a/b", "use_timm_backbone": False}, "names another repository"),
        ({"model_type": "llama", "architectures": ["BertModel"]}, "cannot build this llama config"),
        ({"model_type": "bert", "hidden_size": 10, "num_attention_heads": 3}, "cannot build this bert config"),
    ],
)
def test_rejects_configs_that_transformers_cannot_build(config: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedInputError, match=message):
        build_meta_model(config, source="m")


LAYERED = {"model_type": "bamba", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("decoder_layers", -1, "must not be negative"),
        ("first_k_dense_replace", -7, "must not be negative"),
        ("attn_layer_indices", [0, -5], "from 0 to 3"),
        ("attn_layer_indices", [10**9], "from 0 to 3"),
        ("layer_types", [-1] * 4, "list of names"),
    ],
)
def test_rejects_invalid_layer_fields(field: str, value: Any, rule: str) -> None:
    """Transformers builds a model from each of them, another one than was meant."""
    for config in (LAYERED | {field: value}, {"model_type": "x", "text_config": LAYERED | {field: value}}):
        (error,) = [error for error in config_errors(config, source="config.json") if error.where.endswith(field)]
        assert rule in error.rule
