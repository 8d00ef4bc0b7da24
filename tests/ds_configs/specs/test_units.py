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


@given(thousandths=st.integers(0, 10**9))
def test_decimals_are_exact(thousandths: int) -> None:
    assert parse_bytes(f"{thousandths // 1000}.{thousandths % 1000:03d}kB") == thousandths


@given(text=st.text(max_size=30))
def test_any_text_is_a_size_or_a_usage_error(text: str) -> None:
    try:
        count = parse_bytes(text, where="host_memory")
    except UsageError as error:
        assert error.errors[0].where == "host_memory"
        assert error.errors[0].value == text
    else:
        assert 0 <= count <= 10**18


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "nan", "1.5.2GB", "80 G B", "80gigs", "0x10", "٣GB"])
def test_rejects_text_that_is_not_a_size(text: str) -> None:
    with pytest.raises(UsageError, match="must be a size with a unit; for example 80GB or 80GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1001PB", "9" * 30, "1025PiB"])
def test_rejects_sizes_above_1_eb(text: str) -> None:
    with pytest.raises(UsageError, match="at most 1 EB"):
        parse_bytes(text)


def test_parameter_counts_have_units() -> None:
    assert [human_count(n) for n in (999, 1_500, 124_439_808, 8_030_261_248, 1_200_000_000_000)] == [
        "999",
        "1.50 k",
        "124.44 M",
        "8.03 B",
        "1.20 T",
    ]
    assert [gigabytes(n) for n in (0, 400_000_000, 10**9, 85_899_345_920)] == ["0.000", "0.400", "1.0", "85.9"]
