"""Plans of preference and reinforcement learning: second models, generation, and GPUs of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import CONFIGS
from planning import public_model
from shardwright.ds_configs.check.files import check
from shardwright.ds_configs.plan.plan import Plan, PlanDoesNotFitError, make_plan
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.planning import plan as make
from small_models import llama

QWEN, LLAMA = public_model("Qwen/Qwen2.5-7B"), public_model("meta-llama/Llama-3.1-70B")


def planned(hardware: str, model: Any = QWEN, **fields: Any) -> Plan:
    return make_plan(model, parse_hardware(hardware), TrainingJob(seq_len_tokens=2048, **fields))


def test_a_pair_has_two_sequences_and_a_reference() -> None:
    dpo, orpo = (planned("8xA100-80GB", task=task, global_batch_size=64) for task in ("dpo", "orpo"))
    assert dpo.job.reference == QWEN and orpo.job.reference is None
    assert dpo.chosen.placements["reference"].placement == "replica"
    tokens = dpo.chosen.time.tokens_per_second * dpo.chosen.time.seconds
    assert tokens == pytest.approx(2 * 64 * 2048)
    assert dpo.training_arguments("out")["max_length"] == 2048 and dpo.training_arguments("out")["beta"] == 0.1


def test_a_reward_model_has_a_score_instead_of_logits() -> None:
    plan = planned("8xA100-80GB", task="reward")
    sizes = QWEN.dimensions
    assert plan.model.parameter_count == QWEN.parameter_count + sizes.hidden_size * (1 - sizes.vocab_size)


def test_the_placement_of_a_reference_needs_no_name_of_it(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    sizes: dict[str, Any] = {"seq_len": 32, "reference_placement": "cached"}
    assert make(str(tmp_path), "2xCPU", task="dpo", **sizes).training_arguments("out")["precompute_ref_log_probs"]
    for job in ({"task": "orpo"}, {"task": "grpo", "beta": 0.0}, {}):
        with pytest.raises(UsageError, match="requires a reference"):
            make(str(tmp_path), "2xCPU", **sizes, **job)


def test_a_step_has_a_group_of_completions_per_accelerator_or_as_many_as_are_efficient() -> None:
    few = make_plan(QWEN, parse_hardware("8xH100-80GB"), TrainingJob(task="grpo", seq_len_tokens=8192))
    assert few.chosen.layout.global_batch_size == 64 and "8 groups of 8 completions" in few.chosen.reason
    many = make_plan(QWEN, parse_hardware("8xH100-80GB"), TrainingJob(task="rloo", seq_len_tokens=1024))
    assert many.chosen.layout.global_batch_size == 128 and "tokens per accelerator" in many.chosen.reason


@pytest.mark.parametrize("tokens", [2048, 32_768])
def test_a_micro_batch_of_kto_has_rows_to_compare(tokens: int) -> None:
    hardware = parse_hardware("8xA100-80GB")
    plan = make_plan(QWEN, hardware, TrainingJob(task="kto", seq_len_tokens=tokens, method="lora"))
    assert all(each.layout.micro_batch_size >= 2 for each in (plan.chosen, *plan.rejected))
    for fields in ({"micro_batch_size": 1}, {"global_batch_size": 8}):
        with pytest.raises(UsageError, match="micro_batch_size = 1: must be at least 2 for task kto"):
            make_plan(QWEN, hardware, TrainingJob(task="kto", strategy="zero2", **fields))


def test_the_placement_of_a_reference_is_that_of_the_trainer() -> None:
    for strategy, placed in (("zero2", "replica"), ("zero3", "sharded")):
        choice = planned("8xH100-80GB", task="dpo", strategy=strategy).chosen.placements["reference"]
        assert choice.placement == placed and "is how TRL places it" in choice.reason


def test_small_accelerators_are_offered_adapters_and_train_them_with_the_base_as_reference() -> None:
    with pytest.raises(PlanDoesNotFitError, match="would fit: --method lora"):
        planned("1xRTX4090", task="dpo")
    plan = planned("1xRTX4090", task="dpo", method="qlora")
    assert plan.chosen.placements["reference"].placement == "shared"


def test_one_accelerator_has_a_reference_under_zero3_too() -> None:
    with pytest.raises(PlanDoesNotFitError, match="closest: ZeRO-3 with the reference sharded lacks GPU memory"):
        planned("1xA100-80GB", task="dpo", strategy="zero3", offload="none")
    plan = make(str(CONFIGS / "Qwen--Qwen2.5-7B"), "1xRTX4090", host_memory="512GB", task="dpo", seq_len=2048)
    assert plan.chosen.layout.label.startswith("zero3+cpu")
    assert plan.chosen.placements["reference"].placement == "sharded"


@pytest.mark.parametrize("task", ["sft", "dpo", "kto", "orpo", "reward", "grpo"])
def test_full_training_that_offloads_offers_adapters_that_do_not(task: Any) -> None:
    model = public_model("meta-llama/Llama-3.1-8B")
    chosen = planned("1xA100-80GB", model, task=task).chosen
    adapted = planned("1xA100-80GB", model, task=task, method="lora").chosen
    assert chosen.layout.offload_optimizer == "cpu" and adapted.layout.offload_optimizer == "none"
    assert chosen.reason.endswith(" With --method lora it fits without offload.")
    assert "--method lora" not in adapted.reason
    requested = planned("1xA100-80GB", model, task=task, offload="cpu").chosen
    assert "--method lora" not in requested.reason


def test_a_reference_under_zero3_is_sharded_and_colocated_vllm_has_a_share() -> None:
    plan = planned("8xH100-80GB", task="grpo", beta=0.04, strategy="zero3", completion_tokens=1024)
    assert plan.chosen.placements["reference"].placement == "sharded"
    arguments = plan.training_arguments("out")
    assert plan.job.generation == "vllm" and arguments["vllm_mode"] == "colocate" and arguments["use_vllm"]
    share = plan.chosen.memory.gpu.terms["vllm_engine"] / plan.hardware.gpu_bytes
    assert f"1 GPU per engine with {share:.0%} of the memory, awake during updates." in plan.chosen.reason
    assert arguments["vllm_gpu_memory_utilization"] == pytest.approx(share, abs=1e-9)
    assert arguments["num_generations"] == 8 and plan.chosen.layout.global_batch_size % 8 == 0
    assert {"generation_decode", "weight_synchronization"} <= plan.chosen.time.terms.keys()
    with pytest.raises(UsageError, match="whose weights only the first rank has; use ZeRO-3, adapters, or --beta 0"):
        planned("8xH100-80GB", task="grpo", beta=0.04, strategy="fsdp2")


@pytest.mark.parametrize(
    ("hardware", "model", "trained", "served", "ranks_of_engine"),
    [("8xH100-80GB", QWEN, "7xH100-80GB", 1, 1), ("2x8xH100-80GB", LLAMA, "8xH100-80GB", 8, 4)],
)
def test_a_server_has_gpus_of_its_own(
    hardware: str, model: Any, trained: str, served: int, ranks_of_engine: int
) -> None:
    method = "full" if model is QWEN else "lora"
    plan = planned(hardware, model, task="grpo", generation="vllm-server", method=method)
    assert plan.hardware.name == trained and plan.job.vllm_gpus == served
    assert plan.job.vllm_tensor_parallel_size == ranks_of_engine
    assert f"{served} GPU(s) serve completions" in plan.chosen.reason
    assert plan.training_arguments("out")["vllm_mode"] == "server"
    assert not plan.chosen.memory.gpu.terms.get("vllm_engine")


@pytest.mark.once
@pytest.mark.parametrize(
    ("hardware", "model", "fields", "offered"),
    [
        ("2xA10G", QWEN, {"generation": "vllm-server"}, "--hardware 4xA10G"),
        (
            "8xA100-40GB",
            LLAMA,
            {"generation": "vllm", "vllm_tensor_parallel_size": 1},
            "--vllm-tensor-parallel-size auto",
        ),
    ],
)
def test_offers_of_a_misfit_are_for_all_gpus_and_open_what_was_fixed(
    hardware: str, model: Any, fields: dict[str, Any], offered: str
) -> None:
    with pytest.raises(PlanDoesNotFitError) as raised:
        planned(hardware, model, task="grpo", method="lora" if model is LLAMA else "full", **fields)
    changes = [suggestion.change for suggestion in raised.value.suggestions]
    assert offered in changes and f"--hardware {hardware}" not in changes


def test_too_few_gpus_for_a_split_are_one_line() -> None:
    for hardware, model in (("1xH100-80GB", QWEN), ("4xH100-80GB", LLAMA)):
        with pytest.raises(UsageError, match=r"GPUs or more for the server, and others that train: .* has [14]"):
            planned(hardware, model, task="grpo", generation="vllm-server", method="lora")


def test_fields_of_other_tasks_are_errors_together() -> None:
    with pytest.raises(UsageError) as raised:
        planned("8xA100-80GB", beta=0.1, num_generations=4, reference=QWEN, vllm_sleep="on")
    assert str(raised.value).splitlines() == [
        "beta = 0.1: is not used by task sft; use --task dpo or kto or grpo or rloo or ppo, or omit it",
        "num_generations = 4: is not used by task sft; use --task grpo or rloo, or omit it",
        "vllm_sleep = 'on': is not used by task sft; use --task grpo or rloo, or omit it",
        f"reference = {QWEN.name!r}: is not used by task sft; use --task dpo or kto or grpo or rloo or ppo, or omit it",
    ]
    for fields, rule in (
        ({"task": "gkd"}, "teacher: is required by task gkd; pass --teacher MODEL"),
        ({"task": "ppo", "reward": QWEN}, "value: is required by task ppo"),
        ({"task": "dpo", "loss": "chunked"}, "loss = 'chunked': is not used by task dpo"),
        ({"task": "grpo", "completion_tokens": 2048}, "must be less than the 2048 tokens of a sequence"),
        ({"task": "grpo", "num_generations": 1}, "must be at least 2"),
        ({"task": "grpo", "vllm_gpus": 2}, "is used by a vLLM server only"),
        ({"task": "grpo", "generation": "transformers", "vllm_sleep": "on"}, "is not used by generation transformers"),
        (
            {"task": "grpo", "num_generations": 3, "global_batch_size": 8},
            "divide the 8 completions of a generation",
        ),
    ):
        with pytest.raises(UsageError, match=rule):
            planned("8xA100-80GB", **fields)


@pytest.mark.parametrize(
    ("hardware", "fields"),
    [
        ("8xA100-80GB", {}),
        ("8xA100-40GB", {"method": "lora", "seq_len_tokens": 8192}),
        ("8xH100-80GB", {"strategy": "zero3", "seq_len_tokens": 16384}),
        ("2x8xH100-80GB", {"strategy": "fsdp2", "seq_len_tokens": 4096}),
        ("1xA100-40GB", {"method": "qlora", "seq_len_tokens": 4096}),
    ],
)
@pytest.mark.parametrize("task", ["dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo"])
def test_a_planned_run_breaks_no_rule_of_its_trainer(
    task: Any, hardware: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    beta = {"beta": 0.0} if task == "rloo" and fields.get("strategy") == "fsdp2" else {}
    job = TrainingJob(task=task, **{"seq_len_tokens": 2048} | fields | beta)
    plan = make_plan(QWEN, parse_hardware(hardware), job)
    plan.write(tmp_path / "plan")
    named: dict[str, Any] = {"model_name_or_path": "model", "dataset_name": "data"}
    if job.method != "full":
        named |= {"use_peft": True, **({"lora_task_type": "SEQ_CLS"} if task == "reward" else {})}
    if job.method == "qlora":
        named["load_in_4bit"] = True
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(named | plan.training_arguments("out")), encoding="utf-8")
    findings = check(tmp_path / "plan", run, task=task, hardware=hardware).findings
    assert [str(finding.error) for finding in findings if finding.kind == "error"] == []


def test_kto_runs_each_model_twice() -> None:
    kto, dpo = (planned("8xA100-80GB", task=task, strategy="zero2", global_batch_size=16) for task in ("kto", "dpo"))
    # Two rows of KTO with two mismatched ones, and a pair of DPO with its reference, are four sequences each.
    terms = kto.chosen.time.terms
    assert terms["reference_forward"] == pytest.approx(2 * terms["mismatched_forward"], rel=0.15)
    assert dpo.chosen.time.terms["reference_forward"] == pytest.approx(terms["reference_forward"], rel=0.05)


def test_a_sharded_reference_is_gathered_in_every_micro_batch() -> None:
    """Gathers over the network are not hidden by a micro-batch of few tokens."""
    fields: dict[str, Any] = {"strategy": "zero3", "global_batch_size": 32, "seq_len_tokens": 128, "task": "dpo"}
    sharded, cached = (
        make_plan(
            QWEN, parse_hardware("4x8xA100-80GB"), TrainingJob(reference_placement=placement, **fields)
        ).chosen.time.terms["parameter_gathers"]
        for placement in ("sharded", "cached")
    )
    assert sharded > 2 * cached
