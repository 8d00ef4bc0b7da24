"""Runs on every rank of `memory_accuracy.py`: trains each case for a few steps with the byte meter on."""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from memory_cases import Case
from metered_training import plan_of, train_metered
from shardwright.ds_configs.hardware import parse_hardware
from shardwright.plugins.byte_meter import ByteMeter, MeterReading

_LINEAR = torch.nn.functional.linear


def main(cases_file: Path, output: Path) -> None:
    """Measure every case of a JSON file and append one line for each to `output` on rank 0."""
    cases = [Case(**values) for values in json.loads(cases_file.read_text(encoding="utf-8"))]
    for case in cases:
        reading = measure(case)
        record = asdict(reading) | {"case": asdict(case), "peak_bytes": reading.peak_bytes}
        peaks: list[Any] = [None] * case.ranks
        torch.distributed.all_gather_object(peaks, record)
        if os.environ["RANK"] == "0":
            fullest = max(peaks, key=lambda found: found["peak_bytes"])
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fullest) + "\n")
            print("measured", case.name, flush=True)
        _forget()


def measure(case: Case) -> MeterReading:
    """Train one case through the stock Trainer and return what lived on this rank."""
    plan = plan_of(case.strategy(), case.spec(), parse_hardware(f"{case.ranks}xCPU"), case.job())
    return train_metered(plan, case.config, ByteMeter())


def _forget() -> None:
    """Bring the singletons of Accelerate and Transformers back to a fresh process; the process group stays."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        os.environ.pop(name, None)
    # ZeRO-3 replaces this function for the whole process and leaves it so (deepspeed 0.19.8, partition_parameters.py).
    torch.nn.functional.linear = _LINEAR
    gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
