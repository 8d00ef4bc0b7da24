"""Time that planning takes a user, beside its targets: `python benchmarks/planning_time.py [--strict]`.

Each command runs in fresh processes, so that imports count; planning itself is timed once everything is loaded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning.models import load_model_spec

MODEL = Path(__file__).parents[1] / "tests" / "data" / "models" / "meta-llama--Llama-3.1-405B"
HARDWARE = "128x8xH100-80GB"
PROCESSES = 5
REPETITIONS = 20


def seconds(action: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def command_seconds(*arguments: str) -> float:
    """Return the median wall time of the command in fresh processes."""
    command = [sys.executable, "-m", "shardwright", *arguments]
    return median(
        seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)) for _ in range(PROCESSES)
    )


def loaded_seconds() -> float:
    """Return the median time of `make_plan` when model, hardware and modules are loaded."""
    model, hardware, job = load_model_spec(str(MODEL)).spec, parse_hardware(HARDWARE), TrainingJob()
    return median(seconds(lambda: make_plan(model, hardware, job)) for _ in range(REPETITIONS))


def main() -> int:
    """Print each time beside its target; with `--strict`, return 1 when one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    strict = parser.parse_args().strict
    plan = ("plan", str(MODEL), "--hardware", HARDWARE, "--format", "json")
    rows = (
        (f"shardwright plan {MODEL.name} on {HARDWARE}, cold", command_seconds(*plan), 2.0),
        ("the same once loaded", loaded_seconds(), 0.2),
        ("shardwright --help, cold", command_seconds("--help"), 0.5),
    )
    for name, taken, target in rows:
        verdict = "" if taken <= target else "  MISSED"
        print(f"{name:66} {taken:7.3f} s   target {target:.1f} s{verdict}")
    return int(strict and any(taken > target for _, taken, target in rows))


if __name__ == "__main__":
    raise SystemExit(main())
