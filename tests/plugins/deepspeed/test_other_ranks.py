"""ZeRO checkpoints on another number of ranks: defects of DeepSpeed's universal loader, and rejected cases."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.deepspeed.engine import _check_conversion, _own_values

DECAY = 0.1


def loading_engine(directory: Path) -> Any:
    """A ZeRO-3 optimizer of two parameter groups that is about to load a universal checkpoint."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    partitions = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [one], "weight_decay": decay} for one, decay in zip(partitions, (DECAY, 0.0), strict=True)]
    base = {
        "state": {0: {"step": torch.tensor(4.0)}},
        "param_groups": [{"params": [], "lr": 0.5, "weight_decay": DECAY}],
    }
    (directory / "zero").mkdir()
    torch.save({"optimizer_state_dict": base}, directory / "zero" / "optimizer_state.pt")
    return SimpleNamespace(
        _load_global_state_stage3=lambda state: None,
        load_hp_checkpoint_state=lambda folder, key, param: torch.zeros(2),
        fp16_groups=[[one] for one in weights],
        fp16_partitioned_groups=[[one] for one in weights],
        fp16_partitioned_groups_flat=[torch.ones(2) for _ in weights],
        fp32_partitioned_groups_flat=partitions,
        param_names={one: str(index) for index, one in enumerate(weights)},
        optimizer=torch.optim.AdamW(groups, lr=0.1),
        swap_optimizer=False,
        unflatten=lambda flat, tensors: [flat],
    )


def loaded(zero: Any, directory: Path) -> tuple[list[Any], list[float]]:
    """Load, and return the counts of steps and the weight decays of both groups."""
    DeepSpeedZeroOptimizer_Stage3.load_hp_checkpoint_state_from_checkpoint_dir_stage3(zero, str(directory))
    return counts_and_decays(zero)


def counts_and_decays(zero: Any) -> tuple[list[Any], list[float]]:
    counts = [zero.optimizer.state[one]["step"] for one in zero.fp32_partitioned_groups_flat]
    return counts, [group["weight_decay"] for group in zero.optimizer.param_groups]


def test_deepspeed_still_mixes_up_parameter_groups(tmp_path):
    """Where this fails, `_own_values` is no longer needed."""
    (first, second), decays = loaded(loading_engine(tmp_path), tmp_path)
    assert first is second
    assert decays == [DECAY, DECAY]


def test_each_group_keeps_its_own_values(tmp_path):
    zero = loading_engine(tmp_path)
    with _own_values(zero.optimizer):
        loaded(zero, tmp_path)
    (first, second), decays = counts_and_decays(zero)
    assert first is not second
    assert first == second == 4.0
    assert decays == [DECAY, 0.0]
    assert [group["lr"] for group in zero.optimizer.param_groups] == [0.5, 0.5]


def test_errors_name_nvme_states_and_buffers_together(tmp_path):
    (tmp_path / "checkpoint-4" / "global_step4").mkdir(parents=True)
    for rank in (0, 1):
        (tmp_path / "checkpoint-4" / "global_step4" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    engine = SimpleNamespace(
        module=torch.nn.BatchNorm1d(2), seq_dp_world_size=4, zero_nvme_offload_optimizer=lambda: True
    )
    with pytest.raises(UsageError) as rejected:
        _check_conversion(engine, tmp_path / "checkpoint-4" / "global_step4")
    on_nvme, buffers = rejected.value.errors
    assert on_nvme.rule == "checkpoint-4 was saved by 2 ranks: optimizer states on NVMe are separate files of each rank"
    assert "restores no buffers on another number of ranks, and the model saves running_mean" in buffers.rule
    assert on_nvme.fix.startswith("launch 2 ranks, or")
