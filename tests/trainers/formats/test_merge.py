"""`merge`: logits of the merged model, the refused adapters, and the commands that accept an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Shell, shell_in
from safetensors.torch import load_file, save_file
from small_models import llama, mixture

pytestmark = pytest.mark.slow
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(root: Path, *, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
    """Write `model` and an adapter `tuned` of it with random values in both factors."""
    from peft import LoraConfig, get_peft_model
    from shardwright.plugins.transformers.training_arguments import byte_tokenizer
    from transformers import AutoModelForCausalLM

    llama().to(dtype).save_pretrained(root / "model")
    base = AutoModelForCausalLM.from_pretrained(root / "model")
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", **settings))
    draw = torch.Generator().manual_seed(3)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=draw) * 0.1
    adapted.save_pretrained(root / "tuned")
    byte_tokenizer(512).save_pretrained(root / "tuned")


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return shell_in(tmp_path, "merge", capsys, monkeypatch)


def expected_weight(root: Path, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return W + (alpha / r) · B · A in fp64, from the stored files."""
    adapter = load_file(root / "tuned" / WEIGHTS)
    path = f"base_model.model.{name.removesuffix('.weight')}"
    if f"{path}.lora_A.weight" not in adapter:
        return weight.double()
    a_RN, b_MR = adapter[f"{path}.lora_A.weight"].double(), adapter[f"{path}.lora_B.weight"].double()
    return weight.double() + 12 / 4 * b_MR @ a_RN


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        return model.eval()(ids).logits.float()


@pytest.mark.parametrize("variant", ["dora", "rslora", "pissa"])
def test_merged_variants_compute_what_was_trained(variant: str, run: Shell, tmp_path: Path) -> None:
    from shardwright.plugins.peft import add_lora
    from transformers import AutoModelForCausalLM

    llama().save_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained("model")
    adapted = add_lora(base, rank=4, targets="all-linear", fp32_adapters=True, variant=variant)
    draw = torch.Generator().manual_seed(3)
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data += torch.randn(weight.shape, generator=draw) * 0.02
    adapted.save_pretrained("tuned")
    done = run("tuned", "--output-dir", "merged")
    assert done.code == 0, done.err
    merged = AutoModelForCausalLM.from_pretrained("merged")
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=2e-5)
    assert not torch.allclose(logits(merged), logits(AutoModelForCausalLM.from_pretrained("model")), atol=1e-2)


@pytest.mark.parametrize(
    ("family", "variant", "targets"),
    [
        *((family, "lora", "q_a_proj,q_proj,experts") for family in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")),
        *(("qwen3_moe", "rslora", targets) for targets in ("q_proj,experts", "all-linear")),
    ],
)
def test_merged_experts_equal_base_plus_adapter(
    family: str, variant: str, targets: str, run: Shell, tmp_path: Path
) -> None:
    from peft import PeftModel
    from shardwright.plugins.peft import add_lora
    from transformers import AutoModelForCausalLM

    mixture(family).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained("model")
    adapted = add_lora(base, rank=4, targets=targets, fp32_adapters=False, variant=variant)
    draw = torch.Generator().manual_seed(3)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = (torch.randn(weight.shape, generator=draw) * 0.1).to(weight.dtype)
    adapted.save_pretrained("tuned")
    done = run("tuned", "--output-dir", "merged", "--format", "json")
    assert done.code == 0, done.err
    exact = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32), "tuned")
    weights = exact.merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained("merged").state_dict()
    squares = total = 0.0
    for name, weight in weights.items():
        torch.testing.assert_close(merged[name].float(), weight, rtol=2**-8, atol=1e-6)
        if name.endswith(("experts.gate_up_proj", "experts.down_proj", "q_proj.weight", "q_a_proj.weight")):
            squares += float((merged[name].double() - weight.double()).square().sum())
            total += float(weight.double().square().sum())
    assert json.loads(done.out)["rounding_error"] == pytest.approx((squares / total) ** 0.5, rel=0.05)


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 2**-22), (torch.bfloat16, 2**-8)])
def test_merged_weights_and_logits_equal_base_plus_adapter(
    dtype: torch.dtype, relative: float, run: Shell, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_adapter(tmp_path, dtype=dtype)
    done = run("tuned", "--output-dir", "merged", "--format", "json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    base, merged = load_file(tmp_path / "model/model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    assert base.keys() == merged.keys()
    squares, total = 0.0, 0.0
    for name, weight in base.items():
        expected = expected_weight(tmp_path, name, weight)
        assert merged[name].dtype == dtype
        # Half of a unit in the last place, and the rounding of fp32 sums.
        torch.testing.assert_close(merged[name].double(), expected, rtol=relative, atol=1e-6)
        if not torch.equal(weight.double(), expected):
            squares += float((merged[name].double() - expected).square().sum())
            total += float(expected.square().sum())
    assert report["rounding_error"] == pytest.approx((squares / total) ** 0.5, rel=0.05, abs=1e-7)
    if dtype == torch.float32:
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("model"), "tuned")
        written = AutoModelForCausalLM.from_pretrained("merged")
        torch.testing.assert_close(logits(written), logits(adapted), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(logits(written), logits(AutoModelForCausalLM.from_pretrained("model")), atol=1e-2)
    assert AutoTokenizer.from_pretrained("merged").get_vocab() == AutoTokenizer.from_pretrained("tuned").get_vocab()


def test_qlora_merges_into_dequantized_weights(run: Shell, tmp_path: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    save_adapter(tmp_path, dtype=torch.bfloat16)
    done = run("tuned", "--qlora", "--output-dir", "merged", "--format", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["qlora"] and json.loads(done.out)["rounding_error"] < 2**-8
    name = "model.layers.0.mlp.up_proj.weight"
    merged = load_file(tmp_path / "merged/model.safetensors")
    weight = load_file(tmp_path / "model/model.safetensors")[name]
    codes, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    expected = expected_weight(tmp_path, name, dequantize_4bit(codes, state))
    torch.testing.assert_close(merged[name].double(), expected, rtol=2**-8, atol=1e-6)
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())


def damaged(root: Path, kind: str) -> None:
    directory = root / "tuned"
    tensors = load_file(directory / WEIGHTS)
    config = json.loads((directory / CONFIG).read_text())
    if kind == "truncated":
        (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:5000])
    elif kind == "tensor missing":
        rest = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up" not in name}
        save_file(rest, directory / WEIGHTS)
    elif kind == "fewer layers":
        shutil.rmtree(root / "model")
        llama(num_hidden_layers=1).save_pretrained(root / "model")
    elif kind == "other type":
        config["peft_type"] = "IA3"
    elif kind == "base gone":
        shutil.rmtree(root / "model")
    (directory / CONFIG).write_text("{" if kind == "not json" else json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("truncated", 4, "is not a complete safetensors file"),
        ("tensor missing", 4, "lacks 2 tensors, such as base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"),
        ("fewer layers", 4, "does not belong to"),
        ("other type", 2, "has the PEFT type IA3, but only LORA is supported"),
        ("base gone", 2, "which does not exist here"),
        ("not json", 4, "is not valid JSON"),
    ],
)
def test_a_damaged_adapter_is_one_error_and_leaves_no_files(
    kind: str, code: int, message: str, run: Shell, tmp_path: Path
) -> None:
    save_adapter(tmp_path)
    damaged(tmp_path, kind)
    before = sorted(tmp_path.iterdir())
    done = run("tuned", "--output-dir", "merged")
    assert done.code == code and "Traceback" not in done.err
    (error,) = done.errors
    assert message in error and not done.out
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "tuned", "--scheme", "NF4", "--output-dir", "w4", "--dry-run"),
        ("serve", "tuned", "--hardware", "CPU", "--dry-run"),
        ("evaluate", "model", "--baseline", "tuned"),
    ],
)
def test_other_commands_ask_for_the_merged_model(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(tmp_path)
    done = shell_in(tmp_path, words[0], capsys, monkeypatch)(*words[1:])
    assert done.code == 2 and "it is an adapter: merge it with shardwright merge" in done.err
