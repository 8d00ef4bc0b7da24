"""Time that planning takes a user, beside its targets: `python benchmarks/planning_time.py [--strict]`.

Each command runs in fresh processes, so that imports count; planning itself is timed once everything is loaded. Times
are of the processor: planning has one thread and waits for nothing, and other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning.models import load_model_spec

MODELS = Path(__file__).parents[1] / "ds_configs" / "data" / "models"
LARGEST = ("meta-llama--Llama-3.1-405B", "128x8xH100-80GB", 2.0)
ORDINARY = (("meta-llama--Llama-3.1-70B", "8xH100-80GB", 1.0), ("mistralai--Mistral-7B-v0.3", "8xA100-80GB", 1.0))
"""Models on hardware, with the targets of a cold command in seconds."""
PROCESSES = 5
REPETITIONS = 20


def command_seconds(*arguments: str) -> float:
    """Return the median processor time of the command in fresh processes."""
    command = [sys.executable, "-m", "shardwright", *arguments]

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    taken = []
    for _ in range(PROCESSES):
        before = used()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken.append(used() - before)
    return median(taken)


def loaded_seconds(name: str, hardware: str) -> float:
    """Return the median time of `make_plan` when model, hardware and modules are loaded."""
    model, cluster, job = load_model_spec(str(MODELS / name)).spec, parse_hardware(hardware), TrainingJob()
    taken = []
    for _ in range(REPETITIONS):
        start = time.process_time()
        make_plan(model, cluster, job)
        taken.append(time.process_time() - start)
    return median(taken)


def main() -> int:
    """Print each time beside its target; with `--strict`, return 1 when one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    strict = parser.parse_args().strict
    rows = [
        (
            f"shardwright plan {name} on {hardware}, cold",
            command_seconds("plan", str(MODELS / name), "--hardware", hardware, "--format", "json"),
            target,
        )
        for name, hardware, target in (LARGEST, *ORDINARY)
    ]
    name, hardware, _ = LARGEST
    rows.insert(1, ("the same once loaded", loaded_seconds(name, hardware), 0.2))
    rows.append(("shardwright --help, cold", command_seconds("--help"), 0.5))
    for name, taken, target in rows:
        verdict = "" if taken <= target else "  MISSED"
        print(f"{name:66} {taken:7.3f} s   target {target:.1f} s{verdict}")
    return int(strict and any(taken > target for _, taken, target in rows))


if __name__ == "__main__":
    raise SystemExit(main())
