"""Strict parsers of JSON and YAML: what they accept and reject."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.texts import (
    LARGEST_YAML_BYTES,
    read_small_file,
    strict_json,
    yaml_mapping,
    yaml_value,
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"save_steps": NaN}', "NaN is not a finite number"),
        ('{"a": 1e999}', "1e999 is not a finite number"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' is duplicated"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"a": "\xe9"}', "utf-8"),
        ("{", "Expecting"),
    ],
)
def test_rejects_invalid_json(text: str | bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        strict_json(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3\n", "the key 'a' is duplicated"),
        ("a: .nan\n", r"\.nan is not a finite number"),
        ("a: 1.0e+999\n", r"1\.0e\+999 is not a finite number"),
        ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    ],
)
def test_rejects_invalid_yaml(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        yaml_value(text)
    with pytest.raises(UsageError, match=r"config = 'file\.yaml': is not valid YAML"):
        yaml_mapping(text, name="file.yaml", what="config")


def test_merge_keys_are_not_duplicates() -> None:
    text = "base: &b {x: 1}\na:\n  <<: *b\n  y: 2\n"
    assert yaml_value(text)["a"] == {"x": 1, "y": 2}


def test_rejects_files_that_are_slow_to_parse(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("a: [" + "1," * LARGEST_YAML_BYTES)
    with pytest.raises(UsageError, match=f"at most {LARGEST_YAML_BYTES} bytes"):
        read_small_file(file, what="config")
