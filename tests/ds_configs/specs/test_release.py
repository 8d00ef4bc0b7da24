"""Stored facts by release of Transformers: which changes apply, and how a tool writes one."""

from __future__ import annotations

from typing import Any

import pytest
from planning import public_model
from shardwright.ds_configs.memory.activations import DATA_FILE, load_coefficients
from shardwright.ds_configs.models.stored_shapes import load_shapes
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.model import adapted_mixtures, is_within, merged, newest_tested_release, stored_facts
from shardwright.plugins import releases
from shardwright.tools.release_changes import facts_in, patch_between, with_facts

DOCUMENT: dict[str, Any] = {
    "tables": {"a": {"kept": [1], "rows": 2}, "b": {"kept": [3]}},
    "changes": {"<5.15": {"tables": {"b": None}}, ">=5.18": {"tables": {"a": {"kept": [4]}}}},
}


@pytest.mark.parametrize(
    ("release", "specifier", "expected"),
    [
        ("5.17.0", ">=5.18", False),
        ("5.18.0", ">=5.18", True),
        ("5.18.0.dev0", ">=5.18", True),
        ("5.21.1+local", ">=5.21", True),
        ("5.14.1", "<5.15", True),
        ("6.0.0rc1", ">=5.23", True),
    ],
)
def test_development_releases_compare_by_public_version(release: str, specifier: str, expected: bool) -> None:
    assert is_within(release, specifier) is expected


def test_invalid_version_counts_as_newest_tested_release() -> None:
    newest = newest_tested_release()
    assert newest == releases.tested_releases()["transformers"].newest
    assert is_within("main-of-mine", f">={newest}") and not is_within("main-of-mine", f"<{newest}")


def test_a_merge_patch_replaces_lists_and_removes_nulls() -> None:
    assert merged({"a": {"b": [1, 2], "c": 3}, "d": 4}, {"a": {"b": [5], "e": {"f": 6}}, "d": None}) == {
        "a": {"b": [5], "c": 3, "e": {"f": 6}}
    }


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


def test_tool_writes_differences_as_a_change() -> None:
    facts = {"tables": {"a": {"kept": [4], "rows": 7}}}
    written = with_facts(DOCUMENT, facts, release="5.23.0", change=">=5.18")
    assert written["changes"][">=5.18"] == {"tables": {"a": {"kept": [4], "rows": 7}, "b": None}}
    assert facts_in(written, "5.23.0") == facts
    assert facts_in(written, "5.17.0") == facts_in(DOCUMENT, "5.17.0")
    assert patch_between(facts, facts) == {}


def test_tool_rejects_facts_of_a_changed_release_as_default() -> None:
    with pytest.raises(UsageError, match=r"transformers 5\.23\.0: has changes of its own \(>=5\.18\)"):
        with_facts(DOCUMENT, {}, release="5.23.0", change=None)
    with pytest.raises(UsageError, match=r"change = '<5\.15'.*5\.23\.0"):
        with_facts(DOCUMENT, {}, release="5.23.0", change="<5.15")
    assert with_facts(DOCUMENT, {"tables": {}}, release="5.17.0", change=None)["changes"] == DOCUMENT["changes"]


def test_releases_without_changes_share_facts() -> None:
    assert stored_facts(DATA_FILE, "5.16.0") is stored_facts(DATA_FILE, "5.17.0")
    assert stored_facts(DATA_FILE, "5.18.0") is stored_facts(DATA_FILE, "5.23.0")
    assert stored_facts(DATA_FILE, "5.17.0") is not stored_facts(DATA_FILE, "5.18.0")


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


def test_old_release_has_no_closed_form_for_changed_classes() -> None:
    assert "FalconMambaForCausalLM" not in load_shapes("5.14.0")["classes"]
    assert load_shapes("5.14.0")["classes"]["T5ForConditionalGeneration"]["attention"] == "eager"
    assert load_shapes("5.15.0")["classes"]["T5ForConditionalGeneration"]["attention"] is None


def test_mixtures_that_peft_adapts_grow_with_the_conversions_of_transformers() -> None:
    assert "mixtral" in adapted_mixtures("5.14.0")
    assert "beam" not in adapted_mixtures("5.20.0") and "beam" in adapted_mixtures("5.21.0")


def test_default_release_is_the_newest_tested_one() -> None:
    assert public_model("meta-llama/Llama-3.1-8B").release == newest_tested_release()
