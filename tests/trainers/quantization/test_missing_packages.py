"""Methods of an extra that is not installed are rejected by name, before a model is read."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from shardwright.ds_configs.quantization.layers import LinearLayer
from shardwright.ds_configs.quantization.scheme import METHODS, scheme_named
from shardwright.trainers import quantization

EXPERT = LinearLayer(name="experts.0.up_proj", out_features=8, in_features=8, is_expert=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["W4A16", "W8A8_STATIC", "FP8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("layers", [(), (EXPERT,)], ids=["dense", "experts"])
def test_only_methods_that_need_a_package_report_it(method, name, layers, monkeypatch):
    monkeypatch.setattr(quantization, "find_spec", lambda package: None)
    scheme = scheme_named(name)
    errors = quantization.missing_engine_errors(method, scheme, layers)
    rounds = method == "rtn" and not scheme.activations_are_static and not layers
    assert bool(errors) == (method != "bitsandbytes" and not rounds)
    assert all("pip install 'shardwright[quantize]'" in error.fix for error in errors)
    monkeypatch.setattr(quantization, "find_spec", lambda package: object())
    assert not quantization.missing_engine_errors(method, scheme, layers)


@pytest.mark.needs("llmcompressor")
def test_the_installation_page_names_the_newest_releases_that_llm_compressor_supports():
    page = (Path(__file__).parents[3] / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    required = [Requirement(line) for line in metadata.requires("llmcompressor") or () if "extra ==" not in line]
    newest = {each.name: limit.version for each in required for limit in each.specifier if limit.operator == "<="}
    for name in ("torch", "transformers"):
        assert f"{name} ≤ {newest[name].removesuffix('.0')}" in page
