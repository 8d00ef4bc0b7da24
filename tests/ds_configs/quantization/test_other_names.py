"""Names of schemes in other tools."""

from __future__ import annotations

from shardwright.ds_configs.quantization.other_names import _SCHEMES, METHOD_SCHEMES
from shardwright.ds_configs.quantization.scheme import METHOD_NAMES, PRESETS, combination_with_method_errors


def test_every_method_is_proposed_with_a_scheme_that_it_supports() -> None:
    # bitsandbytes is the method of its own two schemes only.
    assert {*METHOD_SCHEMES, "bitsandbytes"} == set(METHOD_NAMES)
    for method in METHOD_NAMES:
        if method != "bitsandbytes":
            assert not combination_with_method_errors(method, PRESETS[METHOD_SCHEMES[method]]), method


def test_proposed_schemes_exist_and_no_other_name_is_one() -> None:
    assert set(_SCHEMES.values()) <= set(PRESETS)
    assert not set(_SCHEMES) & set(PRESETS)
