"""Launch of the ranks that divide batches among them, on this machine or on several, followed to its end."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.plan.launch import NodePlace
from ...ds_configs.specs.errors import Fault
from ...plugins.launching.launch import Launch, python_arguments, run_together
from ...plugins.launching.notes import NOTE, Notify, OnProgress
from .share import JOB_FILE, WORK

_LONGEST_RUN_SECONDS = 90 * 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Processes that each hold the whole model."""

    processes: int = 1
    """How many, on all machines."""
    nodes: int = 1
    """Machines, with equally many processes."""
    place: NodePlace | None = None
    """This machine's among several; `None` for one."""

    @property
    def are_launched(self) -> bool:
        """Whether ranks are started for them: one process does its work itself."""
        return self.processes > 1 or self.place is not None

    @property
    def result_is_here(self) -> bool:
        """Whether this machine gets the results."""
        return self.place is None or self.place.is_first

    def faults(self, *, device: str | None = None) -> list[Fault]:
        """Return what cannot be about the counts, the machine's place, and a device that is stated."""
        faults = []
        if self.processes < 1:
            faults.append(Fault(where="num_processes", value=self.processes, rule="must be at least 1"))
        if self.nodes < 1 or self.processes % self.nodes:
            rule = f"must divide the {self.processes} processes evenly"
            faults.append(Fault(where="num_nodes", value=self.nodes, rule=rule))
        if self.place is None and self.nodes > 1:
            rule = "are each started with --node-rank and --main-address, or all with --on ssh"
            faults.append(Fault(where="num_nodes", value=self.nodes, rule=rule))
        if self.place is not None and not 0 <= int(self.place.rank) < self.nodes:
            rule, fix = f"must be from 0 to {self.nodes - 1}", "state --num-nodes"
            faults.append(Fault(where="node_rank", value=self.place.rank, rule=rule, fix=fix))
        if device is not None and ":" in device and self.are_launched:
            rule = "names one accelerator, and each process has its own"
            faults.append(Fault(where="device", value=device, rule=rule, fix=f"give {device.partition(':')[0]}"))
        return faults if faults or device == "cpu" else self._accelerator_faults(device)

    def _accelerator_faults(self, device: str | None) -> list[Fault]:
        """Return a fault where this machine has fewer accelerators than processes; none at all means the CPU."""
        import torch

        here, needed = torch.cuda.device_count(), self.processes // self.nodes
        if not self.are_launched or needed <= here or (here == 0 and device is None):
            return []
        rule = f"are more than the {here} accelerators here"
        return [Fault(where="processes of a machine", value=needed, rule=rule, fix=f"at most {here}, or --device cpu")]

    def launch(self, worker: str, job_file: str, *, on_cpu: bool) -> Launch:
        """Return the launch of this machine's processes."""
        local = self.processes // self.nodes
        meeting = ["--standalone"]
        if self.place is not None:
            meeting = [f"--nnodes={self.nodes}", "--node-rank", str(self.place.rank)]
            meeting += ["--master-addr", self.place.main_address, "--master-port", str(self.place.main_port)]
        command = ["torchrun", *meeting, f"--nproc-per-node={local}", "-m", worker, job_file]
        environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(_threads(local))}
        if not on_cpu:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(local))))
            environment |= {"CUDA_VISIBLE_DEVICES": shown, "DS_ACCELERATOR": "cuda"}
        return Launch(arguments=python_arguments(command), environment=environment)


ONE_PROCESS = Replicas()


def _threads(processes: int) -> int:
    return max(1, (os.cpu_count() or 1) // processes)


def run_replicas(
    replicas: Replicas,
    worker: str,
    job: Mapping[str, Any],
    work: Path,
    *,
    on_cpu: bool,
    notify: Notify,
    on_progress: OnProgress,
) -> None:
    """Start the processes, hand over how far they are, and wait for their end.

    Args:
        replicas: How many, and where.
        worker: Module that every rank runs; it ends with `run_share`.
        job: What they are told, as JSON values.
        work: A directory for the job and for what the first rank leaves.
        on_cpu: Whether accelerators are hidden from them.
        notify: Receives remarks of the first rank.
        on_progress: Hears how far it is.

    Raises:
        LaunchFailedError: a rank failed; says which and why.
    """
    file = work / JOB_FILE
    file.write_text(json.dumps(job), encoding="utf-8")

    def on_line(line: str) -> None:
        if line.startswith(WORK):
            # Ranks share one output: another may have written into the line.
            with contextlib.suppress(ValueError, TypeError):
                what, done, total = json.loads(line.removeprefix(WORK))
                on_progress(str(what), int(done), int(total))
        elif line.startswith(NOTE):
            notify(line.removeprefix(NOTE))

    launched = replicas.launch(worker, str(file), on_cpu=on_cpu)
    run_together([launched], timeout_seconds=_LONGEST_RUN_SECONDS, on_line=on_line)
