"""Methods of an extra that is not installed are rejected by name, before a model is read."""

from __future__ import annotations

import pytest
from shardwright.ds_configs.quantization.scheme import METHODS
from shardwright.plugins.llm_compressor import environment
from shardwright.trainers.quantization import inputs

PACKAGES = {"llm-compressor": "llmcompressor", "shardwright": "llmcompressor", "auto-round": "auto_round"}
"""Package of the extra that an engine imports; bitsandbytes needs none."""


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=pytest.mark.needs(PACKAGES[info.engine]) if info.engine in PACKAGES else ())
        for method, info in METHODS.items()
    ],
)
def test_installed_packages_are_not_reported_as_missing(method):
    assert not inputs.missing_engine_errors(method)


@pytest.mark.parametrize("method", METHODS)
def test_missing_package_error_names_the_installation(method, monkeypatch):
    monkeypatch.setattr(inputs, "find_spec", lambda package: None)
    errors = inputs.missing_engine_errors(method)
    assert bool(errors) == (METHODS[method].engine in PACKAGES)
    for error in errors:
        assert "run shardwright env create quantize" in error.fix
        assert "pip install '.[quantize]' in this one" in error.fix


@pytest.mark.parametrize(
    ("transformers", "said"),
    [("5.17.0", "in this one adds it"), ("5.23.0", "in this one would downgrade transformers 5.23.0 to 5.17.0")],
)
def test_missing_package_error_names_downgrades(transformers, said, monkeypatch):
    monkeypatch.setattr(inputs, "find_spec", lambda package: None)
    monkeypatch.setattr(environment, "_versions", lambda: {"torch": "2.13.0+cpu", "transformers": transformers})
    (error,) = inputs.missing_engine_errors("gptq")
    assert error.fix.endswith(said)
