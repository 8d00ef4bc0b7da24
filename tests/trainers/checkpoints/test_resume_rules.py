"""Rules of resuming: rejected differences name a fix, and converted ones continue."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import cpu_arguments
from image_models import llava
from shardwright.trainers.checkpoints import compared, layout_name, run_facts, saved_layout
from shardwright.trainers.exact import make_exact
from small_models import llama, mixtral
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


def facts_of(directory: Path, *, samples: int = 8, width: int = 16, frozen: bool = False, **arguments: Any) -> Any:
    model = llama(hidden_size=width, vocab_size=64)
    model.lm_head.requires_grad_(not frozen)
    rows: Any = [{"input_ids": torch.arange(4) + index} for index in range(samples)]
    common = {"max_steps": 8, "gradient_accumulation_steps": 2, "warmup_steps": 1, "learning_rate": 1e-3}
    return run_facts(Trainer(model, cpu_arguments(directory, 2, **(common | arguments)), train_dataset=rows))


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        *(({name: value}, name) for name, value in (("learning_rate", 2e-3), ("weight_decay", 0.5), ("seed", 7))),
        *(({"data_seed": 7}, "seed"), ({"bf16": True}, "precision"), ({"optim": "sgd"}, "optimizer")),
        *(({name: 0.5}, "optimizer") for name in ("adam_beta1", "adam_beta2", "adam_epsilon")),
        *(({"lr_scheduler_type": "cosine"}, "schedule"), ({"warmup_steps": 3}, "schedule")),
        *(({"gradient_accumulation_steps": 4}, "global_batch_size"), ({"samples": 9}, "data")),
        *(({"frozen": True}, "trained"), ({"width": 32}, "model")),
    ],
)
def test_a_setting_that_the_completed_steps_depend_on_may_not_change(
    changes: dict[str, Any], fact: str, tmp_path: Path
) -> None:
    before, after = facts_of(tmp_path), facts_of(tmp_path, **changes)
    assert compared(before, before) == ([], [])
    assert [error.where for error in compared(before, after)[0]] == [f"resume: {fact}"]


def test_what_only_later_steps_use_may_change_with_a_warning(tmp_path: Path) -> None:
    before = facts_of(tmp_path)
    later = {"max_steps": 9, "max_grad_norm": 0.5, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    errors, warnings = compared(before, facts_of(tmp_path, **later))
    assert not errors
    assert [text.split()[1] for text in warnings] == ["max_grad_norm", "max_steps", "micro_batch_size"]


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


@pytest.mark.parametrize("make", [llava, partial(mixtral, hidden_size=16), partial(llama, hidden_size=16)])
def test_resuming_restores_weights_of_other_names(make: Any, tmp_path: Path) -> None:
    make(seed=1).save_pretrained(tmp_path / "checkpoint-1")
    resumed: Any = make_exact(Trainer(make(), cpu_arguments(tmp_path, 1)))
    resumed._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    best: Any = make_exact(Trainer(make(), cpu_arguments(tmp_path, 1)))
    best.state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
    best._load_best_model()
    for name, weight in make(seed=1).named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), weight), name
        assert torch.equal(best.model.get_parameter(name), weight), name


def test_the_trainer_still_ignores_weights_of_other_names(tmp_path: Path) -> None:
    llava(seed=1).save_pretrained(tmp_path / "checkpoint-1")
    trainer: Any = Trainer(llava(), cpu_arguments(tmp_path, 1))
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(trainer.model.get_parameter(name), own) for name, own in llava().named_parameters())
