"""The picture of the documentation site's first page, drawn from a plan of the gallery and from two real runs.

`make docs` draws it. `python tools/picture.py REHEARSAL_JSON LOSSES_JSON` records two new runs in overview.json:

    shardwright configs cp llama-3.1-8b_8xA100-80GB plan
    shardwright rehearse plan --format json > rehearsal.json
    shardwright demo
    python tools/picture.py rehearsal.json demo-output/losses.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from shardwright.ds_configs.plan.gallery import gallery_entry, gallery_plan
from shardwright.ds_configs.plan.plan import render_files
from shardwright.ds_configs.search.reasons import display_name
from shardwright.ds_configs.search.search import Evaluated

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path(__file__).parent / "overview.json"
_ZERO_KEYS = ("stage", "overlap_comm", "reduce_bucket_size", "stage3_prefetch_bucket_size", "sub_group_size")
_AXES = ("tp", "pp", "sp", "cp", "ep")
_WIDEST_GB = 200


def picture() -> str:
    """The SVG: what the planner weighed, the files, the rehearsal of these files, and the loss of the demo."""
    plan, runs = gallery_plan(gallery_entry("llama-3.1-8b_8xA100-80GB")), json.loads(RUNS.read_text(encoding="utf-8"))
    zero = json.loads(render_files(plan)["ds_config.json"])["zero_optimization"]
    layouts = [
        _layout(one, is_taken=one is plan.chosen)
        for one in (plan.chosen, *plan.rejected)
        if one.strategy.offload_param == "none" and {getattr(one.strategy, axis) for axis in _AXES} == {1}
    ]
    assert max(layout["gb"] for layout in layouts) < _WIDEST_GB
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    made = Environment(loader=loader, undefined=StrictUndefined, autoescape=True)
    return made.get_template("overview.svg").render(
        layouts=layouts,
        capacity_gb=plan.chosen.memory.gpu.capacity_bytes / 1e9,
        widest_gb=_WIDEST_GB,
        files=plan.file_names,
        zero=[(key, json.dumps(zero[key])) for key in _ZERO_KEYS if key in zero],
        rehearsal=runs["rehearsal"],
        losses=runs["training"]["losses"],
        curve=_curve(runs["training"]["losses"], left=520, right=920, top=465, bottom=640),
    )


def _layout(one: Evaluated, *, is_taken: bool) -> dict[str, Any]:
    gpu = one.memory.gpu
    return {
        "name": display_name(one.strategy).replace("CPU offload of optimizer", "offload"),
        "gb": gpu.high_bytes / 1e9,
        "tokens_per_s": one.time.tokens_per_second,
        "kind": "no" if gpu.high_bytes > gpu.capacity_bytes else "taken" if is_taken else "yes",
    }


def measured(rehearsal: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """What the picture shows of two runs."""
    assert rehearsal["passed"], "a rehearsal that failed is not shown"
    megabytes = {
        phase: [_megabytes(rehearsal[side][phase]) for side in ("measured", "predicted")]
        for phase in rehearsal["measured"]
    }
    checks = [check["name"] for check in rehearsal["checks"]]
    shown = {"checks": checks, "megabytes": megabytes, "ranks": rehearsal["ranks"]}
    return {"rehearsal": shown, "training": {"losses": training["losses"]}}


def _megabytes(by_role: dict[str, Any]) -> float:
    # The terms of a prediction follow its roles.
    return sum(size for role, size in by_role.items() if role != "terms") / 1e6


def _curve(losses: list[float], *, left: float, right: float, top: float, bottom: float) -> str:
    """Points of a line, the largest loss at the top and the smallest at the bottom."""
    low, high = min(losses), max(losses)
    across, down = (right - left) / (len(losses) - 1), (bottom - top) / (high - low)
    points = ((left + place * across, top + (high - loss) * down) for place, loss in enumerate(losses))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


if __name__ == "__main__":
    runs = measured(*(json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:3]))
    RUNS.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
