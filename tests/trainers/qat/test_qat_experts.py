"""Mixtures of experts under quantization-aware training: gradients, memory, names, and the written checkpoint."""

from __future__ import annotations

import copy
import importlib
import json
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
import transformers
from engine_settings import cpu_arguments
from packaging.version import Version
from rounding_reference import EXACT, rounded_weight, weights_of
from safetensors.torch import load_file
from saved_tensors import saved_storages
from shardwright.ds_configs.quantization.layers import quantization_config
from shardwright.ds_configs.quantization.scheme import QuantizationScheme, changed, scheme_named
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.trainers.qat.attach import attach
from shardwright.trainers.qat.callback import QATCallback
from shardwright.trainers.qat.experts import expert_linear_layers, fake_quantize_experts, is_fused_experts
from shardwright.trainers.qat.export import export
from shardwright.trainers.qat.layers import LayerQuantizer, QuantizationState
from shardwright.trainers.qat.rounding import Rounding
from shardwright.trainers.qat.settings import QATConfig
from transformers import AutoModelForCausalLM, Trainer, set_seed
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

pytestmark = pytest.mark.slow

HIDDEN, INNER, EXPERTS, TOKENS, CHOICES = 32, 48, 5, 23, 2

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 384, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
MIXTURE = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
SMALL = {**SIZES, "hidden_size": 32, "intermediate_size": 16, "head_dim": 8, "moe_intermediate_size": 16}


CONFIG = SimpleNamespace(
    _experts_implementation="eager",
    hidden_size=HIDDEN,
    hidden_act="silu",
    hidden_activation="gelu_pytorch_tanh",
    mlp_hidden_act="relu2",
    intermediate_size=INNER,
    moe_intermediate_size=INNER,
    num_local_experts=EXPERTS,
    n_routed_experts=EXPERTS,
    num_experts=EXPERTS,
    moe_latent_size=None,
    swiglu_limit=0.5,
)
"""What experts of every family read."""


def experts_module(dtype=torch.float64, kind=MixtralExperts):
    torch.manual_seed(0)
    module = kind(CONFIG)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.to(dtype)


def rounded(module, quantization, *, rule="minmax", stored_dtype=torch.float32, enabled=True):
    """Return the state after changing the class of a module."""
    state = QuantizationState(rule=rule, enabled=enabled)
    scheme = QuantizationScheme(name="x", weights=quantization)
    names = [str(place) for place in range(EXPERTS * (3 if module.has_gate else 2))]
    quantizers = {
        name: LayerQuantizer(name=name, scheme=scheme, stored_dtype=stored_dtype, state=state) for name in names
    }
    fake_quantize_experts(module, "experts", quantizers)
    return state


def routing(dtype=torch.float64):
    torch.manual_seed(1)
    choices = torch.tensor([0, 1, 3, 4])
    index = torch.stack([choices[torch.randperm(4)[:CHOICES]] for _ in range(TOKENS)])
    return torch.randn(TOKENS, HIDDEN, dtype=dtype), index, torch.rand(TOKENS, CHOICES, dtype=dtype)


def reference(module, quantization, rule, hidden, index, chosen_weights):
    """Return answers by plain autograd, token by token."""
    rounding = Rounding(quantization=quantization, rule=rule, stored_dtype=EXACT)

    def rounded_expert(expert, matrices):
        parts = [rounded_weight({"weight": part}, rounding) for part in expert.chunk(matrices)]
        return torch.cat(parts)

    through = [
        [rounded_expert(expert, matrices) for expert in parameter]
        for parameter, matrices in ((module.gate_up_proj, 2), (module.down_proj, 1))
    ]
    rows = []
    for token in range(len(hidden)):
        row = torch.zeros(HIDDEN, dtype=hidden.dtype)
        for expert, share in zip(index[token].tolist(), chosen_weights[token], strict=True):
            gate, up = (through[0][expert] @ hidden[token]).chunk(2)
            row = row + share * (through[1][expert] @ (gate * torch.sigmoid(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("quantization", "rule"),
    [
        (weights_of(4, False, "group"), "minmax"),
        (weights_of(8, True, "channel"), "minmax"),
        (weights_of(3, True, "tensor"), "minmax"),
        (weights_of(2, True, "group"), "ternary"),
        (weights_of(2, True, "tensor"), "binary"),
    ],
)
def test_gradients_are_straight_through(quantization, rule):
    module, (hidden, index, shares) = experts_module(), routing()
    hidden.requires_grad_(), shares.requires_grad_()
    inputs = (hidden, shares, module.gate_up_proj, module.down_proj)
    wanted = reference(module, quantization, rule, hidden, index, shares)
    gradient = torch.randn_like(wanted)
    wanted_gradients = torch.autograd.grad(wanted, inputs, gradient)
    rounded(module, quantization, rule=rule, stored_dtype=EXACT)
    found = module(hidden, index, shares)
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    found_gradients = torch.autograd.grad(found, inputs, gradient)
    for one, other in zip(found_gradients, wanted_gradients, strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()
    assert found_gradients[2][2].abs().max() == 0, "nobody chose the third expert"


@pytest.mark.parametrize(
    ("family", "kind", "autocast"),
    [
        ("mixtral", "MixtralExperts", True),
        ("gemma4", "Gemma4TextExperts", False),
        ("deepseek_v4", "DeepseekV4Experts", False),
        ("nemotron_h", "NemotronHExperts", False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_equals_eager_with_rounded_weights(family, kind, dtype, autocast):
    experts = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), kind)
    module, (hidden, index, shares) = experts_module(dtype, experts), routing(dtype)
    plain = copy.deepcopy(module)
    state = rounded(module, weights_of(4, True, "group"), stored_dtype=torch.bfloat16)
    stored = module.stored_layers(dict(module.named_parameters()))
    values = {name: part.value(weights_of(4, True, "group")) for name, part in stored.items()}
    with torch.no_grad():
        for expert in range(EXPERTS):
            into = torch.cat([values[f"{expert}.{name}"] for name in ("gate_proj", "up_proj") if f"0.{name}" in values])
            (plain.gate_up_proj if plain.has_gate else plain.up_proj)[expert] = into
            plain.down_proj[expert] = values[f"{expert}.down_proj"]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, wanted = module(hidden, index, shares), plain(hidden, index, shares)
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
        state.enabled = False
        assert not torch.equal(module(hidden, index, shares), wanted)
    assert state.trained_steps == 0 and {q.forward_dtype for q in module.quantizers.values()} == {dtype}


def test_no_rounded_copy_is_saved():
    module, (hidden, index, shares) = experts_module(torch.float32), routing(torch.float32)
    hidden.requires_grad_()
    known = [*module.parameters(), hidden, index, shares]
    with saved_storages(known) as plain:
        module(hidden, index, shares)
    rounded(module, weights_of(4, True, "group"))
    with saved_storages(known) as found:
        answer = module(hidden, index, shares)
    matrices = {(2 * INNER, HIDDEN), (HIDDEN, INNER)}
    assert not [shape for shape, _ in found if len(shape) == 3 or shape in matrices]
    bytes_of = [sum(count for (_, dtype), count in each.items() if dtype.is_floating_point) for each in (found, plain)]
    assert bytes_of[0] <= bytes_of[1]
    answer.sum().backward()
    assert hidden.grad is not None and all(parameter.grad is not None for parameter in module.parameters())
    module.requires_grad_(False)
    with saved_storages(known) as frozen:
        module(hidden, index, shares).sum().backward()
    assert sum(frozen.values()) < sum(found.values()), "frozen experts keep their inputs"


def family(name, dtype=torch.float32, **changes):
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    set_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


FAMILIES = {
    "Mixtral": ({**SMALL, "num_local_experts": 4}, "model.layers.1.block_sparse_moe.experts.3.w2"),
    "Qwen3Moe": ({**SMALL, **MIXTURE, "moe_intermediate_size": 16}, "model.layers.1.mlp.experts.3.down_proj"),
    "NemotronH": (
        {
            **SMALL,
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
            **{"moe_shared_expert_intermediate_size": 16, "hybrid_override_pattern": "E*E"},
        },
        "backbone.layers.2.mixer.experts.3.down_proj",
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_names_are_those_that_saving_writes(name, tmp_path):
    changes, last = FAMILIES[name]
    model = family(name, **changes)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    places = [place for place, module in model.named_modules() if is_fused_experts(module)]
    layers = [layer for place in places for layer in expert_linear_layers(model, place)]
    matrices = 2 if name == "NemotronH" else 3
    assert len(layers) == 2 * 4 * matrices and layers[-1].name == last and all(layer.is_expert for layer in layers)
    for layer in layers:
        assert tuple(written[f"{layer.name}.weight"].shape) == (layer.out_features, layer.in_features)
    scheme = changed(scheme_named("W4A16"), group_size=16)
    attachment = attach(model, QATConfig(scheme=scheme), stored_dtype=torch.float32)
    for place in places:
        module = model.get_submodule(place)
        for key, stored in module.stored_layers(dict(module.named_parameters())).items():
            weight = written[f"{module.quantizers[key].name}.weight"]
            value = stored.value(scheme.weights)
            assert (value - weight).abs().max() <= stored.scale.max() / 2 * 1.01, f"{key} is another matrix"
    assert {layer.name for layer in attachment.layers if layer.is_expert} == {layer.name for layer in layers}
    assert not [layer for layer in attachment.layers if layer.name.endswith(".gate")], "a router is rounded"


JAMBA = {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_dt_rank": 16}
JAMBA |= {"attn_layer_period": 2, "attn_layer_offset": 0, "expert_layer_period": 2, "expert_layer_offset": 1}


def test_routers_that_are_linear_layers_stay_dense():
    model, dense = family("Jamba", **{**SMALL, **JAMBA}), "model.layers.1.feed_forward.router"
    # Jamba's is a linear layer in Transformers 5.17, and no longer in 5.24.
    mixture = model.get_submodule(dense.removesuffix(".router"))
    mixture.router = torch.nn.Linear(*reversed(mixture.router.weight.shape), bias=False)
    attachment = attach(model, QATConfig(scheme=changed(scheme_named("W4A16"), group_size=16)))
    assert attachment.layers and dense not in {layer.name for layer in attachment.layers}
    assert dense in attachment.dense and dense in attachment.scheme.ignore


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("GptOss", {"num_local_experts": 4}, "has biases, stores its matrices transposed, interleaves gate and up"),
        ("GraniteMoe", {"num_local_experts": 4}, "has no single matrices in the checkpoints of its family"),
    ],
)
def test_other_expert_layouts_are_rejected(name, changes, reason):
    with pytest.raises(UsageError, match=f"experts = .*{reason}"):
        attach(family(name, **changes), QATConfig(scheme=changed(scheme_named("W4A16"), group_size=16)))


def test_dense_experts_with_packed_layers_are_rejected():
    """Transformers would initialize them randomly."""
    scheme = changed(scheme_named("W4A16"), group_size=16, ignore=("lm_head", r"re:.*experts\.0\.w1"))
    with pytest.raises(UsageError, match="would stay dense while other layers are packed"):
        attach(family("Mixtral", **FAMILIES["Mixtral"][0]), QATConfig(scheme=scheme))


def test_zero_points_of_experts_are_rejected():
    model = family("Mixtral", **FAMILIES["Mixtral"][0])
    scheme = changed(scheme_named("W4A16_ASYM"), group_size=16)
    with pytest.raises(UsageError, match="24 matrices of experts would have zero points"):
        attach(model, QATConfig(scheme=scheme))


def state_config(directory, stated):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))


def reload(directory):
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", experts_implementation="eager", output_loading_info=True
    )


EXPORTED = {"Mixtral": {"num_local_experts": 4}, "Qwen3Moe": MIXTURE}


@pytest.mark.parametrize(
    ("name", "scheme", "dtype", "options"),
    [
        ("Qwen3Moe", "W4A16", torch.float32, {}),
        ("Mixtral", "W8A8_STATIC", torch.bfloat16, {}),
    ],
)
def test_reloaded_checkpoint_is_what_was_trained(name, scheme, dtype, options, tmp_path):
    model = family(name, dtype, **EXPORTED[name])
    before = model.state_dict()["model.layers.1.mlp.experts.down_proj"].clone()
    samples = [{"input_ids": row, "labels": row} for row in torch.arange(12 * 32).reshape(12, 32) % 384]
    arguments = cpu_arguments(tmp_path / "run", 4, max_steps=3, learning_rate=1e-2)
    callback = QATCallback(scheme, **options)
    trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[callback])
    trainer.train()
    attachment = callback.attachment
    module = model.model.layers[1].mlp.experts
    assert not torch.equal(module.down_proj, before), "experts were not trained"
    result = callback.export(trainer, tmp_path / "exported")
    assert (result.largest_weight_difference, result.largest_logit_difference) == (0.0, 0.0)
    assert result.quantized_layers == 2 * (4 + 3 * 4)
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    if name == "Mixtral":
        stated = json.loads((tmp_path / "exported" / "config.json").read_text())["quantization_config"]
        assert {"lm_head", "model.layers.0.block_sparse_moe.gate"} <= set(stated["ignore"])
    last = "block_sparse_moe.experts.3.w2" if name == "Mixtral" else "mlp.experts.3.down_proj"
    assert f"model.layers.1.{last}.weight_packed" in tensors
    loaded, keys = reload(tmp_path / "exported")
    assert not any(keys.values()), "keys are missing or left over"
    tokens = torch.arange(48)[None] * 7 % 384
    model.eval()
    with torch.no_grad():
        difference = (loaded(tokens).logits - model(tokens).logits).abs().max()
    assert difference == 0 and loaded.dtype == dtype
    other = loaded.model.layers[1].mlp.experts
    stored = module.stored_layers(dict(module.named_parameters()))
    for expert in range(4):
        parts = [stored[f"{expert}.{matrix}"] for matrix in ("gate_proj", "up_proj", "down_proj")]
        gate, up, down = (part.value(attachment.scheme.weights) for part in parts)
        assert torch.equal(torch.cat([gate, up]), other.gate_up_proj[expert])
        assert torch.equal(down, other.down_proj[expert])


def test_upstream_still_loads_experts_packed_or_not_at_all(tmp_path):
    """transformers 5.17.0 and 5.23.0; where experts of other forms load, `expert_scheme` and a refusal can go."""
    model = family("Mixtral", **EXPORTED["Mixtral"])
    attachment = attach(model, QATConfig(scheme=scheme_named("W8A8")))
    for quantizer in attachment.quantizers():
        quantizer.scheme = attachment.scheme
    attachment.state.trained_steps = 1
    export(model, attachment, tmp_path / "integers", verify=False)
    state_config(tmp_path / "integers", quantization_config(attachment.scheme))
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        reload(tmp_path / "integers")
    dense = family("Mixtral", **EXPORTED["Mixtral"])
    dense.save_pretrained(tmp_path)
    state_config(tmp_path, quantization_config(scheme_named("W4A16"), ignore=["re:.*"]))
    if Version(version("transformers")) >= Version("5.23.0"):
        with pytest.raises(RuntimeError, match="conversion of the weights"):
            reload(tmp_path)
    else:
        assert "model.layers.0.mlp.experts.down_proj" in reload(tmp_path)[1]["missing_keys"]
