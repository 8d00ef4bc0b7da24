"""Inputs that a rehearsal rejects before the launch, what it scales, and its checks of the ranks' results."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from shardwright.cli.main import run
from shardwright.ds_configs.plan.plan import Plan
from shardwright.ds_configs.shrink import changes_between
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.specs.layout import Layout, ZeroOptions
from shardwright.plugins.planning import plan
from shardwright.trainers.rehearsal.checks import (
    CHECK_NAMES,
    check_export,
    check_resumed,
    check_training,
)
from shardwright.trainers.rehearsal.files import (
    OWN_ARGUMENTS,
    choose_ranks,
    cpu_accelerate,
    cpu_arguments,
    cpu_deepspeed,
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def written(model: Path, directory: Path, hardware: str = "2xCPU", **job: Any) -> Plan:
    made = plan(str(model), hardware, TrainingJob(**{"seq_len_tokens": 64, "micro_batch_size": 2, **job}))
    made.write(directory)
    return made


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_yaml(file: Path, change: Any) -> None:
    values = yaml.safe_load(file.read_text())
    change(values)
    file.write_text(yaml.safe_dump(values))


def rehearse(capsys: pytest.CaptureFixture[str], directory: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    code = run(["rehearse", str(directory), "--format", "json", *flags])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def failing(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["detail"] for check in report["checks"] if check["passed"] is False}


def test_an_edited_key_fails_the_files_and_names_the_nearest(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(model, tmp_path / "plan", strategy="zero2")
    edit_json(tmp_path / "plan" / "ds_config.json", gradient_cliping="auto")
    edit_json(tmp_path / "plan" / "training_arguments.json", lerning_rate=1e-4)
    code, report, err = rehearse(capsys, tmp_path / "plan")
    assert code == 2
    assert list(failing(report)) == ["files"]
    assert "did you mean 'learning_rate'?" in err and "gradient_clipping" in err
    assert not report["passed"]
    assert [check["name"] for check in report["checks"]] == list(CHECK_NAMES)
    assert json.loads((tmp_path / "plan" / "rehearsal" / "rehearsal.json").read_text()) == report


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accelerate": {"num_processes": 6}}, "num_processes = 6: the plan is for 8xA100-80GB, which has 8"),
        ({"deepspeed": {"train_batch_size": 15}}, "train_batch_size = 15: must equal"),
        (
            {
                "deepspeed": {
                    "train_batch_size": 15,
                    "train_micro_batch_size_per_gpu": 2,
                    "gradient_accumulation_steps": 1,
                }
            },
            "2 · 1 · 8 = 16",
        ),
    ],
)
def test_ranks_and_batches_that_do_not_divide_are_found_for_the_plans_own_hardware(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    written(model, tmp_path / "plan", "8xA100-80GB", strategy="zero2")

    def edited(values: dict[str, Any]) -> None:
        # As both files say to do it.
        values["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "plan" / "ds_config.json")
        values.update(changes.get("accelerate", {}))

    edit_yaml(tmp_path / "plan" / "accelerate.yaml", edited)
    edit_json(tmp_path / "plan" / "ds_config.json", **changes.get("deepspeed", {}))
    code, report, _ = rehearse(capsys, tmp_path / "plan")
    assert (code, list(failing(report))) == (2, ["world_size"])
    assert message in failing(report)["world_size"]
    assert "\n" not in failing(report)["world_size"]


def test_a_layer_class_that_the_model_has_not_and_a_replaced_optimizer_are_both_found(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(model, tmp_path / "plan", "8xA100-80GB", strategy="fsdp2")

    def rename(values: dict[str, Any]) -> None:
        values["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = "LlamaLayer"

    edit_yaml(tmp_path / "plan" / "accelerate.yaml", rename)
    code, report, _ = rehearse(capsys, tmp_path / "plan")
    assert (code, list(failing(report))) == (2, ["layer_classes"])
    assert "its layers are LlamaDecoderLayer" in failing(report)["layer_classes"]

    written(model, tmp_path / "offload", "8xA100-80GB", strategy="zero2", offload="cpu")
    edit_json(tmp_path / "offload" / "training_arguments.json", optim="adafactor")
    code, report, _ = rehearse(capsys, tmp_path / "offload")
    assert (code, list(failing(report))) == (2, ["optimizer"])
    assert "would replace it with DeepSpeedCPUAdam" in failing(report)["optimizer"]


def test_a_lock_that_a_killed_compilation_left_is_shown_and_kept(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    written(model, tmp_path / "plan", strategy="zero1")
    code, report, err = rehearse(capsys, tmp_path / "plan")
    assert (code, list(failing(report))) == (1, ["launch"])
    assert f"delete it: rm {lock}" in err
    assert lock.exists()


def test_bad_values_are_reported_together(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(model, tmp_path / "plan")
    flags = ["--steps", "2", "--time-limit", "0", "--ranks", "0"]
    code, report, _ = rehearse(capsys, tmp_path / "plan", *flags)
    assert code == 2
    assert [error["where"] for error in report["error"]["errors"]] == ["steps", "time_limit", "ranks"]
    assert not (tmp_path / "plan" / "rehearsal").exists()


def record(**values: Any) -> dict[str, Any]:
    return {"world_size": 2, "losses": [6.0, 5.0, 4.0], "probe_digest": "a", "probe_mean": 4.0, **values}


@pytest.mark.parametrize(
    ("records", "name", "detail"),
    [
        ([record(losses=[6.0, math.nan, 4.0])] * 2, "loss_finite", "nan"),
        ([record(losses=[6.0, 6.5, 6.1])] * 2, "loss_falls", "6.000 to 6.100"),
        ([record(), record(probe_digest="b", probe_mean=4.5)], "ranks_agree", "rank 0: 4.0, rank 1: 4.5"),
        ([record(world_size=1)] * 2, "world_size", "with world size 1"),
        ([record()], "world_size", "launched 2 ranks, 1 trained"),
    ],
)
def test_what_ranks_wrote_is_judged(records: list[dict[str, Any]], name: str, detail: str) -> None:
    good = check_training([record()] * 2, ranks=2, steps=3, vocab_size=512)
    assert all(check.passed for check in good)
    bad = {check.name: check for check in check_training(records, ranks=2, steps=3, vocab_size=512)}
    assert detail in bad[name].detail and bad[name].passed is False and bad[name].exit_code == 1


@pytest.mark.parametrize(("change", "cpu_optimizer"), [(0.0, False), (1e-4, True)])
def test_resumed_losses_must_be_equal_but_for_the_roundings_of_cpu_adam(change: float, cpu_optimizer: bool) -> None:
    losses = [4.0, 3.0, 2.0, 1.5]
    for resumed, is_equal in (([2.0, 1.5 + change], True), ([2.0, 1.6], False), ([1.5], False)):
        assert check_resumed(losses, resumed, save_step=2, cpu_optimizer=cpu_optimizer).passed == is_equal
    assert not check_resumed(losses, [2.0, 1.5 + 1e-12], save_step=2).passed


def test_an_export_must_be_safetensors_with_the_trained_logits(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    export = tmp_path / "export"
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"

    def verdict(error: str | None = None) -> Any:
        return check_export(export, one, other, error, precision="fp32")

    assert "nothing" in verdict().detail
    export.mkdir()
    save_file({"weight": torch.ones(1)}, export / "model.safetensors")
    logits_BTV = torch.arange(6.0).view(1, 2, 3)
    save_file({"logits_BTV": logits_BTV}, one)
    save_file({"logits_BTV": logits_BTV}, other)
    assert verdict().passed and "bit-identically" in verdict().detail
    save_file({"logits_BTV": logits_BTV + 0.01}, other)
    assert "differ" in verdict().detail
    assert "from_pretrained fails: KeyError" in verdict("KeyError: 'layer'").detail
    (export / "pytorch_model.bin").touch()
    assert "pytorch_model.bin" in verdict().detail


def replaced(replace: Any, values: dict[str, Any], **settings: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the values that a substitute leaves, and the names of those that it changes."""
    scaled = deepcopy(values)
    replace(scaled, **settings)
    return scaled, [change.where for change in changes_between(values, scaled)]


def test_what_needs_a_gpu_or_a_network_is_replaced_and_reported() -> None:
    arguments = {"fp16": True, "optim": "paged_adamw_8bit", "tf32": True, "push_to_hub": True, "weight_decay": 0.1}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    layout = Layout(engine="ddp", micro_batch_size=2)
    found, changes = replaced(cpu_arguments, arguments | sizes, layout=layout, steps=8)
    assert found["bf16"] is True and found["fp16"] is False and found["optim"] == "adamw_torch"
    assert "tf32" not in found and found["push_to_hub"] is False and found["weight_decay"] == 0.1
    # By default, a Trainer logs the mean of earlier losses in place of NaN.
    assert OWN_ARGUMENTS["logging_nan_inf_filter"] is False
    assert set(changes) == {"fp16", "bf16", "optim", "tf32", "push_to_hub", "learning_rate", "max_steps"}
    _, changes = replaced(cpu_arguments, sizes, layout=Layout(engine="ddp"), steps=8)
    assert changes[0] == "per_device_train_batch_size"
    half = {"fp16": {"enabled": "auto", "loss_scale": 0}}
    assert replaced(cpu_deepspeed, half)[0] == {"bf16": {"enabled": "auto"}}
    accelerate, changes = replaced(cpu_accelerate, {"mixed_precision": "fp16", "gpu_ids": "0,1", "debug": False})
    assert accelerate == {"mixed_precision": "bf16", "debug": False} and len(changes) == 2
    offloaded = {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}
    assert replaced(cpu_accelerate, offloaded)[0]["fsdp_config"]["fsdp_offload_params"] is False


def test_kernels_are_replaced_and_reported_but_4_bit_weights_stay(tiny_llama: Path, tmp_path: Path) -> None:
    from shardwright.trainers.rehearsal.files import PlanFiles, scale_plan
    from shardwright.trainers.training.settings import TrainSettings, planned_argument_errors

    kernels = {"precision": "fp8", "torch_compile": True, "use_liger_kernel": True, "strategy": "fsdp2"}
    sizes = {"seq_len": 64, "global_batch_size": 16, "micro_batch_size": 2}
    planned = plan(str(tiny_llama), "8xH100-80GB", calibration=None, **sizes, **kernels)
    config = json.loads((tiny_llama / "config.json").read_text())

    def rehearsed(made: Plan, directory: Path) -> Any:
        made.write(directory)
        (work := directory.with_suffix(".work")).mkdir()
        return scale_plan(made, PlanFiles.read(directory), config, ranks=2, steps=2, work=work)

    quantized = plan(str(tiny_llama), "8xH100-80GB", calibration=None, **sizes, strategy="zero3", method="qlora")
    assert rehearsed(quantized, tmp_path / "qlora").plan.job.method == "qlora"
    scaled = rehearsed(planned, tmp_path / "plan")
    changes = {change.where: (change.before, change.after) for change in scaled.changes}
    assert changes["job: precision"] == ("fp8", "bf16") == changes["accelerate.yaml: mixed_precision"]
    assert changes["job: torch_compile"] == changes["job: use_liger_kernel"] == (True, False)
    arguments = scaled.worker.training_arguments
    assert arguments["bf16"] and not arguments["torch_compile"] and not arguments["use_liger_kernel"]
    errors = {error.where: error.fix for error in planned_argument_errors(TrainSettings(), planned)}
    assert ("pip install torchao" in errors.get("precision", "")) == (find_spec("torchao") is None)


def test_ranks_default_to_two_or_the_fewest_that_the_layout_allows() -> None:
    assert choose_ranks(Layout(engine="ddp", dp_replicate=8), None) == 2
    assert choose_ranks(Layout(engine="single"), None) == 1
    hybrid = Layout(engine="fsdp2", dp_replicate=2, dp_shard=8)
    assert choose_ranks(hybrid, None) == 4
    zeropp = Layout(engine="deepspeed", zero_stage=3, dp_shard=16, zero=ZeroOptions(hpz_partition_size=4))
    assert choose_ranks(zeropp, None) == 4
    with pytest.raises(UsageError, match="use --ranks"):
        choose_ranks(hybrid, 3)
