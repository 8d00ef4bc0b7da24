"""Drawn plans as files, commands and reasons, compared with stored ones by value.

`python tests/ds_configs/plan/test_rendered_plans.py` renews `rendered_plans.json` after a change that is meant.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from shardwright.cli.main import build_app
from shardwright.cli.settings import resolve
from shardwright.ds_configs.check.files import check_text
from shardwright.ds_configs.plan.gallery import GALLERY_RELEASE, packaged_model
from shardwright.ds_configs.plan.out_of_memory import OutOfMemory, out_of_memory_text
from shardwright.ds_configs.plan.plan import make_plan, plan_from_dict, render_files
from shardwright.ds_configs.plan.rendering import HEADER, NodePlace, launch_arguments, train_arguments, trainer_line
from shardwright.ds_configs.search.run_estimates import doubts
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.layout import Layout
from shardwright.plugins.planning import checked_job

FILE = Path(__file__).with_name("rendered_plans.json")
STORED: dict[str, Any] = json.loads(FILE.read_text())
"""What each command line gave. The lines are drawn pairwise: engines, offload, types, methods, axes, optimizers."""
SHOWN_REASONS = 3
FAILURE = OutOfMemory(phase="backward", error="out of memory", limit_bytes=60 * 10**9)


@cache
def _app() -> Any:
    return build_app()


def described(line: str) -> dict[str, Any]:
    """Return what the files, commands and messages of a plan say."""
    settings = resolve(_app(), ["plan", *shlex.split(line)])[1].arguments["settings"]
    model = replace(packaged_model(shlex.split(line)[0], release=GALLERY_RELEASE), revision=settings.revision)
    fields = settings.job_fields()
    if settings.teacher is not None:
        fields["teacher"] = packaged_model(settings.teacher, release=GALLERY_RELEASE)
    hardware = parse_hardware(settings.hardware, host_memory=settings.host_memory, nvme=settings.nvme)
    plan = make_plan(model, hardware, checked_job(None, fields))
    texts = render_files(plan, directory="plan")
    assert plan_from_dict(json.loads(texts.pop("plan.json")), source="plan.json") == plan
    configurations = {name: text for name, text in texts.items() if name in ("accelerate.yaml", "ds_config.json")}
    findings = [
        check_text(text, filename=name, world_size=hardware.world_size) for name, text in configurations.items()
    ]
    files: dict[str, Any] = {
        name: [line for line in text.splitlines() if line.startswith("#") or "--" in line]
        for name, text in texts.items()
        if not name.endswith(("json", "yaml"))
    }
    files |= {name: json.loads(text) for name, text in texts.items() if name.endswith(".json")}
    files.get("ds_config.json", {}).pop(HEADER, None)
    files["accelerate.yaml"] = yaml.safe_load(texts["accelerate.yaml"])
    if engine := files["accelerate.yaml"].get("deepspeed_config"):
        engine["deepspeed_config_file"] = json.loads(engine["deepspeed_config_file"])
    place, chosen = NodePlace(rank=1, main_address="host"), plan.chosen
    commands = [launch_arguments(plan, directory="plan"), launch_arguments(plan, directory="plan", node=place)]
    usual = asdict(Layout(engine=chosen.layout.engine)) | {"zero": asdict(chosen.layout)["zero"]}
    return {
        "layout": {name: value for name, value in asdict(chosen.layout).items() if value != usual[name]},
        "files": files,
        "findings": [str(finding.error) for each in findings for finding in each],
        "environment": plan.environment,
        "own loop": plan.deepspeed_config() if chosen.layout.engine == "deepspeed" else None,
        "commands": [shlex.join(words) for words in (*commands, train_arguments(plan, directory="plan"))],
        "flags": shlex.join(plan.job.flags()),
        "trainer": trainer_line(plan),
        "out of memory": [] if model.revision is None else out_of_memory_text(plan, FAILURE).splitlines(),
        "doubts": doubts(chosen.layout, model, hardware, plan.job),
        "reasons": [layout.reason for layout in (chosen, *plan.rejected)][:SHOWN_REASONS],
        "memory": chosen.memory.gpu.terms,
        "host memory": chosen.memory.host.terms,
        "seconds": {name: float(f"{seconds:.6g}") for name, seconds in chosen.time.terms.items()},
    }


def differences(stored: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each value that is not the stored one, with both."""
    if isinstance(stored, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*stored, *now)):
            yield from differences(stored.get(key, "nothing"), now.get(key, "nothing"), f"{path}.{key}")
    elif isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        for index, (one, other) in enumerate(zip(stored, now, strict=True)):
            yield from differences(one, other, f"{path}.{index}")
    elif stored != now or isinstance(stored, bool) != isinstance(now, bool):
        yield f"{path}: {stored!r} is now {now!r}"


@pytest.mark.parametrize("line", STORED)
def test_a_drawn_plan_is_rendered_as_before(line: str) -> None:
    now = json.loads(json.dumps(described(line)))
    assert not list(differences(STORED[line], now)), (
        f"{line}; renew with: python tests/ds_configs/plan/test_rendered_plans.py"
    )


if __name__ == "__main__":
    renewed = {line: described(line) for line in (sys.argv[1:] or STORED)}
    FILE.write_text(json.dumps(renewed, indent=1, ensure_ascii=False) + "\n")
