"""Plans of the gallery: their frame, and none that would control a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paths import CONFIGS
from shardwright.ds_configs.plan.gallery import GALLERY, gallery_entry, gallery_plan
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.specs.errors import RefusedInputError


def test_entries_have_names_of_their_own_and_cover_every_public_model() -> None:
    assert len({entry.name for entry in GALLERY}) == len(GALLERY)
    assert {entry.model.replace("/", "--") for entry in GALLERY} == {path.name for path in CONFIGS.iterdir()}


def test_a_frame_has_the_chosen_layout_and_the_others() -> None:
    plan = gallery_plan(gallery_entry("llama-3.1-8b_8xA100-80GB"))
    frame, layouts = plan.to_dataframe(), (plan.chosen, *plan.rejected)
    assert plan.chosen.layout.label == "zero2" and plan.chosen.memory.gpu.peak_bytes == 66_647_826_935
    assert list(frame["layout"]) == [candidate.layout.label for candidate in layouts]
    assert list(frame["tokens_per_second"]) == [layout.time.tokens_per_second for layout in layouts]
    assert list(frame["peak_GB"]) == [layout.memory.gpu.peak_bytes / 1e9 for layout in layouts]


@pytest.mark.parametrize("text", ["\x1b[2J", "\u202ename", "\x07", "\x9b31m"], ids=["ESC", "bidi", "bell", "CSI"])
@pytest.mark.parametrize("path", [("model", "name"), ("hardware", "name"), ("chosen", "reason")], ids="-".join)
def test_plans_that_would_control_a_terminal_are_rejected(text: str, path: tuple[str, str], tmp_path: Path) -> None:
    gallery_plan(gallery_entry("qwen2.5-0.5b_1xRTX4090")).write(tmp_path)
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    data[path[0]][path[1]] = f"own {text}"
    (tmp_path / "plan.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(RefusedInputError, match="control characters") as error:
        Plan.load(tmp_path)
    assert str(error.value).isprintable()
