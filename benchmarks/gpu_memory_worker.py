"""Trains one case of `gpu_memory.py` on the first visible GPU and writes what it used."""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from gpu_memory import GpuCase, case_of
from metered_training import plan_of, train_metered
from shardwright.plugins.metering import AcceleratorMeter, MeterPhase
from shardwright.plugins.planning import detect_hardware
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

MOST_LEFT_BYTES = 2**24
"""Of a case whose Trainer is gone, before another case is measured in the same process."""


def main(cases: list[GpuCase], output: Path) -> None:
    """Train the cases one after the other and add a line with the figures of each to `output`."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fresh_process import forget_last_run

    for case in cases:
        found = measured(case)
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": asdict(case), **found}) + "\n")
        print("measured", case.name, found["outcome"], flush=True)
        forget_last_run()
        torch.cuda.empty_cache()
        if torch.cuda.memory_allocated() > MOST_LEFT_BYTES:
            print(f"{torch.cuda.memory_allocated():,} bytes are left", flush=True)
            break


def measured(case: GpuCase) -> dict[str, Any]:
    """Train one case and return its figures."""
    hardware = replace(detect_hardware(), gpus_per_node=1)
    plan = plan_of(case.full_layout(), case.spec(), hardware, case.job())
    meter, loss = TimedMeter(), MeanLoss()
    outcome = "trained"
    try:
        train_metered(plan, case.config, meter, callbacks=[loss])
    except Exception as error:
        traceback.print_exc()
        # Pinned host memory and cuBLAS report it as a plain RuntimeError.
        is_memory = "out of memory" in str(error)
        outcome = "out of memory" if is_memory else f"failed: {type(error).__name__}: {error}".splitlines()[0][:160]
    return {"device": torch.cuda.get_device_name(), "outcome": outcome, "mean_loss": loss.value, **_figures(meter)}


class TimedMeter(AcceleratorMeter):
    """A meter that waits for the GPU between phases, and adds up the seconds of each."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[MeterPhase, float] = {}
        self._began = time.perf_counter()

    def enter(self, phase: MeterPhase) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._began
        self._began = now
        super().enter(phase)

    def reset_peaks(self) -> None:
        super().reset_peaks()
        self.seconds = {}


class MeanLoss(TrainerCallback):
    """Keeps the mean loss of a run."""

    value: float | None = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        self.value = (logs or {}).get("train_loss", self.value)


def _figures(meter: TimedMeter) -> dict[str, Any]:
    reading = meter.reading()
    free_bytes, device_bytes = torch.cuda.mem_get_info()
    return {
        "allocated_phases": reading.peaks,
        "reserved_peak_bytes": reading.reserved_peak_bytes,
        "context_bytes": device_bytes - free_bytes - torch.cuda.memory_reserved(),
        "phase_seconds": {name: seconds for name, seconds in meter.seconds.items() if name not in ("init", "other")},
    }


if __name__ == "__main__":
    main([case_of(values) for values in json.loads(sys.argv[1])], Path(sys.argv[2]))
