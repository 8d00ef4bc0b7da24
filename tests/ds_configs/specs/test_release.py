"""Stored facts by release of Transformers: which changes apply, and how a tool writes one."""

from __future__ import annotations

from typing import Any

from shardwright.ds_configs.memory.activations import load_coefficients
from shardwright.ds_configs.specs.model import adapted_mixtures, is_within, merged, newest_tested_release
from shardwright.plugins import releases
from shardwright.tools.release_changes import facts_in, patch_between

DOCUMENT: dict[str, Any] = {
    "tables": {"a": {"kept": [1], "rows": 2}, "b": {"kept": [3]}},
    "changes": {"<5.15": {"tables": {"b": None}}, ">=5.18": {"tables": {"a": {"kept": [4]}}}},
}


def test_development_releases_compare_by_public_version() -> None:
    assert is_within("5.18.0.dev0", ">=5.18") and is_within("6.0.0rc1", ">=5.23") and is_within("5.14.1", "<5.15")


def test_invalid_version_counts_as_newest_tested_release() -> None:
    newest = newest_tested_release()
    assert newest == releases.tested_releases()["transformers"].newest
    assert is_within("main-of-mine", f">={newest}") and not is_within("main-of-mine", f"<{newest}")


def test_a_change_of_rows_adds_to_one_column() -> None:
    rows = {"kept": [[1, 41, 0], [2, -41, 4], [3, 8, 5]], "other": [[1]]}
    after = {"kept": [[1, 40, 0], [2, -40, 4], [3, 8, 5]], "other": [[1]]}
    patch = patch_between(rows, after)
    assert patch == {"kept": {"column": 1, "add": [-1, 1, 0]}}
    assert merged(rows, patch) == after
    assert patch_between(rows, {"kept": [[1, 41, 1], [2, -40, 4], [3, 8, 5]]}) == {
        "kept": [[1, 41, 1], [2, -40, 4], [3, 8, 5]],
        "other": None,
    }


def test_changes_apply_only_to_their_releases() -> None:
    old, base, new = (facts_in(DOCUMENT, release)["tables"] for release in ("5.14.0", "5.17.0", "5.23.0"))
    assert old == {"a": {"kept": [1], "rows": 2}}
    assert base == {"a": {"kept": [1], "rows": 2}, "b": {"kept": [3]}}
    assert new == {"a": {"kept": [4], "rows": 2}, "b": {"kept": [3]}}


def test_mixtures_keep_one_byte_less_per_routed_token_since_5_18() -> None:
    """The mask of experts that are elsewhere, which every layer kept without expert parallelism too."""
    for family in ("mixtral", "qwen3_moe"):
        for path in ("fused", "masked", "eager"):
            before, since = (
                load_coefficients(release)["tables"][family]["bf16"]["none"][path] for release in ("5.17.0", "5.18.0")
            )
            ((old,), (new,)) = before["saved_per_layer"], since["saved_per_layer"]
            less = {name: a - b for name, a, b in zip(before["features"], old, new, strict=True) if a != b}
            assert less == {"routed_token": 1}


def test_mixtures_that_peft_adapts_grow_with_the_conversions_of_transformers() -> None:
    assert "mixtral" in adapted_mixtures("5.14.0")
    assert "beam" not in adapted_mixtures("5.20.0") and "beam" in adapted_mixtures("5.21.0")
