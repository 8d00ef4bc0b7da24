"""Trains a grid of cases on CPU ranks and collects what each of them metered."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.ds_configs.specs.model import FIRST_RELEASE
from shardwright.plugins.launching.launch import Launch, free_port, launch_ranks, python_arguments
from shardwright.plugins.releases import transformers_release

SECONDS_PER_CASE = 90


def measure_cases(cases: Sequence[Any], *, worker_file: str) -> list[dict[str, Any]]:
    """Train every case, those with the same number of ranks in one launch, and return the readings.

    Args:
        cases: Dataclasses with a field or property `ranks`.
        worker_file: The script beside this one that each rank runs with a file of cases and a file for readings.
    """
    records: list[dict[str, Any]] = []
    worker = Path(__file__).with_name(worker_file)
    with tempfile.TemporaryDirectory() as directory:
        for ranks in sorted({case.ranks for case in cases}):
            chosen = [asdict(case) for case in cases if case.ranks == ranks]
            wanted, output = Path(directory) / f"{ranks}.json", Path(directory) / f"{ranks}.jsonl"
            wanted.write_text(json.dumps(chosen), encoding="utf-8")
            launch = ["torchrun", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
            command = python_arguments([*launch, str(worker), str(wanted), str(output)])
            launch_ranks(
                Launch(arguments=tuple(command)), timeout_seconds=120 + SECONDS_PER_CASE * len(chosen), on_line=_show
            )
            records += [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    release = transformers_release()
    if release != FIRST_RELEASE:
        records = [record | {"release": release} for record in records]
    return records


def _show(line: str) -> None:
    if line.startswith("measured "):
        print(line, file=sys.stderr)
