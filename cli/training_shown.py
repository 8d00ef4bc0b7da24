"""Output of a dry run, for the commands that launch a training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..ds_configs.plan.plan import Plan
    from ..trainers.data.samples import Samples
    from ..trainers.runs.settings import LaunchedSettings


def show_dry_run(
    settings: LaunchedSettings, plan: Plan, samples: Samples, files: list[Path], *, as_json: bool, **more: Any
) -> None:
    """Print the settings, the plan, the data and the files of a training that was not launched.

    Args:
        settings: What was asked for.
        plan: Where everything would go.
        samples: What it would read.
        files: What it would write.
        as_json: One object instead of text.
        more: Further values of that object; as text each is a line.
    """
    from ..ds_configs.plan.plan_json import plan_to_dict
    from .show import console, show_plan, show_settings

    statistics, values = samples.statistics, settings.model_dump()
    if as_json:
        found = {"schema_version": 1, "settings": values, "dataset": asdict(statistics), "plan": plan_to_dict(plan)}
        print(json.dumps(found | more | {"files": [str(file) for file in files]}))
        return
    show_settings(values, settings.origins())
    show_plan(plan, None)
    out = console()
    out.print(
        f"{statistics.train_samples:,} samples of {statistics.source} with {statistics.train_labels:,} labelled tokens "
        f"to train on, {len(samples.evaluation):,} to evaluate on",
        markup=False,
    )
    for name, value in more.items():
        out.print(f"{name.replace('_', ' ')}: {value}", markup=False)
    out.print("A run would write " + ", ".join(str(file) for file in files), markup=False)
