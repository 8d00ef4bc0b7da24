"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.units import gigabytes, human_count, parse_bytes

POWERS = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


@given(
    count=st.integers(0, 888),
    letter=st.sampled_from("kmgtp"),
    binary=st.booleans(),
    space=st.sampled_from(["", " "]),
    upper=st.booleans(),
)
def test_units_are_powers_of_1000_or_1024_in_any_case(
    count: int, letter: str, binary: bool, space: str, upper: bool
) -> None:
    text = f"{count}{space}{letter}{'i' if binary else ''}b"
    base = 1024 if binary else 1000
    assert parse_bytes(text.upper() if upper else text) == count * base ** POWERS[letter]


@given(text=st.text(max_size=30))
def test_any_text_is_a_size_or_a_usage_error(text: str) -> None:
    try:
        count = parse_bytes(text, where="host_memory")
    except UsageError as error:
        assert error.errors[0].where == "host_memory"
        assert error.errors[0].value == text
    else:
        assert 0 <= count <= 10**18


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        *((text, "must be a size with a unit; for example 80GB or 80GiB") for text in ("", "GB", "-1GB", "1e9", "٣GB")),
        *((text, "at most 1 EB") for text in ("1001PB", "9" * 30)),
    ],
)
def test_rejects_text_that_is_no_size_and_sizes_above_1_eb(text: str, rule: str) -> None:
    with pytest.raises(UsageError, match=rule):
        parse_bytes(text)


def test_counts_have_units() -> None:
    assert [human_count(n) for n in (999, 1_500, 124_439_808)] == ["999", "1.50 k", "124.44 M"]
    assert [gigabytes(n) for n in (0, 400_000_000, 10**9, 85_899_345_920)] == ["0.000", "0.400", "1.0", "85.9"]
