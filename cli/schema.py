"""`shardwright schema`: JSON schemas for editors and agents."""

from __future__ import annotations

import json
from typing import Literal


def schema_command(subject: Literal["settings", "hardware", "plan"] = "settings") -> int:
    """Print the JSON schema of a file that Shardwright reads or writes.

    Parameters
    ----------
    subject
        settings (the YAML of plan --config), hardware (the YAML of --hardware), or plan (what plan.json holds).
    """
    from pydantic import TypeAdapter

    from ..ds_configs.hardware import HardwareSpec
    from ..ds_configs.plan_data import PlanData
    from .settings import PlanSettings

    adapters: dict[str, TypeAdapter[object]] = {
        "settings": TypeAdapter(PlanSettings),
        "hardware": TypeAdapter(HardwareSpec),
        "plan": TypeAdapter(PlanData),
    }
    print(json.dumps(adapters[subject].json_schema(), indent=2))
    return 0
