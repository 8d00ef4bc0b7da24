"""Quantization-aware training: one gradient under every layout, and the export holds what was trained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from qat_cases import (
    ADAM_LEARNING_RATE,
    CASES,
    FP32_SCHEMES,
    IN_BF16,
    LEARNING_RATE,
    OFFLOADED,
    REFERENCES,
    RESUMED,
    RESUMED_STEPS,
    Case,
    callback_settings,
    save_models,
)
from safetensors.torch import load_file
from shardwright.plugins.compressed_tensors.codes import unpack_tensors, weight_codes, weight_scale_and_zero_point
from warm_ranks import OnDemand, on_ranks

pytestmark = pytest.mark.distributed

BETWEEN_LAYOUTS = 1e-5
"""Largest difference of a gradient's element, relative to the largest element of its tensor. Seen: 5.2e-6, and 0 but
for ZeRO-3, whose head multiplies by a function of its own."""
OTHER_CODES = 5e-3
"""Largest share of a matrix's codes that fall on the other side of a half. Seen: 0.0012, under ZeRO-3: the largest
weight of a group, if negative, lies at -7.5 steps."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    trained: dict[str, torch.Tensor]
    """Weights after the last step."""
    exported: dict[str, torch.Tensor]
    """Tensors of the checkpoint."""
    config: dict[str, Any]
    """Its `config.json`."""
    report: dict[str, Any]
    """What the export said about itself."""


def outcome(where: Path) -> Outcome:
    export = where / "export"
    return Outcome(
        trained=load_file(where / "trained.safetensors"),
        exported=load_file(export / "model.safetensors"),
        config=json.loads((export / "config.json").read_text()),
        report=json.loads((export / "qat_report.json").read_text()),
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qat-models")
    save_models(directory)
    return directory


@pytest.fixture(scope="module")
def launched(models: Path, deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return on_ranks(Path(__file__).with_name("qat_cases.py"), tmp_path_factory.mktemp("two-ranks"), models)


@pytest.fixture(scope="module")
def on_two_ranks(launched: dict[str, Path]) -> dict[Case, Outcome]:
    return OnDemand(lambda case: outcome(launched[case.name] / case.name))


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from qat_cases import trained

    output = tmp_path_factory.mktemp("one-process")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in REFERENCES:
            trained(case, models, output)
    finally:
        torch.set_num_threads(threads)
    return output


@pytest.fixture(scope="module")
def on_one_process(alone: Path) -> dict[Case, Outcome]:
    return {case: outcome(alone / case.name) for case in REFERENCES}


@pytest.fixture(scope="module")
def start(alone: Path) -> dict[Case, dict[str, torch.Tensor]]:
    """All parameters before training, with learned scales and adapters."""

    return {case: load_file(alone / case.name / "start.safetensors") for case in REFERENCES}


def gradients(found: Outcome, start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    assert found.trained.keys() == start.keys()
    return {name: (value.double() - found.trained[name].double()) / LEARNING_RATE for name, value in start.items()}


def matrices(case: Case, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in trained.items():
        name = name.removeprefix("base_model.model.")
        if name.endswith(("proj.weight", "proj.base_layer.weight")):
            found[name.removesuffix(".weight").removesuffix(".base_layer")] = value
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            prefix = name.rsplit(".", 1)[0].replace("mlp", "block_sparse_moe")
            for index, expert in enumerate(value):
                parts = (
                    (("w2", expert),) if name.endswith("down_proj") else zip(("w1", "w3"), expert.chunk(2), strict=True)
                )
                found |= {f"{prefix}.{index}.{part}": matrix for part, matrix in parts}
    for name in list(found) if case.lora else []:
        a, b = (trained[f"base_model.model.{name}.lora_{side}.default.weight"] for side in "AB")
        found[name] = found[name] + (b @ a) * 2.0
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_give_the_gradient_of_one_process(
    case: Case, on_two_ranks: dict[Case, Outcome], on_one_process: dict[Case, Outcome], start: dict[Case, Any]
) -> None:
    """Of every parameter, learned scales and adapters too."""
    first = start[case.reference]
    found, wanted = gradients(on_two_ranks[case], first), gradients(on_one_process[case.reference], first)
    for name, gradient in wanted.items():
        largest = float(gradient.abs().max())
        frozen = case.lora and "lora_" not in name
        assert (largest == 0) == frozen, name
        # A weight is known to its own last place alone.
        rounding = float(first[name].abs().max()) * torch.finfo(torch.float32).eps / LEARNING_RATE
        assert float((found[name] - gradient).abs().max()) <= BETWEEN_LAYOUTS * largest + rounding * (not frozen), name


@pytest.mark.parametrize("case", [*CASES, *REFERENCES], ids=lambda case: case.name)
def test_export_contains_the_trained_codes(
    case: Case, on_two_ranks: dict[Case, Outcome], on_one_process: dict[Case, Outcome]
) -> None:
    """Quantized once more from the weights that the engine's own gathering gives, by the functions of quantize."""
    found = (on_one_process if case in on_one_process else on_two_ranks)[case]
    scheme, _ = callback_settings(case)
    expected = matrices(case, found.trained)
    assert len(expected) == 2 * (16 if case.mixture else 7)
    for name, weight in expected.items():
        stored = unpack_tensors(name, found.exported, scheme)
        if case.scheme == "w2-learned":
            scale, zero = found.trained[f"{name}.learned_weight_scale"], None
            assert (scale > 0).all()
        else:
            scale, zero = weight_scale_and_zero_point(weight, scheme.weights)
        assert torch.equal(stored.scale, scale) and stored.zero_point is None and zero is None
        assert torch.equal(stored.codes, weight_codes(weight, scale, zero, scheme.weights)), name
    dense = {name for name in found.exported if name.endswith(("norm.weight", "embed_tokens.weight", "gate.weight"))}
    prefix = "base_model.model." if case.lora else ""
    for name in dense:
        assert torch.equal(found.exported[name], found.trained[prefix + name.replace("block_sparse_moe", "mlp")]), name
    assert len(dense) == 2 * 2 + 2 + 2 * case.mixture


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exports_of_all_layouts_are_equal(
    case: Case, on_two_ranks: dict[Case, Outcome], on_one_process: dict[Case, Outcome]
) -> None:
    """Weights that differ in their last place fall on other codes now and then, and ranges of inputs not at all."""
    found, wanted = on_two_ranks[case], on_one_process[case.reference]
    assert found.exported.keys() == wanted.exported.keys() and found.config == wanted.config
    for name, tensor in wanted.exported.items():
        if name.endswith(("_shape", "input_scale")):
            assert torch.equal(found.exported[name], tensor), name
    scheme, _ = callback_settings(case)
    for name in matrices(case, wanted.trained):
        both = [unpack_tensors(name, each.exported, scheme).codes for each in (found, wanted)]
        apart = (both[0].int() - both[1].int()).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() < OTHER_CODES


@pytest.mark.parametrize("case", [case for case in CASES if case.verify], ids=lambda case: case.name)
def test_export_is_verified_by_a_fresh_process(case: Case, on_two_ranks: dict[Case, Outcome]) -> None:
    report = on_two_ranks[case].report
    assert report["largest_weight_difference"] == 0.0
    assert report["verification"]["largest_logit_difference"] == 0.0


def test_schemes_have_different_gradients(on_one_process: dict[Case, Outcome]) -> None:
    """Otherwise the comparisons would say nothing about rounding."""
    name = "model.layers.0.mlp.up_proj.weight"
    trained = [on_one_process[Case(scheme=scheme)].trained[name] for scheme in FP32_SCHEMES]
    for index, one in enumerate(trained):
        assert all(not torch.allclose(one, other, rtol=1e-3) for other in trained[:index])


@pytest.mark.parametrize("case", IN_BF16, ids=lambda case: case.name)
def test_learned_scales_are_exported_in_the_forward_dtype(case: Case, on_two_ranks: dict[Case, Outcome]) -> None:
    """FSDP2's policy shows zero points in bf16, where 3.4999 is 3.5 and rounds to 4."""
    found = on_two_ranks[case]
    scheme, _ = callback_settings(case)
    seen = torch.float32 if case.engine == "ddp" else torch.bfloat16
    moved = 0
    for name, weight in matrices(case, found.trained).items():
        scale, zero = (found.trained[f"{name}.learned_weight_{part}"] for part in ("scale", "zero_point"))
        rounded = zero.to(seen).round().clamp(-8, 7).to(torch.int8)
        moved += int((rounded != zero.round().clamp(-8, 7)).sum())
        stored = unpack_tensors(name, found.exported, scheme)
        assert torch.equal(stored.zero_point, rounded), name
        assert torch.equal(stored.scale, scale.to(torch.bfloat16))
        assert torch.equal(stored.codes, weight_codes(weight.to(seen), stored.scale, rounded, scheme.weights)), name
    assert (moved > 0) == (case.engine == "fsdp2")


@pytest.mark.parametrize("case", OFFLOADED, ids=lambda case: case.name)
def test_an_offloaded_optimizer_steps_learned_scales(
    case: Case, on_two_ranks: dict[Case, Outcome], on_one_process: dict[Case, Outcome], start: dict[Case, Any]
) -> None:
    """Adam's first step is the learning rate wherever a gradient is not tiny."""
    first, found, wanted = start[case.reference], on_two_ranks[case], on_one_process[case.reference]
    learned = [name for name in first if name.endswith("learned_weight_scale")]
    assert len(learned) == 14
    for name in learned:
        moved = (found.trained[name] - first[name]).abs()
        assert (moved > 0.9 * ADAM_LEARNING_RATE).float().mean() > 0.99, name
        assert torch.allclose(found.trained[name], wanted.trained[name], rtol=0, atol=1e-2 * ADAM_LEARNING_RATE), name


def test_adapters_under_zero3_resume_and_reach_the_export(launched: dict[str, Path]) -> None:
    """Ranges are a moving average: a resumed run that started again would end with other values."""
    output = launched["resumed"]
    whole, resumed = (outcome(output / name) for name in ("whole", "resumed"))
    assert whole.trained.keys() == resumed.trained.keys()
    for name, value in whole.trained.items():
        assert torch.equal(resumed.trained[name], value), name
    assert whole.exported.keys() == resumed.exported.keys()
    for name, tensor in whole.exported.items():
        assert torch.equal(resumed.exported[name], tensor), name
    assert any(name.endswith("input_scale") for name in whole.exported)
    # The first step only looks.
    assert whole.report["trained_steps"] == resumed.report["trained_steps"] == RESUMED_STEPS - 1
    histories = [json.loads((output / name / "history.json").read_text()) for name in ("whole", "resumed")]
    losses = [{row["step"]: row["loss"] for row in history if "loss" in row} for history in histories]
    assert losses[0] == losses[1] and len(losses[0]) == RESUMED_STEPS
    assert RESUMED.lora and whole.config["quantization_config"]["format"] == "int-quantized"
