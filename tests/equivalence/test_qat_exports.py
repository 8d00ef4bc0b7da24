"""Quantization-aware training under every layout: the step of one process, and exports that hold what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from equivalence.cases import Case
from equivalence.comparison import assert_equal
from equivalence.records import Record, marked, records_of
from equivalence.settings import reference_of, run_of
from safetensors.torch import load_file
from shardwright.plugins.compressed_tensors import unpack_tensors, weight_levels, weight_scale_and_zero_point

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

OTHER_CODES = 1e-2
"""Largest share of a matrix's codes that fall on the other side of a half: the largest weight of a group of 16, if
negative, lies at -7.5 steps."""


def _cases(layouts: str, *settings: str, model: str = "") -> list[Case]:
    return [Case(layout=layout, settings=settings, model=model) for layout in layouts.split()]


CASES = [
    *_cases("zero3 fsdp2", "w4", "probe"),
    *_cases("zero3 fsdp2", "w2_learned", "probe"),
    *_cases("zero1 zero2 zero0 ddp fsdp2", "qat_inputs", "probe"),
    *_cases("zero1 zero2", "w8a8_static", "probe"),
    *_cases("ddp zero3 fsdp2", "w8a8_static", "gradient_checkpointing", "probe"),
    *_cases("zero3", "w2_learned", "from_directory", "probe"),
    *_cases("ddp zero3 fsdp2", "w4", "probe", model="mixtral"),
    *_cases("zero3", "qat_inputs", "verified", "probe"),
    *_cases("zero3-offload", "w2_learned", "probe_adam"),
]
IN_BF16 = _cases("ddp zero3 fsdp2", "w4_zero_points", "probe_adam")
RESUMED = Case(layout="zero3", settings=("w8a8_static", "resumed", "exported"))
SCHEMES = ("w4", "w2_learned", "qat_inputs", "w8a8_static")
REFERENCES = list(dict.fromkeys(map(reference_of, CASES)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def records(deepspeed_cpu_ops: None, request: pytest.FixtureRequest, directory: Path) -> dict[str, Record]:
    items = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    selected = [item.callspec.params["case"] for item in items] + [RESUMED]
    schemes = [Case(layout="single", model="llama", settings=(scheme, "probe")) for scheme in SCHEMES]
    references = [reference_of(case) for case in selected if case in CASES]
    return records_of([*selected, *references, *schemes], directory, Path(__file__).with_name("runs.py"))


def _named(case: Case) -> str:
    return case.name


def _trained(case: Case, directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(directory / case.name / "weights"))


def _exported(case: Case, directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(directory / case.name / "export" / "model.safetensors"))


def _matrices(case: Case, trained: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the matrices that are rounded by their names in the export, experts apart."""
    found = {}
    for name, value in trained.items():
        if name.endswith("proj.weight"):
            found[name.removesuffix(".weight")] = value
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            prefix = name.rsplit(".", 1)[0].replace("mlp", "block_sparse_moe")
            for index, expert in enumerate(value):
                halves = zip(("w1", "w3"), expert.chunk(2), strict=True)
                parts = (("w2", expert),) if name.endswith("down_proj") else halves
                found |= {f"{prefix}.{index}.{part}": matrix for part, matrix in parts}
    return found


def _values(case: Case) -> tuple[str, ...]:
    return (case.layout, case.family, *case.settings)


@pytest.mark.parametrize("case", marked(CASES, _values), ids=_named)
def test_steps_equal_one_process(case: Case, records: dict[str, Record], directory: Path) -> None:
    """Weights and learned scales after one step show the gradient."""
    assert_equal(case, records, directory)


@pytest.mark.parametrize("case", marked([*CASES, *REFERENCES], _values), ids=_named)
def test_export_contains_the_trained_codes(case: Case, records: dict[str, Record], directory: Path) -> None:
    """Quantized once more from the weights that the engine's own gathering gives, by the functions of quantize."""
    assert "losses" in records[case.name], records[case.name]
    trained, exported, scheme = _trained(case, directory), _exported(case, directory), run_of(case, "").scheme
    expected, mixture = _matrices(case, trained), case.family == "mixtral"
    assert len(expected) == 2 * (16 if mixture else 7)
    for name, weight in expected.items():
        stored = unpack_tensors(name, exported, scheme)
        if "w2_learned" in case.settings:
            scale, zero = trained[f"{name}.learned_weight_scale"], None
            assert (scale > 0).all()
        else:
            scale, zero = weight_scale_and_zero_point(weight, scheme.weights)
        assert torch.equal(stored.scale, scale) and stored.zero_point is None and zero is None
        assert torch.equal(stored.codes, weight_levels(weight, scale, zero, scheme.weights).to(torch.int8)), name
    dense = {name for name in exported if name.endswith(("norm.weight", "embed_tokens.weight", "gate.weight"))}
    for name in dense:
        assert torch.equal(exported[name], trained[name.replace("block_sparse_moe", "mlp")]), name
    assert len(dense) == 2 * 2 + 2 + 2 * mixture


@pytest.mark.parametrize("case", CASES, ids=_named)
def test_exports_of_all_layouts_are_equal(case: Case, records: dict[str, Record], directory: Path) -> None:
    """Weights that differ in their last place fall on other codes now and then, and ranges of inputs not at all."""
    reference = reference_of(case)
    found, wanted = _exported(case, directory), _exported(reference, directory)
    configs = [json.loads((directory / one.name / "export" / "config.json").read_text()) for one in (case, reference)]
    assert found.keys() == wanted.keys() and configs[0] == configs[1]
    for name, tensor in wanted.items():
        if name.endswith(("_shape", "input_scale")):
            assert torch.equal(found[name], tensor), name
    scheme = run_of(case, "").scheme
    for name in _matrices(case, _trained(reference, directory)):
        both = [unpack_tensors(name, each, scheme).codes for each in (found, wanted)]
        apart = (both[0].int() - both[1].int()).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() < OTHER_CODES


@pytest.mark.parametrize("case", [case for case in CASES if "verified" in case.settings], ids=_named)
def test_export_is_verified_by_a_fresh_process(case: Case, records: dict[str, Record], directory: Path) -> None:
    report = json.loads((directory / case.name / "export" / "qat_report.json").read_text())
    assert report["largest_weight_difference"] == report["verification"]["largest_logit_difference"] == 0.0


@pytest.mark.parametrize("case", IN_BF16, ids=_named)
def test_learned_scales_are_exported_in_the_forward_dtype(
    case: Case, records: dict[str, Record], directory: Path
) -> None:
    """FSDP2's policy shows zero points in bf16, where 3.4999 is 3.5 and rounds to 4."""
    trained, exported, scheme = _trained(case, directory), _exported(case, directory), run_of(case, "").scheme
    seen = torch.float32 if case.layout == "ddp" else torch.bfloat16
    moved = 0
    for name, weight in _matrices(case, trained).items():
        scale, zero = (trained[f"{name}.learned_weight_{part}"] for part in ("scale", "zero_point"))
        rounded = zero.to(seen).round().clamp(-8, 7).to(torch.int8)
        moved += int((rounded != zero.round().clamp(-8, 7)).sum())
        stored = unpack_tensors(name, exported, scheme)
        assert torch.equal(stored.zero_point, rounded), name
        assert torch.equal(stored.scale, scale.to(torch.bfloat16))
        codes = weight_levels(weight.to(seen), stored.scale, rounded, scheme.weights)
        assert torch.equal(stored.codes, codes.to(torch.int8)), name
    assert (moved > 0) == (case.layout == "fsdp2")


def test_schemes_have_different_gradients(records: dict[str, Record], directory: Path) -> None:
    """Otherwise the comparisons would say nothing about rounding."""
    name = "model.layers.0.mlp.up_proj.weight"
    cases = [Case(layout="single", model="llama", settings=(scheme, "probe")) for scheme in SCHEMES]
    trained = [_trained(case, directory)[name] for case in cases]
    for index, one in enumerate(trained):
        assert all(not torch.allclose(one, other, rtol=1e-3) for other in trained[:index])


def test_ranges_under_zero3_resume_and_reach_the_export(records: dict[str, Record], directory: Path) -> None:
    """Ranges are a moving average: a resumed run that started again would end with other values."""
    record, whole = records[RESUMED.name], directory / RESUMED.name / "whole"
    assert record["losses"] == record["whole"]
    for kept, found in (("weights", "weights"), ("export/model.safetensors", "export/model.safetensors")):
        expected, tensors = load_file(whole / kept), load_file(directory / RESUMED.name / found)
        assert expected.keys() == tensors.keys()
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    assert any(name.endswith("input_scale") for name in _exported(RESUMED, directory))
    report = json.loads((directory / RESUMED.name / "export" / "qat_report.json").read_text())
    # The first step only looks.
    assert report["trained_steps"] == len(record["losses"]) - 1
