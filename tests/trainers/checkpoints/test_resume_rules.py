"""Rules of resuming: rejected differences name a fix, and converted ones continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import cpu_arguments
from shardwright.trainers.checkpoints.resume import compared, layout_name, saved_layout
from transformers import Trainer


def test_other_world_size_is_rejected_if_states_are_sharded_by_axes():
    saved = {"engine": "deepspeed", "axes": {"pipeline_stages": 2}, "world_size": 4}
    (error,), warnings = compared(saved, saved | {"world_size": 2})
    assert (error.where, error.value, warnings) == ("resume: world_size", 2, [])
    assert error.fix.startswith("launch 4 ranks, or start a new run")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_other_world_size_continues_if_states_are_complete_or_resharded(engine):
    errors, (warning,) = compared({"engine": engine, "world_size": 4}, {"engine": engine, "world_size": 2})
    assert not errors
    assert warning.startswith("resume: world_size was 4 and is now 2: the random states of the ranks")


COMMON = (
    "trainer_state.json",
    "scheduler.pt",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "model.safetensors",
    "config.json",
)
OPTIMIZER = tuple(f"global_step4/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))
WEIGHTS = "global_step4/mp_rank_00_model_states.pt"
NOW = {
    "states": "all",
    "engine": "deepspeed",
    "zero_stage": 2,
    "sharded": "",
    "world_size": 2,
    "weights": "all weights",
}


@pytest.mark.parametrize(
    ("names", "name"),
    [
        ((*COMMON, "optimizer.pt"), "DDP or one process on 2 ranks"),
        (("rng_state.pth", "optimizer.pt", "scheduler.pt"), "DDP or one process on 1 rank"),
        ((*COMMON, "optimizer.bin", "pytorch_model_fsdp.bin"), "FSDP2 on 2 ranks"),
        ((*COMMON, "optimizer_0", "optimizer_0/__0_0.distcp", "pytorch_model_fsdp_0"), "FSDP2 on 2 ranks"),
        ((*COMMON, WEIGHTS), "ZeRO-0 on 2 ranks"),
        ((*COMMON, WEIGHTS, *OPTIMIZER), "ZeRO-1 or 2 on 2 ranks"),
        ((*COMMON, WEIGHTS, *(name.replace("zero", "bf16_zero") for name in OPTIMIZER)), "ZeRO-1 or 2 on 2 ranks"),
        (
            (*COMMON, "global_step4/zero_pp_rank_0_mp_rank_00_model_states.pt", *OPTIMIZER),
            "ZeRO-3 on 2 ranks",
        ),
        (
            (*COMMON, WEIGHTS, WEIGHTS.replace("00", "01"), OPTIMIZER[0], OPTIMIZER[0].replace("rank_00", "rank_01")),
            "ZeRO-1 or 2 with tensors over 2 ranks on 2 ranks",
        ),
        (
            (*COMMON, WEIGHTS, WEIGHTS.replace("00", "01"), "global_step4/layer_00-model_states.pt"),
            "ZeRO-0 with pipeline stages on 2 ranks",
        ),
        (
            (*COMMON, WEIGHTS, *OPTIMIZER, "global_step4/layer_0_expert_3_mp_rank_00_model_states.pt"),
            "ZeRO-1 or 2 with expert parallelism on 2 ranks",
        ),
    ],
)
def test_names_of_files_show_the_layout_that_saved_them(names: tuple[str, ...], name: str) -> None:
    saved = saved_layout(names)
    assert layout_name(saved) == name
    errors, _ = compared(saved, NOW)
    assert bool(errors) != (name == "ZeRO-1 or 2 on 2 ranks"), errors
    for error in errors:
        assert name in error.rule and error.value == "ZeRO-2 on 2 ranks"


def test_checkpoints_of_adapters_belong_to_adapters() -> None:
    adapters = saved_layout([*COMMON[:4], "optimizer.pt", "adapter_config.json", "adapter_model.safetensors"])
    model = saved_layout([*COMMON, "optimizer.pt"])
    now = NOW | {"engine": "ddp"}
    assert [error.where for error in compared(adapters, now)[0]] == ["resume: weights"]
    assert [error.where for error in compared(model, now | {"weights": "adapters"})[0]] == ["resume: weights"]
    assert compared(model, now) == compared(adapters, now | {"weights": "adapters"}) == ([], [])


def test_the_trainer_still_resumes_without_an_optimizer(tmp_path: Path) -> None:
    """A checkpoint of DeepSpeed or of `save_only_model`: its weights load, and the optimizer starts again, silently."""
    trainer: Any = Trainer(torch.nn.Linear(1, 1), cpu_arguments(tmp_path, 1))
    trainer._load_optimizer_and_scheduler(str(tmp_path))
    assert trainer.optimizer is None and trainer.lr_scheduler is None
