"""Quantization-aware training: one gradient under every layout, and the export holds what was trained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import RANKS, WORKER_ENVIRONMENT
from qat_cases import CASES, LEARNING_RATE, REFERENCES, SCHEMES, Case, callback_settings, model_directory, save_models
from shardwright.plugins.launching import torchrun

pytestmark = pytest.mark.distributed

BETWEEN_LAYOUTS = 1e-5
"""Largest difference of a gradient's element, relative to the largest element of its tensor."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run gave."""

    trained: dict[str, torch.Tensor]
    """Weights after the last step."""
    exported: dict[str, torch.Tensor]
    """Tensors of the checkpoint."""
    config: dict[str, Any]


def outcome(output: Path, case: Case) -> Outcome:
    from safetensors.torch import load_file

    where = output / case.name
    exported = load_file(where / "export" / "model.safetensors")
    config = json.loads((where / "export" / "config.json").read_text())
    return Outcome(trained=load_file(where / "trained.safetensors"), exported=exported, config=config)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qat-models")
    save_models(directory)
    return directory


@pytest.fixture(scope="module")
def on_two_ranks(
    models: Path, deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, Outcome]:
    output = tmp_path_factory.mktemp("two-ranks")
    worker = str(Path(__file__).with_name("qat_worker.py"))
    torchrun([worker, str(models), str(output)], ranks=RANKS, timeout_seconds=400, environment=WORKER_ENVIRONMENT)
    return {case: outcome(output, case) for case in CASES}


@pytest.fixture(scope="module")
def on_one_process(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    from qat_worker import trained

    output = tmp_path_factory.mktemp("one-process")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in REFERENCES:
            trained(case, models, output)
    finally:
        torch.set_num_threads(threads)
    return {case: outcome(output, case) for case in REFERENCES}
