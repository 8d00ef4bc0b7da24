"""Methods of an extra that is not installed are refused by name, before a model is read."""

from __future__ import annotations

import pytest
from shardwright.ds_configs.quantization.methods import METHODS
from shardwright.trainers.quantization import inputs


def test_what_is_installed_is_not_missing():
    assert not [fault for method in METHODS for fault in inputs.missing_engine_faults(method)]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_without_its_package_says_what_to_install(method, monkeypatch):
    monkeypatch.setattr(inputs, "find_spec", lambda package: None)
    faults = inputs.missing_engine_faults(method)
    assert bool(faults) == (METHODS[method].engine != "bitsandbytes")
    assert all("pip install '.[quantize]'" in str(fault) for fault in faults)
