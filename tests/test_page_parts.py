"""Parts of pages that benchmarks write."""

from __future__ import annotations

import pytest
from page_parts import with_part


def test_a_part_of_a_page_is_replaced_and_a_missing_one_is_no_silence():
    page = "before\n<!-- cases -->\nold\n<!-- end of cases -->\nafter\n"
    assert with_part(page, "cases", "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no part between <!-- groups -->"):
        with_part(page, "groups", "new")
