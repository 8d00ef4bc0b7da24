"""Tasks of every plan of the gallery with several nodes, as SkyPilot's own loader reads them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import shardwright
import yaml
from shardwright.ds_configs.plan.clusters import ClusterJob, sky_task
from shardwright.ds_configs.plan.plan import Plan

pytestmark = pytest.mark.clusters

GALLERY = Path(shardwright.__file__).parent / "ds_configs" / "gallery"
LOADER = """
import json, sys, sky
tasks = [sky.Task.from_yaml(file) for file in sys.argv[1:]]
print("TASKS" + json.dumps([[task.num_nodes, [r.accelerators for r in task.resources]] for task in tasks]))
"""


def test_skypilot_reads_them(tmp_path: Path) -> None:
    plans = {file.parent: Plan.load(file.parent) for file in sorted(GALLERY.glob("*/plan.json"))}
    several = {directory: plan for directory, plan in plans.items() if plan.hardware.nodes > 1}
    assert len(several) >= 3
    files = []
    for index, (directory, plan) in enumerate(several.items()):
        job = ClusterJob(plan=plan, directory=str(directory), arguments=("--max-steps", "10"))
        files.append(tmp_path / f"{index}.yaml")
        files[-1].write_text(yaml.safe_dump(sky_task(job), sort_keys=False))
    python = os.environ["SKYPILOT_PYTHON"]
    done = subprocess.run([python, "-c", LOADER, *map(str, files)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.partition("TASKS")[2])
    assert [nodes for nodes, _ in found] == [plan.hardware.nodes for plan in several.values()]
    assert [sum(each[0].values()) for _, each in found] == [plan.hardware.gpus_per_node for plan in several.values()]
