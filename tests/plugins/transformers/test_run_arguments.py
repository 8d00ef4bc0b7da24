"""What training arguments imply for a run: its layout, the type of its weights, its optimizer, and what it can save."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.layout import Layout, ZeroOptions
from shardwright.plugins.transformers.training_arguments import (
    layout_of,
    prepare_model_directory_save,
    refuse_replaced_optimizer,
    save_model_directory,
    stated_settings,
    training_arguments,
    weights_dtype,
)


def arguments(deepspeed: dict[str, Any] | None = None, **further: Any) -> Any:
    plugin = None if deepspeed is None else SimpleNamespace(deepspeed_config=deepspeed)
    settings = {"parallelism_config": None, "fsdp": False, "world_size": 2, "mixed_precision": "no"}
    return SimpleNamespace(deepspeed_plugin=plugin, **settings | further)


def axes(**sizes: int) -> Any:
    return SimpleNamespace(**{f"{name}_size": sizes.get(name, 1) for name in ("sp", "cp", "tp")})


ZERO2 = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
ZERO3 = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}}
SHARED = {"sequence_parallel_size": 4, "tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize(
    ("run", "engine", "expected"),
    [
        (arguments(world_size=1), "single", {}),
        (arguments(), "ddp", {}),
        (arguments(fsdp=True, fsdp_config={}), "fsdp2", {}),
        (
            arguments(fsdp=True, fsdp_config={"offload_params": True}, parallelism_config=axes(cp=2)),
            "fsdp2",
            {"offload_optimizer": "cpu", "offload_param": "cpu", "cp": 2},
        ),
        (arguments({"zero_optimization": ZERO2}), "deepspeed", {"zero_stage": 2, "offload_optimizer": "cpu"}),
        # Then the optimizer is the script's own, on any device.
        (
            arguments({"zero_optimization": ZERO2, "zero_force_ds_cpu_optimizer": False}),
            "deepspeed",
            {"zero_stage": 2},
        ),
        (
            arguments({"zero_optimization": ZERO3 | {"zero_hpz_partition_size": 8}}),
            "deepspeed",
            {"zero_stage": 3, "zero": ZeroOptions(hpz_partition_size=8)}
            | {"offload_optimizer": "nvme", "offload_param": "cpu"},
        ),
        (arguments(SHARED), "deepspeed", {"zero_stage": 0, "sp": 4, "tp": 2}),
        (
            arguments({"expert_parallel": {"autoep_size": 8}}, parallelism_config=axes(sp=2)),
            "deepspeed",
            {"zero_stage": 0, "ep": 8, "sp": 2},
        ),
    ],
)
def test_the_layout_of_a_run_is_what_its_arguments_say(run: Any, engine: Any, expected: dict[str, Any]) -> None:
    assert layout_of(run) == Layout(engine=engine, **expected)


def test_settings_of_a_run_name_its_optimizer_parts_that_do_not_train_and_dropout() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model.config = SimpleNamespace(attention_dropout=0.1, dropout=0)
    model[0].requires_grad_(False)
    set_off = dict.fromkeys(("gradient_checkpointing", "label_smoothing_factor", "torch_compile", "bf16", "fp16"))
    further = set_off | {"accelerator_config": SimpleNamespace(split_batches=False), "optim": "sgd"}
    assert set(stated_settings(arguments(**further), model)) == {"sgd", "frozen", "dropout"}
    # The optimizer of the DeepSpeed configuration has precedence, and one of the script over both.
    run = arguments({"optimizer": {"type": "Muon"}}, **further)
    assert set(stated_settings(run, model)) == {"muon", "frozen", "dropout"}
    assert set(stated_settings(run, model, has_own_optimizer=True)) == {"frozen", "dropout"}


@pytest.mark.parametrize(
    ("deepspeed", "method", "trained", "expected"),
    [
        (None, "full", "fp32", torch.float32),
        (None, "full", "bf16", torch.bfloat16),
        (None, "lora", "fp32", torch.bfloat16),
        ({}, "full", "fp32", torch.bfloat16),
        ({}, "lora", "fp32", torch.bfloat16),
    ],
)
def test_weights_are_fp32_where_no_engine_keeps_such_a_copy(
    deepspeed: dict[str, Any] | None, method: str, trained: str, expected: torch.dtype
) -> None:
    assert weights_dtype(arguments(deepspeed, mixed_precision="bf16"), method=method, trained=trained) == expected
    if trained == "fp32":
        assert weights_dtype(arguments(deepspeed), method=method) == torch.float32


def test_an_offloaded_optimizer_that_deepspeed_would_replace_is_rejected() -> None:
    for kept in ("adamw_torch", "adamw_torch_fused"):
        refuse_replaced_optimizer(arguments({"zero_optimization": ZERO2}, optim=kept))
    for configuration in (None, {"zero_optimization": ZERO2, "optimizer": {}}, {"zero_optimization": {"stage": 2}}):
        refuse_replaced_optimizer(arguments(configuration, optim="sgd"))
    with pytest.raises(UsageError, match="replace it with DeepSpeedCPUAdam"):
        refuse_replaced_optimizer(arguments({"zero_optimization": ZERO2}, optim="sgd"))


def test_zero3_gathers_weights_to_save_them_or_is_rejected() -> None:
    key = "stage3_gather_16bit_weights_on_model_save"
    sections = {stage: {"stage": stage} for stage in (2, 3)}
    for section in sections.values():
        prepare_model_directory_save(arguments({"zero_optimization": section}))
    assert (sections[2].get(key), sections[3].get(key)) == (None, True)
    with pytest.raises(UsageError, match="must be true to save a model directory under ZeRO-3"):
        prepare_model_directory_save(arguments({"zero_optimization": {"stage": 3, key: False}}))


def test_arguments_that_contradict_the_host_and_unknown_ones_are_reported_together() -> None:
    given = {"use_cpu": False, "fp16": True, "learning_rat": 1.0, "accelerator_config": {"split_batches": True}}
    with pytest.raises(UsageError) as rejected:
        training_arguments(given, {"use_cpu": True})
    assert [error.where.rpartition(" ")[2] for error in rejected.value.errors] == ["learning_rat", "use_cpu", "fp16"]
    del given["use_cpu"], given["fp16"], given["learning_rat"]
    both = training_arguments(given, {"use_cpu": True, "accelerator_config": {"non_blocking": True}})
    assert both.accelerator_config.split_batches and both.accelerator_config.non_blocking


def test_weights_are_saved_in_the_types_that_training_started_from(tmp_path: Path) -> None:
    """A name that the starting model lacks keeps its type, as does one that it stores in fp32."""
    start, saved = tmp_path / "start", tmp_path / "saved"
    start.mkdir()
    stored = {"a": torch.ones(2, 2, dtype=torch.bfloat16), "b": torch.ones(2)}
    save_file(stored, start / "model.safetensors")
    trained = {name: torch.full((2, 2), 1 / 3) for name in ("a", "b", "c")}

    def save_model(directory: str) -> None:
        Path(directory).mkdir()
        save_file(trained, saved / "model.safetensors", {"format": "pt"})
        (saved / "training_args.bin").write_bytes(b"")
        (saved / "config.json").write_text(json.dumps({"dtype": "float32", "text_config": {"dtype": "float32"}}))

    trainer: Any = SimpleNamespace(
        model=torch.nn.Linear(1, 1),
        is_fsdp_enabled=False,
        save_model=save_model,
        args=SimpleNamespace(should_save=True),
    )
    save_model_directory(trainer, str(saved), starting=start)
    written = load_file(saved / "model.safetensors")
    assert torch.equal(written["a"], trained["a"].bfloat16())
    assert all(torch.equal(written[name], trained[name]) for name in ("b", "c"))
    assert json.loads((saved / "config.json").read_text()) == {
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
    }
    assert not (saved / "training_args.bin").exists()
