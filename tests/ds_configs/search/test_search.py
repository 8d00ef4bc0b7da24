"""What the search chooses, in which order, and why."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import llama, public_model
from shardwright.ds_configs.plan.plan import PlanDoesNotFitError, make_plan
from shardwright.ds_configs.search.choice import ENOUGH_TOKENS, USEFUL_TOKENS, search
from shardwright.ds_configs.search.reasons import display_name
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob

LLAMA_1B = public_model("meta-llama/Llama-3.2-1B")
LLAMA_8B = public_model("meta-llama/Llama-3.1-8B")
LLAMA_70B = public_model("meta-llama/Llama-3.1-70B")

# Sharding degree of each layout, for the property that more memory never shards or offloads more.
SEVERITY = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3, "fsdp2-hybrid": 3}


def severity(strategy) -> tuple[int, int]:
    offload = {"none": 0, "cpu": 1, "nvme": 3}[strategy.offload_optimizer] + (strategy.offload_param != "none")
    return offload, SEVERITY[strategy.label.partition("+")[0]]


@pytest.mark.parametrize(
    ("model", "hardware", "expected"),
    [
        (LLAMA_1B, "1xA100-80GB", "single"),
        (LLAMA_1B, "8xA100-80GB", "ddp"),
        (LLAMA_8B, "8xA100-80GB", "zero1"),
        (LLAMA_70B, "4x8xH100-80GB", "zero3"),
        (LLAMA_70B, "8xH100-80GB", "zero3+cpu-offload of optimizer"),
        (public_model("meta-llama/Llama-3.1-405B"), "128x8xH100-80GB", "zero3"),
    ],
)
def test_choices_that_practice_agrees_with(model, hardware, expected):
    plan = make_plan(model, parse_hardware(hardware), TrainingJob())
    assert plan.chosen.strategy.label == expected
    assert plan.chosen.memory.fits


def test_first_fitting_layout_is_chosen_and_earlier_ones_do_not_fit():
    outcome = search(LLAMA_8B, parse_hardware("8xA100-40GB"), TrainingJob())
    assert outcome.chosen is not None
    chosen_offload = severity(outcome.chosen.strategy)[0]
    for other in outcome.rejected:
        if severity(other.strategy)[0] < chosen_offload:
            assert not other.memory.fits, other.reason


def test_every_reason_names_numbers_and_rejections_say_what_lacks():
    plan = make_plan(LLAMA_8B, parse_hardware("8xA100-80GB"), TrainingJob())
    assert re.search(r"\d+\.\d GB \(\d+\.\d to \d+\.\d\) of 85\.0 GB", plan.chosen.reason)
    for other in plan.rejected:
        assert other.reason.endswith(".")
        assert re.search(r"\d", other.reason)
        if not other.memory.gpu.fits:
            assert re.search(r"needs up to \d+\.\d GB of 85\.0 GB: [a-z ]+\d", other.reason)


def test_ddp_rejection_of_8b_is_arithmetically_right():
    plan = make_plan(LLAMA_8B, parse_hardware("8xA100-80GB"), TrainingJob())
    ddp = next(other for other in plan.rejected if other.strategy.engine == "ddp")
    assert ddp.memory.gpu.terms["optimizer_states"] == 8 * LLAMA_8B.parameter_count
    assert "optimizer states 64.2" in ddp.reason


def test_global_batch_is_met_exactly():
    job = TrainingJob(global_batch_size=96, seq_len_tokens=2048)
    strategy = make_plan(LLAMA_8B, parse_hardware("8xH100-80GB"), job).chosen.strategy
    assert strategy.micro_batch_size * strategy.gradient_accumulation_steps * 8 == 96


def test_global_batch_that_ranks_do_not_divide_names_the_neighbours():
    with pytest.raises(UsageError, match=r"global_batch_size = 100: .*nearest legal values: 96, 104"):
        make_plan(LLAMA_8B, parse_hardware("8xH100-80GB"), TrainingJob(global_batch_size=100))


def test_micro_batch_larger_than_the_share_of_a_rank_is_refused():
    job = TrainingJob(global_batch_size=16, micro_batch_size=3)
    with pytest.raises(UsageError, match="global_batch_size = 16"):
        make_plan(LLAMA_8B, parse_hardware("8xH100-80GB"), job)


def test_micro_batch_stays_useful():
    strategy = make_plan(LLAMA_1B, parse_hardware("8xB200"), TrainingJob(seq_len_tokens=1024)).chosen.strategy
    assert strategy.micro_batch_size * 1024 == USEFUL_TOKENS


def test_checkpointing_only_where_the_micro_batch_would_starve():
    roomy = make_plan(LLAMA_8B, parse_hardware("8xH200"), TrainingJob()).chosen.strategy
    assert not roomy.gradient_checkpointing
    assert roomy.micro_batch_size * 4096 >= ENOUGH_TOKENS
    tight = make_plan(LLAMA_8B, parse_hardware("8xA100-40GB"), TrainingJob(strategy="zero3")).chosen.strategy
    assert tight.gradient_checkpointing


@pytest.mark.parametrize(
    ("job", "pattern"),
    [
        (TrainingJob(strategy="ddp", offload="cpu"), "offload_optimizer = 'cpu': needs ZeRO stage"),
        (TrainingJob(strategy="zero2", offload="cpu-all"), "offload_param = 'cpu': needs ZeRO stage 3"),
        (TrainingJob(strategy="zero2", offload="nvme"), "needs ZeRO stage 3"),
        (TrainingJob(strategy="zero3", offload="nvme"), "needs NVMe on each node"),
        (TrainingJob(strategy="zero2", offload="cpu", optimizer="lion_8bit"), "no DeepSpeed CPU kernel"),
        (TrainingJob(strategy="fsdp2", optimizer="adamw_8bit"), "DTensors"),
        (TrainingJob(strategy="single"), "needs 1 rank, not 8"),
        (TrainingJob(method="lora", lora_targets=("q_prj",)), "match no Linear module"),
        (TrainingJob(optimizer="adamw_9bit"), "did you mean adamw_8bit"),
        (TrainingJob(seq_len_tokens=0), "must be an integer from 1"),
    ],
)
def test_illegal_combinations_name_the_rule(job, pattern):
    with pytest.raises(UsageError, match=pattern):
        make_plan(LLAMA_8B, parse_hardware("8xH100-80GB"), job)


def test_all_faults_of_a_job_come_together():
    with pytest.raises(UsageError) as caught:
        make_plan(LLAMA_8B, parse_hardware("8xH100-80GB"), TrainingJob(seq_len_tokens=-1, lora_rank=0, optimizer="x"))
    assert {fault.where for fault in caught.value.faults} == {"seq_len_tokens", "lora_rank", "optimizer"}


def test_bf16_on_hardware_without_it():
    with pytest.raises(UsageError, match="precision = 'bf16': is not computed by T4; use fp16 or fp32"):
        make_plan(LLAMA_1B, parse_hardware("8xT4"), TrainingJob())


def test_learned_positions_bound_the_sequence():
    gpt2 = public_model("openai-community/gpt2")
    with pytest.raises(UsageError, match="cannot exceed the 1024 learned positions"):
        make_plan(gpt2, parse_hardware("1xA100-80GB"), TrainingJob(seq_len_tokens=2048))


@pytest.mark.parametrize(
    ("model", "hardware", "job"),
    [
        (LLAMA_8B, "1xRTX4090", TrainingJob()),
        (LLAMA_70B, "1xT4", TrainingJob(precision="fp16")),
        (LLAMA_8B, "2xRTX4090", TrainingJob(strategy="zero1", gradient_checkpointing="off")),
    ],
)
def test_when_nothing_fits_three_changes_are_named_and_each_really_fits(model, hardware, job):
    with pytest.raises(PlanDoesNotFitError) as caught:
        make_plan(model, parse_hardware(hardware), job)
    error = caught.value
    assert error.exit_code == 3
    assert len(error.suggestions) == 3
    for suggestion in error.suggestions:
        assert suggestion.high_bytes <= suggestion.capacity_bytes
        words = suggestion.change.split()
        flags = dict(zip(words[::2], words[1::2], strict=True))
        cluster = parse_hardware(flags.pop("--hardware", hardware), host_memory=flags.pop("--host-memory", None))
        fields = {name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()}
        if "seq_len" in fields:
            fields["seq_len_tokens"] = int(fields.pop("seq_len"))
        if "micro_batch_size" in fields:
            fields["micro_batch_size"] = None
        if "lora_rank" in fields:
            fields["lora_rank"] = int(fields["lora_rank"])
        plan = make_plan(model, cluster, replace(job, **fields))
        assert display_name(plan.chosen.strategy) == suggestion.strategy
        assert plan.chosen.memory.gpu.high_bytes == suggestion.high_bytes


def test_host_memory_decides_too():
    starved = parse_hardware("8xH100-80GB", host_memory="200GB")
    with pytest.raises(PlanDoesNotFitError, match="host memory on each node"):
        make_plan(LLAMA_70B, starved, TrainingJob(offload="cpu", strategy="zero3"))


@given(
    layers=st.integers(2, 60),
    width=st.sampled_from([512, 1024, 4096]),
    gpu_gib=st.integers(8, 120),
    more_gib=st.integers(0, 80),
    gpus=st.sampled_from([1, 2, 8]),
    nodes=st.sampled_from([1, 4]),
    sequence=st.sampled_from([512, 4096]),
)
@settings(max_examples=30, deadline=None)
@pytest.mark.slow
def test_more_memory_never_raises_the_stage(layers, width, gpu_gib, more_gib, gpus, nodes, sequence):
    model = llama(num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width, vocab_size=32000)
    job = TrainingJob(seq_len_tokens=sequence)
    base = parse_hardware(f"{nodes}x{gpus}xA100-80GB", host_memory="4TB", nvme="/nvme:20TB")
    small = search(model, replace(base, gpu_bytes=gpu_gib * 2**30), job).chosen
    large = search(model, replace(base, gpu_bytes=(gpu_gib + more_gib) * 2**30), job).chosen
    if small is not None:
        assert large is not None
        assert severity(large.strategy) <= severity(small.strategy)


@given(
    gpu=st.sampled_from(["RTX4090", "A100-40GB", "H100-80GB", "B200"]),
    gpus=st.sampled_from([1, 2, 4, 8]),
    method=st.sampled_from(["full", "lora", "qlora"]),
    checkpointing=st.sampled_from(["auto", "on", "off"]),
)
@settings(max_examples=40, deadline=None)
def test_a_chosen_plan_fits_and_is_legal(gpu, gpus, method, checkpointing):
    job = TrainingJob(method=method, gradient_checkpointing=checkpointing)
    outcome = search(LLAMA_8B, parse_hardware(f"{gpus}x{gpu}"), job)
    if outcome.chosen is None:
        assert all(not other.memory.fits for other in outcome.rejected)
        return
    chosen = outcome.chosen
    assert chosen.memory.gpu.high_bytes <= chosen.memory.gpu.capacity_bytes
    assert chosen.strategy.world_size == gpus
    if checkpointing != "auto":
        assert chosen.strategy.gradient_checkpointing == (checkpointing == "on")
