"""Settings of `quantize`, the example files, and which method works with which scheme."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compressed_tensors.quantization import QuantizationScheme as UpstreamScheme
from paths import ROOT
from shardwright.ds_configs.quantization.layers import config_group
from shardwright.ds_configs.quantization.scheme import (
    PRESETS,
    combination_with_method_errors,
    default_method,
    needs_calibration,
)
from shardwright.ds_configs.quantization.settings import QuantizeSettings
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.settings import settings_of
from shardwright.ds_configs.specs.texts import settings_mapping


def resolved(**flags):
    return settings_of(QuantizeSettings, flags).resolved()


def errors_of(**flags) -> dict[str, str]:
    with pytest.raises(UsageError) as error:
        resolved(**flags)
    return {config_error.where: str(config_error) for config_error in error.value.errors}


@pytest.mark.parametrize("file", sorted((ROOT / "examples" / "quantization").iterdir()), ids=lambda file: file.stem)
def test_example_files_fit_together_and_load_upstream(file):
    run_settings = resolved(**settings_mapping(file.read_bytes(), name=file.name)[0])
    assert run_settings.method_reason == "named"
    if run_settings.scheme.storage == "compressed-tensors":
        UpstreamScheme.model_validate(config_group(run_settings.scheme))


def test_errors_of_scheme_method_and_data_come_together():
    found = errors_of(scheme="W4A16", method="smoothquant", ranges="l2", group_size=0)
    assert set(found) == {"ranges", "group_size", "method"}
    assert set(errors_of(scheme="W4A16", method="gptq")) == {"dataset"}
    assert "stores static ranges" in errors_of(scheme="W8A8_STATIC", method="rtn")["dataset"]
    assert resolved(scheme="W8A8_STATIC", method="rtn", dataset="python-help").method == "rtn"
    assert resolved(scheme="W4A16", method="rtn").scheme.name == "W4A16"


def test_awq_supports_tensor_scales_without_duo_scaling():
    assert not combination_with_method_errors("awq", PRESETS["FP8"], {"duo_scaling": False})
    by_tensor = replace(PRESETS["W8A8"].weights, strategy="tensor")
    assert combination_with_method_errors("awq", replace(PRESETS["W4A16"], weights=by_tensor))


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("has_dataset", [True, False])
def test_default_method_needs_no_missing_calibration_text(name, has_dataset):
    method, reason = default_method(PRESETS[name], has_dataset=has_dataset)
    assert reason
    assert combination_with_method_errors(method, PRESETS[name]) == []
    if not has_dataset and not PRESETS[name].activations_are_static:
        assert not needs_calibration(method, PRESETS[name])
