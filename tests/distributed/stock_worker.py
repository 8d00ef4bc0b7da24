"""Runs on every rank: what Transformers and DeepSpeed do under axes without our callbacks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from equivalence.cases import Case, make_model, padded, samples
from equivalence.runs import make_trainer, sequence_parallelism
from fresh_process import forget_last_run
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.deepspeed import auto_ep


def of_twelve(rows: Any) -> dict[str, Any]:
    batch = padded([{name: torch.cat([value] * 3)[:12] for name, value in row.items()} for row in rows])
    positions = torch.arange(12).expand(len(rows), -1).contiguous()
    return {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": positions}


def shared_sequences(directory: Path) -> dict[str, str]:
    """Return how the Trainer's own sequence parallelism fails on these ranks, and what it leaves behind."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers import Trainer, TrainingArguments
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ranks = int(os.environ["WORLD_SIZE"])
    settings = Case(layout="sp2-zero2").arguments(directory) | {"per_device_train_batch_size": 4 // ranks}
    axes = {"parallelism_config": sequence_parallelism(2, ranks // 2)}
    built = TrainingArguments(**settings, **axes, **configure_cpu_ranks("deepspeed"))
    found = {"failure": "", "second run": ""}
    try:
        Trainer(model=make_model("llama", {}), args=built, train_dataset=samples(), data_collator=of_twelve).train()
    except Exception as error:
        found["failure"] = f"{type(error).__name__}: {error}"
    found["attention"] = ALL_ATTENTION_FUNCTIONS["sdpa"].__module__
    try:
        parallel_state_sp.initialize_sequence_parallel(2)
    except AssertionError as error:
        found["second run"] = str(error)
    forget_last_run()
    found["attention afterwards"] = ALL_ATTENTION_FUNCTIONS["sdpa"].__module__
    return found


def unmarked_experts(directory: Path) -> str:
    """Return how ZeRO-2 rejects experts whose parameter groups are not marked."""
    with patch.object(auto_ep, "mark_expert_groups"):
        try:
            make_trainer(Case(layout="ep2-zero2"), directory)[0].train()
        except AssertionError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    output = Path(sys.argv[1])
    record: dict[str, Any] = {"sequences": shared_sequences(output)}
    if os.environ["WORLD_SIZE"] == "2":
        record["experts"] = unmarked_experts(output)
    (output / f"{os.environ['WORLD_SIZE']}-{os.environ['RANK']}.json").write_text(json.dumps(record))
