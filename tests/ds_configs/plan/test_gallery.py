"""Plans of the gallery: three by value, and none that would control a terminal."""

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


@pytest.mark.parametrize(
    ("name", "label", "micro_batch_size", "peak_bytes"),
    [
        ("llama-3.1-8b_8xA100-80GB", "zero2", 1, 66_647_826_935),
        pytest.param("qwen3-30b-a3b_8xH200", "fsdp2", 2, 134_386_904_702, marks=pytest.mark.full),
        ("llama-3.1-8b_1xRTX4090_qlora", "single", 1, 22_528_156_991),
    ],
)
def test_three_plans_are_those_of_the_planner(name: str, label: str, micro_batch_size: int, peak_bytes: int) -> None:
    plan = gallery_plan(gallery_entry(name))
    chosen, frame, layouts = plan.chosen, plan.to_dataframe(), (plan.chosen, *plan.rejected)
    assert (chosen.layout.label, chosen.layout.micro_batch_size) == (label, micro_batch_size)
    assert chosen.memory.gpu.peak_bytes == peak_bytes
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
